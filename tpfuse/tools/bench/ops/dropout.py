"""Dropout on its own.  Its error is taken against torch with the same mask."""

import torch.nn.functional as F
from torch import Tensor

from ....kernels import dropout
from ....kernels.runtime.philox import Mask, keep_rows, scale
from ..definition import Bench, Random, acc


def inputs(random: Random, M: int, D: int) -> tuple[Tensor, ...]:
    return random(M, D), random.rng()


def tpfuse(x: Tensor, rng: Tensor, p: float) -> Tensor:
    return dropout(x, p, rng=rng)


def torch(x: Tensor, rng: Tensor, p: float) -> Tensor:
    return F.dropout(x, p)


def exact(x: Tensor, rng: Tensor, p: float) -> Tensor:
    M, D = x.shape
    return (acc(x) * keep_rows(Mask(rng, p), M, D, acc(x).dtype) * scale(p)).to(x.dtype)


BENCH = Bench(
    name="dropout",
    axes=("M", "D"),
    shapes=((8192, 1024), (8192, 4096), (8192, 16384)),
    cpu_shapes=((2048, 768),),
    inputs=inputs,
    providers=dict(tpfuse=tpfuse, torch=torch),
    p=0.1,
    exact=exact,
    yardsticks=("torch",),
)
