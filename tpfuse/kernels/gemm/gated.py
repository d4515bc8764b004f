"""Activations on their own, plain and gated: act(gate) up (Shazeer 2020, arXiv:2002.05202), for a gate_up that another
GEMM made.

    y = act(gate) up          dgate = dy up act'(gate)          dup = dy act(gate)

Shapes: gate_up [M, F, 2], gate and up side by side, as the GEMM of a parameter [F, 2, D] leaves them; y [M, F].  One
pass each way, fp32 inside, rounded once.  The ops are those of op.py, whose GEMMs take a gated activation in their
epilogue.
"""

from typing import Any

from torch import Tensor

from ..runtime.errors import check, check_floating
from ..runtime.function import Function, once_differentiable
from ..runtime.op import autocast
from .activation import ACTIVATIONS, GATED
from .op import activation_bwd, activation_fwd


class _Activation(Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(z)
        ctx.activation = activation
        return activation_fwd(z, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (z,) = ctx.saved_tensors
        return activation_bwd(dy.contiguous(), z, ctx.activation, rebuild=False, bias=None)[0], None


def activate(z: Tensor, activation: str) -> Tensor:
    """Returns act(z), for a z that more than one GEMM made: [M, N] -> [M, N], gated [M, 2N] -> [M, N].

    ``activation`` as in linear.
    """
    (z,) = autocast(z)
    return z if activation == "none" else _Activation.apply(z.contiguous(), activation)


def swiglu(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """Returns act(gate) up.  gate_up [..., F, 2] -> [..., F] in gate_up's dtype (under autocast: in autocast's dtype).

    ``activation``: the gate's, one of those with a gated form, as "silu", "gelu" (erf: geglu) and "gelu_tanh".
    ValueError for another, or for a last dimension that is not 2.
    """
    gates = GATED.values()
    check(activation in gates, f"swiglu: activation must be one of {', '.join(gates)}, got {activation!r}")
    check(
        gate_up.dim() > 1 and gate_up.shape[-1] == 2, f"swiglu: gate_up must be [..., F, 2], got {tuple(gate_up.shape)}"
    )
    check_floating("swiglu", "gate_up", gate_up)
    (gate_up,) = autocast(gate_up)
    rows, columns = gate_up.shape[:-2].numel(), 2 * gate_up.shape[-2]
    z = gate_up.reshape(rows, columns).contiguous()
    return _Activation.apply(z, ACTIVATIONS[activation].gated).view(gate_up.shape[:-1])
