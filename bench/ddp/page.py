"""The tables and the picture of docs/data_parallel.md, from bench/results/ddp.json.

python -m bench.ddp.page
"""

import pathlib

from bench import documents, machine
from bench.ddp import BUCKETS, MICRO_BATCHES, USUAL
from bench.documents import spread
from bench.measured import NOT_YET, of_kinds, with_machines

PAGE = documents.DOCS / "data_parallel.md"
PICTURE = documents.DOCS / "ddp.png"
COMMAND = "bench.ddp.page"
CHANGES = [name for name in (*BUCKETS, "copied gradients", "static graph", *MICRO_BATCHES) if name != USUAL]


def link(row: dict) -> str:
    return f"{row['gbit']:g} Gbit/s" if row["gbit"] else "one machine"


def settings(results: list[dict]) -> str:
    """A row a setting, a column a number of replicas, a link and a processor: time over that of the usual buckets."""
    if not results:
        return f"Settings: {NOT_YET}."
    heads, columns = ["in place of 25 MiB"], []
    for row in results[0]["rows"]:
        heads += machine.heads(f"{row['ranks']} replicas, {link(row)}", results)
        columns += of_case(row, results)
    cells = lambda name: (NOT_YET if row is None else spread(row["over"][name]) for row in columns)
    return documents.table(heads, [[name, *cells(name)] for name in CHANGES])


def of_case(row: dict, results: list[dict]) -> list[dict | None]:
    """Returns the row of the same replicas and link of each result."""
    same = lambda other: (other["ranks"], other["gbit"]) == (row["ranks"], row["gbit"])
    return [next(filter(same, result["rows"]), None) for result in results]


def overlap(results: list[dict]) -> str:
    """A row a processor, a number of replicas and a link: what overlap saves, how much could hide, the best buckets."""
    if not results:
        return f"Overlap: {NOT_YET}."
    heads = (
        "processor", "replicas", "link", "a step, ms", "no overlap, ms", "compute, ms", "messages, ms",
        "saved by overlap, %", "hidden of the messages, %", "could hide, %", "over the least",
        "fastest buckets, and over 25 MiB",
    )  # fmt: skip
    lines = []
    for result in results:
        processor = machine.kind(result["machine"]) if "machine" in result else "not said"
        for row in result["rows"]:
            times = (f"{1e3 * row['seconds'][name][1]:.0f}" for name in (USUAL, "no overlap", "compute", "messages"))
            shares = (spread(row[name], "{:.0f}", 100) for name in ("saved", "hidden", "can_hide"))
            best = fastest(row)
            cells = *times, *shares, spread(row["over_least"]), f"{best}: {spread(row['over'][best])}"
            lines.append((processor, str(row["ranks"]), link(row), *cells))
    return with_machines(documents.table(heads, lines), results)


def fastest(row: dict) -> str:
    """Returns the buckets of the least median, the usual ones where that is no less in a quarter of the rounds."""
    best = min(BUCKETS, key=lambda name: row["over"][name][1])
    return best if row["over"][best][2] < 1 else USUAL


def picture(result: dict) -> str:
    """Shows the picture, which there is when there is a result."""
    picture_line = f"![Time of a step over the size of buckets]({PICTURE.name})"
    return picture_line if result.get("rows") else f"A picture: {NOT_YET}."


def draw(result: dict, path: pathlib.Path) -> None:
    """A panel a number of replicas: time over the size of buckets, a line a link, dashed without overlap."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    panels = list(dict.fromkeys(row["ranks"] for row in result["rows"]))
    figure, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.4), squeeze=False)
    for axis, ranks in zip(axes.flat, panels, strict=True):
        for i, row in enumerate(row for row in result["rows"] if row["ranks"] == ranks):
            low, middle, high = zip(*(row["seconds"][name] for name in BUCKETS), strict=True)
            ms = lambda values: [1e3 * value for value in values]
            axis.plot(ms(middle), f"C{i}-o", label=link(row), markersize=3)
            axis.fill_between(range(len(BUCKETS)), ms(low), ms(high), color=f"C{i}", alpha=0.2)
            axis.axhline(1e3 * row["seconds"]["no overlap"][1], color=f"C{i}", linestyle="--", linewidth=1)
        axis.set_xticks(range(len(BUCKETS)), [name.removesuffix(" MiB") for name in BUCKETS])
        axis.set(ylim=(0, None), xlabel="buckets, MiB", ylabel="ms a step", title=f"{ranks} replicas")
    axes.flat[0].legend(fontsize=7, title="dashed: no overlap", title_fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def parts(results: list[dict]) -> dict[str, str]:
    """The picture is of the first kind of processor."""
    return dict(overlap=overlap(results), picture=picture(results[0] if results else {}), settings=settings(results))


if __name__ == "__main__":
    results = of_kinds("ddp")
    documents.write(PAGE, COMMAND, parts(results))
    if results:
        draw(results[0], PICTURE)
