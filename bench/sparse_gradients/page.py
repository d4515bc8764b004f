"""The tables and the picture of docs/training.md about gradients over slow links, from the results in bench/results/.

python -m bench.sparse_gradients.page
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench import documents
from bench.measured import NOT_YET, whole_result, with_machines

PAGE = documents.DOCS / "training.md"
PICTURE = documents.DOCS / "sparse_gradients.svg"
COMMAND = "bench.sparse_gradients.page"


# ---- a step over links of a given rate ----


def rate(gbit: float) -> str:
    return f"{gbit:g}" if gbit else "unshaped"


def heads(methods: Iterable[str]) -> tuple[str, ...]:
    return "replicas", "Gbit/s", "dense, ms", *(name for name in methods if name != "dense")


def line(row: dict[str, Any]) -> list[str]:
    """A step's milliseconds, and each method's time over it with quartiles."""
    cells = [str(row["ranks"]), rate(row["gbit"]), f"{1e3 * row['seconds']['dense']:.0f}"]
    return cells + [documents.spread(over) for name, over in row["over_dense"].items() if name != "dense"]


def links(result: dict[str, Any]) -> str:
    if not result:
        return f"Steps over links of a given rate: {NOT_YET}."
    return documents.table(heads(result["rows"][0]["seconds"]), map(line, result["rows"]))


# ---- a model trained ----


def training(result: dict[str, Any]) -> str:
    """A row a run."""
    if not result:
        return f"A model trained: {NOT_YET}."
    held_out = f"held out after {result['steps']} steps, bits per byte"
    columns = "", held_out, "over dense", "MB sent by a rank, in all", "in a step after the warm-up"
    lines, dense = [], result["rows"][0]
    for row in result["rows"]:
        bits, base = row["held_out"][-1][1], dense["held_out"][-1][1]
        cells = row["name"], f"{bits:.3f}", f"{100 * (bits / base - 1):+.1f} %", f"{row['bytes'] / 1e6:.0f}"
        lines.append((*cells, f"{row['bytes_a_step'] / 1e6:.3f}"))
    return documents.table(columns, lines)


def plot(result: dict[str, Any], path: Path) -> None:
    """Held-out bits over steps, and over what a rank has sent."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = path.name  # the same picture is the same file
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained", sharey=True)
    for row in result["rows"]:
        steps, bits, sent = zip(*row["held_out"], strict=True)
        axes[0].plot(steps, bits, label=row["name"])
        axes[1].plot([x / 1e9 for x in sent], bits)
    axes[0].set(xlabel="step", ylabel="held out, bits per byte")
    axes[1].set(xlabel="GB sent by a rank", xlim=0)
    axes[0].legend(fontsize=7)
    figure.savefig(path, metadata=dict(Date=None))
    plt.close(figure)


def parts() -> dict[str, str]:
    """The name of each part of the page -> its text."""
    trained = whole_result("sparse_training")
    picture = f"\n\n![Held-out bits over steps and bytes]({PICTURE.name})" if trained else ""
    sent = whole_result("sparse_gradients")
    return {"links": with_machines(links(sent), [sent]), "training": training(trained) + picture}


def main() -> None:
    documents.write(PAGE, COMMAND, parts())
    trained = whole_result("sparse_training")
    if trained:
        plot(trained, PICTURE)


if __name__ == "__main__":
    main()
