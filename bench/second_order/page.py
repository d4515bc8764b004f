"""The table and the picture of docs/pipeline.md about second-order optimizers in bubbles, from bench/results/.

python -m bench.second_order.page
"""

from pathlib import Path
from typing import Any

from bench import documents
from bench.measured import NOT_YET, whole_result, with_machines

PAGE = documents.DOCS / "pipeline.md"
PICTURE = documents.DOCS / "second_order.png"
COMMAND = "bench.second_order.page"
HEADS = (
    "weights of linear layers by",
    "rate",
    "held out, bits per byte",
    "steps between refreshes: at least",
    "planned",
    "optimizer, ms a step",
    "planned ms a step",
    "the same with refreshes outside bubbles",
    "planned seconds to AdamW's bits",
)


def best(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the run that ended with the fewest bits."""
    return min(row["runs"], key=lambda run: run["held_out"][-1][1])


def step_seconds(row: dict[str, Any], rows: list[dict[str, Any]]) -> float:
    """Returns the planned seconds of a step: the passes, which are the same under every optimizer, so that their
    fastest measurement counts, and the optimizer after them."""
    return min(other["seconds"] for other in rows) + best(row)["optimizer"]


def line(row: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    run, seconds, bits = best(row), step_seconds(row, rows), best(rows[0])["held_out"][-1][1]
    steps = next((step for step, held_out in run["held_out"] if held_out <= bits), None)
    cells = [row["name"], f"{run['rate']:g}", f"{run['held_out'][-1][1]:.3f}"]
    if row["work"]:
        outside = f"{1e3 * (seconds + row['work'] / row['steps']):.0f}"
        cells += [f"{row['demand']:.2f}", str(row["steps"])]
    else:
        cells += ["", ""]
        outside = ""
    cells += [f"{1e3 * run['optimizer']:.0f}", f"{1e3 * seconds:.0f}", outside]
    return [*cells, "not reached" if steps is None else f"{steps * seconds:.1f}"]


def table_of(result: dict[str, Any]) -> str:
    if not result:
        return f"Second-order optimizers in bubbles: {NOT_YET}."
    return documents.table(HEADS, [line(row, result["rows"]) for row in result["rows"]])


def plot(result: dict[str, Any], path: Path) -> None:
    """Held-out bits over steps, and over planned seconds."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained", sharey=True)
    for row in result["rows"]:
        steps, bits = zip(*best(row)["held_out"], strict=True)
        axes[0].plot(steps, bits, label=row["name"])
        axes[1].plot([n * step_seconds(row, result["rows"]) for n in steps], bits)
    axes[0].set(xlabel="step", ylabel="held out, bits per byte")
    axes[1].set(xlabel="planned seconds", xlim=0)
    axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=100, metadata=dict(Software=None))
    plt.close(figure)


def parts() -> dict[str, str]:
    """Returns the text of each part of the page by its name."""
    result = whole_result("second_order")
    picture = f"\n\n![Held-out bits over steps and planned seconds]({PICTURE.name})" if result else ""
    return {"second order": with_machines(table_of(result), [result]) + picture}


def main() -> None:
    documents.write(PAGE, COMMAND, parts())
    if result := whole_result("second_order"):
        plot(result, PICTURE)


if __name__ == "__main__":
    main()
