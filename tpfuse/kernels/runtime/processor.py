"""What chooses the order of a sum inside one call of a CPU library, beside the call itself.

torch, oneDNN and MKL have kernels for each set of instructions, block them for the caches, and share them out to
threads.  Ranks that are to have the same bits agree on all of it, and a run that is resumed has the bits of the one
before where it is as it was.
"""

import functools
import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

PROC = Path("/proc")
# Instructions that get_cpu_capability() does not tell from AVX512, and for which oneDNN and MKL have kernels.
BEYOND = "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16"
# Each is read once by its library, so here too.
LIMITS = {
    name: os.environ.get(name)
    for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR")
}
SHARE = 1 << 15  # elements: torch starts no thread for fewer
# Limits of oneDNN's instructions below which it has no GEMM of 16 bits.
NARROW = "SSE41", "AVX", "AVX2", "AVX2_VNNI"
SUPPORTED = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}


@functools.cache
def multiplies(dtype: torch.dtype) -> bool:
    """Returns whether oneDNN multiplies matrices of bf16 or fp16 here, and torch not element by element."""
    limit = LIMITS["ONEDNN_MAX_CPU_ISA"] or LIMITS["DNNL_MAX_CPU_ISA"] or ""
    supported = getattr(torch.ops.mkldnn, SUPPORTED[dtype], None) if torch.backends.mkldnn.is_available() else None
    return supported is not None and limit.upper() not in NARROW and bool(supported())


@functools.cache
def multiplies_tiles() -> bool:
    """Returns whether oneDNN multiplies tiles of bf16 by AMX instructions here."""
    limit = LIMITS["ONEDNN_MAX_CPU_ISA"] or LIMITS["DNNL_MAX_CPU_ISA"] or "ALL"
    return "amx_bf16" in instructions() and (limit.upper() in ("ALL", "DEFAULT") or "AMX" in limit.upper())


def order_of_sums() -> dict[str, Any]:
    """Returns what must be the same for the same bits: values of JSON, by their names."""
    precision = torch.get_float32_matmul_precision()
    return {"threads": torch.get_num_threads(), "float32_matmul_precision": precision} | _fixed() | LIMITS


@functools.cache
def instructions() -> tuple[str, ...]:
    """Returns the widest set of instructions that torch uses here, and those of 16 bits beyond AVX-512."""
    flags = _field("flags").split()
    return torch.backends.cpu.get_cpu_capability(), *(flag for flag in BEYOND if flag in flags)


@functools.cache
def _fixed() -> dict[str, str]:
    versions = re.findall(r"(Math Kernel Library|MKL-DNN) (?:Version )?(\S+)", torch.__config__.show())
    libraries = ", ".join(map(" ".join, versions)).replace("MKL-DNN", "oneDNN").replace("Math Kernel Library", "MKL")
    return {"processor": model_name(), "instructions": " ".join(instructions()), "libraries": libraries}


def model_name(proc: Path = PROC) -> str:
    return _field("model name", proc) or platform.machine()


def _field(key: str, proc: Path = PROC) -> str:
    """Returns a field of the first processor; "" where the system does not say it."""
    try:
        lines = (proc / "cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), "")
