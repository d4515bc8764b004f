"""Bytes and flops of the GEMMs of a linear layer, on the path that each takes."""

from typing import Any

from ..runtime.op import Cost, least, moved
from .triton_activation import partial_rows, with_partials
from .triton_gemm import fused


def linear_fwd_cost(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> Cost:
    (x, w, _, activation, *leaf), (_, z) = args, outputs
    cost = least(args, outputs)._replace(flops=2 * x.numel() * len(w))
    if fused("linear_fwd", activation, x, (len(x), *w.shape), leaf=leaf[0] if leaf else None):
        return cost
    return cost._replace(read=cost.read + moved(z))


def linear_dgrad_cost(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> Cost:
    dy, w, *_ = args
    return least(args, outputs)._replace(flops=2 * dy.numel() * w.shape[1])


def linear_dgrad_act_cost(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> Cost:
    dy, w, z, activation, _, bias, *fixed = args
    (M, K), N = dy.shape, w.shape[1]
    cost = least(args, outputs)._replace(flops=2 * M * K * N)
    columns = 0 if bias is None else z.shape[1:].numel()
    if config := fused("linear_dgrad_act", activation, dy, (M, N, K), leaf=0 if any(fixed) else None):
        return with_partials(cost, -(-M // config["BM"]), columns)
    da = dy.new_empty(1, 1).expand(M, N)
    hidden_bytes = da.element_size() * M * N
    cost = cost._replace(read=cost.read + hidden_bytes, written=cost.written + hidden_bytes)
    return with_partials(cost, partial_rows(da), columns)


def linear_wgrad_cost(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> Cost:
    dy, x, _, bias, *fixed = args
    cost = least(args, outputs)._replace(flops=2 * dy.numel() * x.shape[1])
    if bias is None:
        return cost
    return with_partials(cost._replace(read=cost.read + moved(dy)), partial_rows(dy, any(fixed)), dy.shape[1])


def linear_wgrad_add_cost(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> Cost:
    """Beside what linear_wgrad moves, the sum so far is read; where ``fixed`` dW is written and read too."""
    dy, x, out, bias, *fixed = args
    cost, dw = least(args, outputs), moved(out) * any(fixed)
    return cost._replace(
        read=cost.read + (0 if bias is None else moved(dy)) + dw,
        written=cost.written + moved(out) + dw,
        flops=2 * dy.numel() * x.shape[1],
    )


def bias_grad_cost(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> Cost:
    dy, _ = args
    return with_partials(least(args, outputs), partial_rows(dy, fixed=True), dy.shape[1])
