"""Which op a wrong result comes from."""

import torch

from ....kernels.runtime.op import OPS, tensors
from .compare import error, limit
from .references import Call, cast


def blamed(calls: list[Call], device: torch.device, others: tuple[str, ...] = ()) -> str:
    """Returns in words which ops differ from their definitions on the very inputs they had, in fp32.

    Where none does, these are the ``others``, which the definition does not call, or without such all that it calls.
    """
    wrong = [call.name for call in calls if not _same(call, device)]
    names = dict.fromkeys(wrong or others or [call.name for call in calls])
    return f", op {' or '.join(names)}" if names else ""


def _same(call: Call, device: torch.device) -> bool:
    try:
        with torch.no_grad():
            ours = OPS[call.name](*cast(call.args, device, torch.float32))
    except Exception:
        return False
    pairs = zip(tensors((ours,)), call.outputs, strict=True)
    return all(error(a, b) <= limit(torch.float32) for a, b in pairs)
