"""gelu(x W' + b), the first half of an MLP, its pre-activation kept for backward.  "gemm" is the bare x W', as a
yardstick."""

import torch.nn.functional as F
from torch import Tensor

from ....kernels import linear
from ..definition import Bench, Random


def inputs(random: Random, M: int, N: int, K: int) -> tuple[Tensor, ...]:
    return random(M, K), random(N, K, std=K**-0.5), random(N, std=0.1)


def tpfuse(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return linear(x, weight, bias, "gelu_tanh")


def torch(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


def gemm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight)


BENCH = Bench(
    name="linear_gelu",
    axes=("M", "N", "K"),
    shapes=((4096, 4096, 1024), (8192, 16384, 4096), (8192, 10240, 2560)),
    cpu_shapes=((1024, 3072, 768),),
    inputs=inputs,
    providers=dict(tpfuse=tpfuse, torch=torch, gemm=gemm),
    yardsticks=("gemm",),
)
