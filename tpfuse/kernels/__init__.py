"""Fused kernels: plain functions on tensors, with gradients, that know nothing of ranks."""

from .attention.op import attention
from .cross_entropy.linear import linear_cross_entropy
from .cross_entropy.op import cross_entropy
from .embedding.op import embedding
from .linear.gated import swiglu
from .linear.op import linear
from .norm import dropout, embed_finish, layer_norm, reduce_bias_dropout_add_norm, rms_norm
from .rope import rope
from .rope_table import rope_table
from .select_large import select_large

__all__ = [
    "attention",
    "cross_entropy",
    "dropout",
    "embed_finish",
    "embedding",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "reduce_bias_dropout_add_norm",
    "rms_norm",
    "rope",
    "rope_table",
    "select_large",
    "swiglu",
]
