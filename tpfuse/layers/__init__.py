"""Parallel layers: nn.Modules that hold this rank's shards and choose kernels and collectives.

attention          ParallelAttention
block              TransformerBlock
cache              keys and values during generation
cross_attention    CrossAttention
embedding          VocabParallelEmbedding
hooks              whether a hook of torch waits for a part that fused code would run past
initial            init_weights, for modules made on the meta device
linear             ColumnParallelLinear, RowParallelLinear
lora               low-rank adapters
loss               losses over a split vocabulary, and a head for one
mlp                ParallelMLP
module             ParallelModule: shards as parameters, initial weights
norm               LayerNorm, RMSNorm
one_node           a block on one rank as one autograd node
parallel_residual  a block with attention and MLP side by side
partial            partial gradients are found and named
plain              replicated: plain torch modules on row shards
sites              the number of each dropout mask of a model
spec               a parameter as a whole, of which a rank holds a slice
state              a shard in a state dictionary: a DTensor that knows the whole, and back
"""

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
