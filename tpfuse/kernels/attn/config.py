"""Launch parameters of attention's kernels: free of spills on sm_90, sm_80 and gfx942; a measured table may replace
them."""

from typing import Any

import torch
from torch import Tensor

from ..runtime.launch import next_power_of_2
from ..runtime.tuning import LaunchConfig, tuned
from . import torch_forward
from .options import Options, QueryChunk

_SHAPE = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
# of heads up to 64 wide; up to 128; where registers are short; of wider heads
_DEFAULT: dict[str, dict[str, Any]] = {
    "sm_90": dict(
        fwd=((128, 128, 8, 2), (128, 128, 8, 2), (128, 64, 8, 2), (128, 32, 8, 2)),
        dkdv=((128, 64, 8, 1), (128, 64, 8, 1), (128, 64, 8, 1), (32, 64, 8, 1)),
        dq=((128, 64, 8, 2), (128, 64, 8, 2), (128, 32, 8, 2), (32, 64, 8, 1)),
        fp32=(16, 32, 8, 1),
    ),
    "sm_80": dict(
        fwd=((128, 64, 8, 2), (128, 64, 8, 2), (32, 32, 4, 1), (32, 32, 4, 1)),
        dkdv=((64, 32, 4, 1), (64, 64, 8, 1), (64, 32, 4, 1), (32, 32, 4, 1)),
        dq=((128, 32, 8, 1), (64, 32, 4, 1), (64, 32, 4, 1), (32, 32, 4, 1)),
        fp32=(16, 32, 8, 1),
    ),
    "gfx942": dict(
        fwd=((128, 32, 4, 1), (128, 32, 4, 1), (128, 32, 4, 1), (64, 32, 4, 1)),
        dkdv=((64, 64, 4, 1), (64, 64, 4, 1), (64, 64, 4, 1), (32, 32, 4, 1)),
        dq=((64, 32, 4, 1), (64, 32, 4, 1), (64, 32, 4, 1), (32, 32, 4, 1)),
        fp32=(16, 32, 4, 1),
    ),
    "cpu": dict.fromkeys(("fwd", "dkdv", "dq"), ((32, 32, 4, 1),) * 4) | dict(fp32=(32, 32, 4, 1)),
}


def tuning_name(kernel: str, qkv: Tensor, options: Options) -> str:
    """Returns what the table of measured parameters calls ``kernel``: by the features that take registers too, so that
    a winner without them is not taken for a call with them; "attention_fwd" where there is none."""
    E = qkv.shape[-1]
    features = dict(
        padded=E < next_power_of_2(E),
        rope=options.cos is not None,
        bias=options.bias is not None,
        softcap=options.softcap is not None,
        dropout=options.rng is not None,
    )
    return " ".join([kernel, *(name for name, there in features.items() if there)])


def default_config(kernel: str, arch: str, qkv: Tensor, options: Options) -> LaunchConfig:
    """Returns the launch parameters of ``kernel``, which is "fwd", "dkdv" or "dq", where none were measured.

    Registers are short where masks of columns, the rotation of keys or a bias need some of their own.
    """
    E, table = qkv.shape[-1], _DEFAULT.get(arch, _DEFAULT["gfx942" if arch.startswith("gfx") else "sm_80"])
    rotates = kernel == "fwd" and options.cos is not None
    short = (E > 64 and (E < next_power_of_2(E) or rotates)) or options.bias is not None
    row = 3 if E > 128 else 2 if short else 1 if E > 64 else 0
    default = table["fp32"] if qkv.dtype == torch.float32 else table[kernel][row]
    choice = dict(dkdv=dict(TRANSPOSED=False), fwd=torch_forward.default_path(qkv, options) | dict(AHEAD=False), dq={})
    return choice[kernel] | dict(zip(_SHAPE, default, strict=True))


def registers(arch: str, chunk: QueryChunk | None) -> LaunchConfig:
    """Returns the launch parameters that let a chunk's kernels have all registers of a thread.

    Of those compilers spill 8 to 36 bytes, on sm_80 and gfx942, to make room for one more block that has none.
    """
    if chunk is None or arch == "cpu":
        return {}
    return dict(waves_per_eu=1) if arch.startswith("gfx") else dict(maxnreg=255)


def config(kernel: str, arch: str, qkv: Tensor, options: Options) -> LaunchConfig:
    """Returns the launch parameters of ``kernel``: ``default_config``, or what was measured to be faster.

    With leaves they are the plain form's of tpfuse's kernels: torch's may split keys by how many heads there are, and
    whether descriptors can hold qkv depends on that too.
    """
    if options.leaves:
        default = default_config(kernel, arch, qkv, options)
        return {name: value for name, value in default.items() if name != "path"}
    name, shape = tuning_name(f"attention_{kernel}", qkv, options), (options.seq, qkv.shape[-1])
    return tuned(name, arch, qkv.dtype, shape, default=default_config(kernel, arch, qkv, options))
