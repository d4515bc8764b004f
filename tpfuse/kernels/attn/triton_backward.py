"""The Triton side of attention's backward: dk and dv, then dq, each from the scores computed again, with no atomics.

Both walk their tiles as forward does.  Their loops read a tile of q, or of k, many times, so q and k are rotated once
ahead, by the kernel that computes delta: where dk and dv rotated q as they loaded it, that took 49 instructions an
element instead of 28, and spilled.  Gradients are rotated back in registers, and dqkv is written once.

P, dP and delta are those of dropout without its factor, which comes back with the last multiplication.

dk and dv have two forms.  Where TRANSPOSED they are accumulated as [E, keys], of do' P and q' dS: both products then
read their operands from shared memory, where descriptors bring q and do while the tile before is computed.
"""

from typing import Any

import torch
from torch import Tensor

from ..runtime.launch import has_tma, launch, target
from ..runtime.leaves import placed
from ..runtime.op import Cost, moved
from ..runtime.triton import tl, triton
from ..runtime.tuning import LaunchConfig
from .config import config, default_config, registers
from .options import TENSORS, Options, QueryChunk, check_width, query_positions, scores
from .triton_forward import Delta, kv_in_range, prepare, rotated_bytes
from .triton_records import (
    Static,
    attending,
    dense_heads,
    described,
    documents_of,
    needs_padding,
    numbers_of,
    padded,
    query_tiles,
    static_of,
    steps_of,
    strides_of,
    tensors_of,
)
from .triton_tiles import (
    LOG2_E,
    ChunkHead,
    Columns,
    Head,
    Rows,
    before_chunk,
    chunk_keys,
    chunk_tiles,
    keep_mask_tile,
    key_order,
    keys_seen,
    load_tile,
    locate_head,
    nth_place,
    present,
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
    TRANSPOSED: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    """Returns dk and dv with one tile of the group's query head i; q and do are Rows, or Columns where TRANSPOSED, and
    they, the pointers and head are those of head 0.  Q S, unlike other products, has 32 bits: that many rows of q would
    be 2^31 E elements."""
    S = head.S
    rows = start_m + tl.arange(0, BLOCK_M)
    inside, count = rows, S
    if CHUNKED:
        count = head.chunk.end - head.chunk.start
        if EDGE:
            inside = present(rows, head.chunk, S)
    if TRANSPOSED:
        q = q.descriptor.load([start_m, q.first + i * STATIC.E_QK])
        do = do.descriptor.load([start_m, do.first + i * STATIC.E])
    else:
        q = load_tile(Rows(q.ptr + i * STATIC.E_QK, q.stride), inside, S, EDGE, STATIC.E_QK, STATIC.BLOCK_E)
        do = load_tile(Rows(do.ptr + i * STATIC.E, do.stride), inside, S, EDGE, STATIC.E, STATIC.BLOCK_E)
    nearest = tl.minimum(rows, S - 1) if EDGE else rows
    if EDGE and CHUNKED:
        nearest = tl.minimum(tl.maximum(rows, head.chunk.start), head.chunk.end - 1)
    lse2 = tl.load(lse_ptr + i * count + nearest) * LOG2_E
    delta = tl.load(delta_ptr + i * count + nearest)
    seen = None
    if EDGE:  # by rows, of which a thread has few, whereas it has many keys
        first, last = keys_seen(rows, head, STATIC)
        seen = (keys[None, :] >= first[:, None]) & (keys[None, :] < last[:, None]) & (inside < S)[:, None]
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
    dqkv_ptr,  # [M, G, Q + 2, E] out: the last two of every group; of a chunk dkv [M, G, 2, E]
    do_rows, qk_rows,  # do and qk as [S, columns]: descriptors where TRANSPOSED, else None
    chunk,  # ChunkRows; then qk is q alone, and do, lse and delta have its rows.  None: the queries are all
    B, S, G, Q, documents, numbers, qk_strides, v_strides, steps,
    STATIC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """One tile of keys of one group: its query heads one after the other, so that their sum has one order."""
    CHUNKED: tl.constexpr = chunk is not None
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
    k_rows = Rows(group_ptr + Q * E_QK, qk_strides.s)
    if chunk is not None:
        count = chunk.end - chunk.start
        lse_ptr, delta_ptr = lse_ptr - h * (S - count) - chunk.start, delta_ptr - h * (S - count) - chunk.start
        first, last = tl.maximum(first, chunk.start), tl.minimum(last, chunk.end)
        k_rows = chunk_keys(chunk, b, g)
        q = Rows(before_chunk(group_ptr, qk_strides.s, chunk), qk_strides.s)  # type: ignore[assignment]
        do = Rows(before_chunk(do_ptr + h * E, do_stride, chunk), do_stride)  # type: ignore[assignment]
        head = ChunkHead(tensors, numbers, documents, B, S, b, head.place, chunk)  # type: ignore[assignment]
    k = load_tile(k_rows, keys, S, True, E_QK, BLOCK_E)
    v = load_tile(Rows(v_ptr, v_strides.s), keys, S, True, E, BLOCK_E)
    dk = tl.zeros([BLOCK_E, BLOCK_N] if TRANSPOSED else [BLOCK_N, BLOCK_E], tl.float32)
    dv = dk
    begin, a, e, end = tile_range(first, last, BLOCK_M)
    i, start = a * 0, a
    for _ in tl.range(0, Q * ((e - a) // BLOCK_M)):
        dk, dv = _dkdv_tile(
            dk, dv, k, v, q, do, lse_ptr, delta_ptr, i, start, start_n, keys, head,
            False, STATIC, BLOCK_M, BLOCK_N, TRANSPOSED, CHUNKED,
        )  # fmt: skip
        i, start = _next_tile(i, start + BLOCK_M, a, e)
    first_edge = tl.where(begin == a, e, begin)
    i, start = a * 0, first_edge
    for _ in tl.range(0, Q * ((end - begin - (e - a)) // BLOCK_M)):
        dk, dv = _dkdv_tile(
            dk, dv, k, v, q, do, lse_ptr, delta_ptr, i, start, start_n, keys, head,
            True, STATIC, BLOCK_M, BLOCK_N, TRANSPOSED, CHUNKED,
        )  # fmt: skip
        start += BLOCK_M
        i, start = _next_tile(i, tl.where(start == a, e, start), first_edge, end)
    dk, dv = dk * (numbers.scale * numbers.keep_scale), dv * numbers.keep_scale
    if TRANSPOSED:
        dk, dv = tl.trans(dk), tl.trans(dv)
    out_ptr = dqkv_ptr + (b.to(tl.int64) * G + g) * (Q + 2) * E
    if chunk is not None:
        out_ptr = dqkv_ptr + ((b.to(tl.int64) * G + g) * 2 - Q) * E
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
    dqkv_ptr,  # [M, G, Q + 2, E] out: the first Q of every group; of a chunk dq [m, G, Q, E]
    chunk,
    B, S, G, Q, documents, numbers, qk_strides, v_strides, steps,
    STATIC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    E: tl.constexpr = STATIC.E
    E_QK: tl.constexpr = STATIC.E_QK
    BLOCK_E: tl.constexpr = STATIC.BLOCK_E
    tiles = tl.cdiv(S, BLOCK_M)
    if chunk is not None:
        first_tile, tiles = chunk_tiles(chunk, BLOCK_M)
    plane = tl.program_id(0) // tiles
    start_m = (tiles - 1 - tl.program_id(0) % tiles) * BLOCK_M
    H = G * Q
    b, h = plane // H, plane % H
    group_ptr = qk_ptr + b.to(tl.int64) * qk_strides.b + (h // Q).to(tl.int64) * qk_strides.g
    v_ptr += b.to(tl.int64) * v_strides.b + (h // Q).to(tl.int64) * v_strides.g
    k_rows, v_rows = Rows(group_ptr + Q * E_QK, qk_strides.s), Rows(v_ptr, v_strides.s)
    head = Head(tensors, numbers, documents, B, S, b, locate_head(tensors, numbers, b, h, S))
    rows = start_m + tl.arange(0, BLOCK_M)
    inside = rows
    if chunk is not None:
        rows += first_tile * BLOCK_M
        inside, count = present(rows, chunk, S), chunk.end - chunk.start
        group_ptr, k_rows = before_chunk(group_ptr, qk_strides.s, chunk), chunk_keys(chunk, b, h // Q)
        do_ptr = before_chunk(do_ptr, steps.o, chunk)
        lse_ptr, delta_ptr = before_chunk(lse_ptr, 1, chunk), before_chunk(delta_ptr, 1, chunk)
    first, last = keys_seen(rows, head, STATIC)
    q = load_tile(Rows(group_ptr + h % Q * E_QK, qk_strides.s), inside, S, True, E_QK, BLOCK_E)
    do = load_tile(Rows(do_ptr + plane.to(tl.int64) * E, steps.o), inside, S, True, E, BLOCK_E)
    offsets = plane.to(tl.int64) * (S if chunk is None else count) + inside
    lse2 = tl.load(lse_ptr + offsets, mask=inside < S, other=0.0) * LOG2_E
    delta = tl.load(delta_ptr + offsets, mask=inside < S, other=0.0)
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
    if chunk is not None:
        out_ptr = before_chunk(dqkv_ptr, steps.dqkv, chunk) + plane.to(tl.int64) * E
    dq *= numbers.scale * numbers.keep_scale
    store_rotated_back(Rows(out_ptr, steps.dqkv), dq, inside, head, STATIC)


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


def _dkdv_parameters(
    qkv: Tensor, qk: Tensor, do: Tensor, static: Static, options: Options, chunk: QueryChunk | None
) -> LaunchConfig:
    """Returns the launch parameters of dk and dv, descriptors included; the plain form's where the other form was
    measured to be faster, but descriptors cannot hold q, k and do, it has no registers for this call, or there is a
    chunk.

    A call with descriptors is not replayed: it costs the host its launcher every time.
    """
    arch = target(qkv.device).arch
    parameters = config("dkdv", arch, qkv, options)
    rows = None
    if parameters["TRANSPOSED"]:
        block = [parameters["BLOCK_M"], static.BLOCK_E]
        able = has_tma(arch) and transposable(static, options) and chunk is None
        rows = described((do, qk), options, [block, block]) if able else None
        if rows is None:
            parameters = default_config("dkdv", arch, qkv, options)
    do_rows, qk_rows = rows or (None, None)
    select = selects(static.BLOCK_E, arch, parameters["TRANSPOSED"])
    return dict(do_rows=do_rows, qk_rows=qk_rows, STATIC=static._replace(SELECT=select)) | parameters


# ---- launcher and cost ----


def bwd_launch(do: Tensor, qkv: Tensor, o: Tensor, lse: Tensor, options: Options) -> Tensor:
    return _launch_bwd(do, qkv, o, lse, options=options, chunk=None)[0]


def of_queries_bwd_launch(
    do: Tensor, q: Tensor, chunk: QueryChunk, o: Tensor, lse: Tensor, options: Options
) -> tuple[Tensor, Tensor]:
    return _launch_bwd(do, q, o, lse, options=options, chunk=chunk)


def _launch_bwd(
    do: Tensor, x: Tensor, o: Tensor, lse: Tensor, options: Options, chunk: QueryChunk | None
) -> tuple[Tensor, Tensor]:
    """Launches backward of qkv, and returns dqkv twice; or of a chunk's q, and returns dq and dkv."""
    check_width(x)
    if needs_padding(E := x.shape[3], options):
        do, o = (padded(t.unflatten(1, (-1, E))).flatten(1) for t in (do, o))
        chunk = None if chunk is None else chunk._replace(kv=padded(chunk.kv))
        dq, dkv = _launch_bwd(do, padded(x), o, lse, options=options, chunk=chunk)
        return dq[..., :E].contiguous(), dkv[..., :E].contiguous()
    if options.leaves:
        do, x, o, lse, options, chunk = placed((do, x, o, lse, options, chunk))
    x, chunk = dense_heads(x), None if chunk is None else chunk._replace(kv=dense_heads(chunk.kv))
    do, o, lse = do.contiguous(), o.contiguous(), lse.contiguous()
    rows, batch, (_, G, slots, _) = query_positions(options, chunk), options.batch, x.shape
    n, Q, kv = rows.stop - rows.start, slots - 2 if chunk is None else slots, x if chunk is None else chunk.kv
    dq, delta = x.new_empty(x.shape), lse.new_empty(lse.shape)
    dkv = dq if chunk is None else kv.new_empty(kv.shape, dtype=torch.float32)
    for gradient, filled in ((dq, n * batch), (dkv, options.seq * batch if n else 0)):
        if len(gradient) > filled:
            gradient[filled:].zero_()
    if n == 0:
        return dq, dkv
    qk, keys = prepare(x, options, chunk, Delta(do, o, delta))
    static = attending(static_of(x, options), qk, options)
    arrays = do, qk, kv[:, :, -1], lse, delta, tensors_of(options)
    numbers = dict(B=batch, S=options.seq, G=G, Q=Q, documents=documents_of(options), numbers=numbers_of(options))
    numbers |= dict(qk_strides=strides_of(qk, batch), v_strides=strides_of(kv, batch), chunk=keys)
    steps_to = lambda gradient: steps_of(gradient, batch, static, chunk=chunk is not None)
    dkdv_config = _dkdv_parameters(x, qk, do, static=static, options=options, chunk=chunk)
    dq_config: LaunchConfig = dict(STATIC=static) | config("dq", target(x.device).arch, x, options)
    numbers |= registers(target(x.device).arch, chunk)
    grid = -(-options.seq // dkdv_config["BLOCK_N"]) * batch * G
    launch(_dkdv_kernel, (grid,), x.device, *arrays, dkv, **numbers, steps=steps_to(dkv), **dkdv_config)
    grid = query_tiles(options, chunk, dq_config["BLOCK_M"]) * batch * G * Q
    launch(_dq_kernel, (grid,), x.device, *arrays, dq, **numbers, steps=steps_to(dq), **dq_config)
    return dq, dkv


def bwd_cost(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> Cost:
    """Counts five products, as is customary; the kernels compute two of them twice.

    The first launch reads do and o and, with rotary positions, q and k, which the other two then read rotated.
    """
    (do, qkv, o, lse, options), (dqkv,) = args, outputs
    first, qkv_bytes, rotated = moved(do, o), moved(qkv), 0
    if options.cos is not None:
        qk, rotated = rotated_bytes(qkv)
        first, qkv_bytes = first + qk + moved(options.cos, options.sin, options.positions), qkv_bytes - qk + rotated
    launch_bytes = qkv_bytes + moved(do, lse, lse, *options[:TENSORS])
    left, computed = scores(qkv, options)
    return Cost(first + 2 * launch_bytes, moved(dqkv, lse) + rotated, 10 * left * qkv.shape[-1], scores=computed)


def of_queries_bwd_cost(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> Cost:
    """Counts as bwd_cost does; dk and dv read all of kv, dq what the chunk's queries see."""
    (do, q, chunk, _, lse, options), (dq, dkv) = args, outputs
    keys, in_range, queries = moved(chunk.kv) // 2, moved(kv_in_range(chunk, options)) // 2, moved(q)
    prepared, width, rotated = 2 * moved(do), 1.0, 0
    if options.cos is not None:
        width = static_of(q, Options()).BLOCK_E / q.shape[3]  # a rotated head has so many times the columns
        prepared += queries + keys + moved(options.cos, options.sin, options.positions)
        rotated = int((queries + keys) * width)
    of_both = int((2 * queries + keys + in_range) * width) + keys + in_range
    of_both += 2 * moved(do, lse, lse, *options[:TENSORS])
    left, computed = scores(q, options, chunk)
    return Cost(prepared + of_both, moved(dq, dkv, lse) + rotated, 10 * left * q.shape[-1], scores=computed)
