"""The op that a wrong result comes from."""

import torch

from ....kernels.gemm.op import in_pairs
from ....kernels.runtime.op import OPS, tensors
from ...accuracy import largest_error, op_limit
from .references import OpCall, cast


def blamed(calls: list[OpCall], device: torch.device, senders: tuple[str, ...] = ()) -> str:
    """Names the ops that differ from their definitions on the very inputs they had, in fp32: ", op a or b".

    Where none does, these are the ``senders``, which the definition does not call, or without such all that it calls.
    """
    wrong = [call.name for call in calls if not _same(call, device)]
    names = dict.fromkeys(wrong or senders or [call.name for call in calls])
    return f", op {' or '.join(names)}" if names else ""


def _same(call: OpCall, device: torch.device) -> bool:
    try:
        with torch.no_grad():
            ours = OPS[call.name](*cast(call.args, device, torch.float32))
    except Exception:
        return False
    pairs = ((a if a.dim() == b.dim() else in_pairs(a), b) for a, b in zip(tensors((ours,)), call.outputs, strict=True))
    return all(largest_error(a, b) <= op_limit(torch.float32) for a, b in pairs)
