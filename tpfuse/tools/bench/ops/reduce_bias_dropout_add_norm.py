"""The kernel between two GEMMs: h' = residual + dropout(sum_r parts + bias), n' = LayerNorm(h').  torch is what one
writes with R = 1."""

import torch.nn.functional as F
from torch import Tensor

from ....kernels import reduce_bias_dropout_add_norm
from ..definition import Bench, Random


def inputs(random: Random, R: int, M: int, D: int) -> tuple[Tensor, ...]:
    vectors = random(D, std=0.1), random(D, mean=1.0, std=0.1), random(D, std=0.1)
    return random(R, M, D), random(M, D), *vectors, random.rng()


def tpfuse(
    parts: Tensor, residual: Tensor, bias: Tensor, weight: Tensor, norm_bias: Tensor, rng: Tensor, p: float
) -> tuple[Tensor, ...]:
    return reduce_bias_dropout_add_norm(parts, bias, residual, weight, norm_bias=norm_bias, p=p, rng=rng)[:2]


def torch(
    parts: Tensor, residual: Tensor, bias: Tensor, weight: Tensor, norm_bias: Tensor, rng: Tensor, p: float
) -> tuple[Tensor, ...]:
    z = parts[0] if len(parts) == 1 else parts.sum(0)
    h = residual + F.dropout(z + bias, p)
    return h, F.layer_norm(h, weight.shape, weight, norm_bias)[None]


BENCH = Bench(
    name="reduce_bias_dropout_add_norm",
    axes=("R", "M", "D"),
    shapes=((1, 8192, 1024), (1, 8192, 4096), (1, 8192, 8192), (1, 8192, 16384), (1, 4096, 32768), (8, 1024, 4096)),
    cpu_shapes=((1, 2048, 768), (2, 1024, 768)),
    inputs=inputs,
    providers=dict(tpfuse=tpfuse, torch=torch),
    p=0.1,
)
