"""What attention's kernels share: what sees what, and the tiles of one head with their rotation, scores and dropout
mask.

Through causal, window and document masks a query sees one interval of keys, and a key is seen by one interval of
queries.  A program therefore walks the tiles between the least and the greatest end of its rows' intervals, first
those that all its rows see as a whole, without any mask, then the others; key_mask and bias are read in both.

With dropout a tile holds its keys in an order that gives a thread eight consecutive ones, that is one call of Philox,
in the layout of NVIDIA's accumulators: about 7 instructions an element instead of 18.  The order is that of the
loads, so it costs nothing else.

With rotary positions a tile of q or k holds the first columns of all pairs, then the second ones: they are rotated
while they are loaded, and gradients rotated back, with no shuffle.

Offsets are int64.  Scores are in units of log 2.  An absent tensor or number is None, for which Triton compiles no
code.
"""

from typing import Any, NamedTuple

from torch import Tensor

from ..runtime.philox import keep_lane_device, mask_key_device
from ..runtime.triton import tl, triton
from .options import LOG2E
from .triton_records import ChunkRows, Numbers, Tensors

LOG2_E, LN_2 = tl.constexpr(LOG2E), tl.constexpr(1 / LOG2E)

# ---- records inside kernels ----


class Place(NamedTuple):
    """Where one head of one sample lies: offsets in key_mask and bias, and its words of the mask."""

    key_mask: int
    bias: int
    k0: int
    k1: int
    sample: int
    site_head: int


class Head(NamedTuple):
    """One head of sample b, and what its kernel was given; rotation alone needs no numbers, documents and place."""

    tensors: Tensors
    numbers: Numbers | None
    documents: int | None
    B: int
    S: int
    b: int
    place: Place | None


class ChunkHead(NamedTuple):
    """A Head, and the chunk that its queries are.  A record of its own, so that kernels of whole calls are what they
    were."""

    tensors: Tensors
    numbers: Numbers | None
    documents: int | None
    B: int
    S: int
    b: int
    place: Place | None
    chunk: ChunkRows


class Rows(NamedTuple):
    """One head's rows of a tensor."""

    ptr: Tensor
    stride: int


class Columns(NamedTuple):
    """One head's columns of a descriptor [S, columns]."""

    descriptor: Any
    first: int


# ---- what sees what ----


@triton.jit
def _document(at, head, STEPS: tl.constexpr):
    """Returns [start, end) of the document that each position lies in, empty where it lies in none; within [0, S),
    whatever the boundaries are: on a GPU they are not checked."""
    if head.tensors.cu_ptr is None:
        return at * 0, at * 0 + head.S
    else:
        low, high = at * 0, at * 0 + head.documents + 1  # how many boundaries are <= at
        for _ in tl.static_range(STEPS):
            mid = (low + high) // 2
            below = (mid < high) & (tl.load(head.tensors.cu_ptr + mid, mask=mid < high, other=0) <= at)
            low, high = tl.where(below, mid + 1, low), tl.where(below, high, mid)
        inside = (low > 0) & (low <= head.documents)
        start = tl.load(head.tensors.cu_ptr + low - 1, mask=inside, other=0)
        end = tl.load(head.tensors.cu_ptr + low, mask=inside, other=0)
        return tl.where(inside, tl.maximum(start, 0), at), tl.where(inside, tl.minimum(end, head.S), at)


@triton.jit
def keys_seen(rows, head, STATIC: tl.constexpr):
    """Returns [first, last) of the keys that each query sees; rows beyond S see what the last one sees."""
    rows = tl.minimum(rows, head.S - 1)
    first, last = _document(rows, head, STATIC.STEPS)
    if STATIC.CAUSAL:
        last = tl.minimum(last, rows + 1)
    if head.numbers.window is not None:
        first = tl.maximum(first, rows - head.numbers.window + 1)
        if not STATIC.CAUSAL:
            last = tl.minimum(last, rows + head.numbers.window)
    return first, last


@triton.jit
def queries_seeing(keys, head, STATIC: tl.constexpr):
    """Returns [first, last) of the queries that see each key."""
    keys = tl.minimum(keys, head.S - 1)
    first, last = _document(keys, head, STATIC.STEPS)
    if STATIC.CAUSAL:
        first = tl.maximum(first, keys)
    if head.numbers.window is not None:
        last = tl.minimum(last, keys + head.numbers.window)
        if not STATIC.CAUSAL:
            first = tl.maximum(first, keys - head.numbers.window + 1)
    return first, last


@triton.jit
def tile_range(first, last, BLOCK: tl.constexpr):
    """Returns multiples of BLOCK: all tiles lie in [start, end), those that need no mask in [a, b)."""
    start = tl.min(first, 0) // BLOCK * BLOCK
    end = tl.maximum(tl.cdiv(tl.max(last, 0), BLOCK) * BLOCK, start)
    a = tl.minimum(tl.maximum(tl.cdiv(tl.max(first, 0), BLOCK) * BLOCK, start), end)
    b = tl.maximum(tl.minimum(tl.min(last, 0) // BLOCK * BLOCK, end), a)
    return start, a, b, end


# ---- a chunk of the queries ----


@triton.jit
def chunk_tiles(chunk, BLOCK: tl.constexpr):
    """Returns the first tile with queries of the chunk, and how many there are: tiles of all positions, so that a row
    sees its keys in the order in which it does in a whole call."""
    tile = chunk.start // BLOCK
    return tile, tl.cdiv(chunk.end, BLOCK) - tile


@triton.jit
def present(rows, chunk, S):
    """Returns the positions ``rows``, and S, of which nothing is loaded or stored, where the chunk has no query."""
    return tl.where((rows >= chunk.start) & (rows < chunk.end), rows, S)


@triton.jit
def before_chunk(ptr, stride, chunk):
    """Returns the pointer to where position 0 would lie in a tensor of the chunk's positions."""
    return ptr - tl.cast(chunk.start, tl.int64) * stride


@triton.jit
def chunk_keys(chunk, b, g):
    """Returns the Rows of k."""
    strides = chunk.strides
    return Rows(chunk.k_ptr + b.to(tl.int64) * strides.b + g.to(tl.int64) * strides.g, strides.s)


# ---- tiles of one head ----


@triton.jit
def locate_head(tensors, numbers, b, h, S):
    """Returns the Place of query head h of sample b; without dropout its words mean nothing."""
    key_mask, bias = b.to(tl.int64) * S, h.to(tl.int64) * numbers.stride_bias
    if tensors.rng_ptr is None:
        return Place(key_mask, bias, b, b, b, h)
    else:
        k0, k1, first_sample = mask_key_device(tensors.rng_ptr)
        site_head = (numbers.site_head + h).to(tl.uint32)
        return Place(key_mask, bias, k0, k1, first_sample + b.to(tl.uint32), site_head)


@triton.jit
def nth_place(place, i, numbers):
    """Returns the Place of the query head i heads further on, in the same group."""
    bias, site_head = place.bias + i.to(tl.int64) * numbers.stride_bias, place.site_head + i.to(tl.uint32)
    return Place(place.key_mask, bias, place.k0, place.k1, place.sample, site_head)


@triton.jit
def key_order(head, BLOCK: tl.constexpr):
    """Returns the key within its tile that each column holds."""
    n = tl.arange(0, BLOCK)
    if head.tensors.rng_ptr is not None:
        n = (n & -32) | (((n >> 1) & 3) << 3) | (((n >> 3) & 3) << 1) | (n & 1)
    return n


@triton.jit
def keep_mask_tile(head, rows, start, BLOCK: tl.constexpr):
    """Returns booleans [rows, BLOCK keys from start, in their order].

    Which lane a column is depends on the register alone, not on the thread.
    """
    n = tl.arange(0, BLOCK)
    group, lane = ((n >> 5) << 2) | ((n >> 1) & 3), (((n >> 3) & 3) << 1) | (n & 1)
    block = (group + start // 8).to(tl.uint32)[None, :]
    position, lane = rows.to(tl.uint32)[:, None], lane.to(tl.uint32)[None, :]
    place, threshold = head.place, head.numbers.threshold.to(tl.uint32)
    return keep_lane_device(place.k0, place.k1, position, place.site_head, block, lane, place.sample, threshold)


@triton.jit
def load_tile(x, at, S, EDGE: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """Returns the rows ``at`` of one head [positions, BLOCK_E], 0 outside; EDGE says that some lie beyond S."""
    e = tl.arange(0, BLOCK_E)
    ptr = x.ptr + at.to(tl.int64)[:, None] * x.stride + e[None, :]
    if EDGE:
        return tl.load(ptr, mask=(at < S)[:, None] & (e < E)[None, :], other=0.0)
    elif E < BLOCK_E:
        return tl.load(ptr, mask=(e < E)[None, :], other=0.0)
    else:
        return tl.load(ptr)


@triton.jit
def store_tile(y, x, at, S, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """Writes x [positions, BLOCK_E] to the rows ``at`` of y, in y's dtype."""
    e = tl.arange(0, BLOCK_E)
    ptr = y.ptr + at.to(tl.int64)[:, None] * y.stride + e[None, :]
    tl.store(ptr, x.to(y.ptr.dtype.element_ty), mask=(at < S)[:, None] & (e < E)[None, :])


@triton.jit
def score_tile(q, k, head, rows, keys):
    """Returns what ``unit`` brings into units of log 2, -inf where key_mask hides it; and d scores / d (scale q k')."""
    tensors, numbers, S = head.tensors, head.numbers, head.S
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    slope = 1.0
    if numbers.softcap is not None:
        t = 2.0 * tl.sigmoid(2.0 * s * (numbers.scale / numbers.softcap)) - 1.0
        s, slope = numbers.softcap * t, 1.0 - t * t
    if tensors.bias_ptr is not None:
        if numbers.softcap is None:
            s *= numbers.scale
        ptr = tensors.bias_ptr + head.place.bias + rows.to(tl.int64)[:, None] * S + keys[None, :]
        s += tl.load(ptr, mask=(rows < S)[:, None] & (keys < S)[None, :], other=0.0).to(tl.float32)
    if tensors.key_mask_ptr is not None:
        seen = tl.load(tensors.key_mask_ptr + head.place.key_mask + keys, mask=keys < S, other=0)
        s = tl.where((seen != 0)[None, :], s, float("-inf"))
    return s, slope


# ---- rotation on load, and back on store ----


@triton.jit
def _pairs(STATIC: tl.constexpr):
    """Returns the columns that rotate together, and whether they exist; those that do not rotate are paired too, behind
    the others."""
    i = tl.arange(0, STATIC.BLOCK_E // 2)
    E: tl.constexpr = STATIC.E
    HALF: tl.constexpr = STATIC.HALF
    if STATIC.INTERLEAVED:
        return 2 * i, 2 * i + 1, 2 * i < E, 2 * i + 1 < E
    else:
        REST: tl.constexpr = (E - 2 * HALF + 1) // 2
        if REST == 0:
            first, second = i, i + HALF
        else:
            first = tl.where(i < HALF, i, i + HALF)
            second = first + tl.where(i < HALF, HALF, REST)
            if HALF % 8 == 0:
                first = tl.max_contiguous(tl.multiple_of(first, 8), 8)
        return first, second, i < HALF + REST, (i < HALF + REST) & (second < E)


@triton.jit
def _angles(at, head, STATIC: tl.constexpr):
    """Returns cos and sin [positions, BLOCK_E / 2]; 1 and 0 where nothing rotates."""
    tensors, S = head.tensors, head.S
    i = tl.arange(0, STATIC.BLOCK_E // 2)
    row = at
    if tensors.positions_ptr is not None:
        row = tl.load(tensors.positions_ptr + at.to(tl.int64) * head.B + head.b, mask=at < S, other=0)
    offsets = row.to(tl.int64)[:, None] * STATIC.HALF + i[None, :]
    mask = (at < S)[:, None] & (i < STATIC.HALF)[None, :]
    cos = tl.load(tensors.cos_ptr + offsets, mask=mask, other=1.0).to(tl.float32)
    return cos, tl.load(tensors.sin_ptr + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_rotated(x, at, head, EDGE: tl.constexpr, STATIC: tl.constexpr):
    """Returns the rows ``at`` of q or k [positions, BLOCK_E]; with cos rotated, the first columns of all pairs, then
    the second."""
    if head.tensors.cos_ptr is None:
        return load_tile(x, at, head.S, EDGE, STATIC.E_QK, STATIC.BLOCK_E)
    else:
        first, second, has_first, has_second = _pairs(STATIC)
        ptr, mask = x.ptr + at.to(tl.int64)[:, None] * x.stride, (at < head.S)[:, None]
        u = tl.load(ptr + first[None, :], mask=mask & has_first[None, :], other=0.0)
        v = tl.load(ptr + second[None, :], mask=mask & has_second[None, :], other=0.0)
        cos, sin = _angles(at, head, STATIC)
        rotated = tl.join((u * cos - v * sin).to(u.dtype), (v * cos + u * sin).to(u.dtype))
        return tl.reshape(tl.permute(rotated, (0, 2, 1)), (at.shape[0], STATIC.BLOCK_E))


@triton.jit
def store_rotated_back(y, x, at, head, STATIC: tl.constexpr):
    """Writes x, in the order of load_rotated, rotated back to the rows ``at`` of y."""
    if head.tensors.cos_ptr is None:
        store_tile(y, x, at, head.S, STATIC.E, STATIC.BLOCK_E)
    else:
        u, v = tl.split(tl.permute(tl.reshape(x, (at.shape[0], 2, STATIC.BLOCK_E // 2)), (0, 2, 1)))
        cos, sin = _angles(at, head, STATIC)
        first, second, has_first, has_second = _pairs(STATIC)
        ptr, mask = y.ptr + at.to(tl.int64)[:, None] * y.stride, (at < head.S)[:, None]
        dtype: tl.constexpr = y.ptr.dtype.element_ty
        tl.store(ptr + first[None, :], (u * cos + v * sin).to(dtype), mask=mask & has_first[None, :])
        tl.store(ptr + second[None, :], (v * cos - u * sin).to(dtype), mask=mask & has_second[None, :])
