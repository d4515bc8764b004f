"""x W' + b.  x [M, K], W [N, K]."""

import torch.nn.functional as F
from torch import Tensor

from ....kernels import linear
from ..definition import Bench, Random


def inputs(random: Random, M: int, N: int, K: int) -> tuple[Tensor, ...]:
    return random(M, K), random(N, K, std=K**-0.5), random(N, std=0.1)


def torch(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight, bias)


BENCH = Bench(
    name="linear",
    axes=("M", "N", "K"),
    shapes=((4096, 3072, 1024), (8192, 4096, 4096), (8192, 8192, 8192)),
    cpu_shapes=((1024, 768, 768),),
    inputs=inputs,
    providers=dict(tpfuse=linear, torch=torch),
)
