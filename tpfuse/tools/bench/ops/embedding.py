"""The lookup in a table and its gradient, which sorts instead of adding atomically."""

import torch.nn.functional as F
from torch import Tensor

from ....kernels import embedding
from ..definition import Bench, Random


def inputs(random: Random, V: int, M: int, D: int) -> tuple[Tensor, ...]:
    return random(V, D), random.ids(V, M)


def torch(weight: Tensor, ids: Tensor) -> Tensor:
    return F.embedding(ids, weight)


def liger(weight: Tensor, ids: Tensor) -> Tensor:
    from liger_kernel.ops.experimental.embedding import LigerEmbeddingFunction

    return LigerEmbeddingFunction.apply(weight, ids)


BENCH = Bench(
    name="embedding",
    axes=("V", "M", "D"),
    shapes=((50304, 8192, 1024), (128256, 8192, 4096)),
    cpu_shapes=((8192, 2048, 768),),
    inputs=inputs,
    providers=dict(tpfuse=embedding, torch=torch, liger=liger),
)
