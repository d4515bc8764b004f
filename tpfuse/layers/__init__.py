"""Parallel layers: nn.Modules that hold this rank's shards and choose kernels and collectives.

attention          ParallelAttention
balance            ExpertBalance, balance_loss: experts are kept equally busy
block              TransformerBlock
cache              keys and values during generation
call               the arguments of one call, as a record that is handed on whole
cross_attention    CrossAttention
embedding          VocabParallelEmbedding
expert_lora        low-rank adapters of experts
expert_ranks       the ranks that hold experts: of one replica, or of all
expert_sizes       a mixture of experts in closed form: flops, bytes saved and sent
hooks              whether a hook of torch waits for a part that fused code would run past
initial            init_weights, for modules made on the meta device
linear             ColumnParallelLinear, RowParallelLinear
lora               low-rank adapters
lora_targets       the layers that targets of adapters name
loss               losses over a split vocabulary, and a head for one
mlp                ParallelMLP
module             ParallelModule: shards as parameters, initial weights
moe                ParallelMoE
norm               LayerNorm, RMSNorm
one_node           a block on one rank as one autograd node
partial            partial gradients are found and named
plain              replicated: plain torch modules on row shards
projections        the projections in a layer's weights, by Hugging Face's names
shapes             shapes of attention, MLP and norms, as records
shards             parameters of parallel modules, each with the whole that it is a slice of
sites              the number of each dropout mask of a model
sparse_linear      SparseLinear: pruned and quantised, for inference
spec               a parameter as a whole, of which a rank holds a slice
state              a shard in a state dictionary: a DTensor that knows the whole, and back
wiring             WIRINGS: a block as a list of steps, and the runners that take them
"""

from ..collectives import collect, gather, scatter_sum
from ..collectives import copy as copy  # not in __all__: a star import would hide Python's
from ..collectives import reduce as reduce
from ..collectives import split as split
from .attention import ParallelAttention
from .balance import ExpertBalance, balance_loss
from .block import TransformerBlock
from .cache import KVCache
from .call import Call, Rope
from .cross_attention import CrossAttention
from .embedding import VocabParallelEmbedding
from .linear import ColumnParallelLinear, RowParallelLinear
from .loss import VocabParallelHead, cross_entropy, linear_cross_entropy, log_probs
from .mlp import ParallelMLP
from .module import ParallelModule
from .moe import ParallelMoE
from .norm import LayerNorm, RMSNorm
from .shapes import AttentionShape, Init, MLPShape, MoEShape, NormShape
from .sparse_linear import SparseLinear
from .wiring import Normed

__all__ = [
    "AttentionShape",
    "ExpertBalance",
    "Call",
    "ColumnParallelLinear",
    "CrossAttention",
    "Init",
    "KVCache",
    "LayerNorm",
    "MLPShape",
    "MoEShape",
    "NormShape",
    "Normed",
    "ParallelAttention",
    "ParallelMLP",
    "ParallelMoE",
    "ParallelModule",
    "RMSNorm",
    "Rope",
    "RowParallelLinear",
    "SparseLinear",
    "TransformerBlock",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "balance_loss",
    "collect",
    "cross_entropy",
    "gather",
    "linear_cross_entropy",
    "log_probs",
    "scatter_sum",
]
