"""The public names of the package, which :mod:`tpfuse` imports when one of them is first used."""

from ._version import __version__
from .interop.accelerator import AcceleratorMixin
from .interop.adapter import load_adapter, save_adapter
from .interop.parallelize import parallelize
from .interop.trainer import TrainerMixin
from .kernels.runtime.philox import make_rng
from .layers.initial import init_weights
from .layers.lora import add_lora, merge_lora, unmerge_lora
from .layers.plain import replicated
from .parallel import TensorParallel
from .ranks.agreement import checking
from .tools.doctor import doctor
from .tools.explain import explain
from .tools.parity import check_parity
from .tools.watch import watch
from .training.checkpoint import check_replicas, load_checkpoint, save_checkpoint, watch_replicas
from .training.data_parallel import data_parallel
from .training.delayed_gradients import DelayedGradients
from .training.dtensor import as_dtensor
from .training.expert_load import balance_experts
from .training.foreign.guard import guard_torch
from .training.kfac import KFAC
from .training.main_grad import MainGrad
from .training.matrices import WholeMatrices
from .training.ok_topk import OkTopk, ok_topk_hook
from .training.optim import clip_grad_norm_, param_groups

__all__ = [
    "KFAC",
    "AcceleratorMixin",
    "DelayedGradients",
    "MainGrad",
    "OkTopk",
    "TensorParallel",
    "TrainerMixin",
    "WholeMatrices",
    "__version__",
    "add_lora",
    "as_dtensor",
    "balance_experts",
    "check_parity",
    "check_replicas",
    "checking",
    "clip_grad_norm_",
    "data_parallel",
    "doctor",
    "explain",
    "guard_torch",
    "init_weights",
    "load_adapter",
    "load_checkpoint",
    "make_rng",
    "merge_lora",
    "ok_topk_hook",
    "parallelize",
    "param_groups",
    "replicated",
    "save_adapter",
    "save_checkpoint",
    "unmerge_lora",
    "watch",
    "watch_replicas",
]
