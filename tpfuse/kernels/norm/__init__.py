"""The fused norm: one core, and the public functions that are each a part of it.

alone                  layer_norm and rms_norm
config                 launch parameters by width
core                   one op pair: sum over ranks, bias, dropout, residual, norm; its autograd
kinds                  KINDS: the table of norms
records                the records its ops take
row_leaves             gradients of vectors and tables, summed by leaves of the rows
triton_backward        Triton: backward
triton_backward_tiles  Triton: what the kernels of backward share
triton_backward_wide   Triton: backward of wide rows, in two forms
triton_forward         Triton: forward
verbs                  the public functions, each a part of the core
"""

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
