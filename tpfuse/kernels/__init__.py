"""Fused kernels: plain functions on tensors, with gradients, that know nothing of ranks."""

from .attention import attention
from .cross_entropy import cross_entropy
from .dropout import dropout
from .embedding import embed_finish, embedding
from .linear import linear
from .norm import layer_norm, rms_norm
from .reduce_bias_dropout_add_norm import reduce_bias_dropout_add_norm

__all__ = [
    "attention",
    "cross_entropy",
    "dropout",
    "embed_finish",
    "embedding",
    "layer_norm",
    "linear",
    "reduce_bias_dropout_add_norm",
    "rms_norm",
]
