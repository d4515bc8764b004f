"""The gated MLPs of E experts, of which each of M rows has chosen k, and their sum.  torch loops over the experts, each
with a copy of its rows.  x [M, D], fc1 [E, F, 2, D], fc2 [E, D, F]."""

import torch.nn.functional as F
from torch import Tensor

from ....kernels import expert_mlps, reduce_bias_dropout_add_norm
from ..definition import Bench, Random, acc


def inputs(random: Random, M: int, D: int, W: int, E: int, k: int) -> tuple[Tensor, ...]:
    chosen = random.constant(M, E).argsort(1)[:, :k]
    fc1, fc2 = random(E, W, 2, D, std=D**-0.5), random(E, D, W, std=W**-0.5)
    return random(M, D), random(M, k, mean=1.0, std=0.1), chosen, fc1, fc2


def tpfuse(x: Tensor, weights: Tensor, chosen: Tensor, fc1: Tensor, fc2: Tensor) -> Tensor:
    return reduce_bias_dropout_add_norm(expert_mlps(x, weights, chosen, fc1=fc1, fc2=fc2))[0]


def torch(x: Tensor, weights: Tensor, chosen: Tensor, fc1: Tensor, fc2: Tensor) -> Tensor:
    y = acc(x) * 0
    for e in range(len(fc1)):
        rows, slots = (chosen == e).nonzero(as_tuple=True)
        gate, up = F.linear(x[rows], fc1[e].flatten(0, 1)).unflatten(1, (-1, 2)).unbind(2)
        part = F.linear(F.silu(gate) * up, fc2[e])
        y = y.index_add(0, rows, acc(part * weights[rows, slots, None]))
    return y.to(x.dtype)


BENCH = Bench(
    name="experts",
    axes=("M", "D", "F", "E", "k"),
    shapes=((8192, 2048, 768, 128, 8), (8192, 4096, 14336, 8, 2), (8192, 2048, 1024, 64, 8)),
    cpu_shapes=((512, 512, 1792, 8, 2),),
    inputs=inputs,
    providers=dict(tpfuse=tpfuse, torch=torch),
)
