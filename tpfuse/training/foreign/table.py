"""All that the library replaces in other libraries, in one table.  What is replaced calls the original where no
parameter is split.
"""

import torch.distributed._composable as composable
import torch.distributed._composable.replicate_with_fsdp as replicate_with_fsdp
import torch.distributed.fsdp as fsdp
from torch import nn
from torch.amp import GradScaler
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize, prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.optim import Optimizer

from . import accelerate, clip, elementwise, groups, optimizer_state, reparametrized, scaler
from .behind import Replacement

_SLICES = "refuses a group whose ranks hold different slices of a parameter"
_DISTRIBUTE = f"distribute_tensor {_SLICES}"
_SCALES = "scales slices and DTensors of several meshes"
_WHOLE = "is over the whole gradients, where a rank holds slices"
_STATE = "a split parameter's state is that of the whole"
_ELEMENTS = "refuses an optimizer that looks at whole tensors where a rank holds slices"
_FINITE = "an infinity in one rank's slice is one on all its tensor-parallel ranks"
_SHARD_NORM = "refuses a norm of the whole weight where a rank holds a slice"
_MASK = "refuses a mask of the whole weight where a rank holds a slice"

TABLE: tuple[Replacement, ...] = (
    Replacement(DistributedDataParallel, "__init__", groups.refusing(groups.WRAPPED), _SLICES),
    Replacement(FullyShardedDataParallel, "__init__", groups.refusing(groups.FSDP1), "refuses to flatten slices"),
    Replacement(fsdp, "fully_shard", groups.refusing(groups.FSDP2), _SLICES),
    Replacement(composable, "replicate", groups.refusing(groups.REPLICATE), _SLICES),
    Replacement(replicate_with_fsdp, "replicate", groups.refusing(groups.REPLICATE_FSDP), _SLICES),
    Replacement(Shard, "_make_shard_tensor", groups.refusing(groups.DISTRIBUTE), _DISTRIBUTE),
    Replacement(Replicate, "_make_replicate_tensor", groups.refusing(groups.DISTRIBUTE), _DISTRIBUTE),
    Replacement(nn.utils, "get_total_norm", clip.get_total_norm, f"the norm {_WHOLE}"),
    Replacement(nn.utils, "clip_grads_with_norm_", clip.clip_grads_with_norm_, _SCALES),
    Replacement(GradScaler, "_unscale_grads_", scaler.unscale, _FINITE),
    Replacement(ShardedGradScaler, "_unscale_grads_", scaler.unscale, _FINITE),
    Replacement(Optimizer, "add_param_group", elementwise.add_param_group, _ELEMENTS),
    Replacement(Optimizer, "state_dict", optimizer_state.state_dict, _STATE),
    Replacement(Optimizer, "load_state_dict", optimizer_state.load_state_dict, _STATE),
    Replacement(parametrize, "register_parametrization", reparametrized.register, _SHARD_NORM),
    Replacement(WeightNorm, "apply", reparametrized.weight_norm, _SHARD_NORM),
    Replacement(SpectralNorm, "apply", reparametrized.spectral_norm, _SHARD_NORM),
    Replacement(prune.BasePruningMethod, "apply", reparametrized.pruning, _MASK),
    Replacement(prune, "global_unstructured", reparametrized.global_pruning, _MASK),
    *(
        Replacement(accelerate.CLASS, name, accelerate.refusing(name), "refuses split models without the mix-in")
        for name in accelerate.METHODS
    ),
)
