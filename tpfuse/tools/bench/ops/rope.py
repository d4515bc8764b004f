"""Rotary positions on their own (rotate-half, all of a head's columns), row i at position i."""

import torch as pytorch
from torch import Tensor

from ....kernels.rotary.op import rope
from ....kernels.rotary.table import rope_table
from ..definition import Bench, Random, acc


def inputs(random: Random, M: int, H: int, E: int) -> tuple[Tensor, ...]:
    return random(M, H, E), *rope_table(E, M, theta=1e4, device=random.device)


def torch(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = acc(x).chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return pytorch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


BENCH = Bench(
    name="rope",
    axes=("M", "H", "E"),
    shapes=((8192, 16, 64), (8192, 32, 128)),
    cpu_shapes=((2048, 12, 64),),
    inputs=inputs,
    providers=dict(tpfuse=rope, torch=torch),
)
