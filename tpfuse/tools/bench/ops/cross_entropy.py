"""Mean cross-entropy of logits [M, V].  Liger Kernel makes the gradient in its forward, over the logits: compare whole
steps with it."""

import torch.nn.functional as F
from torch import Tensor

from ....kernels import cross_entropy
from ..definition import Bench, Random, acc


def inputs(random: Random, M: int, V: int) -> tuple[Tensor, ...]:
    return random(M, V), random.ids(V, M)


def torch(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(acc(logits), labels)


def liger(logits: Tensor, labels: Tensor) -> Tensor:
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    return LigerCrossEntropyFunction.apply(logits, labels, None)[0]


BENCH = Bench(
    name="cross_entropy",
    axes=("M", "V"),
    shapes=((8192, 50304), (8192, 128256)),
    cpu_shapes=((512, 8192),),
    inputs=inputs,
    providers=dict(tpfuse=cross_entropy, torch=torch, liger=liger),
)
