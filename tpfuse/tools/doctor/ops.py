"""The implementation that each op runs on, as :class:`~tpfuse.kernels.runtime.op.Op` picks it by device."""

import torch

from ...kernels.attn.torch_forward import has_flash
from ...kernels.gemm import triton_gemm as gemm
from ...kernels.runtime.launch import target
from ...kernels.runtime.op import COMMUNICATION, OPS, Op
from .report import Finding

SHAPE = 4096, 4096, 4096  # of the GEMM whose path stands for all
TORCH = "torch on the CPU"
BLOCKED = "blocked on the CPU"
MESSAGES = "torch.distributed"
COMPOSED = "other ops and messages"


def findings(device: torch.device) -> list[Finding]:
    """Returns a line for each implementation, with its ops; a GPU computes fp64 by the definitions in torch."""
    groups: dict[str, list[str]] = {}
    for name, op in OPS.items():
        groups.setdefault(implementation(op, device), []).append(name)
    return [Finding(kind, ", ".join(names)) for kind, names in groups.items()]


def implementation(op: Op, device: torch.device) -> str:
    """Returns in words what runs ``op`` on ``device``, in bf16 on a GPU."""
    if op.kind == COMMUNICATION:
        return MESSAGES
    if ".overlap." in op.reference.__module__:
        return COMPOSED
    if device.type != "cuda":
        return TORCH if op.cpu is op.reference else BLOCKED
    if op.launch is None:
        return "torch on the GPU"
    if op.name == "attention_fwd" and has_flash(device):
        return "Triton, or torch's flash attention"
    if op.name.startswith("linear_") and op.reference.__module__.endswith("gemm.op"):
        return _gemm(op.name, device)
    return "Triton"


def _gemm(name: str, device: torch.device) -> str:
    activation = "gelu_tanh" if name in ("linear_fwd", "linear_dgrad_act") else "none"
    path = gemm.path(name, activation, target(device).arch, dtype=torch.bfloat16, shape=SHAPE)
    return "Triton" if path == "fused" else "torch's GEMM, then Triton"
