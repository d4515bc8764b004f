"""Rows of this rank to the experts of all ranks, and back: no row is dropped, and bits do not depend on the number of
ranks.

    rank r of R      n [k + 1, m, D]      Wr [E, D] replicated      W1 [E / R, 2 F, D], W2 [E / R, D, F]
    forward          weights, chosen = router(n)
                     rows by (expert, row) -> their ranks, where they stand by (source, expert, row)
                     y = the experts' MLPs, each over its rows by (source, row): by their number among all rows
                     y -> back -> parts [k, m, D], the j-th experts of all rows in part j
    dgrad            dparts -> the experts; dn = (dz W1 of the k experts, back; dlogits Wr), k + 1 parts, unsummed
    wgrad            dW1 = dz' n, dW2 = dparts' (g a) of every expert here, at once for all ranks' rows
                     dWr = dlogits' n of this rank's rows, with ``bitwise`` by leaves of them

There is no kernel that combines, in either direction: the kernel between two GEMMs adds the k parts to the residual
stream, and in backward the k + 1 gradients of n.  On one rank nothing is sent or copied, and the host learns no number
of rows.  On more, the ranks tell each other how many rows each expert gets, E numbers, for which the host waits; every
one of the exchanges is uneven, and a rank without rows takes part in them.

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

from ..collectives import all_gather, exchange_rows
from ..kernels.experts.grouped import rows_of_gradient
from ..kernels.experts.low_rank import LowRank, adapted_dact, adapted_down, adapted_dx, adapted_up
from ..kernels.experts.records import ExpertOrder, ExpertRows, Routed, Routing, Sides
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
from .assumed import assumed_rows
from .crossings import expanded
from .records import ExpertWeightGrad, SavedInput, WantedGrads, restore, save

# ---- where rows go ----


class RowExchange(NamedTuple):
    """The rows that one rank sends to each rank and receives from each, and where those stand that it receives."""

    sent: list[int]
    received: list[int]
    arrived: ExpertRows

    @classmethod
    def of(cls, order: ExpertOrder, tp: TensorParallel) -> "RowExchange | None":
        """Compares the ranks' counts, one small message, after which the host knows its own; on meta tensors they are
        assumed.  None on one rank."""
        if tp.size == 1:
            return None
        counts = all_gather(order.offsets.diff(), tp.size, tp.group_name).view(tp.size, tp.size, -1)
        here = counts[:, tp.rank]  # [source, expert of this rank]
        sources, experts = here.shape
        kinds = torch.arange(experts, device=here.device).repeat(sources)
        if here.is_meta:
            sent, received = assumed_rows(len(order.numbers), tp)
        else:
            sent, received = counts[tp.rank].sum(1).tolist(), here.sum(1).tolist()
        arrived = kinds.repeat_interleave(here.flatten(), output_size=sum(received))
        by_expert = ExpertOrder.of(arrived, experts)
        return cls(sent, received, ExpertRows(by_expert.numbers, by_expert.offsets))


class Routes(NamedTuple):
    """The way of valid rows of [m, D] to their k experts each, and of the results to parts [k, m, D]."""

    order: ExpertOrder
    k: int
    m: int
    tp: TensorParallel
    exchange: RowExchange | None

    @classmethod
    def of(cls, chosen: Tensor, experts: int, m: int, tp: TensorParallel) -> "Routes":
        order = ExpertOrder.of(chosen, experts)
        return cls(order, chosen.shape[1], m, tp, RowExchange.of(order, tp))

    def there(self, x: Tensor, rows: ExpertRows) -> tuple[Tensor, ExpertRows]:
        """Brings rows, each at a place of x [.., D], to their experts' rank: the tensor, and where they stand in it."""
        if self.exchange is None:
            return x, rows
        assert rows.row_index is not None
        return self._sent(x.index_select(0, rows.row_index)), self.exchange.arrived

    def destinations(self) -> tuple[ExpertRows, int]:
        """Returns where experts put their results, and how many rows that tensor has: it is parts, or goes back."""
        if self.exchange is None:
            return self.order.places(self.k, self.m), self.k * self.m
        return self.exchange.arrived, sum(self.exchange.received)

    def back(self, y: Tensor, slots: int) -> Tensor:
        """Returns the results that experts put at their destinations as [slots, m, D]: of the k first slots, of which
        those of rows that are not valid are 0, and room for others."""
        D = y.shape[1]
        if self.exchange is None:
            return y.view(slots, self.m, D)
        parts = y.new_zeros(slots * self.m, D) if self.padded else y.new_empty(slots * self.m, D)
        index = self.order.places(self.k, self.m).row_index
        assert index is not None
        return parts.index_copy_(0, index, self._returned(y)).view(slots, self.m, D)

    def numbers_there(self, x: Tensor) -> Tensor:
        """Brings numbers, fp32 [valid, k], to their experts' rank, in the experts' order."""
        x = x.flatten().index_select(0, self.order.numbers)
        return x if self.exchange is None else self._sent(x).index_select(0, self._arrived)

    def numbers_back(self, x: Tensor) -> Tensor:
        """The way back of :meth:`numbers_there`."""
        if self.exchange is not None:
            x = self._returned(torch.empty_like(x).index_copy_(0, self._arrived, x))
        return torch.empty_like(x).index_copy_(0, self.order.numbers, x).view(-1, self.k)

    @property
    def padded(self) -> bool:
        """True if some of the m rows are not valid."""
        return len(self.order.numbers) < self.k * self.m

    @property
    def _arrived(self) -> Tensor:
        assert self.exchange is not None and self.exchange.arrived.row_index is not None
        return self.exchange.arrived.row_index

    def _sent(self, x: Tensor) -> Tensor:
        assert self.exchange is not None
        sent, received, _ = self.exchange
        return exchange_rows(x, sent, received, self.tp.group_name)

    def _returned(self, x: Tensor) -> Tensor:
        assert self.exchange is not None
        sent, received, _ = self.exchange
        return exchange_rows(x, received, sent, self.tp.group_name)


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
    def of(cls, tensors: list[Tensor], scales: tuple[float | None, ...]) -> "ExpertAdapters":
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
        *args: Any,
    ) -> RoutedParts:
        ctx.set_materialize_grads(False)
        *pairs, options, tp, recompute = args
        experts, routing, activation, valid, keep, ctx.deferral, scales = options
        adapters = ExpertAdapters.of(pairs, scales)
        rows, (m, _) = n[0, :valid], n.shape[1:]
        weights, chosen, logits = router_fwd(rows, wr, bias, routing)
        routes = Routes.of(chosen, len(wr), m, experts)
        x, at = routes.there(rows, routes.order.rows(routing.k))
        g = routes.numbers_there(weights)
        z, a = adapted_up(x, at, w1, adapters.fc1, activation=activation, tile=tp.row_tile)
        places, count = routes.destinations()
        y = adapted_down(a, places, w2, adapters.fc2, weights=g, count=count, tile=tp.row_tile)
        parts = routes.back(y, routing.k)
        order, exchange = routes.order, routes.exchange
        arrived = (None, None) if exchange is None else tuple(exchange.arrived)
        kept = x if keep and exchange is not None else None
        saved = w1, w2, wr, weights, chosen, logits, g, z, kept, *pairs, *order, *arrived
        save(ctx, saved, SavedInput.of(n, recompute, tp))
        counts = None if exchange is None else (exchange.sent, exchange.received)
        ctx.args, ctx.mains = (experts, routing, activation, valid, m, counts, scales), mains(w1, w2)
        ctx.mark_non_differentiable(chosen)
        return RoutedParts(parts, logits, chosen)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dparts: Tensor | None, dlogits: Tensor | None, _chosen: None) -> tuple[Tensor | None, ...]:
        (w1, w2, wr, weights, chosen, logits, g, z, x, a1, b1, a2, b2, *places), n = restore(ctx)
        experts, routing, activation, valid, m, counts, scales = ctx.args
        first, second = ExpertAdapters.of([a1, b1, a2, b2], scales)
        numbers, offsets, *arrived = places
        exchange = None if counts is None else RowExchange(counts[0], counts[1], ExpertRows(*arrived))
        routes = Routes(ExpertOrder(numbers, offsets), routing.k, m, tp=experts, exchange=exchange)
        grads, rows = WantedGrads.of(ctx, ("weight", "out_weight")), n.shard()[:valid]
        if dparts is None:  # the parts are not used, the logits are
            dparts = rows.new_zeros(()).expand(routing.k, m, rows.shape[1])
        dy, at = routes.there(*rows_of_gradient(dparts, routes.order))
        dz, ga, dg = adapted_dact(dy, at, w2, second, z=z, weights=g, activation=activation)
        destinations, count = routes.destinations()
        room = 0 if exchange is not None else m
        dn = routes.back(adapted_dx(dz, destinations, w1, first, count=count, room=room), routing.k + 1)
        dw1: Tensor | None = None
        dw2: Tensor | None = None
        dwr: Tensor | None = None
        of_pairs: list[Tensor | None] = [None] * 4
        sides = Sides(dy, ga, at.offsets, dy_index=at.row_index)
        if second is not None and any(ctx.needs_input_grad[7:9]):
            of_pairs[2:] = _pair_gradients(second, sides, experts)
        if grads.out_weight:
            dw2, _ = grads.run("out_weight", ExpertWeightGrad(sides, w2.dtype, experts.replicas))
        trains_first = any(ctx.needs_input_grad[5:7])
        if grads.weight or trains_first:
            x, at = routes.there(rows, routes.order.rows(routing.k)) if x is None else (x, at)
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
        return dn, dw1, dw2, dwr, None, *of_pairs, None, None, None


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
    outputs = RoutedExperts.apply(x, *weights, router_weight, router_bias, *adapters.tensors, options, tp, recompute)
    return RoutedParts(*outputs)
