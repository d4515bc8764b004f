"""The steps after the lookup in GPT: h = dropout(sum_r parts + position), n = LayerNorm(h)."""

import torch.nn.functional as F
from torch import Tensor

from ....kernels import embed_finish
from ..definition import Bench, Random


def inputs(random: Random, R: int, M: int, D: int) -> tuple[Tensor, ...]:
    most = min(2048, R * M)
    table, positions = random(most, D), random.ids(most, M)
    return random(R, M, D), table, positions, random(D, mean=1.0, std=0.1), random(D, std=0.1), random.rng()


def tpfuse(
    parts: Tensor, table: Tensor, positions: Tensor, weight: Tensor, norm_bias: Tensor, rng: Tensor, p: float
) -> tuple[Tensor, ...]:
    return embed_finish(
        parts, position_weight=table, positions=positions, weight=weight, norm_bias=norm_bias, p=p, rng=rng
    )[:2]


def torch(
    parts: Tensor, table: Tensor, positions: Tensor, weight: Tensor, norm_bias: Tensor, rng: Tensor, p: float
) -> tuple[Tensor, ...]:
    x = parts[0] if len(parts) == 1 else parts.sum(0)
    h = F.dropout(x + F.embedding(positions, table), p)
    return h, F.layer_norm(h, weight.shape, weight, norm_bias)[None]


BENCH = Bench(
    name="embed_finish",
    axes=("R", "M", "D"),
    shapes=((1, 8192, 1024), (1, 8192, 4096), (8, 1024, 4096)),
    cpu_shapes=((1, 2048, 768),),
    inputs=inputs,
    providers=dict(tpfuse=tpfuse, torch=torch),
    p=0.1,
)
