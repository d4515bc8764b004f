"""The experts of all ranks for the rows of this one: no row is dropped, and bits do not depend on the number of ranks.

    rank r of R      n [k + 1, m, D]      Wr [E, D] replicated      W1 [E / R, 2 F, D], W2 [E / R, D, F]
    forward          weights, chosen = router(n)
                     rows -> the ranks of their experts (routes.py)
                     y = the experts' MLPs, each over its rows by (source, row): by their number among all rows
                     y -> back -> parts [k, m, D], the j-th experts of all rows in part j
    dgrad            dparts -> the experts; dn = (dz W1 of the k experts, back; dlogits Wr), k + 1 parts, unsummed
    wgrad            dW1 = dz' n, dW2 = dparts' (g a) of every expert here, at once for all ranks' rows
                     dWr = dlogits' n of this rank's rows, with ``bitwise`` by leaves of them

There is no kernel that combines, in either direction: the kernel between two GEMMs adds the k parts to the residual
stream, and in backward the k + 1 gradients of n.

The experts may be divided among the ranks of several data-parallel replicas, replica by replica: then R is the number
of all of them, rows are those of all replicas, which may have unequal numbers of them, and the gradients of W1 and W2
are sums over all rows, divided by the number of replicas as those that replicas average.

An adapter's pair A, B beside W1 or W2 is split as the experts are (kernels/experts/low_rank.py).

Saved: n or how to recompute it, z [n, 2 F], logits, weights and places; on several ranks with ``keep`` the rows that
arrived, which are otherwise sent again in backward.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.experts.low_rank import LowRank, adapted_dact, adapted_down, adapted_dx, adapted_up
from ..kernels.experts.records import Routed, Routing, Sides
from ..kernels.experts.reference import check_expert_tiles
from ..kernels.experts.router import router_bwd, router_fwd, router_wgrad
from ..kernels.gemm.activation import ACTIVATIONS
from ..kernels.norm import Recompute
from ..kernels.runtime.deferred import Later, later
from ..kernels.runtime.errors import check
from ..kernels.runtime.function import Function, once_differentiable
from ..kernels.runtime.leaves import check_leaves, tree_of_new
from ..kernels.runtime.main_grad import mains
from ..kernels.runtime.op import acc_dtype, autocast
from ..parallel import TensorParallel
from .crossings import expanded
from .records import ExpertWeightGrad, SavedInput, WantedGrads, restore, save
from .routes import Routes

# ---- autograd ----


class RoutedParts(NamedTuple):
    """The experts' outputs, and the router's logits and choice of the rows that are valid."""

    parts: Tensor  # [k, m, D]
    logits: Tensor  # [valid, E], fp32 (fp64 for fp64)
    chosen: Tensor  # int32 [valid, k]


class ExpertAdapters(NamedTuple):
    """The pairs A, B beside the experts' two weights, of this rank's experts; None where there is none."""

    fc1: LowRank | None = None
    fc2: LowRank | None = None

    @classmethod
    def of(cls, tensors: tuple[Any, ...], scales: tuple[float | None, ...]) -> "ExpertAdapters":
        """Puts together what :attr:`tensors` and :attr:`scales` took apart."""
        pairs = zip(tensors[::2], tensors[1::2], scales, strict=True)
        return cls(*(None if scale is None else LowRank(a, b, scale) for a, b, scale in pairs))

    @property
    def tensors(self) -> list[Tensor | None]:
        """A and B of fc1, and of fc2."""
        return [t for pair in self for t in ((None, None) if pair is None else (pair.a, pair.b))]

    @property
    def scales(self) -> tuple[float | None, ...]:
        """The scale of fc1's pair, and of fc2's."""
        return tuple(None if pair is None else pair.scale for pair in self)


NO_ADAPTERS = ExpertAdapters()


class ExpertOptions(NamedTuple):
    """``experts``: the ranks that hold them.  ``valid``: the first rows of n, behind which stands padding, which goes
    nowhere.  ``keep``: rows that arrive are saved for backward."""

    experts: TensorParallel
    routing: Routing
    activation: str
    valid: int
    keep: bool
    deferral: Later | None
    scales: tuple[float | None, ...]


class RoutedExperts(Function):
    @staticmethod
    def forward(
        ctx: Any,
        n: Tensor,
        w1: Tensor,
        w2: Tensor,
        wr: Tensor,
        bias: Tensor | None,
        options: ExpertOptions,
        tp: TensorParallel,
        recompute: Recompute | None,
        *pairs: Tensor | None,
    ) -> RoutedParts:
        ctx.set_materialize_grads(False)
        experts, routing, activation, valid, keep, ctx.deferral, scales = options
        adapters = ExpertAdapters.of(pairs, scales)
        rows, (m, _) = n[0, :valid], n.shape[1:]
        weights, chosen, logits = router_fwd(rows, wr, bias, routing)
        routes, g = Routes.of(Routed(logits, weights, chosen), m, experts)
        x, at = routes.there(rows)
        z, a = adapted_up(x, at, w1, adapters.fc1, activation=activation, tile=tp.row_tile)
        places, count = routes.destinations()
        y = adapted_down(a, places, w2, adapters.fc2, weights=g, count=count, tile=tp.row_tile)
        parts = routes.back(y, routing.k)
        tensors, ctx.traffic = routes.saved()
        kept = x if keep and experts.size > 1 else None
        saved = w1, w2, wr, weights, chosen, logits, g, z, kept, *pairs, *tensors
        save(ctx, saved, SavedInput.of(n, recompute, tp))
        ctx.args, ctx.mains = (experts, routing, activation, valid, m, scales), mains(w1, w2)
        ctx.mark_non_differentiable(chosen)
        return RoutedParts(parts, logits, chosen)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dparts: Tensor | None, dlogits: Tensor | None, _chosen: None) -> tuple[Tensor | None, ...]:
        (w1, w2, wr, weights, chosen, logits, g, z, x, a1, b1, a2, b2, *tensors), n = restore(ctx)
        experts, routing, activation, valid, m, scales = ctx.args
        first, second = ExpertAdapters.of((a1, b1, a2, b2), scales)
        routes = Routes.of_saved(tensors, ctx.traffic, routing.k, m=m, tp=experts)
        grads, rows = WantedGrads.of(ctx, ("weight", "out_weight")), n.shard()[:valid]
        if dparts is None:  # the parts are not used, the logits are
            dparts = rows.new_zeros(()).expand(routing.k, m, rows.shape[1])
        dy, at = routes.gradients_there(dparts)
        dz, ga, dg = adapted_dact(dy, at, w2, second, z=z, weights=g, activation=activation)
        destinations, count = routes.destinations()
        room = m if experts.size == 1 else 0
        dn = routes.back(adapted_dx(dz, destinations, w1, first, count=count, room=room), routing.k + 1)
        dw1: Tensor | None = None
        dw2: Tensor | None = None
        dwr: Tensor | None = None
        of_pairs: list[Tensor | None] = [None] * 4
        sides = Sides(dy, ga, at.offsets, dy_index=at.row_index)
        if second is not None and any(ctx.needs_input_grad[10:]):
            of_pairs[2:] = _pair_gradients(second, sides, experts)
        if grads.out_weight:
            dw2, _ = grads.run("out_weight", ExpertWeightGrad(sides, w2.dtype, experts.replicas))
        trains_first = any(ctx.needs_input_grad[8:10])
        if grads.weight or trains_first:
            at = routes.rows_here()
            x = routes.there(rows)[0] if x is None else x
            sides = Sides(dz, x, at.offsets, x_index=at.row_index)
            if first is not None and trains_first:
                of_pairs[:2] = _pair_gradients(first, sides, experts)
            if grads.weight:
                dw1, _ = grads.run("weight", ExpertWeightGrad(sides, w1.dtype, experts.replicas))
        if valid < m:
            dn[routing.k, valid:] = 0
        dweights, dx = routes.numbers_back(dg), dn[routing.k, :valid]
        dlogits = router_bwd(dweights, dlogits, Routed(logits, weights, chosen), wr, routing=routing, dx=dx)
        if ctx.needs_input_grad[3]:
            dwr = _router_gradient(dlogits, rows, m, n.tp).to(wr.dtype)
        return dn, dw1, dw2, dwr, None, None, None, None, *of_pairs


def _pair_gradients(pair: LowRank, work: Sides, experts: TensorParallel) -> list[Tensor]:
    """Returns dA and dB, whose sums are rounded once; ``work``: the rows of the weight's gradient."""
    gradients = []
    for sides, t in zip(pair.sides(work), pair[:2], strict=True):
        total = t.new_zeros(t.shape, dtype=torch.promote_types(t.dtype, acc_dtype(sides.x)))
        ExpertWeightGrad(sides, total.dtype, experts.replicas).add_to(total)
        gradients.append(total.to(t.dtype))
    return gradients


def _router_gradient(dlogits: Tensor, rows: Tensor, m: int, tp: TensorParallel) -> Tensor:
    """dlogits [valid, E], rows [valid, D] of m -> dWr [E, D] in fp32, with ``tp.bitwise`` a node of the sum over all
    rows: of products of leaves, padding with zeros."""
    step = m // max(tp.leaves, 1)
    if tp.bitwise is None or step == 0:
        return router_wgrad(dlogits, rows)
    leaves = (F.pad(t, (0, 0, 0, m - len(t))).split(step) for t in (dlogits, rows))
    return tree_of_new(router_wgrad(d.clone(), x.clone()) for d, x in zip(*leaves, strict=True))


# ---- public ----


def routed_experts(
    x: Tensor,
    fc1_weight: Tensor,
    fc2_weight: Tensor,
    router_weight: Tensor,
    router_bias: Tensor | None = None,
    *,
    routing: Routing,
    activation: str,
    tp: TensorParallel,
    experts: TensorParallel | None = None,
    valid: int | None = None,
    recompute: Recompute | None = None,
    keep: bool = True,
    adapters: ExpertAdapters = NO_ADAPTERS,
) -> RoutedParts:
    """Sends rows to the experts that the router chooses: x [m, D] or expanded [k + 1, m, D] -> parts [k, m, D], to be
    summed over k, and the router's logits and choice.

    Each rank of ``tp`` has m rows of its own, m the same on all, of which the first ``valid`` (all) are rows and the
    others padding, whose parts are 0.  fc1_weight [E / R, F, 2, D] and fc2_weight [E / R, D, F] are this rank's experts
    of those of R ranks: of ``tp``, or of ``experts`` over replicas (:meth:`TensorParallel.over_replicas`), where the
    gradients of both are divided by the number of replicas.  ``activation`` is that of the gate; router_weight [E, D]
    and router_bias [E] as in ``kernels.route``, the same on every rank, and the weight's gradient is that of this
    rank's rows: sum it, as ``collectives.copy`` does.  ``recompute``: n is not saved, but recomputed in backward.
    ``keep``: rows that arrive from other ranks are saved, not sent again.  ``adapters``: low-rank pairs beside the two
    weights, which may be of a wider dtype, as their gradients then are.
    """
    x, fc1_weight, fc2_weight = autocast(x, fc1_weight, fc2_weight)
    x = expanded("routed_experts", x, tp, copies=routing.k + 1)
    m = x.shape[1]
    weights = fc1_weight.flatten(1, 2), fc2_weight
    valid = m if valid is None else valid
    check(0 <= valid <= m, f"routed_experts: valid must be 0 to {m}, the rows of this rank, got {valid}")
    check_leaves("routed_experts", x, tp.leaves)
    check_expert_tiles(x, *weights, tile=tp.row_tile)
    deferral = later(x, weights[0], None, weights[1])
    if deferral is not None:
        weights = weights[0].detach(), weights[1].detach()
    gated = ACTIVATIONS[activation].gated
    assert gated is not None
    experts = tp if experts is None else experts
    options = ExpertOptions(experts, routing, gated, valid, keep=keep, deferral=deferral, scales=adapters.scales)
    router_weight = router_weight.to(acc_dtype(x))
    outputs = RoutedExperts.apply(x, *weights, router_weight, router_bias, options, tp, recompute, *adapters.tensors)
    return RoutedParts(*outputs)
