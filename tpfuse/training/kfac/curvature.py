"""The Kronecker factors of a weight's curvature (K-FAC, Martens & Grosse 2015, arXiv:1503.05671).

    weight [N, K]    A = mean over rows of x' x  [K, K]        G = mean over rows of g' g  [N, N]

The n rows are the tokens of all micro-batches and replicas whose gradient is not zero, so that padding counts nowhere.
g = n dy is the gradient of one row's loss, where the loss is a mean over rows: the empirical Fisher (PipeFisher, Osawa
et al. 2022, arXiv:2211.14133), which takes the labels of the data.  Where the gradient is the mean of those of L
losses, as of L replicas, dy is that of one of these, and g = n dy / L.

Each rank adds the products of its own rows, at any split, so that memory and time are divided by the tensor-parallel
size; whole factors are sums over ranks, made when they are inverted.
"""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ...collectives import all_to_all
from ...kernels.runtime.op import acc_dtype
from ...layers.shards import SplitParameter

if TYPE_CHECKING:
    from ...pipeline import Pipeline

INPUT, OUTPUT = SIDES = "input", "output"  # of A and of G
State = dict[str, Tensor]  # a weight's, in the optimizer


class CapturedRows(NamedTuple):
    """x and dy of one micro-batch: of the side that is split over ranks this rank's columns of all rows, of the whole
    side this rank's rows."""

    x: Tensor
    dy: Tensor


class RowSizes(NamedTuple):
    """Shapes of one micro-batch's CapturedRows, and which side is split: they decide the time of a weight's pieces."""

    x: torch.Size
    dy: torch.Size
    split: int | None
    dtype: torch.dtype
    device: torch.device

    def random_rows(self) -> CapturedRows:
        return CapturedRows(*(torch.randn(shape, dtype=self.dtype, device=self.device) for shape in self[:2]))


class Sum(NamedTuple):
    """The products of this rank's rows [d, d], and their number, an fp32 or fp64 scalar."""

    gram: Tensor
    rows: Tensor


class _KeptSums(NamedTuple):
    """The ``sums`` of a curvature, of which those of the sides in ``shared`` are not to be added to in place, the rows
    that it ``held``, and of each refresh since (the state, as it was before)."""

    sums: dict[str, Sum]
    held: dict[int, list[CapturedRows]]
    shared: set[str]
    states: list[tuple[State, State]]


class Moment:
    """When matrices are taken, the same for all weights.

    ``group``: of the optimizer, with the numbers ``steps`` and ``refresh``.  ``pipeline``: the one whose bubbles have
    the work, if any.  ``losses``: of how many losses a step's gradient is the mean.
    """

    def __init__(self, losses: Callable[[], int]) -> None:
        self.losses = losses
        self.group: Mapping[str, Any] = {}
        self.pipeline: Pipeline | None = None

    @property
    def due(self) -> bool:
        """Returns whether factors are refreshed in the coming step."""
        return bool(self.group["steps"] % self.group["refresh"] == 0)

    @property
    def filler(self) -> Any:
        """The runner of work in the pipeline's bubbles; None where there is none."""
        return None if self.pipeline is None else self.pipeline.filler


class Curvature:
    """The factors of the ``weight`` called ``name``; ``placement``: its matrix, of which this rank holds a slice.
    ``groups``: the ranks with other rows."""

    def __init__(
        self, name: str, placement: SplitParameter, groups: list[dist.ProcessGroup], moment: Moment, *, weight: Tensor
    ):
        self.name, self.placement, self.groups, self.moment = name, placement, groups, moment
        self.weight = weight
        self.sums: dict[str, Sum] = {}
        self.held: dict[int, list[CapturedRows]] = {}  # by micro-batch, in which a layer may be called again
        self.size: RowSizes | None = None
        self._kept: _KeptSums | None = None

    def receive(self, dy: Tensor, x: Tensor) -> None:
        """Takes dy [M, N] and x [M, K] of a backward pass, of which one is this rank's slice of columns: adds them at
        once, or keeps them for a piece of work."""
        filler = self.moment.filler
        if filler is None and self.moment.due:
            self.add(self.rows(dy, x))
        elif filler is not None and filler.step == 0:
            assert self.moment.pipeline is not None
            self.held.setdefault(self.moment.pipeline.micro_batch, []).append(self.rows(dy, x))

    # ---- gradients that are dropped ----

    def forget(self) -> None:
        """Drops what has been added since the latest step; work in a pipeline's bubbles is of several, and stays."""
        if self.moment.filler is None:
            self.sums.clear()

    def keep(self) -> None:
        """Keeps what is here, and what is refreshed from now on, until :meth:`release`."""
        held = {micro_batch: list(rows) for micro_batch, rows in self.held.items()}
        self._kept = _KeptSums(dict(self.sums), held, shared=set(self.sums), states=[])

    def restore(self) -> None:
        """Makes everything as it was at :meth:`keep`."""
        assert self._kept is not None
        self.sums, self.held = self._kept.sums, self._kept.held
        for state, earlier in reversed(self._kept.states):
            state.clear()
            state.update(earlier)

    def release(self) -> None:
        self._kept = None

    # ---- sums ----

    def rows(self, dy: Tensor, x: Tensor) -> CapturedRows:
        """Returns what this rank keeps of the matrices."""
        dim = self._split
        rows = CapturedRows(x if dim in (None, 1) else self._mine(x), dy if dim in (None, 0) else self._mine(dy))
        self.size = RowSizes(rows.x.shape, rows.dy.shape, dim, dtype=x.dtype, device=x.device)
        return rows

    def blank(self) -> "Curvature":
        """Returns new factors of the same weight."""
        return Curvature(self.name, self.placement, self.groups, self.moment, weight=self.weight)

    @property
    def _split(self) -> int | None:
        """The dimension of the matrix that is split over ranks: 0, whose dy is split, or 1, whose x is."""
        return self.placement.spec.dim if self.placement.tp.size > 1 else None

    def _mine(self, side: Tensor) -> Tensor:
        """Returns this rank's rows [m, .] of all M, the last ones filled up with zeros."""
        m = -(-len(side) // self.placement.tp.size)
        mine = side[self.placement.tp.rank * m : (self.placement.tp.rank + 1) * m]
        return F.pad(mine, (0, 0, 0, m - len(mine))) if len(mine) < m else mine.clone()  # a view would keep all rows

    def _exchanged(self, side: Tensor) -> Tensor:
        """Returns this rank's rows of all columns [m, R c], given its columns of all rows [M, c]."""
        tp = self.placement.tp
        parts = F.pad(side, (0, 0, 0, -len(side) % tp.size)).view(tp.size, -1, side.shape[1])
        return all_to_all(parts.contiguous(), tp.group_name).movedim(0, 1).flatten(1)

    @torch.no_grad()
    def add(self, rows: CapturedRows) -> None:
        """Adds the products of a micro-batch.  Every tensor-parallel rank calls it."""
        x, dy = (side.to(acc_dtype(side)) for side in rows)
        if self._split == 0:
            dy = self._exchanged(dy)
        elif self._split == 1:
            x = self._exchanged(x)
        counted = dy.any(1, keepdim=True)
        number = counted.sum(dtype=x.dtype)
        for side, values in zip(SIDES, (x * counted, dy), strict=True):
            gram, earlier = self.sums.get(side, (None, 0))
            if gram is None:
                product = values.mT @ values
            elif self._kept is not None and side in self._kept.shared:
                product = gram.addmm(values.mT, values)
                self._kept.shared.remove(side)
            else:
                product = gram.addmm_(values.mT, values)
            self.sums[side] = Sum(product, earlier + number)

    @torch.no_grad()
    def refresh(self, side: str, state: State, decay: float, damping: float) -> None:
        """Moves the running mean of a factor towards the sums' and inverts it; the sums then begin anew.

        A mean that is not finite, as after a step that a gradient scaler skips, or that is of no rows, changes nothing.
        Every rank of the groups calls it.
        """
        if self._kept is not None:
            self._kept.states.append((state, dict(state)))
        gram, rows = self.sums.pop(side) if side in self.sums else self._of_no_rows(side)
        message = torch.cat([gram.flatten(), rows[None]])
        for group in self.groups:
            dist.all_reduce(message, group=group)
        gram, rows = message[:-1].view_as(gram), message[-1]
        sample = gram / rows if side == INPUT else gram * rows / self.moment.losses() ** 2
        if math.isfinite(scale := sample.trace().item()) and scale > 0:
            mean = torch.lerp(sample, state[side], decay) if side in state else sample
            state[side], state[f"{side}_inverse"] = mean, inverse(mean, damping)

    def _of_no_rows(self, side: str) -> Sum:
        """Returns the sum of a rank whose loss does not depend on the weight: that of another may."""
        d, dtype = self.placement.spec.shape[side == INPUT], acc_dtype(self.weight)
        return Sum(self.weight.new_zeros(d, d, dtype=dtype), self.weight.new_zeros((), dtype=dtype))

    def precondition(self, gradient: Tensor, state: State) -> Tensor:
        """Returns G^-1 dW A^-1 of a whole gradient, each inverse of a factor whose mean eigenvalue is 1."""
        left, right = state.get(f"{OUTPUT}_inverse"), state.get(f"{INPUT}_inverse")
        gradient = gradient if left is None else left @ gradient
        return gradient if right is None else gradient @ right


def inverse(factor: Tensor, damping: float) -> Tensor:
    """Returns (F + sqrt(damping) I)^-1 of F = the factor over its mean eigenvalue.

    That is factored damping (Martens & Grosse 2015, section 6.3, with traces as norms) of A x G + lambda I by lambda =
    ``damping`` times the mean eigenvalue of A x G: the scales of the loss and of its gradients do not matter.
    """
    identity = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
    scaled = factor / (factor.trace() / len(factor))
    return torch.cholesky_inverse(torch.linalg.cholesky(scaled + damping**0.5 * identity))
