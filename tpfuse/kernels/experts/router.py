"""The router: which experts a row goes to, and with which weights.

    logits = x W'                          fp32; a row's are the same whatever rows stand beside it
    s = softmax(logits) or sigmoid(logits)
    chosen = the k largest of s + bias     of the best groups' experts; ties go to the lower index, NaN is the largest
    weights = s[chosen]                    over their sum where ``renormalize``, times ``scale``

    dlogits = dweights through weights     and what comes from losses on the logits
    dx = dlogits W                         dW = dlogits' x, a linear layer's

Shapes: x [m, D], W [E, D], bias [E] -> weights fp32 [m, k], chosen int32 [m, k] in the order of their scores, logits
fp32 [m, E]; all fp64 for x in fp64.  ``bias`` (Wang et al. 2024, arXiv:2408.15664) decides who is chosen, and does not
enter the weights.  The choice has no gradient.

A GEMM may add a row's products in another order where it has another number of rows.  A last bit decides between two
experts of nearly one score, so products are of ROWS rows each time on a CPU, and of one tile's on a GPU: ranks choose
alike however many rows they have.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..gemm.op import linear_wgrad
from ..runtime.errors import check, check_rows
from ..runtime.function import Function, once_differentiable
from ..runtime.op import GEMM, acc_dtype, as_rows, autocast, op
from ..runtime.rules import described
from ..runtime.tiles import in_tiles
from .cost import router_bwd_cost, router_fwd_cost
from .products import begins_a_line
from .records import Routed, Routing, check_routing
from .triton_router import router_bwd_launch, router_fwd_launch

ROWS = 48  # of a product on a CPU, whose kernels take 4, 6 or 12 rows at a time, and those left over in another order
COLUMNS = 16  # the multiple that sums are filled up to with 0: rows then start where vectors do, and are treated alike
TINY = 1e-20  # added to the sum of sigmoids, which may all be 0

# ---- reference ----


def sigmoid(logits: Tensor) -> Tensor:
    """The same for an element wherever it stands: torch's own rounds the last ones of a tensor in another way."""
    return torch.neg(logits).exp().add(1).reciprocal()


def _scores(logits: Tensor, score: str) -> Tensor:
    if score == "sigmoid":
        return sigmoid(logits)
    return logits.softmax(-1) if score == "softmax" else logits


def _largest(scores: Tensor, k: int) -> Tensor:
    """scores [m, E] -> the places of the k largest in falling order, int64 [m, k]; 0.0 and -0.0 are equal."""
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    return order[:, :k].flatten().view(scores.shape[0], k)


def _choice(scores: Tensor, bias: Tensor | None, routing: Routing) -> Tensor:
    """scores [m, E] -> the chosen experts, int64 [m, k]"""
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if routing.groups > 1:
        grouped = scores.unflatten(1, (routing.groups, -1))
        pair = min(2, grouped.shape[2])
        best = _largest(grouped.sort(dim=-1, descending=True).values[..., :pair].sum(-1), routing.best_groups)
        allowed = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, True)
        scores = grouped.masked_fill(~allowed[..., None], -torch.inf).flatten(1)
    return _largest(scores, routing.k)


def _weigh(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor, Tensor]:
    scores = _scores(logits, routing.score)
    chosen = _choice(scores, bias, routing)
    if routing.normalized == "chosen":
        weights = logits.gather(1, chosen).softmax(-1)
    else:
        weights = scores.gather(1, chosen)
    if routing.normalized == "sigmoid sum":
        weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    weights = (weights * routing.scale).flatten().view(logits.shape[0], routing.k)  # strides of no rows too
    return weights, chosen.to(torch.int32), logits


def router_fwd_ref(x: Tensor, w: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor, Tensor]:
    """-> weights [m, k], chosen [m, k], logits [m, E]"""
    acc = acc_dtype(x)
    return _weigh(x.to(acc) @ w.to(acc).t(), bias, routing)


def _dlogits(dweights: Tensor | None, dlogits: Tensor | None, routed: Routed, routing: Routing) -> Tensor:
    logits, weights, chosen = routed
    total = torch.zeros_like(logits) if dlogits is None else dlogits.to(logits.dtype, copy=True)
    if dweights is None:
        return total
    places, d = chosen.long(), dweights.to(logits.dtype) * routing.scale
    normal = weights / routing.scale
    if routing.normalized == "softmax":
        p = logits.softmax(-1)
        dp = torch.zeros_like(p).scatter_add_(1, places, d)
        return total.add_(p * (dp - (dp * p).sum(-1, keepdim=True)))
    if routing.normalized == "chosen":
        d = normal * (d - (d * normal).sum(-1, keepdim=True))
    else:
        s = sigmoid(logits.gather(1, places))
        if routing.normalized == "sigmoid sum":
            d = (d - (d * normal).sum(-1, keepdim=True)) / (s.sum(-1, keepdim=True) + TINY)
        d = d * s * (1 - s)
    return total.scatter_add_(1, places, d)


def router_bwd_ref(
    dweights: Tensor | None, dlogits: Tensor | None, routed: Routed, w: Tensor, routing: Routing, dx: Tensor
) -> Tensor:
    """-> the whole gradient of the logits [m, E], fp32; that of the rows fills ``dx`` [m, D], in its dtype.

    Of dweights [m, k] and dlogits [m, E] either may be None.
    """
    total = _dlogits(dweights, dlogits, routed, routing)
    dx.copy_(total @ w.to(total.dtype))
    return total


# ---- CPU: products of so many rows each time ----


def _product(x: Tensor, w: Tensor) -> Tensor:
    """x [m, K], w [N, K] -> x W' [m, N] in w's dtype, a row the same wherever it stands."""
    missing = -x.shape[1] % COLUMNS
    prepared = lambda t: begins_a_line(F.pad(t, (0, missing)) if missing else t)
    transposed = prepared(w).t()
    (y,) = in_tiles(lambda rows: (prepared(rows.to(w.dtype)) @ transposed,), x, ROWS)
    return y


def _router_fwd_cpu(x: Tensor, w: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor, Tensor]:
    return _weigh(_product(x, w.to(acc_dtype(x))), bias, routing)


def _router_bwd_cpu(
    dweights: Tensor | None, dlogits: Tensor | None, routed: Routed, w: Tensor, routing: Routing, dx: Tensor
) -> Tensor:
    total = _dlogits(dweights, dlogits, routed, routing)
    dx.copy_(_product(total, w.to(total.dtype).t()))
    return total


router_fwd = op(router_fwd_ref, kind=GEMM, launch=router_fwd_launch, cpu=_router_fwd_cpu, cost=router_fwd_cost)
router_bwd = op(
    router_bwd_ref,
    kind=GEMM,
    launch=router_bwd_launch,
    cpu=_router_bwd_cpu,
    fake=lambda dweights, dlogits, routed, w, routing, dx: torch.empty_like(routed.logits),
    mutates=("dx",),
    cost=router_bwd_cost,
)


def router_wgrad(dlogits: Tensor, x: Tensor) -> Tensor:
    """dlogits [m, E], x [m, D] -> dW [E, D] in dlogits' dtype, fp32"""
    dw, _ = linear_wgrad(dlogits, x.to(dlogits.dtype), dlogits.dtype, None)
    return dw


# ---- autograd ----


class _Route(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor, Tensor]:
        weights, chosen, logits = router_fwd(x, w, bias, routing)
        ctx.save_for_backward(x, w, weights, chosen, logits)
        ctx.routing = routing
        ctx.mark_non_differentiable(chosen)
        ctx.set_materialize_grads(False)
        return weights, chosen, logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dweights: Tensor | None, _: None, dlogits: Tensor | None) -> tuple[Tensor | None, ...]:
        x, w, weights, chosen, logits = ctx.saved_tensors
        if dweights is None and dlogits is None:
            return None, None, None, None
        dx = x.new_empty(x.shape)
        total = router_bwd(dweights, dlogits, Routed(logits, weights, chosen), w, routing=ctx.routing, dx=dx)
        return dx, router_wgrad(total, x).to(w.dtype) if ctx.needs_input_grad[1] else None, None, None


# ---- public ----


def route(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, routing: Routing) -> tuple[Tensor, Tensor, Tensor]:
    """Chooses experts for rows: x [..., D], weight [E, D], bias [E] -> weights and chosen [M, k], logits [M, E].

    M counts the rows.  Weights and logits are fp32 (fp64 for fp64), also under autocast; chosen is int32, without a
    gradient.  ``bias`` is added to the scores for the choice alone, and has no gradient.  ValueError for shapes that
    do not agree and for a routing that E experts do not allow.
    """
    check_rows("route", x)
    check(
        weight.dim() == 2 and weight.shape[1] == x.shape[-1],
        f"route: weight must be [E, {x.shape[-1]}], got {described(weight)}",
    )
    experts = len(weight)
    check(bias is None or bias.shape == (experts,), f"route: bias must be [{experts}], got {described(bias)}")
    check_routing("route", routing, experts)
    (x,) = autocast(x)
    return _Route.apply(as_rows("route", x), weight, bias, routing)
