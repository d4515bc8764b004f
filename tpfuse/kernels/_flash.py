"""The Triton side of attention: what its kernels share, and forward.  (Backward: _flash_backward.py.)

What a query sees through causal, window and document masks is one interval of keys, and what sees a key one interval of queries.  A
program therefore walks the tiles between the least and the greatest end of its rows' intervals, first those that all its rows see as a
whole, without any mask, then the others; key_mask and bias are looked up in both.

With dropout a tile holds its keys in an order that gives a thread eight consecutive ones, that is one call of Philox, in the layout of
NVIDIA's accumulators: about 7 instructions an element instead of 18.  The order is that of the loads, so it costs nothing else.

With rotary positions a tile of q or k holds the first columns of all pairs, then the second ones: they turn while they are loaded, and
gradients turn back, with no shuffle.  Backward, and forward of heads wider than 128, turn q and k once ahead into a buffer instead, because
in their loops the turning would spill registers.

Offsets are int64.  Scores are in units of log 2.  An absent tensor or number is None, for which Triton compiles no code.
"""

import torch
from torch import Tensor

from ._attention import LOG2E, TENSORS, Options, scores
from ._launch import launch, next_power_of_2, target
from ._op import Cost, moved
from ._philox import keep_lane_device, mask_key_device, scale, threshold
from ._triton import tl, triton
from ._tuning import tuned

# ---- what sees what ----


@triton.jit
def _document(at, cu_ptr, N, S, STEPS: tl.constexpr):
    """[start, end) of the document that each position lies in, empty where it lies in none; N documents, found in STEPS halvings."""
    if cu_ptr is None:
        return at * 0, at * 0 + S
    else:
        low, high = at * 0, at * 0 + N + 1  # how many boundaries are <= at
        for _ in tl.static_range(STEPS):
            mid = (low + high) // 2
            below = (mid < high) & (tl.load(cu_ptr + mid, mask=mid < high, other=0) <= at)
            low, high = tl.where(below, mid + 1, low), tl.where(below, high, mid)
        inside = (low > 0) & (low <= N)
        start, end = tl.load(cu_ptr + low - 1, mask=inside, other=0), tl.load(cu_ptr + low, mask=inside, other=0)
        return tl.where(inside, start, at), tl.where(inside, end, at)


@triton.jit
def _keys_seen(rows, cu_ptr, N, S, window, STEPS: tl.constexpr, CAUSAL: tl.constexpr):
    """[first, last) of every query; rows beyond S see what the last one sees"""
    rows = tl.minimum(rows, S - 1)
    first, last = _document(rows, cu_ptr, N, S, STEPS)
    if CAUSAL:
        last = tl.minimum(last, rows + 1)
    if window is not None:
        first = tl.maximum(first, rows - window + 1)
    return first, last


@triton.jit
def _queries_seeing(keys, cu_ptr, N, S, window, STEPS: tl.constexpr, CAUSAL: tl.constexpr):
    keys = tl.minimum(keys, S - 1)
    first, last = _document(keys, cu_ptr, N, S, STEPS)
    if CAUSAL:
        first = tl.maximum(first, keys)
    if window is not None:
        last = tl.minimum(last, keys + window)
    return first, last


@triton.jit
def _tiles(first, last, BLOCK: tl.constexpr):
    """Multiples of BLOCK: all tiles lie in [start, end), those that need no mask in [a, b)."""
    start = tl.min(first, 0) // BLOCK * BLOCK
    end = tl.maximum(tl.cdiv(tl.max(last, 0), BLOCK) * BLOCK, start)
    a = tl.minimum(tl.maximum(tl.cdiv(tl.max(first, 0), BLOCK) * BLOCK, start), end)
    b = tl.maximum(tl.minimum(tl.min(last, 0) // BLOCK * BLOCK, end), a)
    return start, a, b, end


# ---- tiles of one head ----


@triton.jit
def _order(BLOCK: tl.constexpr, rng_ptr):
    """The key within its tile that each column holds."""
    n = tl.arange(0, BLOCK)
    if rng_ptr is not None:
        n = (n & -32) | (((n >> 1) & 3) << 3) | (((n >> 3) & 3) << 1) | (n & 1)
    return n


@triton.jit
def _key(rng_ptr, b, site_head, h, threshold):
    """k0, k1, sample, site << 16 | head, T << 16 as uint32: all of the mask but rows and keys; without dropout whatever"""
    if rng_ptr is None:
        return b, b, b, h, h
    else:
        k0, k1, first_sample = mask_key_device(rng_ptr)
        return k0, k1, first_sample + b.to(tl.uint32), (site_head + h).to(tl.uint32), threshold.to(tl.uint32)


@triton.jit
def _kept(key, rows, start, BLOCK: tl.constexpr):
    """Boolean [rows, BLOCK keys from start, in their order]; which lane a column is depends on the register alone, not on the thread."""
    n = tl.arange(0, BLOCK)
    group, lane = ((n >> 5) << 2) | ((n >> 1) & 3), (((n >> 3) & 3) << 1) | (n & 1)
    k0, k1, sample, site_head, threshold = key
    block = (group + start // 8).to(tl.uint32)[None, :]
    return keep_lane_device(k0, k1, rows.to(tl.uint32)[:, None], site_head, block, lane.to(tl.uint32)[None, :], sample, threshold)


@triton.jit
def _load(ptr, at, stride, S, EDGE: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """[positions, BLOCK_E] of one head, 0 outside"""
    e = tl.arange(0, BLOCK_E)
    at_ptr = ptr + at.to(tl.int64)[:, None] * stride + e[None, :]
    if EDGE:
        return tl.load(at_ptr, mask=(at < S)[:, None] & (e < E)[None, :], other=0.0)
    elif E < BLOCK_E:
        return tl.load(at_ptr, mask=(e < E)[None, :], other=0.0)
    else:
        return tl.load(at_ptr)


@triton.jit
def _pairs(HALF: tl.constexpr, INTERLEAVED: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """Columns that turn together, and whether they are there; those that do not turn are paired too, behind the others."""
    i = tl.arange(0, BLOCK_E // 2)
    if INTERLEAVED:
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
def _angles(at, cos_ptr, sin_ptr, positions_ptr, B, b, S, HALF: tl.constexpr, BLOCK_E: tl.constexpr):
    """cos and sin [positions, BLOCK_E / 2]; 1 and 0 where nothing turns"""
    i = tl.arange(0, BLOCK_E // 2)
    row = at
    if positions_ptr is not None:
        row = tl.load(positions_ptr + at.to(tl.int64) * B + b, mask=at < S, other=0)
    offsets, there = row.to(tl.int64)[:, None] * HALF + i[None, :], (at < S)[:, None] & (i < HALF)[None, :]
    cos = tl.load(cos_ptr + offsets, mask=there, other=1.0).to(tl.float32)
    return cos, tl.load(sin_ptr + offsets, mask=there, other=0.0).to(tl.float32)


@triton.jit
def _load_turned(
    ptr, at, stride, S, cos_ptr, sin_ptr, positions_ptr, B, b,
    EDGE: tl.constexpr, INTERLEAVED: tl.constexpr, HALF: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """[positions, BLOCK_E] of q or k; with cos the first columns of all pairs, then the second"""
    if cos_ptr is None:
        return _load(ptr, at, stride, S, EDGE, E, BLOCK_E)
    else:
        first, second, has_first, has_second = _pairs(HALF, INTERLEAVED, E, BLOCK_E)
        base, there = ptr + at.to(tl.int64)[:, None] * stride, (at < S)[:, None]
        x = tl.load(base + first[None, :], mask=there & has_first[None, :], other=0.0)
        y = tl.load(base + second[None, :], mask=there & has_second[None, :], other=0.0)
        cos, sin = _angles(at, cos_ptr, sin_ptr, positions_ptr, B, b, S, HALF, BLOCK_E)
        turned = tl.join((x * cos - y * sin).to(x.dtype), (y * cos + x * sin).to(x.dtype))
        return tl.reshape(tl.permute(turned, (0, 2, 1)), (at.shape[0], BLOCK_E))


@triton.jit
def _store(ptr, x, at, stride, S, E: tl.constexpr, BLOCK_E: tl.constexpr):
    e = tl.arange(0, BLOCK_E)
    at_ptr = ptr + at.to(tl.int64)[:, None] * stride + e[None, :]
    tl.store(at_ptr, x.to(ptr.dtype.element_ty), mask=(at < S)[:, None] & (e < E)[None, :])


@triton.jit
def _store_turned_back(
    ptr, x, at, stride, S, cos_ptr, sin_ptr, positions_ptr, B, b,
    INTERLEAVED: tl.constexpr, HALF: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    if cos_ptr is None:
        _store(ptr, x, at, stride, S, E, BLOCK_E)
    else:
        x, y = tl.split(tl.permute(tl.reshape(x, (at.shape[0], 2, BLOCK_E // 2)), (0, 2, 1)))
        cos, sin = _angles(at, cos_ptr, sin_ptr, positions_ptr, B, b, S, HALF, BLOCK_E)
        first, second, has_first, has_second = _pairs(HALF, INTERLEAVED, E, BLOCK_E)
        base, there = ptr + at.to(tl.int64)[:, None] * stride, (at < S)[:, None]
        tl.store(base + first[None, :], (x * cos + y * sin).to(ptr.dtype.element_ty), mask=there & has_first[None, :])
        tl.store(base + second[None, :], (y * cos - x * sin).to(ptr.dtype.element_ty), mask=there & has_second[None, :])


@triton.jit
def _scores(q, k, key_mask_ptr, bias_ptr, rows, keys, S, scale, softcap):
    """What ``unit`` turns into units of log 2, -inf where key_mask says so; and d scores / d (scale q k')"""
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    slope = 1.0
    if softcap is not None:
        t = 2.0 * tl.sigmoid(2.0 * s * (scale / softcap)) - 1.0
        s, slope = softcap * t, 1.0 - t * t
    if bias_ptr is not None:
        if softcap is None:
            s *= scale
        there = (rows < S)[:, None] & (keys < S)[None, :]
        s += tl.load(bias_ptr + rows.to(tl.int64)[:, None] * S + keys[None, :], mask=there, other=0.0).to(tl.float32)
    if key_mask_ptr is not None:
        seen = tl.load(key_mask_ptr + keys, mask=keys < S, other=0)
        s = tl.where((seen != 0)[None, :], s, float("-inf"))
    return s, slope


# ---- turning ahead, and delta ----


@triton.jit
def _prepare_kernel(
    do_ptr, o_ptr,  # [M, H E] in
    qkv_ptr,  # [M, G, Q + 2, E] in, strides stride_b, stride_g, E, 1
    cos_ptr, sin_ptr, positions_ptr,  # as above
    delta_ptr,  # [B, H, S] out, fp32
    turned_ptr,  # [S B, G, Q + 1, BLOCK_E] out with cos: q and k turned, the first columns of all pairs, then the second
    B, S, G, Q, stride_b, stride_s, stride_g,
    INTERLEAVED: tl.constexpr, HALF: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    tiles, H = tl.cdiv(S, BLOCK_M), G * Q
    plane = tl.program_id(0) // tiles
    b, h = plane // H, plane % H
    rows = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    if delta_ptr is not None:
        do = _load(do_ptr + plane.to(tl.int64) * E, rows, B * H * E, S, True, E, BLOCK_E).to(tl.float32)
        o = _load(o_ptr + plane.to(tl.int64) * E, rows, B * H * E, S, True, E, BLOCK_E).to(tl.float32)
        tl.store(delta_ptr + plane.to(tl.int64) * S + rows, tl.sum(do * o, 1), mask=rows < S)
    if cos_ptr is not None:
        in_ptr = qkv_ptr + b.to(tl.int64) * stride_b + (h // Q).to(tl.int64) * stride_g
        out_ptr = turned_ptr + (b.to(tl.int64) * G + h // Q) * (Q + 1) * BLOCK_E
        stride_t = B * G * (Q + 1) * BLOCK_E
        q = _load_turned(
            in_ptr + h % Q * E, rows, stride_s, S, cos_ptr, sin_ptr, positions_ptr, B, b, True, INTERLEAVED, HALF, E, BLOCK_E
        )  # fmt: skip
        _store(out_ptr + h % Q * BLOCK_E, q, rows, stride_t, S, BLOCK_E, BLOCK_E)
        if h % Q == 0:
            k = _load_turned(
                in_ptr + Q * E, rows, stride_s, S, cos_ptr, sin_ptr, positions_ptr, B, b, True, INTERLEAVED, HALF, E, BLOCK_E
            )  # fmt: skip
            _store(out_ptr + Q * BLOCK_E, k, rows, stride_t, S, BLOCK_E, BLOCK_E)


# ---- forward ----


@triton.jit
def _fwd_tile(
    o, total, top, q, k_ptr, v_ptr, start, rows, first, last, key_mask_ptr, bias_ptr, cos_ptr, sin_ptr, positions_ptr, rng_ptr,
    B, S, b, stride_s, stride_vs, scale, unit, softcap, key,
    EDGE: tl.constexpr, INTERLEAVED: tl.constexpr, HALF: tl.constexpr, E: tl.constexpr, E_QK: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    keys = start + _order(BLOCK_N, rng_ptr)
    k = _load_turned(k_ptr, keys, stride_s, S, cos_ptr, sin_ptr, positions_ptr, B, b, EDGE, INTERLEAVED, HALF, E_QK, BLOCK_E)
    s, _ = _scores(q, k, key_mask_ptr, bias_ptr, rows, keys, S, scale, softcap)
    if EDGE:
        s = tl.where((keys[None, :] >= first[:, None]) & (keys[None, :] < last[:, None]), s, float("-inf"))
    new = tl.maximum(top, tl.max(s, 1) * unit)
    shift = new
    if EDGE or key_mask_ptr is not None or bias_ptr is not None:
        shift = tl.where(new == float("-inf"), 0.0, new)  # a row that has seen no key yet
    p = tl.exp2(s * unit - shift[:, None])
    old = tl.exp2(top - shift)
    total = total * old + tl.sum(p, 1)
    if rng_ptr is not None:
        p = tl.where(_kept(key, rows, start, BLOCK_N), p, 0.0)
    if v_ptr is None:
        v = _load(k_ptr + E, keys, stride_s, S, EDGE, E, BLOCK_E)
    else:
        v = _load(v_ptr, keys, stride_vs, S, EDGE, E, BLOCK_E)
    o = tl.dot(p.to(v.dtype), v, o * old[:, None], input_precision="ieee")
    return o, total, new


@triton.jit
def _fwd_kernel(
    qk_ptr,  # [M, G, Q + 1 or more, E_QK] in, strides stride_b, stride_g, E_QK, 1; stride_s = B stride_b from position to position
    v_ptr,  # [M, G, E] in, likewise stride_vb, stride_vs, stride_vg; None: v lies behind k
    key_mask_ptr,  # [B, S] in
    cu_ptr,  # [N + 1] in
    bias_ptr,  # [H or 1, S, S] in, stride_bias from head to head
    cos_ptr, sin_ptr,  # [P, HALF] in
    positions_ptr,  # [S B] in
    rng_ptr,  # [3] in
    o_ptr,  # [M, H E] out
    lse_ptr,  # [B, H, S] out, fp32
    B, S, G, Q, N, stride_b, stride_s, stride_g, stride_vb, stride_vs, stride_vg, stride_bias,
    window, scale, unit, softcap, site_head, threshold, keep_scale,
    STEPS: tl.constexpr, CAUSAL: tl.constexpr, INTERLEAVED: tl.constexpr, HALF: tl.constexpr, E: tl.constexpr, E_QK: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(S, BLOCK_M)
    plane = tl.program_id(0) // tiles
    start_m = (tiles - 1 - tl.program_id(0) % tiles) * BLOCK_M  # the longest first, under a causal mask
    H = G * Q
    b, h = plane // H, plane % H
    group_ptr = qk_ptr + b.to(tl.int64) * stride_b + (h // Q).to(tl.int64) * stride_g
    k_ptr = group_ptr + Q * E_QK
    if v_ptr is not None:
        v_ptr += b.to(tl.int64) * stride_vb + (h // Q).to(tl.int64) * stride_vg
    if key_mask_ptr is not None:
        key_mask_ptr += b.to(tl.int64) * S
    if bias_ptr is not None:
        bias_ptr += h.to(tl.int64) * stride_bias
    key = _key(rng_ptr, b, site_head, h, threshold)
    rows = start_m + tl.arange(0, BLOCK_M)
    first, last = _keys_seen(rows, cu_ptr, N, S, window, STEPS, CAUSAL)
    q = _load_turned(
        group_ptr + h % Q * E_QK, rows, stride_s, S, cos_ptr, sin_ptr, positions_ptr, B, b, True, INTERLEAVED, HALF, E_QK, BLOCK_E
    )  # fmt: skip
    o = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    total, top = tl.zeros([BLOCK_M], tl.float32), tl.full([BLOCK_M], float("-inf"), tl.float32)
    begin, a, e, end = _tiles(first, last, BLOCK_N)
    for start in tl.range(a, e, BLOCK_N):
        o, total, top = _fwd_tile(
            o, total, top, q, k_ptr, v_ptr, start, rows, first, last, key_mask_ptr, bias_ptr, cos_ptr, sin_ptr, positions_ptr, rng_ptr,
            B, S, b, stride_s, stride_vs, scale, unit, softcap, key, False, INTERLEAVED, HALF, E, E_QK, BLOCK_E, BLOCK_N,
        )  # fmt: skip
    for start in tl.range(begin, end - (e - a), BLOCK_N):
        o, total, top = _fwd_tile(
            o, total, top, q, k_ptr, v_ptr, tl.where(start < a, start, start + e - a), rows, first, last,
            key_mask_ptr, bias_ptr, cos_ptr, sin_ptr, positions_ptr, rng_ptr,
            B, S, b, stride_s, stride_vs, scale, unit, softcap, key, True, INTERLEAVED, HALF, E, E_QK, BLOCK_E, BLOCK_N,
        )  # fmt: skip
    nothing = total == 0.0
    lse = tl.where(nothing, float("inf"), (top + tl.log2(total)) * 0.6931471805599453)
    tl.store(lse_ptr + plane.to(tl.int64) * S + rows, lse, mask=rows < S)
    o *= (keep_scale / tl.where(nothing, 1.0, total))[:, None]
    _store(o_ptr + plane.to(tl.int64) * E, o, rows, B * H * E, S, E, BLOCK_E)


# ---- launch parameters: free of spills on sm_90, sm_80 and gfx942; a measured table may replace them ----

_SHAPE = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
# of heads up to 64 wide; up to 128; where registers are short; of wider heads
_DEFAULT = {
    "sm_90": dict(
        fwd=((128, 128, 8, 2), (128, 128, 8, 2), (128, 64, 8, 2), (128, 32, 8, 2)),
        dkdv=((128, 64, 8, 1), (128, 64, 8, 1), (128, 64, 8, 1), (32, 64, 8, 1)),
        dq=((128, 64, 8, 2), (128, 64, 8, 2), (128, 32, 8, 2), (32, 64, 8, 1)),
        fp32=(16, 32, 8, 1),
    ),
    "sm_80": dict(
        fwd=((128, 64, 8, 2), (128, 64, 8, 2), (32, 32, 4, 1), (32, 32, 4, 1)),
        dkdv=((64, 32, 4, 1), (64, 64, 8, 1), (64, 32, 4, 1), (32, 32, 4, 1)),
        dq=((128, 32, 8, 1), (64, 32, 4, 1), (64, 32, 4, 1), (32, 32, 4, 1)),
        fp32=(16, 32, 8, 1),
    ),
    "gfx942": dict(
        fwd=((128, 32, 4, 1), (128, 32, 4, 1), (128, 32, 4, 1), (64, 32, 4, 1)),
        dkdv=((64, 64, 4, 1), (64, 64, 4, 1), (64, 64, 4, 1), (32, 32, 4, 1)),
        dq=((64, 32, 4, 1), (64, 32, 4, 1), (64, 32, 4, 1), (32, 32, 4, 1)),
        fp32=(16, 32, 4, 1),
    ),
    "cpu": dict.fromkeys(("fwd", "dkdv", "dq"), ((32, 32, 4, 1),) * 4) | dict(fp32=(32, 32, 4, 1)),
}


def config(kernel: str, arch: str, qkv: Tensor, options: Options) -> dict[str, int]:
    """kernel "fwd", "dkdv" or "dq".  Registers are short where masks of columns, the turning of keys or a bias need some of their own."""
    E, table = qkv.shape[-1], _DEFAULT.get(arch, _DEFAULT["gfx942" if arch.startswith("gfx") else "sm_80"])
    short = E > 64 and (E < next_power_of_2(E) or (kernel == "fwd" and options.cos is not None)) or options.bias is not None
    row = 3 if E > 128 else 2 if short else 1 if E > 64 else 0
    default = table["fp32"] if qkv.dtype == torch.float32 else table[kernel][row]
    return tuned(f"attention_{kernel}", arch, qkv.dtype, (options.seq, E), dict(zip(_SHAPE, default, strict=True)))


def path(qkv: Tensor, options: Options) -> str:
    """Who computes the forward, "tpfuse" or "sdpa": a pure function of the shapes, the features asked for and the measured table.

    Backward is tpfuse's either way, from the o and lse that torch's flash attention returns: its own adds dq by atomics unless
    torch.use_deterministic_algorithms is on.
    """
    plain = not any(t is not None for t in options[:TENSORS]) and options.window is None and options.softcap is None
    if not plain or qkv.dtype not in (torch.float16, torch.bfloat16) or qkv.shape[2] != 3 or qkv.shape[-1] % 8 or qkv.shape[-1] > 256:
        return "tpfuse"
    shape = (options.seq, qkv.shape[-1])
    return tuned("attention", target(qkv.device).arch, qkv.dtype, shape, dict(path="tpfuse"))["path"]


# ---- launchers ----


def dense_heads(qkv: Tensor) -> Tensor:
    return qkv if qkv.stride(3) == 1 and qkv.stride(2) == qkv.shape[3] else qkv.contiguous()


def arguments(qkv: Tensor, options: Options) -> tuple[tuple, tuple, tuple, dict]:
    """What kernels share: tensors, the numbers before and after the strides, and constants."""
    o, (_, G, slots, _) = options, qkv.shape
    tensors = tuple(None if t is None else t.contiguous() for t in o[:TENSORS])
    documents = 0 if o.cu_seqlens is None else o.cu_seqlens.numel() - 1
    stride_bias = 0 if o.bias is None or len(o.bias) == 1 else o.seq**2
    unit = o.scale * LOG2E if o.softcap is None and o.bias is None else LOG2E
    sizes = o.batch, o.seq, G, slots - 2, documents
    where = stride_bias, o.window, o.scale, unit, o.softcap, (o.site << 16) + o.first_head, threshold(o.p) << 16, scale(o.p)
    return tensors, sizes, where, dict(STEPS=(documents + 1).bit_length(), CAUSAL=o.causal)


def head_constants(E: int, options: Options) -> dict:
    half = 0 if options.cos is None else options.cos.shape[1]
    return dict(INTERLEAVED=options.interleaved, HALF=half, E=E, BLOCK_E=max(next_power_of_2(E), 16))


def strides(x: Tensor, batch: int) -> tuple[int, int, int]:
    """From sample to sample, position to position, group to group."""
    return x.stride(0), x.stride(0) * batch, x.stride(1)


def prepare(qkv: Tensor, options: Options, do: Tensor | None, o: Tensor | None, delta: Tensor | None) -> Tensor:
    """Fills delta [B, H, S], where it is asked for, and returns q and k as the kernels after it read them: turned, if they turn."""
    B, S, (_, G, slots, E) = options.batch, options.seq, qkv.shape
    constants = head_constants(E, options)
    width = constants["BLOCK_E"]
    angles = (None if t is None else t.contiguous() for t in (options.cos, options.sin, options.positions))
    turned = None if options.cos is None else qkv.new_empty(S * B, G, slots - 1, width)
    rows = max(4096 // width, 16)
    grid = (-(-S // rows) * B * G * (slots - 2),)
    numbers = B, S, G, slots - 2, *strides(qkv, B)
    launch(_prepare_kernel, grid, qkv.device, do, o, qkv, *angles, delta, turned, *numbers, BLOCK_M=rows, num_warps=4, **constants)
    return qkv if turned is None else turned


def turned_bytes(qkv: Tensor) -> tuple[int, int]:
    """Of q and k as they are, and as ``prepare`` writes them"""
    qk = moved(qkv) // qkv.shape[2] * (qkv.shape[2] - 1)
    return qk, qk // qkv.shape[3] * head_constants(qkv.shape[3], Options())["BLOCK_E"]


def _turns_ahead(qkv: Tensor, options: Options) -> bool:
    """Forward turns keys while it loads them, unless heads are so wide that the registers do not suffice for that."""
    return options.cos is not None and qkv.shape[3] > 128


def fwd_launch(qkv: Tensor, *args) -> tuple[Tensor, Tensor]:
    """The launcher of attention_fwd."""
    options = Options(*args)
    if path(qkv, options) == "sdpa":
        return _sdpa(qkv, options)
    qkv = dense_heads(qkv)
    batch, seq, (M, G, slots, E) = options.batch, options.seq, qkv.shape
    H = G * (slots - 2)
    o, lse = qkv.new_empty(M, H * E), qkv.new_empty(batch, H, seq, dtype=torch.float32)
    o[seq * batch :].zero_()
    qk, v = qkv, None
    if _turns_ahead(qkv, options):
        qk, v = prepare(qkv, options, None, None, None), qkv[:, :, -1]
        options = options._replace(cos=None, sin=None, positions=None)
    tensors, sizes, where, constants = arguments(qkv, options)
    shape = config("fwd", target(qkv.device).arch, qkv, options)
    grid = (-(-seq // shape["BLOCK_M"]) * batch * H,)
    numbers = *sizes, *strides(qk, batch), *strides(qkv, batch), *where
    constants |= dict(E_QK=qk.shape[3], **head_constants(E, options))
    launch(_fwd_kernel, grid, qkv.device, qk, v, *tensors, o, lse, *numbers, **constants, **shape)
    return o, lse


def _sdpa(qkv: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    B, S, (M, H, _, E) = options.batch, options.seq, qkv.shape
    q, k, v = qkv[: S * B].view(S, B, H, 3, E).permute(3, 1, 2, 0, 4)
    o, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, options.causal, scale=options.scale)
    o = o.permute(2, 0, 1, 3).reshape(S * B, H * E)
    return torch.cat([o, o.new_zeros(M - S * B, H * E)]) if M > S * B else o, lse


# ---- cost ----


def fwd_cost(args: tuple, outputs: tuple) -> Cost:
    qkv, options = args[0], Options(*args[1:])
    ahead = turned_bytes(qkv)[1] if _turns_ahead(qkv, options) else 0
    left, made = scores(qkv, options)
    return Cost(moved(qkv, *options[:TENSORS]) + ahead, moved(*outputs) + ahead, 4 * left * qkv.shape[-1], scores=made)
