"""tpfuse: fused, tensor-parallel transformer layers that give the same answer however they are split."""

from ._version import __version__
from .checkpoint import load_checkpoint, save_checkpoint
from .dtensor import as_dtensor
from .explain import explain
from .layers.lora import add_lora, merge_lora, unmerge_lora
from .models.adapter import load_adapter, save_adapter
from .optim import clip_grad_norm_, param_groups
from .parallel import TensorParallel
from .parallelize import parallelize

__all__ = [
    "TensorParallel",
    "__version__",
    "add_lora",
    "as_dtensor",
    "clip_grad_norm_",
    "load_adapter",
    "explain",
    "load_checkpoint",
    "merge_lora",
    "parallelize",
    "param_groups",
    "save_adapter",
    "save_checkpoint",
    "unmerge_lora",
]
