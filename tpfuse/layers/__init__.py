"""Parallel layers: nn.Modules that hold this rank's shards and choose kernels and collectives."""

from .attention import ParallelAttention
from .block import Normed, TransformerBlock
from .embedding import VocabParallelEmbedding
from .linear import ColumnParallelLinear, RowParallelLinear
from .mlp import ParallelMLP
from .norm import LayerNorm, RMSNorm

__all__ = [
    "ColumnParallelLinear",
    "LayerNorm",
    "Normed",
    "ParallelAttention",
    "ParallelMLP",
    "RMSNorm",
    "RowParallelLinear",
    "TransformerBlock",
    "VocabParallelEmbedding",
]
