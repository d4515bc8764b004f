"""Ops, and the shapes that each is run at."""

from tpfuse.tools.bench.definition import Bench, Shape, discover, load

SMALL, TINY, FEW = 256, 16, 2  # FEW: of what is counted rather than computed with, in a rehearsal
COUNTED = "B", "H", "G", "R"


def small(bench: Bench, tiny: bool) -> Shape:
    """The shape of a check: on a GPU no size over SMALL."""
    most = {axis: FEW if axis in COUNTED else TINY for axis in bench.axes} if tiny else dict.fromkeys(bench.axes, SMALL)
    return tuple(min(n, most[axis]) for n, axis in zip(bench.cpu_shapes[0], bench.axes, strict=True))


def in_turn(ops: tuple[str, ...], tiny: bool) -> list[tuple[Bench, Shape]]:
    """The first shape of every op, then the second: whatever is left out, every op has been seen."""
    benches = [load(name) for name in ops]
    shapes = [[small(bench, True)] if tiny else list(bench.shapes) for bench in benches]
    longest = max(map(len, shapes))
    return [(bench, sizes[i]) for i in range(longest) for bench, sizes in zip(benches, shapes) if i < len(sizes)]


def remaining(ops: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in discover() if name not in ops)


def name_of(bench: Bench, shape: Shape) -> str:
    return f"{bench.name} {'x'.join(map(str, shape))}"


def case(name: str) -> tuple[Bench, Shape]:
    """Returns the case of a name, the inverse of :func:`name_of`."""
    op, shape = name.split()[:2]
    return load(op), load(op).parse(shape)
