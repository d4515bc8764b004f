"""tpfuse: fused, tensor-parallel transformer layers that give the same answer however they are split."""

from ._version import __version__
from .checkpoint import load_checkpoint, save_checkpoint
from .dtensor import as_dtensor
from .explain import explain
from .optim import clip_grad_norm_, param_groups
from .parallel import TensorParallel

__all__ = [
    "TensorParallel",
    "__version__",
    "as_dtensor",
    "clip_grad_norm_",
    "explain",
    "load_checkpoint",
    "param_groups",
    "save_checkpoint",
]
