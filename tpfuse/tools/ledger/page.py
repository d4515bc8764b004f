"""A layer as a page of HTML that counts for itself: one file, which asks nothing of the network.

The page holds every op's bytes and flops as functions of batch and sequence (:mod:`.coefficients`), for each size of tp
and cp, and the rates of devices and links.  Its sliders, and stretches of the layer taken from plain torch in place of
tpfuse, then give the ledger's numbers to the byte, after DaCeML's view of data movement (Rausch et al. 2022,
arXiv:2110.10802).  The script and its looks are page.html.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ...kernels.runtime.errors import check
from ...kernels.runtime.launch import pretending
from ...models.config.model import ModelConfig
from ...parallel import TensorParallel
from ..plan.cluster import BETWEEN, INSIDE, LINKS, RING, Cluster, Level
from ..plan.devices import DEVICES, Device
from ..plan.messages import over_tp
from ..plan.split import Split
from .aten import COMMUNICATION
from .coefficients import Axes, Pool, Size
from .dryrun import Plan, axis_of, fake_world, ranks_of
from .layer import Column, Comparison, compare
from .recorder import Entry
from .text import progress

TEMPLATE = Path(__file__).with_name("page.html")
MOST = 200_000  # bytes of a page
RANKS = 1, 2, 4, 8  # of tp and of cp
COUNTS = "read", "written", "least", "flops", "wire"

Json = dict[str, object]


class Subject(NamedTuple):
    """A layer that a page shows: ``plan``: its tp, cp and dtype; ``batch`` and ``seq``: the size that it opens at."""

    name: str
    config: ModelConfig
    plan: Plan
    batch: int
    seq: int
    arch: str
    layer: int = 0

    @property
    def dtype(self) -> str:
        return str(self.plan.dtype).removeprefix("torch.")


class CountedOp(NamedTuple):
    """What is the same of an op at all sizes; ``stretch``: of the block, or the part of the operator table."""

    op: str
    kind: str
    phase: str
    stretch: str
    over: str  # the axis that a message is over
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def write(subject: Subject, path: Path) -> None:
    """Writes the page.  ValueError, as at run time, for a layer that cannot be split as asked for, and where counts are
    no exact functions of the sizes; a split that was not asked for then shows the error in place of numbers."""
    text = render(gather(subject))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def render(data: Json) -> str:
    """Returns the page with its data; no string of them can end the element that they stand in."""
    embedded = json.dumps(data, separators=(",", ":")).replace("</", "<\\/").replace("<!--", "<\\u0021--")
    text = TEMPLATE.read_text(encoding="utf-8").replace("{{data}}", embedded)
    size = len(text.encode())
    check(size < MOST, f"ledger: the page would have {size:,} bytes, and at most {MOST:,} are allowed")
    return text


def gather(subject: Subject) -> Json:
    """Returns all that the page knows."""
    axes = Axes.around(subject.batch, subject.seq, positions=subject.config.max_positions)
    pool, structures = Pool(axes), dict[tuple[CountedOp, ...], int]()
    plan = subject.plan
    sizes = {(tp, cp): plan._replace(tp=tp, cp=cp) for tp in {*RANKS, plan.tp} for cp in {*RANKS, plan.cp}}
    splits: Json = {}
    for (tp, cp), other in progress(sorted(sizes.items()), "counting split"):
        try:
            columns = _columns(subject._replace(plan=other), axes)
            splits[f"{tp}x{cp}"] = {
                title: _embedded(f"{title}, tp {tp}, cp {cp}", column, pool, structures)
                for title, column in columns.items()
            }
        except ValueError as error:
            if other == plan:
                raise
            splits[f"{tp}x{cp}"] = str(error)
    start = dict(batch=subject.batch, seq=subject.seq, tp=plan.tp, cp=plan.cp)
    ranks = dict(tp=sorted({tp for tp, _ in sizes}), cp=sorted({cp for _, cp in sizes}))
    model = dict(name=subject.name, layer=subject.layer, dtype=subject.dtype, arch=subject.arch)
    return dict(
        model=dict(model, element=plan.dtype.itemsize),
        start=start,
        axes=axes._asdict() | ranks,
        splits=splits,
        structures=[list(map(list, structure)) for structure in structures],
        functions=[[f.kind, f.values, f.keys or f.denominator] for f in pool.functions],
        devices=_devices(subject),
        links=_links(),
        messages=_messages([op for structure in structures for op in structure], {n for pair in sizes for n in pair}),
    )


# ---- counts ----


def _columns(subject: Subject, axes: Axes) -> dict[str, list[list[tuple[str, Entry, str]]]]:
    """Returns, for each column, its ops at each size, with the stretch and the axis of each."""
    plan, columns = subject.plan, dict[str, list[list[tuple[str, Entry, str]]]]()
    with pretending(subject.arch), fake_world(plan.tp, cp=plan.cp) as mesh:
        tp = ranks_of(plan, mesh)
        for size in (*axes.fitted, *axes.further):
            for column in _compared(subject, size, tp).columns:
                columns.setdefault(column.title, []).append(list(_ops(column, tp)))
    return columns


def _compared(subject: Subject, size: Size, tp: TensorParallel) -> Comparison:
    batch, seq = size
    plan = subject.plan
    return compare(
        subject.config, batch=batch, seq=seq, dtype=plan.dtype, tp=tp, imbalance=plan.imbalance, layer=subject.layer
    )


def _ops(column: Column, tp: TensorParallel) -> Iterator[tuple[str, Entry, str]]:
    for part, e in column.entries:
        stretch = e.stretch or part
        check(bool(stretch), f"ledger: {column.title}: {e.op} in {e.phase} belongs to no stretch of the block")
        yield stretch, e, axis_of(e.group, tp) if e.kind == COMMUNICATION else ""


def _embedded(
    name: str,
    column: Sequence[Sequence[tuple[str, Entry, str]]],
    pool: Pool,
    structures: dict[tuple[CountedOp, ...], int],
) -> list[object]:
    """Returns a column as the number of its structure, and the numbers of each op's functions.

    ValueError where sizes have other ops.
    """
    shapes = [[(e.op, e.kind, e.phase, stretch, over) for stretch, e, over in ops] for ops in column]
    check(
        all(shape == shapes[0] for shape in shapes),
        f"ledger: {name}: other ops run at other sizes, so there is no page",
    )
    seen: dict[int, int] = {}  # storages by the order in which they are met
    number = lambda tensors: tuple(seen.setdefault(storage, len(seen)) for storage, _ in tensors)
    structure = tuple(
        CountedOp(*shape, number(e.inputs), number(e.outputs))
        for shape, (_, e, _) in zip(shapes[0], column[0], strict=True)
    )
    functions = [
        [pool.number(f"{name}: {field} of {ops[0][1].op}", [getattr(e, field) for _, e, _ in ops]) for field in COUNTS]
        for ops in zip(*column, strict=True)
    ]
    return [structures.setdefault(structure, len(structures)), sum(functions, [])]


# ---- rates ----


def _devices(subject: Subject) -> Json:
    """Returns the rates of the devices whose kernels have these launch parameters, and so these bytes."""
    devices: Json = {
        d.name: dict(
            gemm=d.gemm * d.peak[subject.dtype],
            attention=d.attention * d.peak[subject.dtype],
            memory=d.reached * d.bandwidth,
            launch=d.launch,
        )
        for d in DEVICES.values()
        if d.arch == subject.arch and subject.dtype in d.peak
    }
    check(bool(devices), f"ledger: there is no device of {subject.arch} with a peak of {subject.dtype}")
    return devices


def _links() -> list[Json]:
    """Returns links, from the slowest: a device's share of its node's network, and inside a node."""
    rates = [(r.network, BETWEEN, "network") for r in LINKS.values()]
    rates += [(RING * r.inside, INSIDE, "in a node") for r in LINKS.values()]
    return [
        dict(bandwidth=bandwidth, latency=latency, name=f"{bandwidth / 1e9:.3g} GB/s, {place}")
        for bandwidth, latency, place in sorted(set(rates))
    ]


def _messages(ops: Sequence[CountedOp], ranks: set[int]) -> Mapping[str, Mapping[int, tuple[float, float]]]:
    """Returns, by collective and ranks, how many latencies it takes, and seconds for a byte on a link of one byte a
    second: the planner's model, which is linear in both."""
    names = {op.op for op in ops if op.kind == COMMUNICATION}
    any_device: Device = next(iter(DEVICES.values()))

    def seconds(op: str, n: int, *, wire: float, latency: float) -> float:
        return over_tp(op, wire, Split(tp=n), Cluster(any_device, n, (Level(n, 1.0, latency),)))

    return {
        op: {n: (seconds(op, n, wire=0, latency=1), seconds(op, n, wire=1, latency=0)) for n in sorted(ranks - {1})}
        for op in sorted(names)
    }
