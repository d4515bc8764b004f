"""silu(gate) up of gate and up side by side, [M, F, 2].  Liger Kernel wants two halves and would be timed copying them:
left out."""

import torch.nn.functional as F
from torch import Tensor

from ....kernels.gemm.gated import swiglu
from ..definition import Bench, Random


def inputs(random: Random, M: int, N: int) -> tuple[Tensor, ...]:
    return (random(M, N, 2),)


def torch(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.unbind(-1)
    return F.silu(gate) * up


BENCH = Bench(
    name="swiglu",
    axes=("M", "F"),
    shapes=((8192, 4096), (8192, 14336)),
    cpu_shapes=((1024, 2048),),
    inputs=inputs,
    providers=dict(tpfuse=swiglu, torch=torch),
)
