"""A layer as a page of HTML that counts for itself: one file, which asks nothing of the network.

The page holds every op's bytes and flops as functions of batch and sequence (:mod:`.coefficients`), for each size of tp
and cp and each width, and the rates of devices and links.  Its sliders, and stretches of the layer taken from plain
torch in place of tpfuse, then give the ledger's numbers to the byte, after DaCeML's view of data movement (Rausch et
al. 2022, arXiv:2110.10802).  The script and its looks are page.html.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from ...kernels.runtime.errors import check
from ...kernels.runtime.launch import pretending
from ...models.config.model import ModelConfig
from ...parallel import TensorParallel
from .. import html
from ..html import Json
from ..plan.cluster import BETWEEN, INSIDE, LINKS, RING, Cluster, Level
from ..plan.devices import DEVICES, Device
from ..plan.messages import over_tp
from ..plan.split import Split
from .aten import COMMUNICATION
from .coefficients import BATCH, Axes, Pool, Size
from .dryrun import Plan, axis_of, fake_world, ranks_of
from .layer import Column, Comparison, compare
from .recorder import Entry
from .text import progress

TEMPLATE = Path(__file__).with_name("page.html")
RANKS = 1, 2, 4, 8  # of tp and of cp
WIDTHS = Fraction(1, 2), Fraction(1), Fraction(2)  # of the model's
SCALED = "hidden_size", "num_heads", "num_kv_heads", "ffn_size", "expert_size", "shared_size"
COUNTS = "read", "written", "least", "flops", "wire", "tiles"


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


class Variant(NamedTuple):
    """A setting that is counted by itself, since it runs other ops or other launch parameters."""

    tp: int
    cp: int
    width: int
    several: bool  # sequences

    @property
    def key(self) -> str:
        return f"{self.tp}x{self.cp}x{self.width}x{2 if self.several else 1}"

    def __str__(self) -> str:
        return f"tp {self.tp}, cp {self.cp}, width {self.width}"


class CountedOp(NamedTuple):
    """The part of an op that is the same at all sizes; ``stretch``: of the block, or the part of the operator table."""

    op: str
    kind: str
    phase: str
    stretch: str
    over: str  # the axis that a message is over
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


Structure = tuple[CountedOp, ...]
StretchedOp = tuple[str, Entry, str]  # a stretch, an op of it, and the axis that a message is over


class Tables:
    """Numbers what variants share: functions, those of an op (COUNTS) as one row, and the ops of a column."""

    def __init__(self) -> None:
        self.pool, self.rows, self.structures = Pool(), dict[tuple[int, ...], int](), dict[Structure, int]()

    def column(self, name: str, ops: Sequence[Sequence[StretchedOp]], axes: Axes) -> list[object]:
        """Returns a column, counted at the axes' sizes, as the numbers of its structure and of each op's row.

        ValueError where sizes have other ops.
        """
        shapes = [[(e.op, e.kind, e.phase, stretch, over) for stretch, e, over in of_size] for of_size in ops]
        check(
            all(shape == shapes[0] for shape in shapes),
            f"ledger: {name}: other ops run at other sizes, so there is no page",
        )
        seen: dict[int, int] = {}  # storages by the order in which they are met
        number = lambda tensors: tuple(seen.setdefault(storage, len(seen)) for storage, _ in tensors)
        structure = tuple(
            CountedOp(*shape, number(e.inputs), number(e.outputs))
            for shape, (_, e, _) in zip(shapes[0], ops[0], strict=True)
        )
        rows = [self._row(name, [e for _, e, _ in calls], axes) for calls in zip(*ops, strict=True)]
        return [self.structures.setdefault(structure, len(self.structures)), rows]

    def _row(self, name: str, calls: Sequence[Entry], axes: Axes) -> int:
        counts = {field: [getattr(e, field) for e in calls] for field in COUNTS}
        row = tuple(
            self.pool.number(f"{name}: {field} of {calls[0].op}", numbers, axes) for field, numbers in counts.items()
        )
        return self.rows.setdefault(row, len(self.rows))


def write(subject: Subject, path: Path) -> None:
    """Writes the page.  ValueError, as at run time, for a layer that cannot be split as asked for, and where counts are
    no exact functions of the sizes; a split that was not asked for then shows the error in place of numbers."""
    html.write(render(gather(subject)), path)


def render(data: Json) -> str:
    return html.render(TEMPLATE, data, "ledger")


def gather(subject: Subject) -> Json:
    """Returns all that the page knows."""
    several, one = (_axes(subject, batch) for batch in (max(subject.batch, BATCH[0]), 1))
    subjects, tables, variants = _variants(subject), Tables(), Json()
    opened = Variant(subject.plan.tp, subject.plan.cp, subject.config.hidden_size, several=subject.batch > 1)
    for variant, other in progress(sorted(subjects.items()), "counting split"):
        axes = several if variant.several else one
        try:
            columns = _columns(other, axes)
            variants[variant.key] = {
                title: tables.column(f"{title}, {variant}", ops, axes) for title, ops in columns.items()
            }
        except ValueError as error:
            if variant == opened:
                raise
            variants[variant.key] = str(error)
    start = dict(batch=subject.batch, seq=subject.seq, tp=opened.tp, cp=opened.cp, width=opened.width)
    values = {name: sorted({getattr(v, name) for v in subjects}) for name in ("tp", "cp", "width")}
    model = dict(name=subject.name, layer=subject.layer, dtype=subject.dtype, arch=subject.arch)
    return dict(
        model=dict(model, element=subject.plan.dtype.itemsize),
        start=start,
        axes=dict(batch=one.batch + several.batch, seq=several.seq) | values,
        variants=variants,
        structures=[list(map(list, structure)) for structure in tables.structures],
        rows=list(tables.rows),
        functions=[[f.kind, f.values, f.keys or f.denominator] for f in tables.pool.functions],
        devices=_devices(subject),
        links=_links(),
        messages=_messages([op for ops in tables.structures for op in ops], {*values["tp"], *values["cp"]}),
    )


def _axes(subject: Subject, batch: int) -> Axes:
    return Axes.around(batch, subject.seq, positions=subject.config.max_positions)


def _variants(subject: Subject) -> dict[Variant, Subject]:
    """Returns every variant of a page with the layer that is counted for it."""
    plan, configs = subject.plan, _widths(subject.config)
    return {
        Variant(tp, cp, config.hidden_size, several): subject._replace(config=config, plan=plan._replace(tp=tp, cp=cp))
        for tp in {*RANKS, plan.tp}
        for cp in {*RANKS, plan.cp}
        for config in configs
        for several in (False, True)
    }


def _widths(config: ModelConfig) -> list[ModelConfig]:
    """Returns the model at WIDTHS: with so many times the heads, each as wide, and MLPs and experts as many times as
    wide.  A width is left out that has no whole number of them."""
    sizes = {name: size for name in SCALED if (size := getattr(config, name, None)) is not None}
    whole: list[Any] = [
        {name: int(size * factor) for name, size in sizes.items()}
        for factor in WIDTHS
        if all(size % factor.denominator == 0 for size in sizes.values())
    ]
    return [replace(config, **scaled) for scaled in whole]


# ---- counts ----


def _columns(subject: Subject, axes: Axes) -> dict[str, list[list[StretchedOp]]]:
    """Returns, for each column, its ops at each size, with the stretch and the axis of each."""
    plan, columns = subject.plan, dict[str, list[list[StretchedOp]]]()
    with pretending(subject.arch), fake_world(plan.tp, cp=plan.cp) as mesh:
        tp = ranks_of(plan, mesh)
        for size in axes.sizes:
            for column in _compared(subject, size, tp).columns:
                columns.setdefault(column.title, []).append(list(_ops(column, tp)))
    return columns


def _compared(subject: Subject, size: Size, tp: TensorParallel) -> Comparison:
    batch, seq = size
    plan = subject.plan
    return compare(
        subject.config, batch=batch, seq=seq, dtype=plan.dtype, tp=tp, imbalance=plan.imbalance, layer=subject.layer
    )


def _ops(column: Column, tp: TensorParallel) -> Iterator[StretchedOp]:
    for part, e in column.entries:
        stretch = e.stretch or part
        check(bool(stretch), f"ledger: {column.title}: {e.op} in {e.phase} belongs to no stretch of the block")
        yield stretch, e, axis_of(e.group, tp) if e.kind == COMMUNICATION else ""


# ---- rates ----


def _devices(subject: Subject) -> Json:
    """Returns the rates of the devices whose kernels have these launch parameters, and so these bytes."""
    devices: Json = {
        d.name: dict(
            gemm=d.gemm * d.peak[subject.dtype],
            attention=d.attention * d.peak[subject.dtype],
            memory=d.reached * d.bandwidth,
            launch=d.launch,
            multiprocessors=d.multiprocessors,
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
