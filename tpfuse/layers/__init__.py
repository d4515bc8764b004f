"""Parallel layers: nn.Modules that hold this rank's shards and choose kernels and collectives."""

from ..collectives import collect, copy, gather, reduce, scatter_sum, split
from .attention import ParallelAttention, Rope
from .block import Normed, TransformerBlock
from .cache import KVCache
from .cross_attention import CrossAttention
from .embedding import VocabParallelEmbedding
from .linear import ColumnParallelLinear, RowParallelLinear
from .loss import VocabParallelHead, cross_entropy, linear_cross_entropy, log_probs
from .mlp import ParallelMLP
from .module import ParallelModule
from .norm import LayerNorm, RMSNorm

__all__ = [
    "ColumnParallelLinear",
    "CrossAttention",
    "KVCache",
    "LayerNorm",
    "Normed",
    "ParallelAttention",
    "ParallelMLP",
    "ParallelModule",
    "RMSNorm",
    "Rope",
    "RowParallelLinear",
    "TransformerBlock",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "collect",
    "copy",
    "cross_entropy",
    "gather",
    "linear_cross_entropy",
    "log_probs",
    "reduce",
    "scatter_sum",
    "split",
]
