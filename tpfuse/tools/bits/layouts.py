"""Steps of training at several layouts of tensor-parallel ranks, each compared with one process."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ...parallel import TensorParallel
from ...ranks.messages import channel, gather
from ...training.optim import clip_grad_norm_
from ..ledger.text import table
from .difference import BitsRow
from .trace import Trace, trace
from .whole import pairs

# The columns of the table: which kinds of tensors each counts.
COLUMNS = {
    "loss": ("loss",),
    "outputs": ("op", "output"),
    "gradients": ("gradient of loss", "gradient of op", "gradient of output", "input gradient", "gradient"),
    "norm": ("norm",),
    "weights": ("weight", "weight after"),
}
LEARNING_RATE, MOST_NORM = 1e-2, 0.5  # so that a step changes every weight, and clips

Batch = Mapping[str, Any]  # arguments of a call, the same on every rank; with labels
Make = Callable[[TensorParallel], Any]  # -> nn.Module, whose call returns a loss among its outputs


class Layout(NamedTuple):
    """A tensor-parallel size, with sequence parallelism or without."""

    size: int
    sequence_parallel: bool = False

    def __str__(self) -> str:
        return f"tp {self.size}" + " sp" * self.sequence_parallel


class LayoutBits(NamedTuple):
    """The comparison of a layout with one process, in the order of execution.  ``skipped``: what is no slice of it."""

    layout: Layout
    rows: list[BitsRow]
    skipped: list[str]

    @property
    def first_difference(self) -> BitsRow | None:
        """The first tensor whose bits differ."""
        return next((row for row in self.rows if not row.same), None)

    @property
    def same(self) -> bool:
        return self.first_difference is None

    def counts(self) -> dict[str, tuple[int, int]]:
        """Returns the tensors that are equal, and all, by columns."""
        same = {name: [row.same for row in self.rows if row.kind in kinds] for name, kinds in COLUMNS.items()}
        return {name: (sum(equal), len(equal)) for name, equal in same.items()}

    def json(self) -> dict[str, Any]:
        """Returns plain values; ``first`` has the fields of a BitsRow."""
        first = None if self.first_difference is None else self.first_difference._asdict()
        return self.layout._asdict() | self.counts() | dict(first=first, skipped=self.skipped)


class Bits(list[LayoutBits]):
    """A row a layout; prints as a table."""

    @property
    def same(self) -> bool:
        """True where no bit differs at any layout."""
        return all(row.same for row in self)

    def __str__(self) -> str:
        cells = [
            (row.layout, *(f"{equal}/{count}" for equal, count in row.counts().values()), row.first_difference or "-")
            for row in self
        ]
        skipped = sorted({name for row in self for name in row.skipped})
        lines = [table(("layout", *COLUMNS, "first that differs"), cells)]
        lines += [f"not compared, for their shapes: {', '.join(skipped)}"] * bool(skipped)
        return "\n".join([*lines, "the same bits at every layout" if self.same else "bits differ"])


_groups: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]]" = weakref.WeakKeyDictionary()


def first_ranks(size: int) -> dist.ProcessGroup:
    """Returns the group of so many first ranks, made once, since a group keeps its threads.

    Every rank of the default group calls it; those that are not in it get torch's mark of that.
    """
    world = dist.group.WORLD
    assert world is not None
    groups = _groups.setdefault(world, {})
    if size not in groups:
        groups[size] = dist.new_group(list(range(size)))
    return groups[size]


def compare(make: Make, batches: Sequence[Batch], layouts: Sequence[Layout], bitwise: int | None) -> Bits:
    """Trains a step a batch at each layout and in one process, and compares all tensors.

    A collective of the default group, which has as many ranks as the largest layout; its first rank gets the rows, and
    the others those of the layouts that they are in.  ValueError, on the ranks of a layout, where the model has none.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    groups = {size: first_ranks(size) for size in sorted({x.size for x in layouts if x.size > 1})}
    one = train(make(TensorParallel(bitwise=bitwise)), batches, TensorParallel(bitwise=bitwise))
    result = Bits()
    for layout in layouts:
        if rank < layout.size:
            tp = TensorParallel(groups.get(layout.size), sequence_parallel=layout.sequence_parallel, bitwise=bitwise)
            result.append(_against(one, train(make(tp), batches, tp), layout))
    return result


def train(model: nn.Module, batches: Sequence[Batch], tp: TensorParallel) -> list[Trace]:
    """Trains a step a batch -> the trace of each, with the norm and the weights after it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    traces = []
    for batch in batches:
        optimizer.zero_grad()
        step = trace(model, batch, tp, loss=lambda outputs: outputs["loss"], ops=True)
        step.add(step.key("norm", "of all gradients"), clip_grad_norm_(model, MOST_NORM))
        optimizer.step()
        step.add_parameters("weight after", model, lambda p: p)
        traces.append(step)
    return traces


def _against(one: list[Trace], split: list[Trace], layout: Layout) -> LayoutBits:
    """Returns the comparison of all steps; of several ranks the worst."""
    skipped: list[str] = []
    by_rank = gather(list(_rows(one, split, skipped)), channel(split[0].tp.group))
    return LayoutBits(layout, [max(rows, key=lambda row: row.differ) for rows in zip(*by_rank)], skipped)


def _rows(one: list[Trace], split: list[Trace], skipped: list[str]) -> Iterator[BitsRow]:
    for i, (a, b) in enumerate(zip(one, split, strict=True)):
        for key, x, y in pairs(a, b):
            step = f"step {i + 1}: " * (i > 0)
            if y is None:
                skipped.append(f"{step}{key.label}")
            else:
                row = BitsRow.of(key, x, y)
                yield row._replace(name=f"{step}{row.name}")
