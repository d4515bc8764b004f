"""Linear layer with a fused activation, and the three GEMMs that a parallel layer is built of.

    z = x W' + b          y = act(z)
    dz = dy act'(z)       dx = dz W        dW = dz' x        db = sum_rows dz

Shapes: x [M, K], W [N, K], b [N], z, y [M, N].  Activations: "none", "gelu" (erf), "gelu_tanh", "relu", "silu".  A gated one, "swiglu"
(silu), "geglu" (gelu) or "geglu_tanh", is act(gate) up of z = (gate, up, gate, up, ..), W [2N, K] being [N, 2, K] seen flat: z [M, 2N],
y [M, N] (Shazeer 2020, arXiv 2002.05202).  GEMMs accumulate in fp32; outputs have x's dtype, dW has W's; db is fp32.  The activation is
taken of z as rounded and stored, and rebuilt from z in the same pass as its derivative.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._activation import GATED, activation_bwd_cost, activation_bwd_launch, activation_fwd_launch, width
from ._gemm import (
    linear_dgrad_act_cost,
    linear_dgrad_act_launch,
    linear_dgrad_cost,
    linear_dgrad_launch,
    linear_fwd_cost,
    linear_fwd_launch,
    linear_wgrad_cost,
    linear_wgrad_launch,
)
from ._op import acc_dtype, autocast, check, op, row_blocks

ACTIVATIONS = "none", "gelu", "gelu_tanh", "relu", "silu"  # y has z's shape; those of GATED halve it
aten = torch.ops.aten


# ---- reference ----


def column_sum(x: Tensor) -> Tensor:
    """[M, N] -> [N] in fp32"""
    return x.sum(0, dtype=acc_dtype(x))


def _gate_up(z: Tensor) -> tuple[Tensor, Tensor]:
    """[M, 2N] -> [M, N], [M, N], in fp32"""
    return z.to(acc_dtype(z)).unflatten(1, (-1, 2)).unbind(2)


def activation_fwd_ref(z: Tensor, activation: str) -> Tensor:
    """[M, N] -> [M, N];  gated, [M, 2N] -> [M, N]"""
    if activation in GATED:
        gate, up = _gate_up(z)
        return (activation_fwd_ref(gate, GATED[activation]) * up).to(z.dtype)
    if activation == "relu":
        return F.relu(z)
    if activation == "silu":
        return F.silu(z)
    return F.gelu(z, approximate="tanh" if activation == "gelu_tanh" else "none")


def _dz_ref(dy: Tensor, z: Tensor, activation: str) -> Tensor:
    if activation in GATED:
        (gate, up), act = _gate_up(z), GATED[activation]
        dgate, dup = _dz_ref(dy * up, gate, act), dy * activation_fwd_ref(gate, act)
        return torch.stack((dgate, dup), 2).flatten(1).to(z.dtype)
    if activation == "relu":
        return dy * (z > 0)
    if activation == "silu":
        return aten.silu_backward(dy, z)
    return aten.gelu_backward(dy, z, approximate="tanh" if activation == "gelu_tanh" else "none")


def activation_bwd_ref(dy: Tensor, z: Tensor, activation: str, rebuild: bool) -> tuple[Tensor, Tensor, Tensor]:
    """-> dz like z, db [columns of z] fp32, act(z) (empty unless ``rebuild``)."""
    dz = _dz_ref(dy, z, activation)
    return dz, column_sum(dz), activation_fwd_ref(z, activation) if rebuild else z.new_empty(0)


def linear_fwd_ref(x: Tensor, w: Tensor, b: Tensor | None, activation: str) -> tuple[Tensor, Tensor]:
    """-> y, z (empty for "none")."""
    z = F.linear(x, w, None if b is None else b.to(x.dtype))
    return (z, z.new_empty(0)) if activation == "none" else (activation_fwd(z, activation), z)


def linear_dgrad_ref(dy: Tensor, w: Tensor) -> Tensor:
    """dy [M, N], w [N, K] -> dx [M, K]"""
    return dy @ w


def linear_dgrad_act_ref(dy: Tensor, w: Tensor, z: Tensor, activation: str, rebuild: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Through W and then through the activation before it: dy [M, N], w [N, K], z [M, K] (gated [M, 2K]) -> dz like z, db its columns'
    sums in fp32, act(z) [M, K] or empty."""
    return activation_bwd(dy @ w, z, activation, rebuild)


def linear_wgrad_ref(dy: Tensor, x: Tensor, dtype: torch.dtype, has_bias: bool) -> tuple[Tensor, Tensor]:
    """dy [M, N], x [M, K] -> dW [N, K] in ``dtype``, db [N] fp32 (empty without a bias)."""
    db = column_sum(dy) if has_bias else dy.new_empty(0, dtype=acc_dtype(dy))
    return (dy.t() @ x).to(dtype), db


# ---- CPU: gelu(tanh) is z sigmoid(2u), u = sqrt(2/pi) (z + 0.044715 z^3); one sigmoid serves the value and, where both are wanted, the
# derivative, in fp32 on rows that stay in the cache.  bench/kernels/cpu.py compares it with ATen's. ----

_K, _C = 2 * (2 / torch.pi) ** 0.5, 0.044715


def _activation_fwd_cpu(z: Tensor, activation: str, y: Tensor | None = None) -> Tensor:
    if activation not in GATED and activation != "gelu_tanh":
        made = activation_fwd_ref(z, activation)
        return made if y is None else y.copy_(made)
    y = z.new_empty(len(z), z.shape[1] // width(activation)) if y is None else y
    if activation in GATED:
        for i, j in row_blocks(*z.shape):
            y[i:j] = activation_fwd_ref(z[i:j], activation)
        return y
    k = torch.tensor(_K, dtype=acc_dtype(z), device=z.device)
    for start, stop in row_blocks(*z.shape):
        rows = slice(start, stop)
        zf = z[rows].to(k.dtype)
        y[rows] = torch.addcmul(k, zf, zf, value=_C * _K).mul_(zf).sigmoid_().mul_(zf)
    return y


def _activation_bwd_cpu(
    dy: Tensor, z: Tensor, activation: str, rebuild: bool, dz: Tensor | None = None, y: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    if activation not in GATED and activation != "gelu_tanh":
        made, db, again = activation_bwd_ref(dy, z, activation, rebuild)
        return made if dz is None else dz.copy_(made), db, again if y is None else y.copy_(again)
    dz = torch.empty_like(z) if dz is None else dz
    y = (torch.empty_like(dy) if rebuild else z.new_empty(0)) if y is None else y
    if activation in GATED:
        db = z.new_zeros(z.shape[1], dtype=acc_dtype(z))
        for i, j in row_blocks(*z.shape):
            dz[i:j], db_block, a = activation_bwd_ref(dy[i:j], z[i:j], activation, rebuild)
            db += db_block
            if rebuild:
                y[i:j] = a
        return dz, db, y
    k = torch.tensor(_K, dtype=acc_dtype(z), device=z.device)
    for start, stop in row_blocks(*z.shape):
        rows = slice(start, stop)
        zf = z[rows].to(k.dtype)
        slope = torch.addcmul(k, zf, zf, value=_C * _K)  # 2u / z; its three-fold less 2k is d(2u)/dz
        s = (slope * zf).sigmoid_()
        a = zf * s
        if rebuild:
            y[rows] = a
        dz[rows] = torch.addcmul(s, torch.addcmul(a, a, s, value=-1), slope.mul_(3).sub_(2 * _K)).mul_(dy[rows])
    return dz, column_sum(dz), y


def _linear_dgrad_act_cpu(dy: Tensor, w: Tensor, z: Tensor, activation: str, rebuild: bool, *out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _activation_bwd_cpu(dy @ w, z, activation, rebuild, *out)


activation_fwd = op(activation_fwd_ref, launch=activation_fwd_launch, cpu=_activation_fwd_cpu)
activation_bwd = op(activation_bwd_ref, launch=activation_bwd_launch, cpu=_activation_bwd_cpu, cost=activation_bwd_cost)
linear_fwd = op(linear_fwd_ref, launch=linear_fwd_launch, cost=linear_fwd_cost)
linear_dgrad = op(linear_dgrad_ref, launch=linear_dgrad_launch, cost=linear_dgrad_cost)
linear_dgrad_act = op(linear_dgrad_act_ref, launch=linear_dgrad_act_launch, cpu=_linear_dgrad_act_cpu, cost=linear_dgrad_act_cost)
linear_wgrad = op(linear_wgrad_ref, launch=linear_wgrad_launch, cost=linear_wgrad_cost)


# ---- autograd ----


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, activation):
        y, z = linear_fwd(x, w, b, activation)
        ctx.save_for_backward(x, w, None if activation == "none" else z)
        ctx.activation, ctx.has_bias = activation, b is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, w, z = ctx.saved_tensors
        dy = dy.contiguous()
        dw = db = None
        if z is not None:
            dy, db, _ = activation_bwd(dy, z, ctx.activation, False)
        if ctx.needs_input_grad[1]:
            dw, db_plain = linear_wgrad(dy, x, w.dtype, ctx.has_bias and z is None)
            db = db_plain if z is None else db
        elif ctx.needs_input_grad[2] and z is None:
            db = column_sum(dy)
        return linear_dgrad(dy, w), dw, db if ctx.has_bias else None, None


# ---- public ----


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "none") -> Tensor:
    """act(x W' + b).  x [..., K], weight [N, K], bias [N] -> [..., N] in x's dtype (under autocast: in its dtype).

    ``activation``: "none", "gelu", "gelu_tanh", "relu" or "silu"; or gated, "swiglu", "geglu" or "geglu_tanh", with weight [2N, K], bias
    [2N], gate and up in turns (a [N, 2, K] seen flat).  ValueError for shapes or dtypes that do not fit.
    """
    check_linear("linear", x, weight, bias, activation)
    x, weight, bias = autocast(x, weight, bias)
    y = _Linear.apply(x.reshape(-1, x.shape[-1]).contiguous(), weight, bias, activation)
    return y.view(*x.shape[:-1], len(weight) // width(activation))


def check_linear(name: str, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> None:
    known = *ACTIVATIONS, *GATED
    check(activation in known, f"{name}: activation must be one of {', '.join(known)}, got {activation!r}")
    check(weight.dim() == 2 and weight.shape[1] == x.shape[-1], f"{name}: weight must be [N, {x.shape[-1]}], got {tuple(weight.shape)}")
    pairs = len(weight) % width(activation) == 0
    check(pairs, f"{name}: {activation} takes pairs of rows of weight, gate and up in turns, got {len(weight)} rows")
    check(bias is None or bias.shape == weight.shape[:1], f"{name}: bias must be [{len(weight)}], got {getattr(bias, 'shape', None)}")
    same = x.dtype == weight.dtype or torch.is_autocast_enabled(x.device.type)
    check(same, f"{name}: x and weight must have one dtype outside autocast, got {x.dtype} and {weight.dtype}")
