"""Experts: GEMMs over rows sorted by expert, and the router, at the sizes of Qwen3-MoE, Mixtral and DeepSeek-V3; a
shared expert, which has all rows in their order, and its gate, at those of Qwen2-MoE."""

from dataclasses import replace

import torch

from bench.compile._compile import Call, meta
from tpfuse.kernels.experts.records import ExpertRows, Routed, Routing, Sides
from tpfuse.kernels.experts.triton_grouped import (
    experts_dact_launch,
    experts_down_launch,
    experts_dx_launch,
    experts_up_launch,
    experts_wgrad_add_launch,
    experts_wgrad_launch,
)
from tpfuse.kernels.experts.triton_router import router_bwd_launch, router_fwd_launch
from tpfuse.sequence_parallel.shared_expert import GATE

M, D, F, E, K = 4096, 2048, 768, 128, 8
TILE = lambda c: c["BM"] * c["BN"]
ELEMENTS = dict(_up_kernel=TILE, _down_kernel=TILE, _dact_kernel=TILE, _wgrad_kernel=lambda c: c["BN"] * c["BK"])
ELEMENTS |= dict.fromkeys(("_router_fwd_kernel", "_router_bwd_kernel"), lambda c: c["BM"] * c["WIDTH"])
WGMMA = dict.fromkeys(("_up_kernel", "_down_kernel", "_dact_kernel", "_wgrad_kernel"), ("HGMMA",))


def gemms(D: int = D, F: int = F, E: int = E, dtype: torch.dtype = torch.bfloat16, activation: str = "swiglu"):
    """Runs forward and backward of the experts, in one order of rows."""
    n = M * K
    rows = ExpertRows(meta(n, dtype=torch.int64), meta(E + 1, dtype=torch.int64))
    x, weights = meta(M, D, dtype=dtype), meta(n, dtype=torch.float32)
    w1, w2 = meta(E, 2 * F, D, dtype=dtype), meta(E, D, F, dtype=dtype)
    z, a = experts_up_launch(x, rows, w1, activation)
    experts_down_launch(a, rows, w2, weights, n)
    dz, ga, _ = experts_dact_launch(x, rows, w2, z, weights, activation)
    experts_dx_launch(dz, rows, w1, n, M)
    experts_wgrad_launch(Sides(dz, x, rows.offsets, x_index=rows.row_index), dtype)
    experts_wgrad_add_launch(Sides(x, ga, rows.offsets, dy_index=rows.row_index), meta(E, D, F, dtype=torch.float32))


def shared(D: int = D, F: int = 5632, dtype: torch.dtype = torch.bfloat16):
    """Runs forward and backward of one expert that has all rows."""
    rows = ExpertRows(None, meta(2, dtype=torch.int64))
    x, w1, w2 = meta(M, D, dtype=dtype), meta(1, 2 * F, D, dtype=dtype), meta(1, D, F, dtype=dtype)
    weights = meta(M, dtype=torch.float32)
    z, a = experts_up_launch(x, rows, w1, "swiglu")
    experts_down_launch(a, rows, w2, weights, M)
    dz, ga, _ = experts_dact_launch(x, rows, w2, z, weights, "swiglu")
    experts_dx_launch(dz, rows, w1, M, 0)
    experts_wgrad_launch(Sides(dz, x, rows.offsets), dtype)
    experts_wgrad_add_launch(Sides(x, ga, rows.offsets), meta(1, D, F, dtype=torch.float32))


def router(experts: int, routing: Routing, dtype: torch.dtype = torch.bfloat16, bias: bool = False):
    x, w = meta(M, D, dtype=dtype), meta(experts, D, dtype=torch.float32)
    b = meta(experts, dtype=torch.float32) if bias else None
    weights, chosen, logits = router_fwd_launch(x, w, b, routing)
    router_bwd_launch(weights, logits, Routed(logits, weights, chosen), w, routing, x)


CALLS = {
    label: Call(run, ELEMENTS, WGMMA if "router" not in label and "fp32" not in label else {})
    for label, run in {
        "E=128 F=768": gemms,
        "E=8 F=14336": lambda: gemms(4096, 14336, 8),
        "D=2047 F=767": lambda: gemms(2047, 767),
        "gelu_tanh": lambda: gemms(activation="geglu_tanh"),
        "fp32": lambda: gemms(dtype=torch.float32),
        "shared F=5632": shared,
        "router E=128 k=8": lambda: router(128, Routing(8)),
        "router E=8 k=2 fp32": lambda: router(8, Routing(2), dtype=torch.float32),
        "router E=64 k=8 softmax": lambda: router(64, Routing(8, renormalize=False)),
        "router E=1 sigmoid": lambda: router(1, GATE),
        "router E=256 k=8 groups": lambda: router(256, Routing(8, "sigmoid", True, 2.5, 8, 4), bias=True),
    }.items()
}
CALLS["router E=1 sigmoid"] = replace(
    CALLS["router E=1 sigmoid"],
    spills=dict(_router_bwd_kernel=16),
    why="ptxas gives sm_90's 96 registers a thread; the same code takes 156 on sm_80 and spills nothing",
)
