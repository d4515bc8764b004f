"""The tables and the picture of docs/context.md, from bench/results/context.json.

python -m bench.context.page
"""

import pathlib

from bench import documents, machine
from bench.context import ATTENTION, GROUPS, KINDS, RANKS
from bench.ddp.page import link
from bench.measured import NOT_YET, of_kinds, with_machines

PAGE = documents.DOCS / "context.md"
PICTURE = documents.DOCS / "context.png"
COMMAND = "bench.context.page"


def memory(result: dict) -> str:
    """A row a length: MiB of a rank by the number of ranks."""
    if not result.get("memory"):
        return f"Memory: {NOT_YET}."
    heads = "positions", *(f"cp {ranks}, MiB" for ranks in RANKS)
    return documents.table(
        heads, [(f"{row['seq']:,}", *(f"{row[str(ranks)]:.0f}" for ranks in RANKS)) for row in result["memory"]]
    )


def speed(results: list[dict]) -> str:
    """A row a part and kind, a column a link and processor: ms, and the ratio to the first kind."""
    if not results:
        return f"Speed: {NOT_YET}."
    links = list(map(link, results[0]["rows"]))
    of_link = [{link(row): row for row in result["rows"]} for result in results]
    heads = "", "kind", *(head for name in links for head in machine.heads(f"{name}: ms, over the first", results))
    lines = []
    for group, kinds in GROUPS.items():
        for kind in kinds:
            cells = (_cell(rows.get(name), group, kind) for name in links for rows in of_link)
            lines.append((group, kind, *cells))
    return with_machines(documents.table(heads, lines), results)


def _cell(row: dict | None, group: str, kind: str) -> str:
    if row is None:
        return NOT_YET
    return f"{1e3 * row[group]['seconds'][kind][1]:.0f}, {documents.spread(row[group]['over'][kind])}"


def picture(result: dict) -> str:
    """Shows the picture, which there is when there is a result."""
    line = f"![Memory of a rank over the length of a sequence, and time of attention by kind]({PICTURE.name})"
    return line if result.get("rows") else f"A picture: {NOT_YET}."


def draw(result: dict, path: pathlib.Path) -> None:
    """Memory over the length, a line a number of ranks; time of attention, a group of bars a link."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
    for ranks in RANKS:
        lengths, held = zip(*((row["seq"], row[str(ranks)]) for row in result["memory"]), strict=True)
        left.plot(lengths, held, "-o", markersize=3, label=f"cp {ranks}")
    left.set(xlabel="positions", ylabel="MiB a rank", title="memory of a training step", ylim=(0, None))
    left.legend(fontsize=7)
    places = [(row, group) for group in ATTENTION for row in result["rows"]]
    width = 0.8 / len(KINDS)
    for i, kind in enumerate(KINDS):
        quartiles = [row[group]["seconds"][kind] for row, group in places]
        places_of_kind = [x + width * (i - (len(KINDS) - 1) / 2) for x in range(len(places))]
        right.bar(places_of_kind, [1e3 * q[1] for q in quartiles], 0.92 * width, label=kind)
        errors = [[1e3 * (q[1] - q[0]) for q in quartiles], [1e3 * (q[2] - q[1]) for q in quartiles]]
        right.errorbar(places_of_kind, [1e3 * q[1] for q in quartiles], errors, fmt="none", ecolor="k", linewidth=0.8)
    right.set_xticks(range(len(places)), [f"{link(row)}\n{group.split(', ')[1]}" for row, group in places], fontsize=6)
    right.set(ylabel="ms", title="attention of two ranks, forward and backward", ylim=(0, None))
    right.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def parts(results: list[dict]) -> dict[str, str]:
    """Memory and the picture are of the first kind of processor."""
    first = results[0] if results else {}
    return dict(memory=memory(first), picture=picture(first), speed=speed(results))


if __name__ == "__main__":
    results = of_kinds("context")
    documents.write(PAGE, COMMAND, parts(results))
    if results:
        draw(results[0], PICTURE)
