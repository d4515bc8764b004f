"""The Triton side of attention's backward: dk and dv, then dq, each from the scores computed again, with no atomics.

Both walk their tiles as forward does.  Their loops read a tile of q, or of k, many times, so q and k are rotated once
ahead, by the kernel that computes delta: where dk and dv rotated q as they loaded it, that took 49 instructions an
element instead of 28, and spilled.  Gradients are rotated back in registers, and dqkv is written once.

P, dP and delta are those of dropout without its factor, which comes back with the last multiplication.

dk and dv have two forms.  Where TRANSPOSED they are accumulated as [E, keys], of do' P and q' dS: both products then
read their operands from shared memory, where descriptors bring q and do while the tile before is computed.
"""

from typing import Any

from torch import Tensor

from ..runtime.launch import has_tma, launch, target
from ..runtime.leaves import placed
from ..runtime.op import Cost, moved
from ..runtime.triton import tl, triton
from ..runtime.tuning import LaunchConfig
from .config import config, default_config
from .options import TENSORS, Options, check_width, scores
from .triton_forward import prepare, rotated_bytes
from .triton_records import (
    Static,
    attending,
    dense_heads,
    described,
    documents_of,
    needs_padding,
    numbers_of,
    padded,
    static_of,
    steps_of,
    strides_of,
    tensors_of,
)
from .triton_tiles import (
    LOG2_E,
    Columns,
    Head,
    Rows,
    keep_mask_tile,
    key_order,
    keys_seen,
    load_tile,
    locate_head,
    nth_place,
    queries_seeing,
    score_tile,
    store_rotated_back,
    store_tile,
    tile_range,
)


@triton.jit
def _probabilities(
    q, k, v, do, lse2, rows, keys, start, seen, head,
    EDGE: tl.constexpr, SELECT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Returns P, what dropout keeps of it and of dP, and d scores / d (scale q k'), [rows, keys]; ``seen`` is used
    where EDGE.  SELECT: see selects."""
    s, slope = score_tile(q, k, head, rows, keys)
    dp = tl.dot(do, tl.trans(v), input_precision="ieee")
    p = tl.exp2(s * head.numbers.unit - lse2[:, None])
    if EDGE:
        p = tl.where(seen, p, 0.0)
    kept = p
    if head.tensors.rng_ptr is not None:
        keep_mask = keep_mask_tile(head, rows, start, BLOCK_N)
        if SELECT:
            kept, dp = tl.where(keep_mask, p, 0.0), tl.where(keep_mask, dp, 0.0)
        else:
            factor = tl.where(keep_mask, 1.0, 0.0)
            kept, dp = p * factor, dp * factor
    return p, kept, dp, slope


@triton.jit
def _dkdv_tile(
    dk, dv, k, v, q, do, lse_ptr, delta_ptr, i, start_m, start_n, keys, head,
    EDGE: tl.constexpr, STATIC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Returns dk and dv with one tile of the group's query head i; q and do are Rows, or Columns where TRANSPOSED, and
    they, the pointers and head are those of head 0.  Q S, unlike other products, has 32 bits: that many rows of q would
    be 2^31 E elements."""
    S = head.S
    rows = start_m + tl.arange(0, BLOCK_M)
    if TRANSPOSED:
        q = q.descriptor.load([start_m, q.first + i * STATIC.E_QK])
        do = do.descriptor.load([start_m, do.first + i * STATIC.E])
    else:
        q = load_tile(Rows(q.ptr + i * STATIC.E_QK, q.stride), rows, S, EDGE, STATIC.E_QK, STATIC.BLOCK_E)
        do = load_tile(Rows(do.ptr + i * STATIC.E, do.stride), rows, S, EDGE, STATIC.E, STATIC.BLOCK_E)
    at = tl.minimum(rows, S - 1) if EDGE else rows
    lse2 = tl.load(lse_ptr + i * S + at) * LOG2_E
    delta = tl.load(delta_ptr + i * S + at)
    seen = None
    if EDGE:  # by rows, of which a thread has few, whereas it has many keys
        first, last = keys_seen(rows, head, STATIC)
        seen = (keys[None, :] >= first[:, None]) & (keys[None, :] < last[:, None]) & (rows < S)[:, None]
    place = nth_place(head.place, i, head.numbers)
    head = Head(head.tensors, head.numbers, head.documents, head.B, head.S, head.b, place)
    p, kept, dp, slope = _probabilities(
        q, k, v, do, lse2, rows, keys, start_n, seen, head, EDGE, STATIC.SELECT, BLOCK_N
    )
    kept = kept.to(do.dtype)
    if TRANSPOSED:  # before dS, which then takes the registers of what was kept
        dv = tl.dot(tl.trans(do), kept, dv, input_precision="ieee")
    else:
        dv = tl.dot(tl.trans(kept), do, dv, input_precision="ieee")
    ds = (p * (dp - delta[:, None]) * slope).to(q.dtype)
    if TRANSPOSED:
        dk = tl.dot(tl.trans(q), ds, dk, input_precision="ieee")
    else:
        dk = tl.dot(tl.trans(ds), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def _next_tile(i, start, first, end):
    """Returns the query head and the start of the tile after one: beyond ``end`` lies the first of the next head."""
    return tl.where(start < end, i, i + 1), tl.where(start < end, start, first)


@triton.jit(do_not_specialize=["documents"])
def _dkdv_kernel(
    do_ptr,  # [M, H E] in
    qk_ptr,  # [M, G, Q + 1 or more, E_QK] in, rotated, the last two dimensions contiguous
    v_ptr,  # [M, G, E] in, the last dimension contiguous
    lse_ptr, delta_ptr,  # [B, H, S] in, fp32
    tensors,
    dqkv_ptr,  # [M, G, Q + 2, E] out: the last two of every group
    do_rows, qk_rows,  # do and qk as [S, columns]: descriptors where TRANSPOSED, else None
    B, S, G, Q, documents, numbers, qk_strides, v_strides, steps,
    STATIC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr,
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
    if TRANSPOSED:
        q, do = Columns(qk_rows, b * qk_strides.b + g * qk_strides.g), Columns(do_rows, plane * Q * E)
    else:
        q, do = Rows(group_ptr, qk_strides.s), Rows(do_ptr + h * E, do_stride)  # type: ignore[assignment]
    lse_ptr += h * S
    delta_ptr += h * S
    head = Head(tensors, numbers, documents, B, S, b, locate_head(tensors, numbers, b, g * Q, S))
    keys = start_n + key_order(head, BLOCK_N)
    first, last = queries_seeing(keys, head, STATIC)
    k = load_tile(Rows(group_ptr + Q * E_QK, qk_strides.s), keys, S, True, E_QK, BLOCK_E)
    v = load_tile(Rows(v_ptr, v_strides.s), keys, S, True, E, BLOCK_E)
    dk = tl.zeros([BLOCK_E, BLOCK_N] if TRANSPOSED else [BLOCK_N, BLOCK_E], tl.float32)
    dv = dk
    begin, a, e, end = tile_range(first, last, BLOCK_M)
    i, start = a * 0, a
    for _ in tl.range(0, Q * ((e - a) // BLOCK_M)):
        dk, dv = _dkdv_tile(
            dk, dv, k, v, q, do, lse_ptr, delta_ptr, i, start, start_n, keys, head,
            False, STATIC, BLOCK_M, BLOCK_N, TRANSPOSED,
        )  # fmt: skip
        i, start = _next_tile(i, start + BLOCK_M, a, e)
    first_edge = tl.where(begin == a, e, begin)
    i, start = a * 0, first_edge
    for _ in tl.range(0, Q * ((end - begin - (e - a)) // BLOCK_M)):
        dk, dv = _dkdv_tile(
            dk, dv, k, v, q, do, lse_ptr, delta_ptr, i, start, start_n, keys, head,
            True, STATIC, BLOCK_M, BLOCK_N, TRANSPOSED,
        )  # fmt: skip
        start += BLOCK_M
        i, start = _next_tile(i, tl.where(start == a, e, start), first_edge, end)
    dk, dv = dk * (numbers.scale * numbers.keep_scale), dv * numbers.keep_scale
    if TRANSPOSED:
        dk, dv = tl.trans(dk), tl.trans(dv)
    out_ptr = dqkv_ptr + (b.to(tl.int64) * G + g) * (Q + 2) * E
    store_rotated_back(Rows(out_ptr + Q * E, steps.dqkv), dk, keys, head, STATIC)
    store_tile(Rows(out_ptr + (Q + 1) * E, steps.dqkv), dv, keys, S, E, BLOCK_E)


@triton.jit
def _dq_tile(
    dq, q, do, lse2, delta, k, v, start, rows, first, last, head,
    EDGE: tl.constexpr, STATIC: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Returns dq with one tile of keys; k and v are Rows."""
    keys = start + key_order(head, BLOCK_N)
    k = load_tile(k, keys, head.S, EDGE, STATIC.E_QK, STATIC.BLOCK_E)
    v = load_tile(v, keys, head.S, EDGE, STATIC.E, STATIC.BLOCK_E)
    seen = (keys[None, :] >= first[:, None]) & (keys[None, :] < last[:, None])
    p, _, dp, slope = _probabilities(q, k, v, do, lse2, rows, keys, start, seen, head, EDGE, STATIC.SELECT, BLOCK_N)
    ds = p * (dp - delta[:, None]) * slope
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
    head = Head(tensors, numbers, documents, B, S, b, locate_head(tensors, numbers, b, h, S))
    rows = start_m + tl.arange(0, BLOCK_M)
    first, last = keys_seen(rows, head, STATIC)
    q = load_tile(Rows(group_ptr + h % Q * E_QK, qk_strides.s), rows, S, True, E_QK, BLOCK_E)
    do = load_tile(Rows(do_ptr + plane.to(tl.int64) * E, steps.o), rows, S, True, E, BLOCK_E)
    offsets = plane.to(tl.int64) * S + rows
    lse2 = tl.load(lse_ptr + offsets, mask=rows < S, other=0.0) * LOG2_E
    delta = tl.load(delta_ptr + offsets, mask=rows < S, other=0.0)
    dq = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    begin, a, e, end = tile_range(first, last, BLOCK_N)
    for start in tl.range(a, e, BLOCK_N):
        dq = _dq_tile(
            dq, q, do, lse2, delta, k_rows, v_rows, start, rows, first, last, head, False, STATIC, BLOCK_N
        )  # fmt: skip
    for start in tl.range(begin, end - (e - a), BLOCK_N):
        tile = tl.where(start < a, start, start + e - a)
        dq = _dq_tile(
            dq, q, do, lse2, delta, k_rows, v_rows, tile, rows, first, last, head, True, STATIC, BLOCK_N
        )  # fmt: skip
    out_ptr = dqkv_ptr + ((b.to(tl.int64) * G + h // Q) * (Q + 2) + h % Q) * E
    dq *= numbers.scale * numbers.keep_scale
    store_rotated_back(Rows(out_ptr, steps.dqkv), dq, rows, head, STATIC)


# ---- the form of dk and dv ----


def selects(width: int, arch: str, transposed: bool) -> bool:
    """Returns whether dk and dv select by the dropout mask, of P and of dP, instead of multiplying by it.

    It takes fewer registers, without which heads that fill 128 columns spill on sm_90, and 4 % more instructions.
    """
    return transposed or (width == 128 and not arch.startswith("gfx"))


def transposable(static: Static, options: Options) -> bool:
    """Returns whether the transposed form has registers for what a call asks for: never for documents, and for heads
    wider than 64 only for causal, dropout and rotary positions."""
    limits = options.window, options.softcap, options.bias, options.key_mask
    plain = static.BLOCK_E <= 64 or (static.BLOCK_E == 128 and all(limit is None for limit in limits))
    return plain and options.cu_seqlens is None and static.E == static.BLOCK_E


def _dkdv_parameters(qkv: Tensor, qk: Tensor, do: Tensor, static: Static, options: Options) -> LaunchConfig:
    """Returns the launch parameters of dk and dv, descriptors included; the plain form's where the other form was
    measured to be faster, but descriptors cannot hold q, k and do or it has no registers for this call.

    A call with descriptors is not replayed: it costs the host its launcher every time.
    """
    arch = target(qkv.device).arch
    parameters = config("dkdv", arch, qkv, options)
    rows = None
    if parameters["TRANSPOSED"]:
        block = [parameters["BLOCK_M"], static.BLOCK_E]
        rows = described((do, qk), options, [block, block]) if has_tma(arch) and transposable(static, options) else None
        if rows is None:
            parameters = default_config("dkdv", arch, qkv, options)
    do_rows, qk_rows = rows or (None, None)
    select = selects(static.BLOCK_E, arch, parameters["TRANSPOSED"])
    return dict(do_rows=do_rows, qk_rows=qk_rows, STATIC=static._replace(SELECT=select)) | parameters


# ---- launcher and cost ----


def bwd_launch(do: Tensor, qkv: Tensor, o: Tensor, lse: Tensor, options: Options) -> Tensor:
    """Launches attention_bwd."""
    check_width(qkv)
    if needs_padding(E := qkv.shape[3], options):
        do, o = (padded(t.unflatten(1, (-1, E))).flatten(1) for t in (do, o))
        return bwd_launch(do, padded(qkv), o, lse, options=options)[..., :E].contiguous()
    if options.leaves:
        do, qkv, o, lse, options = placed((do, qkv, o, lse, options))
    qkv, do, o, lse = dense_heads(qkv), do.contiguous(), o.contiguous(), lse.contiguous()
    batch, seq, (M, G, slots, _) = options.batch, options.seq, qkv.shape
    dqkv, delta = qkv.new_empty(qkv.shape), lse.new_empty(lse.shape)
    if M > seq * batch:
        dqkv[seq * batch :].zero_()
    qk = prepare(qkv, options, do=do, o=o, delta=delta)
    static = attending(static_of(qkv, options), qk, options)
    arrays = do, qk, qkv[:, :, -1], lse, delta, tensors_of(options), dqkv
    numbers = dict(B=batch, S=seq, G=G, Q=slots - 2, documents=documents_of(options), numbers=numbers_of(options))
    numbers |= dict(steps=steps_of(qkv, batch, static))
    numbers |= dict(qk_strides=strides_of(qk, batch), v_strides=strides_of(qkv, batch))
    dkdv = _dkdv_parameters(qkv, qk, do, static=static, options=options)
    dq: LaunchConfig = dict(STATIC=static) | config("dq", target(qkv.device).arch, qkv, options)
    launch(_dkdv_kernel, (-(-seq // dkdv["BLOCK_N"]) * batch * G,), qkv.device, *arrays, **numbers, **dkdv)
    launch(_dq_kernel, (-(-seq // dq["BLOCK_M"]) * batch * G * (slots - 2),), qkv.device, *arrays, **numbers, **dq)
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
