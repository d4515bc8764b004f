"""Backends: those that torch was built with, and the group's."""

import torch
import torch.distributed as dist

from .connections import backend
from .report import FAULT, NOTE, Finding


def findings(group: dist.ProcessGroup | None) -> list[Finding]:
    """Returns a line for gloo, one for NCCL and one for the group."""
    if not dist.is_available():
        return [Finding("torch.distributed", "missing", NOTE, "Install a torch built with it to use several ranks.")]
    return [_gloo(), _nccl(), Finding("group", "no group: one process" if group is None else backend(group))]


def _gloo() -> Finding:
    if dist.is_gloo_available():
        return Finding("gloo", "available")
    return Finding("gloo", "missing", FAULT, "Install a torch built with gloo: ranks compare their calls over it.")


def _nccl() -> Finding:
    if dist.is_nccl_available():
        version = ".".join(map(str, torch.cuda.nccl.version()))
        return Finding("NCCL", version if torch.cuda.is_available() else f"{version}, no GPU to use it")
    gpu = torch.cuda.is_available()
    advice = "Install a torch built with NCCL: GPUs send nothing to one another without it." if gpu else ""
    return Finding("NCCL", "missing" if gpu else "missing, and no GPU needs it", FAULT if gpu else "ok", advice)
