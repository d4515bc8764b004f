"""The table of activations: each one's value and derivative, in plain torch and in Triton, and the names it goes by.

    y = act(z)              dz = dy act'(z)
    y = act(gate) up        dgate = dy up act'(gate)    dup = dy act(gate)      gated: z = (gate, up, gate, up, ..)

Gated forms are those of Shazeer 2020 (arXiv:2002.05202) and follow from the entry of the gate's activation.
References, CPU implementations, kernels, layers, configurations and error messages read the table: a new activation
is one entry and its device function.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..runtime.triton import tl, triton

aten = torch.ops.aten


class Activation(NamedTuple):
    forward: Callable[[Tensor], Tensor]  # z -> act(z)
    backward: Callable[[Tensor, Tensor], Tensor]  # dy, z -> dy act'(z)
    tile: Any  # Triton device function: z in fp32 -> act(z), act'(z); the compiler drops the one that is not used
    gated: str | None = None  # the name of act(gate) up
    huggingface: tuple[str, ...] = ()  # its names in a config.json; the first one is written


# ---- device functions: tanh(u) = 2 sigmoid(2u) - 1, and erf by a polynomial, need no library call ----


@triton.jit
def identity_tile(z):
    return z, z * 0.0 + 1.0


@triton.jit
def _relu_tile(z):
    return tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL), tl.where(z > 0.0, 1.0, 0.0)


@triton.jit
def _relu2_tile(z):
    r = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return r * r, 2.0 * r


@triton.jit
def _silu_tile(z):
    s = tl.sigmoid(z)
    return z * s, s * (1.0 + z * (1.0 - s))


@triton.jit
def _gelu_tile(z):
    """z Phi(z) = max(z, 0) - a Phi(-a) with a = |z|, and Phi(-a) = 2^G(a).

    G is the polynomial of degree 8 that makes the largest error of max(a, 1) 2^G(a) least: 1.4e-8.  In fp32 value and
    derivative are right to 2e-7, or two roundings where they are large, and nothing cancels in the lower tail.  It
    takes no division, and tl.exp2 is one instruction, unlike tl.exp.  From a = 14 on both powers of 2 are 0.
    """
    a = tl.minimum(tl.abs(z), 14.0, propagate_nan=tl.PropagateNan.ALL)
    g = 3.29696704e-05 - 2.2759973e-06 * a
    g = -0.05254640430 + a * (0.00714274542 + a * (-0.00020245496 + a * (-0.00015728755 + a * g)))
    tail = tl.exp2(-0.99999994 + a * (-1.15110695 + a * (-0.45919308 + a * g)))
    beyond = tail - 0.3989422804014327 * a * tl.exp2(-0.7213475204444817 * a * a)  # act'(-a) = 1 - act'(a)
    return tl.maximum(z, 0.0) - a * tail, tl.where(z < 0.0, beyond, 1.0 - beyond)


@triton.jit
def _gelu_tanh_tile(z):
    """z s with s = sigmoid(2u), u = sqrt(2/pi) (z + 0.044715 z^3)."""
    z2 = z * z
    s = tl.sigmoid(1.5957691216057308 * z * (1.0 + 0.044715 * z2))
    du = 0.7978845608028654 * (1.0 + 0.134145 * z2)
    return z * s, s + 2.0 * z * s * (1.0 - s) * du


# ---- the table ----

ACTIVATIONS = {
    "silu": Activation(F.silu, aten.silu_backward.default, _silu_tile, gated="swiglu", huggingface=("silu", "swish")),
    "gelu": Activation(F.gelu, aten.gelu_backward.default, _gelu_tile, gated="geglu", huggingface=("gelu",)),
    "gelu_tanh": Activation(
        lambda z: F.gelu(z, approximate="tanh"),
        lambda dy, z: aten.gelu_backward.default(dy, z, approximate="tanh"),
        _gelu_tanh_tile,
        gated="geglu_tanh",
        huggingface=("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
    ),
    "relu": Activation(F.relu, lambda dy, z: dy.masked_fill(z <= 0, 0), _relu_tile, huggingface=("relu",)),
    # Primer, So et al. 2021, arXiv:2109.08668
    "relu2": Activation(
        lambda z: F.relu(z).square(), lambda dy, z: dy * (2 * F.relu(z)), _relu2_tile, huggingface=("relu2",)
    ),
}
GATED = {entry.gated: name for name, entry in ACTIVATIONS.items() if entry.gated}  # gated form -> its gate's activation
PLAIN = "none", *sorted(ACTIVATIONS)  # act(z) has z's shape; gated forms halve its columns


def width(activation: str) -> int:
    """Returns the columns of z for one of act(z)."""
    return 2 if activation in GATED else 1
