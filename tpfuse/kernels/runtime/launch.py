"""Starts of kernels: on the tensors' own device, with launch parameters that are a pure function of the call's
shapes."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..replay import active_recorder

_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "waves_per_eu", "matrix_instr_nonkdim")


class Target(NamedTuple):
    arch: str  # "sm_90", "gfx942"; "cpu" under Triton's interpreter
    multiprocessors: int  # how many programs run side by side


MULTIPROCESSORS = {"sm_80": 108, "sm_90": 132, "gfx942": 304}
_pretended: Target | None = None


def target(device: torch.device) -> Target:
    return _target(device) if _pretended is None or device.type == "cuda" else _pretended


@contextlib.contextmanager
def pretending(arch: str) -> Iterator[None]:
    """Inside, tensors on no GPU have the launch parameters, and so the costs, that they would have on one of ``arch``;
    nothing may be launched.  ValueError for an arch that is not in MULTIPROCESSORS."""
    global _pretended
    if arch not in MULTIPROCESSORS:
        raise ValueError(f"arch must be one of {', '.join(MULTIPROCESSORS)}, got {arch!r}")
    previous, _pretended = _pretended, Target(arch, MULTIPROCESSORS[arch])
    try:
        yield
    finally:
        _pretended = previous


@functools.lru_cache(maxsize=64)
def _target(device: torch.device) -> Target:
    if device.type != "cuda":
        return Target("cpu", 2)  # so that striding over tiles is exercised
    properties = torch.cuda.get_device_properties(device)
    arch = properties.gcnArchName.split(":")[0] if torch.version.hip else f"sm_{properties.major}{properties.minor}"
    return Target(arch, properties.multi_processor_count)


def multiprocessors(x: Tensor) -> int:
    return target(x.device).multiprocessors


def has_tma(arch: str) -> bool:
    """Returns whether tiles can move by the copy engine, which descriptors are for; the interpreter has one too."""
    return arch == "cpu" or (arch.startswith("sm_") and int(arch[3:]) >= 90)


def describable(x: Tensor) -> bool:
    """Returns whether a descriptor can hold x [M, N]: the copy engine counts in 16 bytes."""
    return (
        x.numel() > 0
        and x.data_ptr() % 16 == 0
        and x.stride(1) == 1
        and x.stride(0) >= x.shape[1]
        and x.stride(0) * x.element_size() % 16 == 0
    )


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **config: Any) -> None:
    """Starts ``kernel`` with the current device set to ``device``; an empty grid starts nothing."""
    if 0 not in grid:
        compiled = _start(kernel, grid, device, args=args, config=config)
        if (tape := active_recorder()) is not None:
            values = dict(zip(kernel.arg_names, args)) | config
            x, y, z, *_ = (*grid, 1, 1)
            tape.start(compiled, (x, y, z), tuple(values[name] for name in kernel.arg_names))


def _start(
    kernel: Any, grid: tuple[int, ...], device: torch.device, args: tuple[Any, ...], config: dict[str, Any]
) -> Any:
    """Returns the compiled kernel (nothing under Triton's interpreter)."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            return kernel[grid](*args, **config)
    return kernel[grid](*args, **{k: v for k, v in config.items() if k not in _OPTIONS})  # Triton's interpreter


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
