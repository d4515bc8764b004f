"""The Triton side of attention's forward, and the kernel that prepares what several others read: q and k rotated
ahead, and backward's delta.

Forward has two forms.  Where AHEAD, a tile's scores are asked for while the product before it with v is in flight, and
descriptors bring k and v, which takes fewer registers than pointers to them; heads of 80 and 96 columns are not padded.

Forward rotates keys while it loads them.  Backward, and forward of heads wider than 128, read q and k rotated once
ahead into a buffer instead, because in their loops the rotation would spill registers.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..runtime.launch import has_tma, launch, next_power_of_2, target
from ..runtime.leaves import placed
from ..runtime.op import Cost, moved
from ..runtime.philox import scale
from ..runtime.triton import tl, triton
from ..runtime.tuning import LaunchConfig
from . import torch_forward
from .config import config, default_config, registers
from .options import TENSORS, Options, QueryChunk, check_width, keys_in_range, query_positions, scores
from .triton_records import (
    ChunkRows,
    Static,
    attending,
    chunk_rows,
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
    LN_2,
    Columns,
    Head,
    Rows,
    before_chunk,
    chunk_keys,
    chunk_tiles,
    keep_mask_tile,
    key_order,
    keys_seen,
    load_rotated,
    load_tile,
    locate_head,
    present,
    score_tile,
    store_tile,
    tile_range,
)

# ---- rotation ahead, and delta ----


@triton.jit
def _prepare_kernel(
    do_ptr, o_ptr,  # [M, H E] in
    qkv_ptr,  # [M, G, Q + 2, E] in, the last two dimensions contiguous
    tensors,  # of the rotation alone
    delta_ptr,  # [B, H, S] out, fp32: times kept_share
    rotated_ptr,  # [S B, G, Q + 1, BLOCK_E] out with cos: q and k as load_rotated orders them
    B, S, G, Q, kept_share, strides, steps,
    STATIC: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """CHUNK: qkv is a chunk's q, or k as if it were one, and has no other heads."""
    E: tl.constexpr = STATIC.E
    BLOCK_E: tl.constexpr = STATIC.BLOCK_E
    tiles, H = tl.cdiv(S, BLOCK_M), G * Q
    plane = tl.program_id(0) // tiles
    b, h = plane // H, plane % H
    rows = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    if delta_ptr is not None:
        do = load_tile(Rows(do_ptr + plane.to(tl.int64) * E, steps.o), rows, S, True, E, BLOCK_E).to(tl.float32)
        o = load_tile(Rows(o_ptr + plane.to(tl.int64) * E, steps.o), rows, S, True, E, BLOCK_E).to(tl.float32)
        delta = tl.sum(do * o, 1) * kept_share
        tl.store(delta_ptr + plane.to(tl.int64) * S + rows, delta, mask=rows < S)
    if tensors.cos_ptr is not None:
        in_ptr = qkv_ptr + b.to(tl.int64) * strides.b + (h // Q).to(tl.int64) * strides.g
        if CHUNK:
            out_ptr = rotated_ptr + (b.to(tl.int64) * G + h // Q) * Q * BLOCK_E
        else:
            out_ptr = rotated_ptr + (b.to(tl.int64) * G + h // Q) * (Q + 1) * BLOCK_E
        head = Head(tensors, None, None, B, S, b, None)
        q = load_rotated(Rows(in_ptr + h % Q * E, strides.s), rows, head, True, STATIC)
        store_tile(Rows(out_ptr + h % Q * BLOCK_E, steps.rotated), q, rows, S, BLOCK_E, BLOCK_E)
        if not CHUNK and h % Q == 0:
            k = load_rotated(Rows(in_ptr + Q * E, strides.s), rows, head, True, STATIC)
            store_tile(Rows(out_ptr + Q * BLOCK_E, steps.rotated), k, rows, S, BLOCK_E, BLOCK_E)


# ---- forward ----


@triton.jit
def _seen(s, keys, first, last):
    return tl.where((keys[None, :] >= first[:, None]) & (keys[None, :] < last[:, None]), s, float("-inf"))


@triton.jit
def _softmax(s, total, top, head, EDGE: tl.constexpr):
    """Returns the probabilities of one tile, the factor of what was added before, and total and top with the tile."""
    tensors, unit = head.tensors, head.numbers.unit
    new = tl.maximum(top, tl.max(s, 1) * unit)
    shift = new
    if EDGE or tensors.key_mask_ptr is not None or tensors.bias_ptr is not None:
        shift = tl.where(new == float("-inf"), 0.0, new)  # a row that has seen no key yet
    p = tl.exp2(s * unit - shift[:, None])
    old = tl.exp2(top - shift)
    return p, old, total * old + tl.sum(p, 1), new


@triton.jit
def _fwd_tile(
    o, total, top, q, k_rows, v_rows, start, rows, first, last, head,
    EDGE: tl.constexpr, STATIC: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Returns o, total and top with the keys of one tile; without v_rows v lies behind k."""
    keys = start + key_order(head, BLOCK_N)
    k = load_rotated(k_rows, keys, head, EDGE, STATIC)
    s, _ = score_tile(q, k, head, rows, keys)
    if EDGE:
        s = _seen(s, keys, first, last)
    p, old, total, top = _softmax(s, total, top, head, EDGE)
    if head.tensors.rng_ptr is not None:
        p = tl.where(keep_mask_tile(head, rows, start, BLOCK_N), p, 0.0)
    if v_rows is None:
        v_rows = Rows(k_rows.ptr + STATIC.E, k_rows.stride)
    v = load_tile(v_rows, keys, head.S, EDGE, STATIC.E, STATIC.BLOCK_E)
    o = tl.dot(p.to(v.dtype), v, o * old[:, None], input_precision="ieee")
    return o, total, top


@triton.jit
def _scores_ahead(q, k, q_rest, k_rest, start, rows, head, BLOCK_N: tl.constexpr):
    """Returns the scores of one tile; k and k_rest are Columns.  The short product comes first: it is waited for."""
    tile = k.descriptor.load([start, k.first])
    if k_rest is None:
        s, _ = score_tile(q, tile, head, rows, start + tl.arange(0, BLOCK_N))
    else:
        s = tl.dot(q_rest, k_rest.descriptor.load([start, k_rest.first]).T, input_precision="ieee")
        s = tl.dot(q, tile.T, s, input_precision="ieee")
    return s


@triton.jit
def _add_ahead(o, p, old, v, start):
    """Returns o with the values of one tile; v is Columns, None where there are no such columns."""
    if v is not None:
        tile = v.descriptor.load([start, v.first])
        o = tl.dot(p.to(tile.dtype), tile, o * old[:, None], input_precision="ieee")
    return o


@triton.jit
def _fwd_ahead(
    o, o_rest, total, top, q, q_rest, k, v, k_rest, v_rest, begin, a, e, end, rows, first, last, head,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Returns o, o_rest, total and top with all keys: first those at the edges, whose code behind the other loop would
    make that spill, then those of [a, e), all of which all rows see.

    In a turn of that loop the softmax of its tile comes first, then the next tile's product with k and its own with v:
    the softmax runs while the product with v before it is in flight.
    """
    for start in tl.range(begin, end - (e - a), BLOCK_N):
        tile = tl.where(start < a, start, start + e - a)
        s = _scores_ahead(q, k, q_rest, k_rest, tile, rows, head, BLOCK_N)
        p, old, total, top = _softmax(_seen(s, tile + tl.arange(0, BLOCK_N), first, last), total, top, head, True)
        o, o_rest = _add_ahead(o, p, old, v, tile), _add_ahead(o_rest, p, old, v_rest, tile)
    if a < e:
        s = _scores_ahead(q, k, q_rest, k_rest, a, rows, head, BLOCK_N)
        for start in tl.range(a, e - BLOCK_N, BLOCK_N):
            p, old, total, top = _softmax(s, total, top, head, False)
            p = p.to(v.descriptor.dtype)  # of which there are half as many registers while s is computed
            s = _scores_ahead(q, k, q_rest, k_rest, start + BLOCK_N, rows, head, BLOCK_N)
            o, o_rest = _add_ahead(o, p, old, v, start), _add_ahead(o_rest, p, old, v_rest, start)
        p, old, total, top = _softmax(s, total, top, head, False)
        o, o_rest = _add_ahead(o, p, old, v, e - BLOCK_N), _add_ahead(o_rest, p, old, v_rest, e - BLOCK_N)
    return o, o_rest, total, top


@triton.jit(do_not_specialize=["documents"])
def _fwd_kernel(
    qk_ptr,  # [M, G, Q + 1 or more, E_QK] in, the last two dimensions contiguous
    v_ptr,  # [M, G, E] in, the last dimension contiguous; None: v lies behind k
    tensors,
    o_ptr,  # [M, H E] out
    lse_ptr,  # [B, H, S] out, fp32
    qkv_rows, rest_rows,  # qkv as [S, columns]: descriptors of BLOCK_E and REST of them where AHEAD, else None
    chunk,  # ChunkRows; then qk is q alone, and o and lse have its rows.  None: the queries are all
    B, S, G, Q, documents, numbers, qk_strides, v_strides, steps,
    STATIC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    E: tl.constexpr = STATIC.E
    E_QK: tl.constexpr = STATIC.E_QK
    BLOCK_E: tl.constexpr = STATIC.BLOCK_E
    tiles = tl.cdiv(S, BLOCK_M)
    if chunk is not None:
        first_tile, tiles = chunk_tiles(chunk, BLOCK_M)
    plane = tl.program_id(0) // tiles
    start_m = (tiles - 1 - tl.program_id(0) % tiles) * BLOCK_M  # the longest first, under a causal mask
    H = G * Q
    b, h = plane // H, plane % H
    group_ptr = qk_ptr + b.to(tl.int64) * qk_strides.b + (h // Q).to(tl.int64) * qk_strides.g
    k_rows = Rows(group_ptr + Q * E_QK, qk_strides.s)
    v_rows = None
    if v_ptr is not None:
        v_ptr += b.to(tl.int64) * v_strides.b + (h // Q).to(tl.int64) * v_strides.g
        v_rows = Rows(v_ptr, v_strides.s)
    head = Head(tensors, numbers, documents, B, S, b, locate_head(tensors, numbers, b, h, S))
    rows = start_m + tl.arange(0, BLOCK_M)
    inside = rows
    if chunk is not None:
        rows += first_tile * BLOCK_M
        inside, count = present(rows, chunk, S), chunk.end - chunk.start
        group_ptr, k_rows = before_chunk(group_ptr, qk_strides.s, chunk), chunk_keys(chunk, b, h // Q)
    first, last = keys_seen(rows, head, STATIC)
    q = load_rotated(Rows(group_ptr + h % Q * E_QK, qk_strides.s), inside, head, True, STATIC)
    o = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    total, top = tl.zeros([BLOCK_M], tl.float32), tl.full([BLOCK_M], float("-inf"), tl.float32)
    begin, a, e, end = tile_range(first, last, BLOCK_N)
    o_rest = o  # of REST columns, else not used
    if AHEAD:
        REST: tl.constexpr = STATIC.REST
        column = b * qk_strides.b + (h // Q) * qk_strides.g + Q * E
        k, v = Columns(qkv_rows, column), Columns(qkv_rows, column + E)
        q_rest, k_rest, v_rest = None, None, None
        if REST:
            q_rows = Rows(group_ptr + h % Q * E + BLOCK_E, qk_strides.s)
            q_rest, o_rest = load_tile(q_rows, rows, S, True, REST, REST), tl.zeros([BLOCK_M, REST], tl.float32)
            k_rest, v_rest = Columns(rest_rows, column + BLOCK_E), Columns(rest_rows, column + E + BLOCK_E)
        o, o_rest, total, top = _fwd_ahead(
            o, o_rest, total, top, q, q_rest, k, v, k_rest, v_rest, begin, a, e, end, rows, first, last, head, BLOCK_N
        )  # fmt: skip
    else:
        for start in tl.range(a, e, BLOCK_N):
            o, total, top = _fwd_tile(
                o, total, top, q, k_rows, v_rows, start, rows, first, last, head, False, STATIC, BLOCK_N
            )  # fmt: skip
        for start in tl.range(begin, end - (e - a), BLOCK_N):
            tile = tl.where(start < a, start, start + e - a)
            o, total, top = _fwd_tile(
                o, total, top, q, k_rows, v_rows, tile, rows, first, last, head, True, STATIC, BLOCK_N
            )  # fmt: skip
    if chunk is not None:
        o_ptr, lse_ptr = before_chunk(o_ptr, steps.o, chunk), before_chunk(lse_ptr, 1, chunk)
    nothing = total == 0.0
    lse = tl.where(nothing, float("inf"), (top + tl.log2(total)) * LN_2)
    tl.store(lse_ptr + plane.to(tl.int64) * (S if chunk is None else count) + inside, lse, mask=inside < S)
    factor = (numbers.keep_scale / tl.where(nothing, 1.0, total))[:, None]
    o_ptr += plane.to(tl.int64) * E
    store_tile(Rows(o_ptr, steps.o), o * factor, inside, S, E, BLOCK_E)
    if STATIC.REST:
        store_tile(Rows(o_ptr + BLOCK_E, steps.o), o_rest * factor, rows, S, STATIC.REST, STATIC.REST)


# ---- launchers ----


class Delta(NamedTuple):
    """The tensors of backward's delta."""

    do: Tensor | None = None  # [M, H E]
    o: Tensor | None = None
    delta: Tensor | None = None  # [B, H, S], filled: divided by dropout's factor


NO_DELTA = Delta()


def prepare(
    x: Tensor, options: Options, chunk: QueryChunk | None, delta: Delta = NO_DELTA
) -> tuple[Tensor, ChunkRows | None]:
    """Fills delta where it is given, and returns q and k as the kernels after it read them, rotated where there are
    rotary positions: both in one tensor, or a chunk's q, and its k among the ChunkRows."""
    if chunk is None:
        return _prepare(x, options, delta), None
    rows, k = query_positions(options, chunk), chunk.kv
    cut = lambda table: None if table is None else table[rows] if options.positions is None else table
    positions = None if options.positions is None else options.positions[rows.start * options.batch :]
    of_chunk = options._replace(seq=chunk.queries, cos=cut(options.cos), sin=cut(options.sin), positions=positions)
    if options.cos is not None:
        k = _prepare(k[:, :, :1], options, NO_DELTA, chunk=True)
    return _prepare(x, of_chunk, delta, chunk=True), chunk_rows(chunk, k, options.batch)


def _prepare(x: Tensor, options: Options, delta: Delta, *, chunk: bool = False) -> Tensor:
    """Returns the q and k of qkv, or all heads of a chunk's x, rotated; x itself without rotary positions."""
    B, S, (_, G, slots, _) = options.batch, options.seq, x.shape
    heads, rotates = (slots, slots) if chunk else (slots - 2, slots - 1)
    static = static_of(x, options)
    rotated = None if options.cos is None else x.new_empty(S * B, G, rotates, static.BLOCK_E)
    block = max(4096 // static.BLOCK_E, 16)
    grid = (-(-S // block) * B * G * heads,)
    rotation = tensors_of(Options(cos=options.cos, sin=options.sin, positions=options.positions))
    arrays = delta.do, delta.o, x, rotation, delta.delta, rotated
    numbers = dict(B=B, S=S, G=G, Q=heads, strides=strides_of(x, B), steps=steps_of(x, B, static, chunk=chunk))
    constants = dict(STATIC=static, BLOCK_M=block, CHUNK=chunk, num_warps=4)
    launch(_prepare_kernel, grid, x.device, *arrays, **numbers, kept_share=1 / scale(options.p), **constants)
    return x if rotated is None else rotated


def rotated_bytes(qkv: Tensor) -> tuple[int, int]:
    """Returns the bytes of q and k as they are, and as ``prepare`` writes them."""
    qk = moved(qkv) // qkv.shape[2] * (qkv.shape[2] - 1)
    return qk, qk // qkv.shape[3] * static_of(qkv, Options()).BLOCK_E


def _rotates_ahead(qkv: Tensor, options: Options) -> bool:
    return options.cos is not None and qkv.shape[3] > 128


def split(E: int) -> tuple[int, int]:
    """Returns BLOCK_E and REST of the form AHEAD: heads of 80 and 96 are 64 + 16 and 64 + 32 columns, not 128."""
    return (64, E - 64) if E in (80, 96) else (max(next_power_of_2(E), 16), 0)


def runs_ahead(E: int, options: Options) -> bool:
    """Returns whether forward's form AHEAD has registers for what a call asks for: heads that fill up to 128 columns,
    under causal, window and documents alone.

    With dropout it would spill 48 to 88 bytes at 128 columns, and at 64 take 2 to 3 % more instructions where their
    issue is what limits it.
    """
    unsupported = options.key_mask, options.bias, options.cos, options.rng, options.softcap
    return sum(split(E)) == E <= 128 and all(option is None for option in unsupported)


def _form(
    shape: LaunchConfig, qkv: Tensor, static: Static, options: Options, chunk: QueryChunk | None
) -> tuple[tuple[Any, Any], LaunchConfig]:
    """Returns descriptors of qkv where ``shape`` is of the form AHEAD, and the kernel's constants and launch
    parameters; the plain form's where a call cannot take that form, whose tiles are others, or has a chunk.

    A call with descriptors is not replayed: it costs the host its launcher every time.
    """
    arch, E = target(qkv.device).arch, static.E
    if shape["AHEAD"]:
        block, tail = split(E)
        boxes = [[shape["BLOCK_N"], columns] for columns in (block, tail) if columns]
        able = has_tma(arch) and runs_ahead(E, options) and chunk is None
        rows = described([qkv] * len(boxes), options, boxes) if able else None
        if rows is not None:
            first, second = (*rows, None)[:2]
            return (first, second), dict(STATIC=static._replace(BLOCK_E=block, REST=tail)) | shape
        shape = {k: v for k, v in default_config("fwd", arch, qkv, options).items() if k != "path"}
    return (None, None), dict(STATIC=static) | shape


def fwd_launch(qkv: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    return _launch_fwd(qkv, options, None)


def of_queries_fwd_launch(q: Tensor, chunk: QueryChunk, options: Options) -> tuple[Tensor, Tensor]:
    return _launch_fwd(q, options, chunk)


def _launch_fwd(x: Tensor, options: Options, chunk: QueryChunk | None) -> tuple[Tensor, Tensor]:
    """Launches forward of qkv, or of a chunk's q."""
    check_width(x)
    if needs_padding(E := x.shape[3], options):
        x, chunk = padded(x), None if chunk is None else chunk._replace(kv=padded(chunk.kv))
        o, lse = _launch_fwd(x, options, chunk)
        return o.unflatten(1, (-1, x.shape[3]))[..., :E].flatten(1), lse
    if options.leaves:
        x, options, chunk = placed((x, options, chunk))
    requested, rotated = options, _rotates_ahead(x, options)
    if rotated:
        options = options._replace(cos=None, sin=None, positions=None)
    shape = config("fwd", target(x.device).arch, x, options)
    if shape.pop("path", None) == "sdpa" and chunk is None and torch_forward.able(x, requested):
        return torch_forward.launch(x, requested)
    x, chunk = dense_heads(x), None if chunk is None else chunk._replace(kv=dense_heads(chunk.kv))
    rows, batch, (M, G, slots, E) = query_positions(options, chunk), options.batch, x.shape
    n, Q, kv = rows.stop - rows.start, slots - 2 if chunk is None else slots, x if chunk is None else chunk.kv
    o, lse = x.new_empty(M, G * Q * E), x.new_empty(batch, G * Q, n, dtype=torch.float32)
    if M > n * batch:
        o[n * batch :].zero_()
    if rotated:
        (qk, keys), v = prepare(x, requested, chunk), kv[:, :, -1]
    else:
        qk, keys, v = x, None if chunk is None else chunk_rows(chunk, kv, batch), None
    static = attending(static_of(x, options), qk, options)
    descriptors, shape = _form(shape, x, static, options=requested, chunk=chunk)
    grid = (query_tiles(options, chunk, shape["BLOCK_M"]) * batch * G * Q,)
    arrays = qk, v, tensors_of(options), o, lse, *descriptors, keys
    numbers = dict(B=batch, S=options.seq, G=G, Q=Q, documents=documents_of(options), numbers=numbers_of(options))
    numbers |= dict(steps=steps_of(x, batch, static, chunk=chunk is not None))
    numbers |= dict(qk_strides=strides_of(qk, batch), v_strides=strides_of(kv, batch))
    limit = registers(target(x.device).arch, chunk)
    launch(_fwd_kernel, grid, x.device, *arrays, **numbers, **shape, **limit)
    return o, lse


# ---- cost ----


def fwd_cost(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> Cost:
    qkv, options = args
    ahead = rotated_bytes(qkv)[1] if _rotates_ahead(qkv, options) else 0
    left, computed = scores(qkv, options)
    read, written = moved(qkv, *options[:TENSORS]) + ahead, moved(*outputs) + ahead
    return Cost(read, written, 4 * left * qkv.shape[-1], scores=computed)


def of_queries_fwd_cost(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> Cost:
    """Counts of kv what causal and window let the chunk see; where it is rotated ahead, all of its keys."""
    q, chunk, options = args
    left, computed = scores(q, options, chunk)
    kv, ahead = kv_in_range(chunk, options), 0
    read = moved(q, kv, *options[:TENSORS])
    if _rotates_ahead(q, options):
        width = static_of(q, Options()).BLOCK_E / q.shape[3]
        ahead = int(moved(q) * width) + int(moved(chunk.kv) // 2 * width)
        read += int(moved(kv) // 2 * (width - 1)) + int(moved(q) * width) + moved(chunk.kv) // 2
    return Cost(read, moved(*outputs) + ahead, 4 * left * q.shape[-1], scores=computed)


def kv_in_range(chunk: QueryChunk, options: Options) -> Tensor:
    """Returns the rows of kv that causal and window let the chunk's queries see."""
    start, stop = keys_in_range(options, chunk.start, chunk.end) if chunk.queries else (0, 0)
    return chunk.kv[start * options.batch : stop * options.batch]
