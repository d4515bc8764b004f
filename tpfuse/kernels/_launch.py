"""How a kernel is started: on the tensors' own device, with launch parameters that are a pure function of the call's shapes."""

import torch
from torch import Tensor


def launch(kernel, grid: tuple[int, ...], device: torch.device, *args, **config) -> None:
    """Starts ``kernel`` with the current device set to ``device``; an empty grid starts nothing."""
    if 0 in grid:
        return
    if device.type == "cuda":
        with torch.cuda.device(device):
            kernel[grid](*args, **config)
    else:  # Triton's interpreter
        options = ("num_warps", "num_stages", "maxnreg")
        kernel[grid](*args, **{k: v for k, v in config.items() if k not in options})


def multiprocessors(x: Tensor) -> int:
    """How many programs run side by side; 2 under the interpreter, so that striding over rows is exercised."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
