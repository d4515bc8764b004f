"""LayerNorm over D.  Liger Kernel has one."""

import torch.nn.functional as F
from torch import Tensor

from ....kernels import layer_norm
from ..definition import Bench, Random


def inputs(random: Random, M: int, D: int) -> tuple[Tensor, ...]:
    return random(M, D), random(D, mean=1.0, std=0.1), random(D, std=0.1)


def torch(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias)


def liger(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    return LigerLayerNormFunction.apply(x, weight, bias, 1e-5)


BENCH = Bench(
    name="layer_norm",
    axes=("M", "D"),
    shapes=((8192, 1024), (8192, 4096), (8192, 16384), (4096, 32768)),
    cpu_shapes=((2048, 768), (2048, 4096)),
    inputs=inputs,
    providers=dict(tpfuse=layer_norm, torch=torch, liger=liger),
)
