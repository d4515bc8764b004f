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
are sums over all rows, divided by ``experts.divisor``: the number of replicas where these average their gradients.

An expert that every row has (shared_expert.py) adds its parts behind the k, and its gradients of n behind the k + 1.
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
from ..kernels.runtime.deferred import Later, deferred
from ..kernels.runtime.errors import check
from ..kernels.runtime.function import Function, once_differentiable
from ..kernels.runtime.leaves import check_leaves, tree_of_new
from ..kernels.runtime.main_grad import mains
from ..kernels.runtime.op import acc_dtype, autocast
from ..parallel import TensorParallel
from .crossings import expanded
from .records import ExpertWeightGrad, SavedInput, WantedGrads, restore, save
from .routes import Routes
from .shared_expert import SharedGrads, SharedParts, SharedSaved, SharedWeights, shared_bwd, shared_fwd

# ---- autograd ----


class RoutedParts(NamedTuple):
    """The experts' outputs, and the router's logits and choice of the rows that are valid."""

    parts: Tensor  # [k, m, D], with a shared expert more
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
    """``tp``: the ranks that have rows.  ``experts``: those that hold ``num_experts``.  ``valid``: the first rows of n,
    behind which stands padding, which goes nowhere.  ``keep``: rows that arrive are saved for backward.  ``shared``: of
    the expert that every row has.  ``deferrals``: of the weights of the experts, and of the shared one."""

    tp: TensorParallel
    experts: TensorParallel
    num_experts: int
    routing: Routing
    activation: str
    valid: int
    recompute: Recompute | None
    keep: bool
    shared: SharedParts
    deferrals: tuple[Later | None, Later | None]
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
        shared_w1: Tensor | None,
        shared_w2: Tensor | None,
        options: ExpertOptions,
        *pairs: Tensor | None,
    ) -> RoutedParts:
        """``wr``: the router's weight [E, D], and behind it the shared expert's gate's, [1, D]."""
        ctx.set_materialize_grads(False)
        tp, experts, E, routing, activation, valid, recompute, keep, shared, _, scales = options
        rows, (m, _), k, adapters = n[0, :valid], n.shape[1:], routing.k, ExpertAdapters.of(pairs, scales)
        weights, chosen, logits = router_fwd(rows, wr[:E], bias, routing)
        routes, g = Routes.of(Routed(logits, weights, chosen), m, experts)
        x, at = routes.there(rows)
        z, a = adapted_up(x, at, w1, adapters.fc1, activation=activation, tile=tp.row_tile)
        places, count = routes.destinations()
        room = shared.parts * m if experts.size == 1 else 0
        y = adapted_down(a, places, w2, adapters.fc2, weights=g, count=count, tile=tp.row_tile, room=room)
        parts = routes.back(y, k + shared.parts)
        saved: tuple[Any, ...] = (None,) * len(SharedSaved._fields)
        if shared.parts > 0:
            assert shared_w1 is not None and shared_w2 is not None
            parts[k:], saved = shared_fwd(n[0], shared_w1, shared_w2, wr[E:], valid=valid, activation=activation, tp=tp)
        tensors, traffic = routes.saved()
        kept = x if keep and experts.size > 1 else None
        inputs = w1, w2, wr, shared_w1, shared_w2
        of_experts = weights, chosen, logits, g, z, kept, *pairs, *tensors
        save(ctx, (*inputs, *saved, *of_experts), SavedInput.of(n, recompute, tp))
        ctx.args, ctx.mains = (options._replace(recompute=None), m, traffic), (mains(w1, w2), mains(*inputs[3:]))
        ctx.mark_non_differentiable(chosen)
        return RoutedParts(parts, logits, chosen)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dparts: Tensor | None, dlogits: Tensor | None, _chosen: None) -> tuple[Tensor | None, ...]:
        ((w1, w2, wr, *shared_weights), saved, (weights, chosen, logits, g, z, x, *tensors)), n = _restored(ctx)
        (tp, experts, E, routing, activation, valid, _, _, shared, deferrals, scales), m, traffic = ctx.args
        (first, second), tensors = ExpertAdapters.of((*tensors[:4],), scales), tensors[4:]
        k, routes = routing.k, Routes.of_saved(tensors, traffic, routing.k, m=m, tp=experts)
        needs_grad, names, row_shard = ctx.needs_input_grad, ("weight", "out_weight"), n.shard()
        grads, rows = WantedGrads.of_pair(names, needs_grad[1:3], deferrals[0], ctx.mains[0]), row_shard[:valid]
        if dparts is None:  # the parts are not used, the logits are
            dparts = rows.new_zeros(()).expand(k + shared.parts, m, rows.shape[1])
        dy, at = routes.gradients_there(dparts[:k])
        dz, ga, dg = adapted_dact(dy, at, w2, second, z=z, weights=g, activation=activation)
        destinations, count = routes.destinations()
        slots = 1 + shared.gradients
        room = slots * m if experts.size == 1 else 0
        dn = routes.back(adapted_dx(dz, destinations, w1, first, count=count, room=room), k + slots)
        dw1: Tensor | None = None
        dw2: Tensor | None = None
        dwr: Tensor | None = None
        of_pairs: list[Tensor | None] = [None] * 4
        sides = Sides(dy, ga, at.offsets, dy_index=at.row_index)
        if second is not None and any(needs_grad[10:]):
            of_pairs[2:] = _pair_gradients(second, sides, experts)
        if grads.out_weight:
            dw2, _ = grads.run("out_weight", ExpertWeightGrad(sides, w2.dtype, experts.divisor))
        trains_first = any(needs_grad[8:10])
        if grads.weight or trains_first:
            at = routes.rows_here()
            x = routes.there(rows)[0] if x is None else x
            sides = Sides(dz, x, at.offsets, x_index=at.row_index)
            if first is not None and trains_first:
                of_pairs[:2] = _pair_gradients(first, sides, experts)
            if grads.weight:
                dw1, _ = grads.run("weight", ExpertWeightGrad(sides, w1.dtype, experts.divisor))
        if valid < m:
            dn[k, valid:] = 0
        dweights, dx = routes.numbers_back(dg), dn[k, :valid]
        dlogits = router_bwd(dweights, dlogits, Routed(logits, weights, chosen), wr[:E], routing=routing, dx=dx)
        of_shared = SharedGrads()
        if shared.parts > 0:
            grads = WantedGrads.of_pair(names, needs_grad[5:7], deferrals[1], ctx.mains[1])
            of_shared = shared_bwd(
                dparts[k:], row_shard, (*shared_weights, wr[E:]), saved, dn=dn[k + 1 :],
                valid=valid, activation=activation, grads=grads, tp=tp,
            )  # fmt: skip
        if needs_grad[3]:
            dlogits = dlogits if of_shared.logits is None else torch.cat((dlogits, of_shared.logits), 1)
            dwr = _router_gradient(dlogits, rows, m, tp).to(wr.dtype)
        return dn, dw1, dw2, dwr, None, of_shared.w1, of_shared.w2, None, *of_pairs


def _restored(ctx: Any) -> tuple[tuple[tuple[Any, ...], SharedSaved, tuple[Any, ...]], SavedInput]:
    """Returns the weights, what the shared expert has saved and what the others have; and n."""
    tensors, n = restore(ctx)
    end = 5 + len(SharedSaved._fields)
    return (tensors[:5], SharedSaved(*tensors[5:end]), tensors[end:]), n


def _pair_gradients(pair: LowRank, work: Sides, experts: TensorParallel) -> list[Tensor]:
    """Returns dA and dB, whose sums are rounded once; ``work``: the rows of the weight's gradient."""
    gradients = []
    for sides, t in zip(pair.sides(work), pair[:2], strict=True):
        total = t.new_zeros(t.shape, dtype=torch.promote_types(t.dtype, acc_dtype(sides.x)))
        ExpertWeightGrad(sides, total.dtype, experts.divisor).add_to(total)
        gradients.append(total.to(t.dtype))
    return gradients


def _router_gradient(dlogits: Tensor, rows: Tensor, m: int, tp: TensorParallel) -> Tensor:
    """dlogits [valid, E], rows [valid, D] of m -> dWr [E, D] in fp32, with ``tp.bitwise`` a node of the sum over all
    rows: of products of leaves, padding with zeros."""
    step = m // max(tp.leaves, 1)
    if tp.bitwise is None or step == 0:
        return router_wgrad(dlogits, rows)
    leaves = (F.pad(t, (0, 0, 0, m - t.shape[0])).split(step) for t in (dlogits, rows))
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
    shared: SharedWeights | None = None,
    valid: int | None = None,
    recompute: Recompute | None = None,
    keep: bool = True,
    adapters: ExpertAdapters = NO_ADAPTERS,
) -> RoutedParts:
    """Sends rows to the experts that the router chooses: x [m, D] or expanded [k + 1, m, D] -> parts [k, m, D], to be
    summed over k, and the router's logits and choice.  With ``shared``, the weights of an expert that every row has, x
    and parts have its :class:`SharedParts` more.

    Each rank of ``tp`` has m rows of its own, m the same on all, of which the first ``valid`` (all) are rows and the
    others padding, whose parts are 0.  fc1_weight [E / R, F, 2, D] and fc2_weight [E / R, D, F] are this rank's experts
    of those of R ranks: of ``tp``, or of ``experts`` over replicas (:meth:`TensorParallel.over_replicas`), where the
    gradients of both are divided by its ``divisor``.  ``activation`` is that of the gate; router_weight [E, D]
    and router_bias [E] as in ``kernels.route``, the same on every rank, and the weight's gradient is that of this
    rank's rows: sum it, as ``collectives.copy`` does.  ``recompute``: n is not saved, but recomputed in backward.
    ``keep``: rows that arrive from other ranks are saved, not sent again.  Of a shared expert with a gate router_weight
    is [E + 1, D], the gate's weight behind the router's.  ``adapters``: low-rank pairs beside the experts' two weights,
    which may be of a wider dtype, as their gradients then are.  ValueError for x and weights of several dtypes outside
    autocast, and for rows that ``tp`` cannot have.
    """
    x, fc1_weight, fc2_weight = autocast(x, fc1_weight, fc2_weight)
    dtypes = x.dtype, fc1_weight.dtype, fc2_weight.dtype
    check(len(set(dtypes)) == 1, f"routed_experts: x, fc1 and fc2 must have one dtype outside autocast, got {dtypes}")
    shared_parts, shared_w1, shared_w2 = SharedParts(), None, None
    if shared is not None:
        shared_parts = SharedParts.of(tp, gated=shared.gated)
        shared_w1, shared_w2 = autocast(*shared.by_leaves(tp))
        check_expert_tiles(x, shared_w1, shared_w2, tile=tp.row_tile)
    x = expanded("routed_experts", x, tp, copies=routing.k + 1 + shared_parts.gradients)
    m, w1 = x.shape[1], fc1_weight.flatten(1, 2)
    valid = m if valid is None else valid
    if not 0 <= valid <= m:
        raise ValueError(f"routed_experts: valid must be 0 to {m}, the rows of this rank, got {valid}")
    check_leaves("routed_experts", x, tp.leaves)
    check_expert_tiles(x, w1, fc2_weight, tile=tp.row_tile)
    deferral, first, _, second = deferred(x, w1, None, fc2_weight)
    shared_deferral, shared_first, _, shared_second = deferred(x, shared_w1, None, shared_w2)
    gated = ACTIVATIONS[activation].gated
    assert gated is not None
    num_experts = len(router_weight) - (shared is not None and shared.gated)
    options = ExpertOptions(
        tp=tp, experts=tp if experts is None else experts, num_experts=num_experts, routing=routing, activation=gated,
        valid=valid, recompute=recompute, keep=keep, shared=shared_parts, deferrals=(deferral, shared_deferral),
        scales=adapters.scales,
    )  # fmt: skip
    router_weight = router_weight.to(acc_dtype(x))
    weights = first, second, router_weight, router_bias, shared_first, shared_second
    outputs = RoutedExperts.apply(x, *weights, options, *adapters.tensors)
    return RoutedParts(*outputs)
