"""Fused kernels: plain functions on tensors, with gradients, that know nothing of ranks.

attn/      attention on the fused qkv
experts/   mixtures of experts: the router, and GEMMs of experts
gemm/      GEMMs with fused activations
lookup/    lookup in a slice of a table
losses/    losses over a vocabulary that may be split
norm/      the kernel between two GEMMs, and each part of it alone
replay/    launches of a call, recorded once and done again
rotary/    rotary positions, and tables of their cosines and sines
runtime/   what every kernel stands on
sparse/    products of sparse matrices of integers
selection  the large entries of a vector in a row
"""

from .attn.op import attention
from .experts import Routing, expert_mlps, route
from .gemm.gated import swiglu
from .gemm.op import linear
from .lookup.op import embedding
from .losses.linear import linear_cross_entropy
from .losses.op import cross_entropy
from .norm import dropout, embed_finish, layer_norm, reduce_bias_dropout_add_norm, rms_norm
from .rotary.op import rope
from .rotary.table import rope_table
from .selection import select_large
from .sparse import SparseInt, sampled_matmul, sparse_matmul

__all__ = [
    "Routing",
    "SparseInt",
    "attention",
    "cross_entropy",
    "dropout",
    "embed_finish",
    "embedding",
    "expert_mlps",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "reduce_bias_dropout_add_norm",
    "rms_norm",
    "rope",
    "rope_table",
    "route",
    "sampled_matmul",
    "select_large",
    "sparse_matmul",
    "swiglu",
]
