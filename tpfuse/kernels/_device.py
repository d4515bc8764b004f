"""Device functions that more than one kernel uses: loads, sums over ranks, activations with their derivatives, the order of tiles.

Arithmetic is fp32.  (Philox stands in _philox.py, beside the twins it has to equal bit for bit.)
"""

from ._triton import tl, triton


@triton.jit
def load(ptr, offsets, mask):
    """In fp32; 0 where masked."""
    return tl.load(ptr + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def sum_ranks(parts_ptr, offsets, mask, stride_r, R: tl.constexpr):
    """sum over ranks, in rank order, in fp32"""
    total = load(parts_ptr, offsets, mask)
    for _ in tl.static_range(1, R):
        offsets += stride_r  # int64: r * stride_r would be 32 bits wide
        total += load(parts_ptr, offsets, mask)
    return total


# ---- activations: tanh(u) = 2 sigmoid(2u) - 1, which needs no library call ----


@triton.jit
def _gelu_tanh_slope(z):
    """sigmoid(2u) and du/dz of gelu(tanh), u = sqrt(2/pi) (z + 0.044715 z^3)"""
    z2 = z * z
    u2 = 1.5957691216057308 * z * (1.0 + 0.044715 * z2)
    return tl.sigmoid(u2), 0.7978845608028654 * (1.0 + 0.134145 * z2)


@triton.jit
def activate(z, ACTIVATION: tl.constexpr):
    """act(z), ACTIVATION one of "none", "relu", "silu", "gelu" (erf), "gelu_tanh" """
    if ACTIVATION == "relu":
        return tl.maximum(z, 0.0)
    elif ACTIVATION == "silu":
        return z * tl.sigmoid(z)
    elif ACTIVATION == "gelu":
        return 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        s, _ = _gelu_tanh_slope(z)
        return z * s
    else:
        return z


@triton.jit
def activation_slope(z, ACTIVATION: tl.constexpr):
    """d act(z) / dz"""
    if ACTIVATION == "relu":
        return tl.where(z > 0.0, 1.0, 0.0)
    elif ACTIVATION == "silu":
        s = tl.sigmoid(z)
        return s * (1.0 + z * (1.0 - s))
    elif ACTIVATION == "gelu":
        return 0.5 * (1.0 + tl.erf(z * 0.7071067811865476)) + z * 0.3989422804014327 * tl.exp(-0.5 * z * z)
    elif ACTIVATION == "gelu_tanh":
        s, du = _gelu_tanh_slope(z)
        return s + 2.0 * z * s * (1.0 - s) * du
    else:
        return z * 0.0 + 1.0


# ---- the order of tiles ----


@triton.jit
def swizzle(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Linear tile number -> (row tile, column tile): columns of GROUP_M row tiles, so that neighbours share operands in L2."""
    per_group = GROUP_M * tiles_n
    first = (tile // per_group) * GROUP_M
    rows = tl.minimum(tiles_m - first, GROUP_M)
    within = tile % per_group
    return first + within % rows, within // rows
