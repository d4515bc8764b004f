"""Bytes and flops of the router and of experts' GEMMs.  Which experts have rows is not known from shapes: all do."""

from typing import Any

from ..gemm.triton_activation import with_partials
from ..runtime.op import Cost, least, moved
from .triton_grouped import dact_tiles


def router_fwd_cost(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> Cost:
    x, w, *_ = args
    return least(args, outputs)._replace(flops=2 * x.numel() * len(w))


def router_bwd_cost(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> Cost:
    """``dx``, an argument, is written; what leads to the weights is read where these have a gradient."""
    dweights, dlogits, (logits, weights, chosen), w, _, dx = args
    weighed = () if dweights is None else (dweights, weights, chosen)
    return Cost(moved(dlogits, logits, w, *weighed), moved(dx, *outputs), flops=2 * logits.numel() * w.shape[1])


def experts_up_cost(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> Cost:
    (_, _, w1, *_), (z, _) = args, outputs
    return least(args, outputs)._replace(flops=2 * z.numel() * w1.shape[2])


def experts_down_cost(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> Cost:
    """A y with rows that no place names is filled with 0 first; the ``room`` behind is too."""
    (a, _, w2, _, count, *_), (y,) = args, outputs
    cost = least(args, outputs)._replace(flops=2 * a.numel() * w2.shape[1])
    return cost if len(a) == count else cost._replace(written=cost.written + len(a) * moved(y[:1]))


def experts_dact_cost(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> Cost:
    (dy, _, w2, _, _, activation), (_, ga, _) = args, outputs
    tiles = -(-w2.shape[2] // dact_tiles(dy, w2, activation)["BN"])
    cost = least(args, outputs)._replace(flops=2 * ga.numel() * w2.shape[1])
    return with_partials(cost, tiles, len(ga))


def experts_dx_cost(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> Cost:
    """The ``room`` behind is filled with 0, as are all rows first where no place names some."""
    (dz, _, w1, count, _), (dx,) = args, outputs
    rows = len(dx) + (len(dz) if count != len(dz) else 0)
    return Cost(least(args, ()).read, rows * moved(dx[:1]), flops=2 * dz.numel() * w1.shape[2])


def experts_wgrad_cost(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> Cost:
    sides, _ = args
    n = len(sides.x if sides.x_index is None else sides.x_index)
    return least(args, outputs)._replace(flops=2 * n * sides.dy.shape[1] * sides.x.shape[1])


def experts_wgrad_add_cost(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> Cost:
    """The sum so far is read and written."""
    _, total = args
    return experts_wgrad_cost(args, (total,))
