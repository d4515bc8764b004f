"""Fused kernels: plain functions on tensors, with gradients, that know nothing of ranks."""

from .attention import attention
from .cross_entropy import cross_entropy
from .dropout import dropout
from .embedding import embed_finish, embedding
from .gated import swiglu
from .linear import linear
from .linear_cross_entropy import linear_cross_entropy
from .norm import layer_norm, rms_norm
from .reduce_bias_dropout_add_norm import reduce_bias_dropout_add_norm
from .rope import rope, rope_table

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
    "swiglu",
]
