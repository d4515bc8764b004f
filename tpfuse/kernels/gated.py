"""Activations on their own, gated ones first: act(gate) up (Shazeer 2020, arXiv 2002.05202), for a gate_up that some other GEMM made.

    y = act(gate) up          dgate = dy up act'(gate)          dup = dy act(gate)

Shapes: gate_up [M, F, 2], gate and up side by side, as the GEMM of a parameter [F, 2, D] leaves them; y [M, F].  One pass each way, fp32
inside, rounded once.  The ops are those of linear.py, whose GEMMs take a gated activation in their epilogue.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._activation import GATED
from ._op import autocast, check
from .linear import activation_bwd, activation_fwd

_BY_GATE = {gate: gated for gated, gate in GATED.items()}


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, activation):
        ctx.save_for_backward(z)
        ctx.activation = activation
        return activation_fwd(z, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return activation_bwd(dy.contiguous(), *ctx.saved_tensors, ctx.activation, False)[0], None


def activate(z: Tensor, activation: str) -> Tensor:
    """act(z), for a z that more than one GEMM made: [M, N] -> [M, N], gated [M, 2N] -> [M, N].  ``activation`` as in linear."""
    (z,) = autocast(z)
    return z if activation == "none" else _Activation.apply(z.contiguous(), activation)


def swiglu(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """act(gate) up.  gate_up [..., F, 2] -> [..., F] in its dtype (under autocast: in its dtype).

    ``activation``: "silu", "gelu" (erf; geglu) or "gelu_tanh".  ValueError for another, or for a last dimension that is not 2.
    """
    check(activation in _BY_GATE, f"swiglu: activation must be one of {', '.join(_BY_GATE)}, got {activation!r}")
    check(gate_up.dim() > 1 and gate_up.shape[-1] == 2, f"swiglu: gate_up must be [..., F, 2], got {tuple(gate_up.shape)}")
    (gate_up,) = autocast(gate_up)
    rows, columns = gate_up.shape[:-2].numel(), 2 * gate_up.shape[-2]
    return _Activation.apply(gate_up.reshape(rows, columns).contiguous(), _BY_GATE[activation]).view(gate_up.shape[:-1])
