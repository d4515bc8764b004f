"""Bytes and flops of linear_cross_entropy's launchers."""

from typing import Any

from ..runtime.op import Cost, moved
from . import linear_triton
from .linear_triton import config_of, vocabulary_chunks


def stats_cost(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> Cost:
    layer, labels, loss = args
    (M, D), V = layer.x.shape, len(layer.w)
    sums = 4 if loss.label_smoothing > 0 else 3  # a row and tile
    partial = sums * 4 * M * -(-V // config_of("stats", layer.x, (M, V, D))["BN"]) if M else 0
    return Cost(moved(*layer, labels) + partial, partial + moved(*outputs), 2 * M * V * D)


def bwd_cost(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> Cost:
    (x, w, b), rows, _, *fixed = args
    (M, D), V, read, written = x.shape, len(w), 0, moved(*outputs)
    total = 4 * M * D  # dx in fp32
    for start, stop in vocabulary_chunks(M, V, linear_triton.ELEMENTS) if M else ():
        n = stop - start
        dz = M * n * x.element_size()
        read += moved(x, *rows) + dz + moved(x) + dz + total * (start > 0)  # all but W: by dlogits, by dW, by dx
        written += dz + total * (stop < V)
        path = config_of("dx", x, (M, D, n), *fixed)["path"]
        if 0 < start and stop == V and x.element_size() < 4 and path == "torch":
            read, written = read + total, written + total  # which is then rounded
        if b is not None:
            partial = 4 * n * -(-M // config_of("dlogits", x, (M, n, D))["BM"])
            read, written = read + partial, written + partial
    return Cost(read + 2 * moved(w) * bool(M) + moved(b), written, 6 * M * V * D)


def bwd_add_cost(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> Cost:
    """Returns the cost of ``bwd_cost``, with the sum so far read and written in place of dW."""
    layer, rows, loss, out, *fixed = args
    cost = bwd_cost((layer, rows, loss, *fixed), outputs)
    return cost._replace(read=cost.read + moved(out), written=cost.written + moved(out))
