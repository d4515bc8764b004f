"""The fused norm: one core, and the public functions that are each a part of it."""

from .alone import layer_norm, rms_norm
from .core import norm_apply
from .kinds import KINDS, check_kind
from .records import Recompute
from .verbs import dropout, embed_finish, norm_in, reduce_bias_dropout_add_norm

__all__ = [
    "KINDS",
    "Recompute",
    "check_kind",
    "dropout",
    "embed_finish",
    "layer_norm",
    "norm_apply",
    "norm_in",
    "reduce_bias_dropout_add_norm",
    "rms_norm",
]
