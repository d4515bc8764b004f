"""The Triton side of attention's backward: dk and dv, then dq, each from the scores made again, with no atomics.

Both walk their tiles as forward does (_flash.py).  A tile of q, or of k, comes by many times in their loops, so what turns is turned once
ahead, by the kernel that makes delta: where dk and dv turned q as they loaded it, that took 49 instructions an element for 28, and spilled.
Gradients turn back in registers, and dqkv is written once.
"""

from torch import Tensor

from ._attention import TENSORS, Options, scores
from ._flash import (
    _kept,
    _key,
    _keys_seen,
    _load,
    _order,
    _queries_seeing,
    _scores,
    _store,
    _store_turned_back,
    _tiles,
    arguments,
    config,
    dense_heads,
    head_constants,
    prepare,
    strides,
    turned_bytes,
)
from ._launch import launch, target
from ._op import Cost, moved
from ._triton import tl, triton


@triton.jit
def _probabilities(
    q, k, v, do, lse2, delta, rows, keys, start, seen, key_mask_ptr, bias_ptr, rng_ptr,
    S, scale, unit, softcap, key, keep_scale,
    EDGE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dropout(P) and dz / scale, [rows, keys]; ``seen`` is looked at where EDGE"""
    s, slope = _scores(q, k, key_mask_ptr, bias_ptr, rows, keys, S, scale, softcap)
    p = tl.exp2(s * unit - lse2[:, None])
    if EDGE:
        p = tl.where(seen, p, 0.0)
    dp = tl.dot(do, tl.trans(v), input_precision="ieee")
    dropped = p
    if rng_ptr is not None:
        mask = tl.where(_kept(key, rows, start, BLOCK_N), keep_scale, 0.0)
        dropped = p * mask
        dp *= mask
    return dropped, p * (dp - delta[:, None]) * slope


@triton.jit
def _dkdv_tile(
    dk, dv, k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, i, start_m, start_n, keys,
    key_mask_ptr, cu_ptr, bias_ptr, rng_ptr, N, S, window, stride_s, stride_o, stride_bias, scale, unit, softcap, key, keep_scale,
    EDGE: tl.constexpr, STEPS: tl.constexpr, CAUSAL: tl.constexpr, E: tl.constexpr, E_QK: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """What one tile of the group's query head i adds; pointers and key are those of head 0."""
    rows = start_m + tl.arange(0, BLOCK_M)
    q = _load(q_ptr + i * E_QK, rows, stride_s, S, EDGE, E_QK, BLOCK_E)
    do = _load(do_ptr + i * E, rows, stride_o, S, EDGE, E, BLOCK_E)
    lse2 = tl.load(lse_ptr + i * S + rows, mask=rows < S, other=0.0) * 1.4426950408889634
    delta = tl.load(delta_ptr + i * S + rows, mask=rows < S, other=0.0)
    seen = None
    if EDGE:  # by rows, of which a thread has few, whereas it has many keys
        first, last = _keys_seen(rows, cu_ptr, N, S, window, STEPS, CAUSAL)
        seen = (keys[None, :] >= first[:, None]) & (keys[None, :] < last[:, None]) & (rows < S)[:, None]
    if bias_ptr is not None:
        bias_ptr += i.to(tl.int64) * stride_bias
    k0, k1, sample, head, threshold = key
    p, ds = _probabilities(
        q, k, v, do, lse2, delta, rows, keys, start_n, seen, key_mask_ptr, bias_ptr, rng_ptr,
        S, scale, unit, softcap, (k0, k1, sample, head + i.to(tl.uint32), threshold), keep_scale, EDGE, BLOCK_N,
    )  # fmt: skip
    dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision="ieee")
    return tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision="ieee"), dv


@triton.jit
def _dkdv_kernel(
    do_ptr,  # [M, H E] in
    qk_ptr,  # [M, G, Q + 1 or more, E_QK] in, turned, strides stride_b, stride_s = B stride_b, stride_g, E_QK, 1
    v_ptr,  # [M, G, E] in, likewise with stride_vb, stride_vs, stride_vg
    lse_ptr, delta_ptr, key_mask_ptr, cu_ptr, bias_ptr, cos_ptr, sin_ptr, positions_ptr, rng_ptr,  # as above
    dqkv_ptr,  # [M, G, Q + 2, E] out: the last two of every group
    B, S, G, Q, N, stride_b, stride_s, stride_g, stride_vb, stride_vs, stride_vg, stride_bias,
    window, scale, unit, softcap, site_head, threshold, keep_scale,
    STEPS: tl.constexpr, CAUSAL: tl.constexpr, INTERLEAVED: tl.constexpr, HALF: tl.constexpr, E: tl.constexpr, E_QK: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One tile of keys of one group: its query heads one after the other, so that their sum has one order."""
    tiles = tl.cdiv(S, BLOCK_N)
    plane = tl.program_id(0) // tiles
    start_n = tl.program_id(0) % tiles * BLOCK_N
    b, g = plane // G, plane % G
    stride_o = B * G * Q * E
    group_ptr = qk_ptr + b.to(tl.int64) * stride_b + g.to(tl.int64) * stride_g
    v_ptr += b.to(tl.int64) * stride_vb + g.to(tl.int64) * stride_vg
    if key_mask_ptr is not None:
        key_mask_ptr += b.to(tl.int64) * S
    head = plane.to(tl.int64) * Q
    do_ptr += head * E
    lse_ptr += head * S
    delta_ptr += head * S
    if bias_ptr is not None:
        bias_ptr += (g * Q).to(tl.int64) * stride_bias
    key = _key(rng_ptr, b, site_head, g * Q, threshold)
    keys = start_n + _order(BLOCK_N, rng_ptr)
    first, last = _queries_seeing(keys, cu_ptr, N, S, window, STEPS, CAUSAL)
    k = _load(group_ptr + Q * E_QK, keys, stride_s, S, True, E_QK, BLOCK_E)
    v = _load(v_ptr, keys, stride_vs, S, True, E, BLOCK_E)
    dk, dv = tl.zeros([BLOCK_N, BLOCK_E], tl.float32), tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    begin, a, e, end = _tiles(first, last, BLOCK_M)
    full, edges = (e - a) // BLOCK_M, (end - begin - (e - a)) // BLOCK_M
    for t in tl.range(0, Q * full):
        dk, dv = _dkdv_tile(
            dk, dv, k, v, group_ptr, do_ptr, lse_ptr, delta_ptr, t // full, a + t % full * BLOCK_M, start_n, keys,
            key_mask_ptr, cu_ptr, bias_ptr, rng_ptr, N, S, window, stride_s, stride_o, stride_bias, scale, unit, softcap, key, keep_scale,
            False, STEPS, CAUSAL, E, E_QK, BLOCK_E, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    for t in tl.range(0, Q * edges):
        start = begin + t % edges * BLOCK_M
        dk, dv = _dkdv_tile(
            dk, dv, k, v, group_ptr, do_ptr, lse_ptr, delta_ptr, t // edges, tl.where(start < a, start, start + e - a), start_n, keys,
            key_mask_ptr, cu_ptr, bias_ptr, rng_ptr, N, S, window, stride_s, stride_o, stride_bias, scale, unit, softcap, key, keep_scale,
            True, STEPS, CAUSAL, E, E_QK, BLOCK_E, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    stride_d = G * (Q + 2) * E
    out_ptr = dqkv_ptr + (b.to(tl.int64) * G + g) * (Q + 2) * E
    _store_turned_back(
        out_ptr + Q * E, dk * scale, keys, stride_d * B, S, cos_ptr, sin_ptr, positions_ptr, B, b, INTERLEAVED, HALF, E, BLOCK_E
    )  # fmt: skip
    _store(out_ptr + (Q + 1) * E, dv, keys, stride_d * B, S, E, BLOCK_E)


@triton.jit
def _dq_tile(
    dq, q, do, lse2, delta, k_ptr, v_ptr, start, rows, first, last, key_mask_ptr, bias_ptr, rng_ptr,
    S, stride_s, stride_vs, scale, unit, softcap, key, keep_scale,
    EDGE: tl.constexpr, E: tl.constexpr, E_QK: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    keys = start + _order(BLOCK_N, rng_ptr)
    k = _load(k_ptr, keys, stride_s, S, EDGE, E_QK, BLOCK_E)
    v = _load(v_ptr, keys, stride_vs, S, EDGE, E, BLOCK_E)
    seen = (keys[None, :] >= first[:, None]) & (keys[None, :] < last[:, None])
    _, ds = _probabilities(
        q, k, v, do, lse2, delta, rows, keys, start, seen, key_mask_ptr, bias_ptr, rng_ptr,
        S, scale, unit, softcap, key, keep_scale, EDGE, BLOCK_N,
    )  # fmt: skip
    return tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")


@triton.jit
def _dq_kernel(
    do_ptr, qk_ptr, v_ptr, lse_ptr, delta_ptr, key_mask_ptr, cu_ptr, bias_ptr, cos_ptr, sin_ptr, positions_ptr, rng_ptr,  # as above
    dqkv_ptr,  # [M, G, Q + 2, E] out: the first Q of every group
    B, S, G, Q, N, stride_b, stride_s, stride_g, stride_vb, stride_vs, stride_vg, stride_bias,
    window, scale, unit, softcap, site_head, threshold, keep_scale,
    STEPS: tl.constexpr, CAUSAL: tl.constexpr, INTERLEAVED: tl.constexpr, HALF: tl.constexpr, E: tl.constexpr, E_QK: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(S, BLOCK_M)
    plane = tl.program_id(0) // tiles
    start_m = (tiles - 1 - tl.program_id(0) % tiles) * BLOCK_M
    H = G * Q
    b, h = plane // H, plane % H
    group_ptr = qk_ptr + b.to(tl.int64) * stride_b + (h // Q).to(tl.int64) * stride_g
    v_ptr += b.to(tl.int64) * stride_vb + (h // Q).to(tl.int64) * stride_vg
    if key_mask_ptr is not None:
        key_mask_ptr += b.to(tl.int64) * S
    if bias_ptr is not None:
        bias_ptr += h.to(tl.int64) * stride_bias
    key = _key(rng_ptr, b, site_head, h, threshold)
    rows = start_m + tl.arange(0, BLOCK_M)
    first, last = _keys_seen(rows, cu_ptr, N, S, window, STEPS, CAUSAL)
    q = _load(group_ptr + h % Q * E_QK, rows, stride_s, S, True, E_QK, BLOCK_E)
    do = _load(do_ptr + plane.to(tl.int64) * E, rows, B * H * E, S, True, E, BLOCK_E)
    at = plane.to(tl.int64) * S + rows
    lse2 = tl.load(lse_ptr + at, mask=rows < S, other=0.0) * 1.4426950408889634
    delta = tl.load(delta_ptr + at, mask=rows < S, other=0.0)
    dq = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    begin, a, e, end = _tiles(first, last, BLOCK_N)
    for start in tl.range(a, e, BLOCK_N):
        dq = _dq_tile(
            dq, q, do, lse2, delta, group_ptr + Q * E_QK, v_ptr, start, rows, first, last, key_mask_ptr, bias_ptr, rng_ptr,
            S, stride_s, stride_vs, scale, unit, softcap, key, keep_scale, False, E, E_QK, BLOCK_E, BLOCK_N,
        )  # fmt: skip
    for start in tl.range(begin, end - (e - a), BLOCK_N):
        dq = _dq_tile(
            dq, q, do, lse2, delta, group_ptr + Q * E_QK, v_ptr, tl.where(start < a, start, start + e - a), rows, first, last,
            key_mask_ptr, bias_ptr, rng_ptr,
            S, stride_s, stride_vs, scale, unit, softcap, key, keep_scale, True, E, E_QK, BLOCK_E, BLOCK_N,
        )  # fmt: skip
    out_ptr = dqkv_ptr + ((b.to(tl.int64) * G + h // Q) * (Q + 2) + h % Q) * E
    _store_turned_back(
        out_ptr, dq * scale, rows, G * (Q + 2) * E * B, S, cos_ptr, sin_ptr, positions_ptr, B, b, INTERLEAVED, HALF, E, BLOCK_E
    )  # fmt: skip


# ---- launcher and cost ----


def bwd_launch(do: Tensor, qkv: Tensor, o: Tensor, lse: Tensor, *args) -> Tensor:
    """The launcher of attention_bwd."""
    options, qkv = Options(*args), dense_heads(qkv)
    batch, seq, (_, G, slots, E) = options.batch, options.seq, qkv.shape
    arch = target(qkv.device).arch
    dqkv, delta = qkv.new_empty(qkv.shape), lse.new_empty(lse.shape)
    dqkv[seq * batch :].zero_()
    qk = prepare(qkv, options, do, o, delta)
    tensors, sizes, where, constants = arguments(qkv, options)
    numbers = *sizes, *strides(qk, batch), *strides(qkv, batch), *where
    constants |= dict(E_QK=qk.shape[3], **head_constants(E, options))
    for name, kernel, planes, block in (("dkdv", _dkdv_kernel, G, "BLOCK_N"), ("dq", _dq_kernel, G * (slots - 2), "BLOCK_M")):
        shape = config(name, arch, qkv, options)
        grid = (-(-seq // shape[block]) * batch * planes,)
        launch(kernel, grid, qkv.device, do, qk, qkv[:, :, -1], lse, delta, *tensors, dqkv, *numbers, **constants, **shape)
    return dqkv


def bwd_cost(args: tuple, outputs: tuple) -> Cost:
    """Five products, as is customary; the kernels compute two of them twice.  The first launch reads do and o and, where they turn, q and
    k, which the other two then read turned."""
    (do, qkv, o, lse), options, (dqkv,) = args[:4], Options(*args[4:]), outputs
    first, own, turned = moved(do, o), moved(qkv), 0
    if options.cos is not None:
        qk, turned = turned_bytes(qkv)
        first, own = first + qk + moved(*options[3:6]), own - qk + turned
    each = own + moved(do, lse, lse, *options[:TENSORS])
    left, made = scores(qkv, options)
    return Cost(first + 2 * each, moved(dqkv, lse) + turned, 10 * left * qkv.shape[-1], scores=made)
