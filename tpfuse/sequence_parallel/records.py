"""Records of the arguments and results of an op's forms.

A weight's gradient is a unit of work with its inputs: ``WeightGrad``, or ``GatheredWeightGrad`` if the rows of its
input have yet to be gathered, or ``ExpertWeightGrad`` of experts, each of which has rows of its own.  A form passes it
to ``grads.run`` with the weight's name among the fields of ``WantedGrads``, which runs it at once.  ``adding`` makes
the ``run`` of weights whose gradients are added in fp32 (:class:`tpfuse.MainGrad`): the unit adds to the total and
returns no gradient.  If backward defers the gradients of weights (kernels/runtime/deferred.py) ``run`` leaves the unit
in a store and returns (None, None).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..kernels.attn.options import Options
from ..kernels.experts.grouped import experts_wgrad, experts_wgrad_add
from ..kernels.experts.records import Sides
from ..kernels.gemm.op import linear_wgrad, linear_wgrad_add
from ..kernels.norm import Recompute, norm_apply
from ..kernels.runtime.captures import Receive
from ..kernels.runtime.deferred import Later
from ..kernels.runtime.main_grad import Main
from ..kernels.runtime.op import acc_dtype
from ..parallel import TensorParallel
from .crossings import gather_rows

# ---- weights ----


class LinearWeights(NamedTuple):
    """act(x w' + b): w [N, D], b [N]."""

    w: Tensor
    b: Tensor | None
    activation: str


class MLP(NamedTuple):
    """act(x w1' + b1) w2': w1 [F, D] (gated [2 F, D]), b1 [F], w2 [D, F].  Backward has no b1."""

    w1: Tensor
    b1: Tensor | None
    w2: Tensor
    activation: str


class Projections(NamedTuple):
    """Attention's two: w [G (Q + 2) E, D] and b for q, k and v with Q + 2 = heads_per_group and E = head_width;
    w_out [D, G Q E].  Backward has no b."""

    w: Tensor
    b: Tensor | None
    w_out: Tensor
    heads_per_group: int
    head_width: int


class Traffic(NamedTuple):
    """How many rows one rank sends to each rank, and receives from each."""

    sent: list[int]
    received: list[int]


# ---- what is saved for backward ----


class SavedInput(NamedTuple):
    """An op's input n until backward: its one shard [1, m, D], or a recipe to compute it again; never gathered rows."""

    n: Tensor | Recompute
    tp: TensorParallel

    @staticmethod
    def of(n: Tensor, recompute: Recompute | None, tp: TensorParallel) -> "SavedInput":
        return SavedInput(n[:1] if recompute is None else recompute, tp)

    def shard(self) -> Tensor:
        """Returns n [m, D]."""
        return norm_apply(self.n) if isinstance(self.n, Recompute) else self.n[0]

    def expanded(self) -> Tensor:
        """Returns n [R, m, D] with stride 0."""
        return self.shard().expand(self.tp.row_shards, -1, -1)

    def rows(self) -> Tensor:
        """Returns all rows of n, [M, D]."""
        return gather_rows(self.expanded(), self.tp)


def save(ctx: Any, tensors: tuple[Tensor | None, ...], saved: SavedInput) -> None:
    """Saves ``tensors`` and n for backward."""
    n, tp = saved
    if isinstance(n, Recompute):
        ctx.save_for_backward(*tensors, *n.tensors)
        ctx.saved = len(tensors), n.constants, tp
    else:
        ctx.save_for_backward(*tensors, n)
        ctx.saved = len(tensors), None, tp


def restore(ctx: Any) -> tuple[tuple[Any, ...], SavedInput]:
    """Returns the tensors and n that ``save`` saved."""
    (count, constants, tp), tensors = ctx.saved, ctx.saved_tensors
    n = tensors[count] if constants is None else Recompute(*tensors[count:], *constants)
    return tensors[:count], SavedInput(n, tp)


class MLPSaved(NamedTuple):
    """n; z, the activation's input as the first GEMM keeps it (kernels/gemm/op.py); a [M, F], its output, or None to
    compute it again in backward."""

    n: SavedInput
    z: Tensor
    a: Tensor | None


class AttentionSaved(NamedTuple):
    """n; attention's tensors and options."""

    n: SavedInput
    qkv: Tensor
    o: Tensor
    lse: Tensor
    options: Options


# ---- gradients of weights ----


class WeightGrad(NamedTuple):
    """dW = dy' x in ``dtype``, and unless None db = sum_rows dy in the dtype ``bias``.  dy [M, N], x [M, K]."""

    dy: Tensor
    x: Tensor
    dtype: torch.dtype
    bias: torch.dtype | None

    def gathered(self) -> "WeightGrad":
        return self

    def run(self) -> tuple[Tensor, Tensor | None]:
        """Returns dW [N, K] and db [N]."""
        dw, db = linear_wgrad(*self)
        return dw, None if self.bias is None else db

    def add_to(self, total: Tensor) -> Tensor | None:
        """Adds dW to ``total`` [N, K], in its dtype, and returns db."""
        db = linear_wgrad_add(self.dy, self.x, total, self.bias)
        return None if self.bias is None else db


class GatheredWeightGrad(NamedTuple):
    """A WeightGrad whose x is gathered first."""

    dy: Tensor
    n: SavedInput
    dtype: torch.dtype
    bias: torch.dtype | None

    def run(self) -> tuple[Tensor, Tensor | None]:
        return self.gathered().run()

    def add_to(self, total: Tensor) -> Tensor | None:
        return self.gathered().add_to(total)

    def gathered(self) -> WeightGrad:
        return WeightGrad(self.dy, self.n.rows(), self.dtype, self.bias)


class ExpertWeightGrad(NamedTuple):
    """dW_e = dy_e' x_e / ``divisor`` of every expert here, in ``dtype``; 0 of one without rows.

    The rows are those of all replicas; the divisor is their number where each has a mean over its own as its loss.
    """

    sides: Sides
    dtype: torch.dtype
    divisor: int = 1

    def run(self) -> tuple[Tensor, None]:
        """Returns dW [E / R, N, K], rounded once."""
        exact = self.divisor & (self.divisor - 1) == 0  # division by a power of two
        if exact or self.dtype == acc_dtype(self.sides.dy):
            dw = experts_wgrad(self.sides, self.dtype)
            return dw if self.divisor == 1 else dw.div_(self.divisor), None
        dy, x = self.sides.dy, self.sides.x
        total = dy.new_zeros(len(self.sides.offsets) - 1, dy.shape[1], x.shape[1], dtype=acc_dtype(dy))
        self.add_to(total)
        return total.to(self.dtype), None

    def add_to(self, total: Tensor) -> None:
        """Adds dW to ``total`` [E / R, N, K], in its dtype."""
        if self.divisor == 1:
            experts_wgrad_add(self.sides, total)
            return
        total.mul_(self.divisor)  # in place of dW beside it
        experts_wgrad_add(self.sides, total)
        total.div_(self.divisor)


class WeightWork(Protocol):
    """The gradient of a weight, not yet computed; a NamedTuple, whose tensors a store of deferred work counts."""

    def run(self) -> tuple[Tensor, Tensor | None]: ...
    def add_to(self, total: Tensor) -> Tensor | None: ...


Run = Callable[[str, WeightWork], tuple[Tensor | None, Tensor | None]]


def run(name: str, work: WeightWork) -> tuple[Tensor | None, Tensor | None]:
    """Runs the work for the weight ``name``, "weight" or "out_weight", at once."""
    return work.run()


Add = Callable[[Callable[[Tensor], Any]], Any]  # calls a function with a total, and returns its result


def adding(weight: Add | None, out_weight: Add | None) -> Run:
    """Returns a ``run`` that adds a weight's gradient to the total of its ``Add``; if that is None it returns the
    gradient."""

    def run_adding(name: str, work: WeightWork) -> tuple[Tensor | None, Tensor | None]:
        add = weight if name == "weight" else out_weight
        return run(name, work) if add is None else (None, add(work.add_to))

    return run_adding


def handing_over(run: Run, weight: Receive | None, out_weight: Receive | None) -> Run:
    """Returns ``run`` after a weight's matrices were handed to what receives them."""

    def run_handing_over(name: str, work: WeightWork) -> tuple[Tensor | None, Tensor | None]:
        receive = weight if name == "weight" else out_weight
        if receive is not None:
            assert isinstance(work, WeightGrad | GatheredWeightGrad)  # others' weights are not captured
            work = work.gathered()
            receive(work.dy, work.x)
        return run(name, work)

    return run_handing_over


class WantedGrads(NamedTuple):
    """The weights whose gradients backward computes: that of the linear layer whose input is gathered (``weight``) and
    of the one whose output is scattered (``out_weight``); and the dtype of the bias's gradient, None without it.
    ``run`` is called with the name of each weight and the work for it.  ``n``: the gathered input has a gradient."""

    weight: bool = False
    bias: torch.dtype | None = None
    out_weight: bool = False
    run: Run = run
    n: bool = True

    @property
    def at_once(self) -> bool:
        """True if gradients are returned as tensors, at once, so that an opaque op may compute them."""
        return self.run is run

    @staticmethod
    def of(ctx: Any, inputs: tuple[str, ...], bias: torch.dtype | None = None) -> "WantedGrads":
        """Returns the gradients that backward computes now, adds to totals, or defers.

        ``inputs``: the names of forward's inputs after x.  ``bias``: the dtype of the bias.
        """
        grads = WantedGrads.of_pair(inputs, ctx.needs_input_grad[1:], ctx.deferral, ctx.mains, bias=bias)
        return grads if ctx.captures is None else grads._replace(run=handing_over(grads.run, *ctx.captures))

    @staticmethod
    def of_pair(
        inputs: tuple[str, ...],
        needs: Sequence[bool],
        deferral: Later | None,
        mains: tuple[Main | None, ...] | None,
        *,
        bias: torch.dtype | None = None,
    ) -> "WantedGrads":
        """Returns those of one pair of weights among several: which of ``inputs`` need one, where they are deferred and
        added to."""
        if deferral is None:
            wanted = {name for name, need in zip(inputs, needs, strict=False) if need}
        else:
            wanted = set(filter(deferral.needs_gradient, inputs))
        grads = WantedGrads("weight" in wanted, bias if "bias" in wanted else None, "out_weight" in wanted)
        if deferral is not None:
            return grads._replace(run=_deferring(deferral))
        return grads if mains is None else grads._added(*mains)

    def _added(self, weight: Main | None, out_weight: Main | None) -> "WantedGrads":
        """Returns these gradients, added to the totals of the weights that have one."""
        return self._replace(
            weight=self.weight and (weight is None or weight.wanted),
            out_weight=self.out_weight and (out_weight is None or out_weight.wanted),
            run=adding(*(None if main is None else main.add for main in (weight, out_weight))),
        )


def _deferring(deferral: Later) -> Run:
    """Returns a ``run`` that leaves the work in a store."""
    weight, out_weight = deferral.mains or (None, None)
    run_now = adding(*(None if main is None else main.add for main in (weight, out_weight)))
    if (receivers := deferral.captures) is not None:
        run_now = handing_over(run_now, *receivers)

    def defer(name: str, work: WeightWork) -> tuple[None, None]:
        def make() -> None:
            dw, db = run_now(name, work)
            deferral.give(name, dw)
            deferral.give("bias", db)

        deferral.store.add(make, work)
        return None, None

    return defer


def handed_over(deferral: Later | None, gradient: Tensor | None) -> Tensor | None:
    """Returns a bias's gradient for autograd; None if it is deferred, which this does."""
    if deferral is None:
        return gradient
    deferral.keep("bias", gradient)
    return None
