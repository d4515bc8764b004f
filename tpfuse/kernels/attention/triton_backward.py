"""The Triton side of attention's backward: dk and dv, then dq, each from the scores computed again, with no atomics.

Both walk their tiles as forward does.  Their loops read a tile of q, or of k, many times, so q and k are rotated once
ahead, by the kernel that computes delta: where dk and dv rotated q as they loaded it, that took 49 instructions an
element instead of 28, and spilled.  Gradients are rotated back in registers, and dqkv is written once.
"""

from typing import Any

from torch import Tensor

from ..runtime.launch import launch, target
from ..runtime.op import Cost, moved
from ..runtime.replay import Replayed
from ..runtime.triton import tl, triton
from .options import TENSORS, Options, check_width, scores
from .triton_forward import config, prepare, rotated_bytes
from .triton_tiles import (
    LOG2_E,
    Head,
    Rows,
    attending,
    dense_heads,
    documents_of,
    keep_mask_tile,
    key_order,
    keys_seen,
    load_tile,
    locate_head,
    numbers_of,
    queries_seeing,
    score_tile,
    static_of,
    steps_of,
    store_rotated_back,
    store_tile,
    strides_of,
    tensors_of,
    tile_range,
)


@triton.jit
def _probabilities(
    q, k, v, do, lse2, delta, rows, keys, start, seen, tensors, numbers, head, S,
    EDGE: tl.constexpr, MASK_ONCE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Returns dropout(P) and dz / scale, [rows, keys]; ``seen`` is used where EDGE.  MASK_ONCE: see mask_once."""
    s, slope = score_tile(q, k, tensors, numbers, head, rows, keys, S)
    p = tl.exp2(s * numbers.unit - lse2[:, None])
    if EDGE:
        p = tl.where(seen, p, 0.0)
    dp = tl.dot(do, tl.trans(v), input_precision="ieee")
    if tensors.rng_ptr is not None:
        keep_mask = keep_mask_tile(tensors, numbers, head, rows, start, BLOCK_N)
        if MASK_ONCE:
            dropped = tl.where(keep_mask, p * numbers.keep_scale, 0.0)
            return dropped, (dropped * dp - p * delta[:, None]) * slope
        else:
            factor = tl.where(keep_mask, numbers.keep_scale, 0.0)
            dp *= factor
            return p * factor, p * (dp - delta[:, None]) * slope
    else:
        return p, p * (dp - delta[:, None]) * slope


@triton.jit
def _dkdv_tile(
    dk, dv, k, v, q, do, lse_ptr, delta_ptr, i, start_m, start_n, keys, tensors, documents, numbers,
    head, S, EDGE: tl.constexpr, STATIC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Returns dk and dv with one tile of the group's query head i; q and do are Rows, and they, the pointers and head
    are those of head 0.  Q S, unlike other products, has 32 bits: that many rows of q would be 2^31 E elements."""
    rows = start_m + tl.arange(0, BLOCK_M)
    q = load_tile(Rows(q.ptr + i * STATIC.E_QK, q.stride), rows, S, EDGE, STATIC.E_QK, STATIC.BLOCK_E)
    do = load_tile(Rows(do.ptr + i * STATIC.E, do.stride), rows, S, EDGE, STATIC.E, STATIC.BLOCK_E)
    lse2 = tl.load(lse_ptr + i * S + rows, mask=rows < S, other=0.0) * LOG2_E
    delta = tl.load(delta_ptr + i * S + rows, mask=rows < S, other=0.0)
    seen = None
    if EDGE:  # by rows, of which a thread has few, whereas it has many keys
        first, last = keys_seen(rows, tensors, documents, numbers, S, STATIC)
        seen = (keys[None, :] >= first[:, None]) & (keys[None, :] < last[:, None]) & (rows < S)[:, None]
    bias, site_head = head.bias + i.to(tl.int64) * numbers.stride_bias, head.site_head + i.to(tl.uint32)
    head = Head(head.key_mask, bias, head.k0, head.k1, head.sample, site_head)
    p, ds = _probabilities(
        q, k, v, do, lse2, delta, rows, keys, start_n, seen, tensors, numbers, head, S, EDGE, STATIC.MASK_ONCE, BLOCK_N
    )
    dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision="ieee")
    return tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision="ieee"), dv


@triton.jit(do_not_specialize=["documents"])
def _dkdv_kernel(
    do_ptr,  # [M, H E] in
    qk_ptr,  # [M, G, Q + 1 or more, E_QK] in, rotated, the last two dimensions contiguous
    v_ptr,  # [M, G, E] in, the last dimension contiguous
    lse_ptr, delta_ptr,  # [B, H, S] in, fp32
    tensors,
    dqkv_ptr,  # [M, G, Q + 2, E] out: the last two of every group
    B, S, G, Q, documents, numbers, qk_strides, v_strides, steps,
    STATIC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One tile of keys of one group: its query heads one after the other, so that their sum has one order."""
    E: tl.constexpr = STATIC.E
    E_QK: tl.constexpr = STATIC.E_QK
    BLOCK_E: tl.constexpr = STATIC.BLOCK_E
    tiles = tl.cdiv(S, BLOCK_N)
    plane = tl.program_id(0) // tiles
    start_n = tl.program_id(0) % tiles * BLOCK_N
    b, g = plane // G, plane % G
    group_ptr = qk_ptr + b.to(tl.int64) * qk_strides.b + g.to(tl.int64) * qk_strides.g
    v_ptr += b.to(tl.int64) * v_strides.b + g.to(tl.int64) * v_strides.g
    h = plane.to(tl.int64) * Q
    do_stride = tl.cast(B, tl.int64) * (G * Q * E)  # steps.o, made here: read from an argument, E = 96 spills on sm_90
    q_rows, do_rows = Rows(group_ptr, qk_strides.s), Rows(do_ptr + h * E, do_stride)
    lse_ptr += h * S
    delta_ptr += h * S
    head = locate_head(tensors, numbers, b, g * Q, S)
    keys = start_n + key_order(tensors, BLOCK_N)
    first, last = queries_seeing(keys, tensors, documents, numbers, S, STATIC)
    k = load_tile(Rows(group_ptr + Q * E_QK, qk_strides.s), keys, S, True, E_QK, BLOCK_E)
    v = load_tile(Rows(v_ptr, v_strides.s), keys, S, True, E, BLOCK_E)
    dk, dv = tl.zeros([BLOCK_N, BLOCK_E], tl.float32), tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    begin, a, e, end = tile_range(first, last, BLOCK_M)
    full, edges = (e - a) // BLOCK_M, (end - begin - (e - a)) // BLOCK_M
    for t in tl.range(0, Q * full):
        i, start = t // full, a + t % full * BLOCK_M
        dk, dv = _dkdv_tile(
            dk, dv, k, v, q_rows, do_rows, lse_ptr, delta_ptr, i, start, start_n, keys, tensors, documents,
            numbers, head, S, False, STATIC, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    for t in tl.range(0, Q * edges):
        start = begin + t % edges * BLOCK_M
        i, start = t // edges, tl.where(start < a, start, start + e - a)
        dk, dv = _dkdv_tile(
            dk, dv, k, v, q_rows, do_rows, lse_ptr, delta_ptr, i, start, start_n, keys, tensors, documents,
            numbers, head, S, True, STATIC, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    out_ptr = dqkv_ptr + (b.to(tl.int64) * G + g) * (Q + 2) * E
    store_rotated_back(Rows(out_ptr + Q * E, steps.dqkv), dk * numbers.scale, keys, tensors, B, b, S, STATIC)
    store_tile(Rows(out_ptr + (Q + 1) * E, steps.dqkv), dv, keys, S, E, BLOCK_E)


@triton.jit
def _dq_tile(
    dq, q, do, lse2, delta, k, v, start, rows, first, last, tensors, numbers, head, S,
    EDGE: tl.constexpr, STATIC: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Returns dq with one tile of keys; k and v are Rows."""
    keys = start + key_order(tensors, BLOCK_N)
    k = load_tile(k, keys, S, EDGE, STATIC.E_QK, STATIC.BLOCK_E)
    v = load_tile(v, keys, S, EDGE, STATIC.E, STATIC.BLOCK_E)
    seen = (keys[None, :] >= first[:, None]) & (keys[None, :] < last[:, None])
    _, ds = _probabilities(
        q, k, v, do, lse2, delta, rows, keys, start, seen, tensors, numbers, head, S, EDGE, False, BLOCK_N
    )
    return tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")


@triton.jit(do_not_specialize=["documents"])
def _dq_kernel(
    do_ptr, qk_ptr, v_ptr, lse_ptr, delta_ptr, tensors,  # as above
    dqkv_ptr,  # [M, G, Q + 2, E] out: the first Q of every group
    B, S, G, Q, documents, numbers, qk_strides, v_strides, steps,
    STATIC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    E: tl.constexpr = STATIC.E
    E_QK: tl.constexpr = STATIC.E_QK
    BLOCK_E: tl.constexpr = STATIC.BLOCK_E
    tiles = tl.cdiv(S, BLOCK_M)
    plane = tl.program_id(0) // tiles
    start_m = (tiles - 1 - tl.program_id(0) % tiles) * BLOCK_M
    H = G * Q
    b, h = plane // H, plane % H
    group_ptr = qk_ptr + b.to(tl.int64) * qk_strides.b + (h // Q).to(tl.int64) * qk_strides.g
    v_ptr += b.to(tl.int64) * v_strides.b + (h // Q).to(tl.int64) * v_strides.g
    k_rows, v_rows = Rows(group_ptr + Q * E_QK, qk_strides.s), Rows(v_ptr, v_strides.s)
    head = locate_head(tensors, numbers, b, h, S)
    rows = start_m + tl.arange(0, BLOCK_M)
    first, last = keys_seen(rows, tensors, documents, numbers, S, STATIC)
    q = load_tile(Rows(group_ptr + h % Q * E_QK, qk_strides.s), rows, S, True, E_QK, BLOCK_E)
    do = load_tile(Rows(do_ptr + plane.to(tl.int64) * E, steps.o), rows, S, True, E, BLOCK_E)
    offsets = plane.to(tl.int64) * S + rows
    lse2 = tl.load(lse_ptr + offsets, mask=rows < S, other=0.0) * LOG2_E
    delta = tl.load(delta_ptr + offsets, mask=rows < S, other=0.0)
    dq = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    begin, a, e, end = tile_range(first, last, BLOCK_N)
    for start in tl.range(a, e, BLOCK_N):
        dq = _dq_tile(
            dq, q, do, lse2, delta, k_rows, v_rows, start, rows, first, last, tensors, numbers, head, S,
            False, STATIC, BLOCK_N,
        )  # fmt: skip
    for start in tl.range(begin, end - (e - a), BLOCK_N):
        tile = tl.where(start < a, start, start + e - a)
        dq = _dq_tile(
            dq, q, do, lse2, delta, k_rows, v_rows, tile, rows, first, last, tensors, numbers, head, S,
            True, STATIC, BLOCK_N,
        )  # fmt: skip
    out_ptr = dqkv_ptr + ((b.to(tl.int64) * G + h // Q) * (Q + 2) + h % Q) * E
    y = Rows(out_ptr, steps.dqkv)
    store_rotated_back(y, dq * numbers.scale, rows, tensors, B, b, S, STATIC)


# ---- launcher and cost ----


def mask_once(width: int, arch: str) -> bool:
    """Returns whether dk and dv use a tile's dropout mask once, as a factor of P, instead of twice, of P and of dP.

    Twice spilled on sm_90 with Triton 3.6 for heads that fill 128 columns; elsewhere once takes more registers.
    """
    return width == 128 and not arch.startswith("gfx")


@Replayed
def bwd_launch(do: Tensor, qkv: Tensor, o: Tensor, lse: Tensor, options: Options) -> Tensor:
    """Launches attention_bwd."""
    check_width(qkv)
    qkv, do, o, lse = dense_heads(qkv), do.contiguous(), o.contiguous(), lse.contiguous()
    batch, seq, (M, G, slots, _) = options.batch, options.seq, qkv.shape
    arch = target(qkv.device).arch
    dqkv, delta = qkv.new_empty(qkv.shape), lse.new_empty(lse.shape)
    if M > seq * batch:
        dqkv[seq * batch :].zero_()
    qk = prepare(qkv, options, do=do, o=o, delta=delta)
    static = attending(static_of(qkv, options), qk, options)
    static = static._replace(MASK_ONCE=mask_once(static.BLOCK_E, arch))
    arrays = do, qk, qkv[:, :, -1], lse, delta, tensors_of(options), dqkv
    numbers = dict(B=batch, S=seq, G=G, Q=slots - 2, documents=documents_of(options), numbers=numbers_of(options))
    numbers |= dict(steps=steps_of(qkv, batch, static))
    numbers |= dict(qk_strides=strides_of(qk, batch), v_strides=strides_of(qkv, batch))
    for name, kernel, planes, block in (
        ("dkdv", _dkdv_kernel, G, "BLOCK_N"),
        ("dq", _dq_kernel, G * (slots - 2), "BLOCK_M"),
    ):
        shape = config(name, arch, qkv, options)
        grid = (-(-seq // shape[block]) * batch * planes,)
        launch(kernel, grid, qkv.device, *arrays, **numbers, STATIC=static, **shape)
    return dqkv


def bwd_cost(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> Cost:
    """Counts five products, as is customary; the kernels compute two of them twice.

    The first launch reads do and o and, with rotary positions, q and k, which the other two then read rotated.
    """
    (do, qkv, o, lse, options), (dqkv,) = args, outputs
    first, own, rotated = moved(do, o), moved(qkv), 0
    if options.cos is not None:
        qk, rotated = rotated_bytes(qkv)
        first, own = first + qk + moved(options.cos, options.sin, options.positions), own - qk + rotated
    each = own + moved(do, lse, lse, *options[:TENSORS])
    left, computed = scores(qkv, options)
    return Cost(first + 2 * each, moved(dqkv, lse) + rotated, 10 * left * qkv.shape[-1], scores=computed)
