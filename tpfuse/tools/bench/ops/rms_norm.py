"""RMSNorm over D.  Liger Kernel has one; it may write the gradient over its input's, which repeated backwards cannot
have."""

import torch.nn.functional as F
from torch import Tensor

from ....kernels import rms_norm
from ..definition import Bench, Random


def inputs(random: Random, M: int, D: int) -> tuple[Tensor, ...]:
    return random(M, D), random(D, mean=1.0, std=0.1)


def torch(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-6)


def liger(x: Tensor, weight: Tensor) -> Tensor:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return LigerRMSNormFunction.apply(x, weight, 1e-6, 0.0, "llama", False)


BENCH = Bench(
    name="rms_norm",
    axes=("M", "D"),
    shapes=((8192, 1024), (8192, 4096), (8192, 16384), (4096, 32768)),
    cpu_shapes=((2048, 768), (2048, 4096)),
    inputs=inputs,
    providers=dict(tpfuse=rms_norm, torch=torch, liger=liger),
)
