"""What the forms of an op take and give, as records.

A weight's gradient is a unit of work of its own, with its inputs: ``WeightGrad``, or ``GatheredWeightGrad`` if the
rows of its input have yet to be gathered.  A form hands it to ``needs.run`` with the weight's name among the fields of
``Needs``, and it is run at once.  ``adding`` makes the ``run`` of weights whose gradients are added in fp32
(:class:`tpfuse.MainGrad`): the unit adds to the sum so far, whenever it is run, and returns no gradient.  Where
backward hands the gradients of weights over (kernels/runtime/deferred.py) ``run`` leaves the unit in a store and
returns (None, None).  Another kind of weights (experts, which are no single linear layer) brings its own record of
weights and its own unit: anything with ``run()`` and ``add_to(total)``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.attn.options import Options
from ..kernels.gemm.op import linear_wgrad, linear_wgrad_add
from ..kernels.norm import Recompute, norm_apply
from ..kernels.runtime.deferred import Later
from ..kernels.runtime.main_grad import Main
from ..parallel import TensorParallel
from .crossings import gather_rows

# ---- weights ----


class Linear(NamedTuple):
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


# ---- what is saved for backward ----


class Saved(NamedTuple):
    """An op's input n until backward: its one shard [1, m, D], or what makes it again; never what was gathered."""

    n: Tensor | Recompute
    tp: TensorParallel

    @staticmethod
    def of(n: Tensor, recompute: Recompute | None, tp: TensorParallel) -> "Saved":
        return Saved(n[:1] if recompute is None else recompute, tp)

    def expanded(self) -> Tensor:
        """Returns n [R, m, D] with stride 0."""
        n = norm_apply(self.n)[None] if isinstance(self.n, Recompute) else self.n
        return n.expand(self.tp.row_shards, -1, -1)

    def rows(self) -> Tensor:
        """Returns all rows of n, [M, D]."""
        return gather_rows(self.expanded(), self.tp)


def save(ctx: Any, tensors: tuple[Tensor | None, ...], saved: Saved) -> None:
    """Saves ``tensors`` and n for backward."""
    n, tp = saved
    if isinstance(n, Recompute):
        ctx.save_for_backward(*tensors, *n.tensors)
        ctx.saved = len(tensors), n.constants, tp
    else:
        ctx.save_for_backward(*tensors, n)
        ctx.saved = len(tensors), None, tp


def restore(ctx: Any) -> tuple[tuple[Any, ...], Saved]:
    """Returns what ``save`` was given."""
    (count, constants, tp), tensors = ctx.saved, ctx.saved_tensors
    n = tensors[count] if constants is None else Recompute(*tensors[count:], *constants)
    return tensors[:count], Saved(n, tp)


class MLPSaved(NamedTuple):
    """n; z [M, F], the activation's input; a [M, F], its output, unless backward is to make it again."""

    n: Saved
    z: Tensor
    a: Tensor | None


class AttentionSaved(NamedTuple):
    """n; attention's tensors and options."""

    n: Saved
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

    def run(self) -> tuple[Tensor, Tensor | None]:
        """Returns dW [N, K] and db [N]."""
        dw, db = linear_wgrad(*self)
        return dw, None if self.bias is None else db

    def add_to(self, total: Tensor) -> Tensor | None:
        """Adds dW to ``total`` [N, K], in its dtype, and returns db."""
        db = linear_wgrad_add(self.dy, self.x, total, self.bias)
        return None if self.bias is None else db


class GatheredWeightGrad(NamedTuple):
    """A WeightGrad for whose x rows are gathered first."""

    dy: Tensor
    n: Saved
    dtype: torch.dtype
    bias: torch.dtype | None

    def run(self) -> tuple[Tensor, Tensor | None]:
        return self._gathered().run()

    def add_to(self, total: Tensor) -> Tensor | None:
        return self._gathered().add_to(total)

    def _gathered(self) -> WeightGrad:
        return WeightGrad(self.dy, self.n.rows(), self.dtype, self.bias)


Work = WeightGrad | GatheredWeightGrad
Run = Callable[[str, Work], tuple[Tensor | None, Tensor | None]]


def run(name: str, work: Work) -> tuple[Tensor | None, Tensor | None]:
    """Runs the work for the weight ``name``, "weight" or "out_weight", at once."""
    return work.run()


Add = Callable[[Callable[[Tensor], Any]], Any]  # calls what it is given with a total, and returns its result


def adding(weight: Add | None, out_weight: Add | None) -> Run:
    """Returns a ``run`` that adds a weight's gradient to the total that ``Add`` gives; where there is none it runs the
    work."""

    def run_adding(name: str, work: Work) -> tuple[Tensor | None, Tensor | None]:
        add = weight if name == "weight" else out_weight
        return run(name, work) if add is None else (None, add(work.add_to))

    return run_adding


class Needs(NamedTuple):
    """Which gradients of weights are asked for: those of the linear layer whose input is gathered, and of the one whose
    output is scattered; a bias's in which dtype.  ``run`` is given the name of each weight and the work for it."""

    weight: bool = False
    bias: torch.dtype | None = None
    out_weight: bool = False
    run: Run = run

    @property
    def at_once(self) -> bool:
        """Whether gradients are wanted as tensors, and now, so that an opaque op may make them."""
        return self.run is run

    def at(self, deferral: Later | None, mains: tuple[Main | None, ...] | None) -> "Needs":
        """Returns the needs of weights whose gradients are handed over, or which have these places."""
        return self.added(mains) if deferral is None else self._replace(run=_handing_over(deferral))

    def added(self, mains: tuple[Main | None, ...] | None) -> "Needs":
        """Returns the needs of weights with these places, of the weight and of the out_weight."""
        if mains is None:
            return self
        weight, out_weight = mains
        return self._replace(
            weight=self.weight and (weight is None or weight.wanted),
            out_weight=self.out_weight and (out_weight is None or out_weight.wanted),
            run=adding(*(None if main is None else main.add for main in mains)),
        )


def _handing_over(deferral: Later) -> Run:
    """Returns a ``run`` that leaves the work in a store."""
    places = deferral.mains or (None, None)

    def hand_over(name: str, work: Work) -> tuple[None, None]:
        main = places[0 if name == "weight" else 1]

        def make() -> None:
            dw, db = work.run() if main is None else (None, main.add(work.add_to))
            deferral.give(name, dw)
            deferral.give("bias", db)

        deferral.store.add(make, work)
        return None, None

    return hand_over


def wanted(ctx: Any, *, bias: bool = False, out: bool = False) -> tuple[bool, bool, bool]:
    """Whether backward is to make, or to hand over, the gradients of the weight, the bias and the out_weight, which
    stand behind x in this order."""
    if ctx.after is not None:
        return ctx.after.wants("weight"), ctx.after.wants("bias"), ctx.after.wants("out_weight")
    _, weight, *rest = ctx.needs_input_grad
    return weight, bias and rest[0], out and rest[1]


def handed_over(after: Later | None, gradient: Tensor | None) -> Tensor | None:
    """Returns a bias's gradient where autograd takes it; else hands it over."""
    if after is None:
        return gradient
    after.keep("bias", gradient)
    return None
