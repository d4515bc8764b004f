"""The Triton side of attention_decode: one new token against a cache of keys and values, split over programs along the
cache.

A program takes one kv head of one sample, all its query heads, and one split of the positions; its softmax is over
those alone.  A second kernel adds the splits in their order, so that a token does not depend on which program was
first.  How many splits there are is a function of the shapes and the number of multiprocessors.

The number of splits and the cache's length grow from token to token, so kernels are not specialised on them: nothing
compiles in mid-generation.  Lengths divisible by 16 would take a tenth fewer instructions if they were; but an H100
needs five times as long for a tile's bytes (2266 clocks of a scheduler for 64 positions of 128 columns) as for its
instructions (446).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..runtime.launch import launch, multiprocessors, next_power_of_2, target
from ..runtime.op import Cost, moved
from ..runtime.triton import tl, triton
from ..runtime.tuning import tuned
from .options import LOG2E, DecodeOptions, check_width


class Cache(NamedTuple):
    """Keys and values [B, L, G, E] with their common strides (stride_b, stride_l, stride_g, 1), and what is seen of the
    L positions."""

    k_ptr: Tensor
    v_ptr: Tensor
    key_mask_ptr: Tensor | None  # [B, L], stride_mask from sample to sample
    lengths_ptr: Tensor | None  # [B]
    stride_b: int
    stride_l: int
    stride_g: int
    stride_mask: int
    window: int | None


class Part(NamedTuple):
    """What the splits give, fp32."""

    o_ptr: Tensor  # [B, G, splits, Q, E], not divided by the sum of exponentials
    top_ptr: Tensor  # [B, G, splits, Q], the greatest score
    total_ptr: Tensor  # [B, G, splits, Q], the sum of exponentials


@triton.jit(do_not_specialize=["L", "splits"])
def _split_kernel(
    q_ptr,  # [B, G, Q, E] in
    cache,  # in
    part,  # out
    L, splits, G, Q, scale, unit, softcap,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    split, plane = tl.program_id(0) % splits, tl.program_id(0) // splits
    b, g = plane // G, plane % G
    e, heads = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_Q)
    last = split * 0 + L
    if cache.lengths_ptr is not None:
        last = tl.load(cache.lengths_ptr + b)
    first = last * 0
    if cache.window is not None:
        first = tl.maximum(last - cache.window, 0)
    q = tl.load(
        q_ptr + plane.to(tl.int64) * Q * E + heads[:, None] * E + e[None, :],
        mask=(heads < Q)[:, None] & (e < E)[None, :],
        other=0.0,
    )
    base = b.to(tl.int64) * cache.stride_b + g.to(tl.int64) * cache.stride_g
    o = tl.zeros([BLOCK_Q, BLOCK_E], tl.float32)
    total, top = tl.zeros([BLOCK_Q], tl.float32), tl.full([BLOCK_Q], float("-inf"), tl.float32)
    width = tl.cdiv(tl.cdiv(L, BLOCK_N), splits) * BLOCK_N  # positions a split
    for start in tl.range(
        tl.maximum(split * width, first // BLOCK_N * BLOCK_N), tl.minimum((split + 1) * width, last), BLOCK_N
    ):
        keys = start + tl.arange(0, BLOCK_N)
        seen = (keys >= first) & (keys < last)
        if cache.key_mask_ptr is not None:
            visible_ptr = cache.key_mask_ptr + b.to(tl.int64) * cache.stride_mask
            seen = seen & (tl.load(visible_ptr + keys, mask=seen, other=0) != 0)
        mask = (keys < last)[:, None] & (e < E)[None, :]
        offsets = base + keys.to(tl.int64)[:, None] * cache.stride_l + e[None, :]
        k = tl.load(cache.k_ptr + offsets, mask=mask, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if softcap is not None:
            s = softcap * (2.0 * tl.sigmoid(2.0 * s * (scale / softcap)) - 1.0)
        s = tl.where(seen[None, :], s * unit, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        shift = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2(s - shift[:, None])
        old = tl.exp2(top - shift)
        total = total * old + tl.sum(p, 1)
        v = tl.load(cache.v_ptr + offsets, mask=mask, other=0.0)
        o = tl.dot(p.to(v.dtype), v, o * old[:, None], input_precision="ieee")
        top = new
    row = (plane.to(tl.int64) * splits + split) * Q + heads
    tl.store(part.top_ptr + row, top, mask=heads < Q)
    tl.store(part.total_ptr + row, total, mask=heads < Q)
    tl.store(part.o_ptr + row[:, None] * E + e[None, :], o, mask=(heads < Q)[:, None] & (e < E)[None, :])


@triton.jit(do_not_specialize=["splits"])
def _combine_kernel(
    part,  # in
    o_ptr,  # [B, G Q E] out
    Q, splits,
    E: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    plane, head = tl.program_id(0) // Q, tl.program_id(0) % Q
    e = tl.arange(0, BLOCK_E)
    o = tl.zeros([BLOCK_E], tl.float32)
    total, top = 0.0, float("-inf")
    for split in range(0, splits):
        row = (plane.to(tl.int64) * splits + split) * Q + head
        part_top = tl.load(part.top_ptr + row)
        new = tl.maximum(top, part_top)
        shift = tl.where(new == float("-inf"), 0.0, new)
        old, own = tl.exp2(top - shift), tl.exp2(part_top - shift)
        o = o * old + tl.load(part.o_ptr + row * E + e, mask=e < E, other=0.0) * own
        total = total * old + tl.load(part.total_ptr + row) * own
        top = new
    o /= tl.where(total == 0.0, 1.0, total)
    tl.store(o_ptr + tl.program_id(0).to(tl.int64) * E + e, o.to(o_ptr.dtype.element_ty), mask=e < E)


# ---- launch parameters and launcher ----


def config(arch: str, k: Tensor, Q: int) -> dict[str, int]:
    default = dict(
        BLOCK_N=32 if arch == "cpu" or k.element_size() * next_power_of_2(k.shape[-1]) > 256 else 64,
        num_warps=4,
        num_stages=2,
    )
    return tuned("attention_decode", arch, k.dtype, (k.shape[1], k.shape[3], Q), default=default)


def splits_of(planes: int, tiles: int, programs: int) -> int:
    """Returns as many splits as give every multiprocessor two programs, each at least one tile of keys."""
    return max(1, min(-(-2 * programs // max(planes, 1)), tiles))


def _shape(q: Tensor, k: Tensor) -> tuple[dict[str, int], int]:
    shape = config(target(q.device).arch, k, q.shape[2])
    return shape, splits_of(q.shape[0] * q.shape[1], -(-k.shape[1] // shape["BLOCK_N"]), multiprocessors(q))


def decode_launch(q: Tensor, k: Tensor, v: Tensor, options: DecodeOptions) -> Tensor:
    check_width(q)
    q, (B, G, Q, E), (key_mask, lengths, window, scale, softcap) = q.contiguous(), q.shape, options
    if k.stride() != v.stride() or k.stride(3) != 1:
        k, v = k.contiguous(), v.contiguous()
    if key_mask is not None and key_mask.stride(1) != 1:
        key_mask = key_mask.contiguous()
    shape, splits = _shape(q, k)
    top, total = (q.new_empty(B, G, splits, Q, dtype=torch.float32) for _ in range(2))
    part = Part(q.new_empty(B, G, splits, Q, E, dtype=torch.float32), top, total)
    cache = Cache(
        k,
        v,
        key_mask,
        None if lengths is None else lengths.contiguous(),
        stride_b=k.stride(0),
        stride_l=k.stride(1),
        stride_g=k.stride(2),
        stride_mask=0 if key_mask is None else key_mask.stride(0),
        window=window,
    )
    unit = scale * LOG2E if softcap is None else LOG2E
    constants = dict(E=E, BLOCK_E=max(next_power_of_2(E), 16))
    launch(
        _split_kernel, (B * G * splits,), q.device, q, cache=cache, part=part, L=k.shape[1], splits=splits, G=G, Q=Q,
        scale=scale, unit=unit, softcap=softcap, BLOCK_Q=max(next_power_of_2(Q), 16), **constants, **shape,
    )  # fmt: skip
    o = q.new_empty(B, G * Q * E)
    launch(_combine_kernel, (B * G * Q,), q.device, part, o_ptr=o, Q=Q, splits=splits, **constants, num_warps=1)
    return o


def decode_cost(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> Cost:
    """Counts a full cache: lengths are not known from shapes.  A window bounds what is read."""
    (q, k, v, options), (o,) = args, outputs
    B, G, Q, E = q.shape
    L = k.shape[1]
    visible = L if options.window is None else min(options.window, L)
    parts = 4 * B * G * _shape(q, k)[1] * Q * (E + 2)
    read = moved(q, options.lengths) + moved(k, v, options.key_mask) * visible // max(L, 1)
    return Cost(read + parts, moved(o) + parts, 4 * B * G * Q * visible * E, scores=B * G * Q * visible)
