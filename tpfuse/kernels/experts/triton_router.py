"""The Triton side of the router: a program has some rows and all experts, so that a row is read once.

    forward     logits of a tile of rows, in one order of sums whatever m is; the k largest scores, one after another
    backward    dlogits of a tile of rows, and from registers their product with W

Groups of experts stand side by side in a tile, each filled up to a power of two; columns beside them have no score.
The largest are found by keys that are all different, 64 bits of score and column, so that no tie is left to the order
in which threads compare.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..runtime.launch import launch, next_power_of_2, target
from ..runtime.triton import tl, triton
from .records import Routed, Routing

# ---- device functions ----


@triton.jit
def _keys(scores, columns, WIDTH: tl.constexpr):
    """scores [.., WIDTH] -> int64 keys: a larger score, or of equal ones the lower column, has the larger key."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0
    bits = tl.where(scores != scores, 0x7FFFFFFF, bits)
    ascending = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return ascending.to(tl.int64) * WIDTH + (WIDTH - 1 - columns)


@triton.jit
def _score_of(keys, WIDTH: tl.constexpr):
    """Returns the scores that keys were made of."""
    ascending = ((keys - (keys & (WIDTH - 1))) // WIDTH).to(tl.int32)
    bits = tl.where(ascending < 0, ascending ^ 0x7FFFFFFF, ascending)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _allowed(
    keys, rows, GROUPS: tl.constexpr, SLOTS: tl.constexpr, BEST: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    """keys [BM, SLOTS WIDTH] -> the keys with those of other groups than the BEST best made the least."""
    BM: tl.constexpr = keys.shape[0]
    WIDTH: tl.constexpr = keys.shape[1]
    least = keys.to(tl.int64) * 0 - 0x7FFFFFFFFFFFFFFF
    grouped = tl.reshape(keys, (BM, SLOTS, WIDTH // SLOTS))
    top = tl.max(grouped, 2)
    total = _score_of(top, WIDTH)
    if PAIR:
        others = tl.where(grouped == top[:, :, None], tl.reshape(least, grouped.shape), grouped)
        total += _score_of(tl.max(others, 2), WIDTH)
    slots = tl.arange(0, SLOTS)[None, :]
    group_keys = tl.where(slots < GROUPS, _keys(total, slots, SLOTS), -0x7FFFFFFFFFFFFFFF)
    inside = group_keys != group_keys
    for _ in tl.static_range(BEST):
        hit = group_keys == tl.max(group_keys, 1)[:, None]
        inside = inside | hit
        group_keys = tl.where(hit, -0x7FFFFFFFFFFFFFFF, group_keys)
    return tl.reshape(tl.where(inside[:, :, None], grouped, tl.reshape(least, grouped.shape)), keys.shape)


# ---- kernels ----


@triton.jit
def _router_fwd_kernel(
    x_ptr,  # [m, D] in
    w_ptr,  # [E, D] in
    bias_ptr,  # [E] in
    weights_ptr,  # [m, K] out
    chosen_ptr,  # [m, K] out
    logits_ptr,  # [m, E] out
    m, D, E, scale,
    BM: tl.constexpr, BD: tl.constexpr, GROUPS: tl.constexpr, SLOTS: tl.constexpr, WIDTH: tl.constexpr,
    K: tl.constexpr, KP: tl.constexpr, BEST: tl.constexpr, NORMALIZED: tl.constexpr, SCORE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    live = (rows < m)[:, None]
    columns = tl.arange(0, WIDTH)
    size = E // GROUPS
    group, place = columns // (WIDTH // SLOTS), columns % (WIDTH // SLOTS)
    present = (group < GROUPS) & (place < size)
    experts = group * size + place
    acc = tl.zeros([BM, WIDTH], tl.float32)
    for d in tl.range(0, D, BD):
        inner = d + tl.arange(0, BD)
        x = tl.load(x_ptr + rows[:, None] * D + inner[None, :], mask=live & (inner < D)[None, :], other=0.0)
        w = tl.load(
            w_ptr + experts.to(tl.int64)[None, :] * D + inner[:, None],
            mask=present[None, :] & (inner < D)[:, None], other=0.0,
        )  # fmt: skip
        if x.dtype != w.dtype:
            x, w = x.to(tl.float32), w.to(tl.float32)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    inside = live & present[None, :]
    tl.store(logits_ptr + rows[:, None] * E + experts[None, :], acc, mask=inside)
    scores = tl.where(present[None, :], acc, -float("inf"))
    if SCORE == "sigmoid":
        scores = tl.sigmoid(scores)
    elif SCORE == "softmax":
        largest = tl.max(scores, 1, keep_dims=True)
        p = tl.exp(scores - largest)
        scores = p / tl.sum(p, 1, keep_dims=True)
    preference = scores
    if bias_ptr is not None:
        preference += tl.load(bias_ptr + experts, mask=present, other=0.0).to(tl.float32)[None, :]
    keys = tl.where(present[None, :], _keys(preference, columns[None, :], WIDTH), -0x7FFFFFFFFFFFFFFF)
    if GROUPS > 1:
        keys = _allowed(keys, rows, GROUPS, SLOTS, BEST, WIDTH // SLOTS > 1)
    slots = tl.arange(0, KP)[None, :]
    weights = tl.zeros([BM, KP], tl.float32)
    chosen = tl.zeros([BM, KP], tl.int32)
    for j in tl.static_range(K):
        hit = keys == tl.max(keys, 1, keep_dims=True)
        value = tl.where(hit, acc if NORMALIZED == "chosen" else scores, 0.0)
        weights = tl.where(slots == j, tl.sum(value, 1, keep_dims=True), weights)
        chosen = tl.where(slots == j, tl.sum(tl.where(hit, experts[None, :], 0), 1, keep_dims=True), chosen)
        keys = tl.where(hit, -0x7FFFFFFFFFFFFFFF, keys)
    if NORMALIZED == "chosen":
        weights = tl.where(slots < K, weights, -float("inf"))
        p = tl.exp(weights - tl.max(weights, 1, keep_dims=True))
        weights = p / tl.sum(p, 1, keep_dims=True)
    if NORMALIZED == "sigmoid sum":
        weights = weights / (tl.sum(weights, 1, keep_dims=True) + 1e-20)
    kept = live & (slots < K)
    tl.store(weights_ptr + rows[:, None] * K + slots, weights * scale, mask=kept)
    tl.store(chosen_ptr + rows[:, None] * K + slots, chosen, mask=kept)


@triton.jit
def _router_bwd_kernel(
    dweights_ptr,  # [m, K] in
    dlogits_ptr,  # [m, E] in
    logits_ptr,  # [m, E] in
    weights_ptr,  # [m, K] in
    chosen_ptr,  # [m, K] in
    w_ptr,  # [E, D] in
    total_ptr,  # [m, E] out
    dx_ptr,  # [m, D] out, rows ``stride`` apart
    m, D, E, scale, stride,
    BM: tl.constexpr, BD: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    NORMALIZED: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    live = (rows < m)[:, None]
    experts, slots = tl.arange(0, WIDTH)[None, :], tl.arange(0, KP)[None, :]
    inside, kept = live & (experts < E), live & (slots < K)
    logits = tl.load(logits_ptr + rows[:, None] * E + experts, mask=inside, other=-float("inf"))
    total = tl.zeros([BM, WIDTH], tl.float32)
    if dweights_ptr is not None:
        d = tl.load(dweights_ptr + rows[:, None] * K + slots, mask=kept, other=0.0) * scale
        normal = tl.load(weights_ptr + rows[:, None] * K + slots, mask=kept, other=0.0) / scale
        if NORMALIZED == "chosen":
            d = normal * (d - tl.sum(d * normal, 1, keep_dims=True))
        elif NORMALIZED == "sigmoid sum":
            d = d - tl.sum(d * normal, 1, keep_dims=True)
        hits = tl.zeros([BM, WIDTH], tl.int1)
        for j in tl.static_range(K):
            expert = tl.load(chosen_ptr + rows[:, None] * K + j, mask=live, other=-1)
            hit = experts == expert
            total += tl.where(hit, tl.sum(tl.where(slots == j, d, 0.0), 1, keep_dims=True), 0.0)
            hits = hits | hit
        if NORMALIZED == "softmax":
            logits = tl.where(live, logits, 0.0)
            p = tl.exp(logits - tl.max(logits, 1, keep_dims=True))
            p = p / tl.sum(p, 1, keep_dims=True)
            total = p * (total - tl.sum(total * p, 1, keep_dims=True))
        elif NORMALIZED != "chosen":
            s = tl.where(hits, tl.sigmoid(logits), 0.0)
            if NORMALIZED == "sigmoid sum":
                total = total / (tl.sum(s, 1, keep_dims=True) + 1e-20)
            total = total * s * (1.0 - s)
    if dlogits_ptr is not None:
        total += tl.load(dlogits_ptr + rows[:, None] * E + experts, mask=inside, other=0.0).to(tl.float32)
    tl.store(total_ptr + rows[:, None] * E + experts, total, mask=inside)
    e = tl.arange(0, WIDTH).to(tl.int64)[:, None]
    for start in tl.range(0, D, BD):
        columns = start + tl.arange(0, BD)[None, :]
        w = tl.load(w_ptr + e * D + columns, mask=(e < E) & (columns < D), other=0.0).to(tl.float32)
        dx = tl.dot(total, w, input_precision="ieee")
        tl.store(dx_ptr + rows[:, None] * stride + columns, dx.to(dx_ptr.dtype.element_ty), mask=live & (columns < D))


# ---- launch parameters: of a number of experts alone, for a row's bits must not depend on m ----


class Tile(NamedTuple):
    """The columns of a tile: ``slots`` groups of experts side by side, ``width`` in all."""

    slots: int
    width: int

    @classmethod
    def of(cls, experts: int, groups: int = 1) -> "Tile":
        slots = next_power_of_2(groups)
        return cls(slots, max(16, slots * next_power_of_2(experts // groups)))


def config(width: int, arch: str) -> dict[str, int]:
    """Returns a tile's rows and depth: a thread has 16 scores, whose keys take two registers each, or 32 where experts
    are many."""
    if arch == "cpu":
        return dict(BM=16, BD=16)
    return dict(BM=max(16, min(64, 2048 // width)), BD=32, num_warps=max(4, width // 64), num_stages=2)


# ---- launchers ----


def router_fwd_launch(x: Tensor, w: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor, Tensor]:
    x, w, bias = x.contiguous(), w.contiguous(), None if bias is None else bias.contiguous()
    (m, D), E, k = x.shape, len(w), routing.k
    tile = Tile.of(E, routing.groups)
    tiles = config(tile.width, target(x.device).arch)
    weights, logits = x.new_empty(m, k, dtype=torch.float32), x.new_empty(m, E, dtype=torch.float32)
    chosen = x.new_empty(m, k, dtype=torch.int32)
    launch(
        _router_fwd_kernel, (-(-m // tiles["BM"]),), x.device,
        x_ptr=x, w_ptr=w, bias_ptr=bias, weights_ptr=weights, chosen_ptr=chosen, logits_ptr=logits,
        m=m, D=D, E=E, scale=routing.scale, GROUPS=routing.groups, SLOTS=tile.slots, WIDTH=tile.width,
        K=k, KP=next_power_of_2(k), BEST=routing.best_groups, NORMALIZED=routing.normalized, SCORE=routing.score,
        **tiles,
    )  # fmt: skip
    return weights, chosen, logits


def router_bwd_launch(
    dweights: Tensor | None, dlogits: Tensor | None, routed: Routed, w: Tensor, routing: Routing, dx: Tensor
) -> Tensor:
    dense: list[Any] = [None if t is None else t.contiguous() for t in (dweights, dlogits, *routed, w)]
    logits = routed.logits
    (m, E), D, k = logits.shape, w.shape[1], routing.k
    width = Tile.of(E).width
    tiles = config(width, target(logits.device).arch)
    total = logits.new_empty(m, E)
    names = "dweights_ptr", "dlogits_ptr", "logits_ptr", "weights_ptr", "chosen_ptr", "w_ptr"
    launch(
        _router_bwd_kernel, (-(-m // tiles["BM"]),), logits.device, **dict(zip(names, dense)),
        total_ptr=total, dx_ptr=dx, m=m, D=D, E=E, scale=routing.scale, stride=dx.stride(0),
        WIDTH=width, K=k, KP=next_power_of_2(k), NORMALIZED=routing.normalized, **tiles,
    )  # fmt: skip
    return total
