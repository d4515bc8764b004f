"""Counters that are 0 between kernels, by which a kernel's programs tell which of them is the last to arrive.

They belong to a stream, whose kernels run one after the other; the last program sets them back, so that nothing has to
clear them.  A kernel that is captured has its own, which its graph clears: graphs that were captured on one stream may
be replayed side by side on others.
"""

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

COUNTERS = 64  # of a stream
_made: dict[tuple[torch.device, int], Tensor] = {}  # by device and stream


def counters(device: torch.device) -> Tensor:
    """Returns counters for a kernel on the device's current stream, int32 [COUNTERS]."""
    if device.type != "cuda":
        return _of_stream(device, 0)
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            return torch.zeros(COUNTERS, dtype=torch.int32, device=device)
        return _of_stream(device, torch.cuda.current_stream().cuda_stream)


def address(device: torch.device, stream: int) -> int:
    """Returns where the counters of a stream, which is the current one, lie."""
    return int(_of_stream(device, stream).data_ptr())


def are_counters(t: Tensor) -> bool:
    return any(t is tensor for tensor in list(_made.values()))  # to which another thread may add


def _of_stream(device: torch.device, stream: int) -> Tensor:
    tensor = _made.get((device, stream))
    if tensor is None:
        with _disable_current_modes():  # they outlive the call that is recorded
            tensor = _made.setdefault((device, stream), torch.zeros(COUNTERS, dtype=torch.int32, device=device))
    return tensor
