"""The parts that compile kernels: Triton, a GPU to run on, and a C compiler for launch stubs."""

import shutil

import torch

from ...kernels.runtime.triton import AVAILABLE, triton
from .report import FAULT, NOTE, Finding

COMPILERS = "cc", "gcc", "clang"


def findings() -> list[Finding]:
    """Returns a line for Triton and one for the C compiler; without a GPU nothing needs either."""
    gpu = torch.cuda.is_available()
    return [_triton(gpu), _compiler(gpu)]


def _triton(gpu: bool) -> Finding:
    if AVAILABLE:
        return Finding("triton", f"{triton.__version__}, {'compiles for the GPU' if gpu else 'no GPU to compile for'}")
    advice = "Install triton: kernels on a GPU need it, CPU tensors do not."
    return Finding("triton", "does not import", FAULT if gpu else NOTE, advice)


def _compiler(gpu: bool) -> Finding:
    compiler = next(filter(shutil.which, COMPILERS), None)
    if compiler:
        return Finding("C compiler", compiler)
    advice = f"Install one of {', '.join(COMPILERS)}: Triton compiles the stub that launches a kernel with it."
    return Finding("C compiler", "none", FAULT if gpu and AVAILABLE else NOTE, advice)
