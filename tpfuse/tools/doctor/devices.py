"""The hardware: CPU, memory, GPUs, and the disk under a folder."""

import shutil
from pathlib import Path

import torch

from ...kernels.runtime import processor
from ..ledger.text import quantity
from . import limits
from .folder import writable
from .report import FAULT, NOTE, Finding

LITTLE, FULL = 1 << 30, 1 << 20  # bytes of a disk: below the first a note, below the second a fault


def findings(folder: Path) -> list[Finding]:
    """Returns the lines of the CPU, the memory, each GPU and the folder."""
    return [
        Finding("CPU", processor.model_name(limits.PROC)),
        _threads(),
        _memory(),
        *_gpus(),
        disk(folder),
        writable(folder),
    ]


def _threads() -> Finding:
    cores, threads = limits.cores(), torch.get_num_threads()
    value = f"{cores:g} usable, torch uses {threads}"
    if threads <= max(cores, 1):
        return Finding("cores", value)
    return Finding("cores", value, NOTE, f"Call torch.set_num_threads({max(int(cores), 1)}): threads wait for cores.")


def _memory() -> Finding:
    free, allowed = limits.memory()
    sizes = [] if free is None else [f"{quantity(free, 'B')} free"]
    sizes += [] if allowed is None else [f"{quantity(allowed, 'B')} left of the control group's limit"]
    return Finding("memory", ", ".join(sizes) or "unknown")


def _gpus() -> list[Finding]:
    if not torch.cuda.is_available():
        return [Finding("GPUs", "none that torch can use")]
    toolkit = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    driver = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)()
    version = f", driver for CUDA {driver // 1000}.{driver % 1000 // 10}" if driver and not torch.version.hip else ""
    return [Finding("GPU toolkit", toolkit + version), *map(_gpu, range(torch.cuda.device_count()))]


def _gpu(i: int) -> Finding:
    properties = torch.cuda.get_device_properties(i)
    free, total = torch.cuda.mem_get_info(i)
    capability = f"compute capability {properties.major}.{properties.minor}"
    sizes = f"{quantity(free, 'B')} free of {quantity(total, 'B')}"
    return Finding(f"GPU {i}", f"{properties.name}, {capability}, {sizes}")


def disk(folder: Path) -> Finding:
    """Returns the free bytes of the disk under ``folder``: a fault where it is full, or where there is no folder."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Finding("disk", f"{error}", FAULT, "Choose a folder that exists, by --folder.")
    value = f"{quantity(free, 'B')} free"
    if free < LITTLE:
        return Finding(
            "disk", value, FAULT if free < FULL else NOTE, "Free some of the folder's disk, or take another."
        )
    return Finding("disk", value)
