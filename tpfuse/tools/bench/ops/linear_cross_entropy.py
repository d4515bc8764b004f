"""Cross-entropy of x W' without the logits.  x [M, D], W [V, D].  Liger Kernel makes its gradients in forward: compare
whole steps."""

import torch.nn.functional as F
from torch import Tensor

from ....kernels.losses.linear import linear_cross_entropy
from ..definition import Bench, Random, acc


def inputs(random: Random, M: int, V: int, D: int) -> tuple[Tensor, ...]:
    return random(M, D), random(V, D, std=D**-0.5), random.ids(V, M)


def torch(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(acc(F.linear(x, weight)), labels)


def liger(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    return LigerFusedLinearCrossEntropyFunction.apply(x, weight, labels)[0]


BENCH = Bench(
    name="linear_cross_entropy",
    axes=("M", "V", "D"),
    shapes=((8192, 50304, 1024), (8192, 128256, 4096)),
    cpu_shapes=((512, 8192, 256),),
    inputs=inputs,
    providers=dict(tpfuse=linear_cross_entropy, torch=torch, liger=liger),
)
