"""A Triton driver that starts nothing: what is left of a call is the host's work.  No GPU is needed.

Tensors on the CPU stand for a GPU's.  Kernels are compiled for sm_90 and never started; a GEMM of torch's is replaced
by the allocation of its result, so that it costs its call, about what it costs the host on a GPU.  For benchmarks and
tests of the host alone, in a process of their own: every value is wrong.
"""

import os
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from tpfuse.kernels.runtime import launch, replay

ARCH = "sm_90"
STARTED: list[tuple[str, tuple[Any, ...]]] | None = None  # (kernel or "mm", its arguments), where a list is put here


class _Utils:
    def get_device_properties(self, device: int) -> dict[str, int]:
        return dict(max_shared_mem=227 << 10, max_num_regs=65536, multiprocessor_count=132, warpSize=32)

    def load_binary(self, *args: Any) -> tuple[int, ...]:
        return 1, 1, 64, 0, 1024

    def unload_module(self, *args: Any) -> None: ...

    def fill_tma_descriptor(self, *args: Any) -> None: ...

    fill_tma_descriptor_tiled = fill_tma_descriptor


class _Launcher:
    def __init__(self, source: Any, metadata: Any):
        self.name = metadata.name

    def __call__(self, *args: Any, **options: Any) -> None:
        if STARTED is not None:
            STARTED.append((self.name, args))


class _Driver:
    utils, launcher_cls = _Utils(), _Launcher

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None: ...

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", int(ARCH[3:]), 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, name: str) -> str:
        return "int"

    @staticmethod
    def is_active() -> bool:
        return True


def _start(kernel: Any, grid: tuple[int, ...], device: torch.device, args: tuple, config: dict) -> Any:
    return kernel[grid](*args, **config)


def _product(*operands: torch.Tensor, **scales: Any) -> torch.Tensor:
    """Stands for mm and addmm."""
    if STARTED is not None:
        STARTED.append(("mm", operands))
    a, b = operands[-2:]
    return a.new_empty((a.shape[0], b.shape[1]))


def install() -> None:
    """From here on, for this process: tensors on the CPU run launchers, and nothing is started or multiplied.

    RuntimeError where TRITON_INTERPRET is set: it replaces triton.jit.
    """
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        raise RuntimeError("bench.idle: kernels are interpreted in this process; unset TRITON_INTERPRET")
    triton.runtime.driver.set_active(_Driver())
    launch._start, launch._pretended = _start, launch.Target(ARCH, launch.MULTIPROCESSORS[ARCH])
    replay.stream_of = lambda device: 0
    replay.LAUNCHED.add("cpu")
    global _ATEN
    _ATEN = torch.library.Library("aten", "IMPL")
    _ATEN.impl("mm", _product, "CPU", allow_override=True)
    _ATEN.impl("addmm", _product, "CPU", allow_override=True)
