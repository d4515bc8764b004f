"""Device functions that more than one kernel uses: loads, sums over ranks, activations with their derivatives, the order of tiles.

Arithmetic is fp32.  (Philox stands in _philox.py, beside the twins it has to equal bit for bit.)
"""

from ._triton import tl, triton


@triton.jit
def load(ptr, offsets, mask):
    """In fp32; 0 where masked."""
    return tl.load(ptr + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def rank_base(parts_ptr, stride_r, r: tl.constexpr, TYPE: tl.constexpr):
    """Where rank r's part begins: r strides on in one tensor, or entry r of a table of addresses, of elements of ``TYPE``."""
    if TYPE is None:
        return parts_ptr + r * tl.cast(stride_r, tl.int64)
    else:
        return tl.multiple_of(tl.load(parts_ptr + r).to(tl.pointer_type(TYPE)), 16)


@triton.jit
def sum_ranks(parts_ptr, offsets, mask, stride_r, R: tl.constexpr, TYPE: tl.constexpr):
    """sum over ranks, in rank order, in fp32"""
    total = load(rank_base(parts_ptr, stride_r, 0, TYPE), offsets, mask)
    for r in tl.static_range(1, R):
        total += load(rank_base(parts_ptr, stride_r, r, TYPE), offsets, mask)
    return total


# ---- activations: tanh(u) = 2 sigmoid(2u) - 1, and erf by a polynomial, need no library call ----


@triton.jit
def _normal(z):
    """Phi(z) = (1 + erf(z / sqrt(2))) / 2, and exp(-z^2 / 2), which its derivative needs too.

    Abramowitz & Stegun 7.1.26: erfc(x) = t P(t) exp(-x^2), t = 1 / (1 + p x), for x >= 0; in fp32 Phi is right to 4e-7, and nothing
    cancels in the lower tail.  With tl.erf the pass backward takes 52 instructions an element for 36, on sm_90.
    """
    e = tl.exp(-0.5 * z * z)
    t = 1.0 / (1.0 + 0.2316418882663604 * tl.abs(z))
    tail = e * t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145))))
    return tl.where(z < 0.0, tail, 1.0 - tail), e


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
        cdf, _ = _normal(z)
        return z * cdf
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
        cdf, e = _normal(z)
        return cdf + z * 0.3989422804014327 * e
    elif ACTIVATION == "gelu_tanh":
        s, du = _gelu_tanh_slope(z)
        return s + 2.0 * z * s * (1.0 - s) * du
    else:
        return z * 0.0 + 1.0


@triton.jit
def _pairs(z):
    """[R, 2C], gate and up side by side -> gate, up [R, C]"""
    return tl.split(tl.reshape(z, (z.shape[0], z.shape[1] // 2, 2)))


@triton.jit
def activate_tile(z, ACTIVATION: tl.constexpr, GATED: tl.constexpr):
    """act(z) [R, C], of z [R, C], or of z [R, 2C] where GATED: act(gate) up"""
    if GATED:
        gate, up = _pairs(z)
        return activate(gate, ACTIVATION) * up
    else:
        return activate(z, ACTIVATION)


@triton.jit
def activate_tile_backward(dy, z, ACTIVATION: tl.constexpr, GATED: tl.constexpr):
    """dy [R, C] -> dz of z's shape"""
    if GATED:
        gate, up = _pairs(z)
        dgate, dup = dy * up * activation_slope(gate, ACTIVATION), dy * activate(gate, ACTIVATION)
        return tl.reshape(tl.join(dgate, dup), z.shape)
    else:
        return dy * activation_slope(z, ACTIVATION)


# ---- the order of tiles ----


@triton.jit
def swizzle(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Linear tile number -> (row tile, column tile): columns of GROUP_M row tiles, so that neighbours share operands in L2."""
    per_group = GROUP_M * tiles_n
    first = (tile // per_group) * GROUP_M
    rows = tl.minimum(tiles_m - first, GROUP_M)
    within = tile % per_group
    return first + within % rows, within // rows
