"""A CUDA driver that starts nothing: what is left of a call is the host's work, Triton's launcher included.  No GPU is
needed.

Tensors on the CPU stand for a GPU's.  Kernels are compiled for sm_90 and handed to libcuda.c, which checks each launch
as a driver does and starts nothing; a GEMM of torch's is replaced by the allocation of its result, so that it costs its
call, about what it costs the host on a GPU.  For benchmarks and tests of the host alone, in a process of their own:
every value is wrong.
"""

import ctypes
import os
import pathlib
import subprocess
import tempfile
from typing import Any, NamedTuple

import torch
import triton
from triton.backends import nvidia
from triton.backends.nvidia.driver import CudaDriver

from tpfuse.kernels import replay
from tpfuse.kernels.runtime import launch

ARCH, STREAM = "sm_90", 7
LIBRARY = "libcuda.so.1"


class Started(NamedTuple):
    """A kernel that was started, as the machine code sees it, or a GEMM of torch's."""

    name: str  # "mm": a GEMM
    function: int  # the same for the same binary
    launch: tuple[int, ...]  # the grid's x, y and z, threads, bytes of shared memory, stream, attributes
    params: tuple[Any, ...]  # each one's bytes as a number, or a GEMM's tensors


STARTED: list[Started] | None = None  # what was started, where a list is put here
_Observer = ctypes.CFUNCTYPE(
    None,
    ctypes.c_size_t,
    ctypes.c_char_p,
    ctypes.POINTER(ctypes.c_ulonglong),
    ctypes.c_int,
    ctypes.POINTER(ctypes.c_uint),
    ctypes.POINTER(ctypes.c_void_p),
)


@_Observer
def _observe(function: int, name: bytes, launch: Any, count: int, sizes: Any, params: Any) -> None:
    if STARTED is not None:
        values = tuple(int.from_bytes(ctypes.string_at(params[i], sizes[i]), "little") for i in range(count))
        STARTED.append(Started(name.decode(), function, tuple(launch[:7]), values))


def _load(folder: pathlib.Path) -> None:
    """Compiles libcuda.c and puts it in the place of CUDA's driver, for this process."""
    source, include = pathlib.Path(__file__).with_name("libcuda.c"), pathlib.Path(nvidia.__path__[0]) / "include"
    flags = "-O2", "-shared", "-fPIC", f"-Wl,-soname,{LIBRARY}", f"-I{include}"
    subprocess.run([os.environ.get("CC", "cc"), *flags, "-o", folder / LIBRARY, source], check=True)
    (folder / "libcuda.so").symlink_to(LIBRARY)  # which older Tritons link with
    library = ctypes.CDLL(str(folder / LIBRARY), ctypes.RTLD_GLOBAL)
    if library._handle != ctypes.CDLL(LIBRARY)._handle:
        raise RuntimeError("bench.idle: this process has loaded CUDA's own driver; use a fresh process")
    library.observe(_observe)
    triton.knobs.nvidia.libcuda_path = str(folder)


class _Driver(CudaDriver):
    def __init__(self) -> None:
        super().__init__()
        self.get_current_device = lambda: 0  # which torch would be asked for
        self.set_current_device = lambda device: None
        self.get_current_stream = lambda device: STREAM
        self.get_device_capability = lambda device: (9, 0)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    @staticmethod
    def is_active() -> bool:
        return True


def _start(kernel: Any, grid: tuple[int, ...], device: torch.device, args: tuple, config: dict) -> Any:
    return kernel[grid](*args, **config)


def _product(*operands: torch.Tensor, **scales: Any) -> torch.Tensor:
    """Stands for mm and addmm."""
    if STARTED is not None:
        STARTED.append(Started("mm", 0, (), operands))
    a, b = operands[-2:]
    return a.new_empty((a.shape[0], b.shape[1]))


def install() -> None:
    """From here on, for this process: tensors on the CPU run launchers, and nothing is started or multiplied.

    RuntimeError where TRITON_INTERPRET is set, which replaces triton.jit, and where CUDA's own driver is loaded.
    """
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        raise RuntimeError("bench.idle: kernels are interpreted in this process; unset TRITON_INTERPRET")
    global _FOLDER, _ATEN  # kept as long as the process
    _FOLDER = tempfile.TemporaryDirectory()
    _load(pathlib.Path(_FOLDER.name))
    triton.runtime.driver.set_active(_Driver())
    launch._start, launch._pretended = _start, launch.Target(ARCH, launch.MULTIPROCESSORS[ARCH])
    replay.calls.stream_of = lambda device: STREAM
    replay.calls.LAUNCHED.add("cpu")
    _ATEN = torch.library.Library("aten", "IMPL")
    _ATEN.impl("mm", _product, "CPU", allow_override=True)
    _ATEN.impl("addmm", _product, "CPU", allow_override=True)
