"""linear: the fused GEMMs, each epilogue with its default tiles, and the elementwise passes beside torch's GEMM."""

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import torch

from bench.compile._compile import Call, meta
from tpfuse.kernels.gemm import triton_gemm as _gemm
from tpfuse.kernels.gemm.activation import width
from tpfuse.kernels.gemm.triton_activation import activation_bwd_launch, activation_fwd_launch, column_sum_launch

M, N, K = 4096, 4096, 1024
BIAS = torch.bfloat16  # a bias's gradient, as its parameter's
# An epilogue and one step of K.
ELEMENTS = dict.fromkeys(("_linear_kernel", "_dgrad_act_kernel"), lambda c: c["BM"] * c["BN"])
ELEMENTS |= dict(_activation_fwd_kernel=lambda c: c["BLOCK"], _activation_bwd_kernel=lambda c: c["ROWS"] * c["A"])
BY_DESCRIPTORS = dict.fromkeys(("_linear_kernel", "_dgrad_act_kernel"), ("HGMMA", "UTMALDG"))
BY_POINTERS = dict.fromkeys(("_linear_kernel", "_dgrad_act_kernel"), ("HGMMA",))


def fused(run: Callable, *args, **parameters) -> Callable:
    """Returns a call that takes the fused kernel, whatever the table says, with ``parameters`` over the defaults."""

    def fused_run():
        with mock.patch.object(_gemm, "tuned", lambda *lookup, default: default | parameters | dict(path="fused")):
            run(*args)

    return fused_run


def forward(activation: str, K: int = K):
    _gemm.linear_fwd_launch(meta(M, K), meta(N, K), meta(N), activation)


def backward(activation: str, rebuild: bool = True):
    """Runs the gradient through fc2 [K, N] and the activation: N columns of activation, K of output."""
    z = meta(M, N * width(activation))
    _gemm.linear_dgrad_act_launch(meta(M, K), meta(K, N), z, activation, rebuild=rebuild, bias=BIAS)


def passes(activation: str):
    z = meta(M, N * width(activation))
    activation_fwd_launch(z, activation)
    activation_bwd_launch(meta(M, N), z, activation, rebuild=True, bias=BIAS)


def gemm(run: Callable, *args, **parameters) -> Call:
    return Call(fused(run, *args, **parameters), ELEMENTS, BY_DESCRIPTORS)


def by_leaves(leaves: int, K: int = N, dtype: torch.dtype = torch.bfloat16, layout: str = "NT") -> Call:
    """Compiles a row-parallel forward [M, K] [N, K]', or a column-parallel dgrad [M, K] [K, N], of so many leaves."""
    x, leaf = meta(M, K, dtype=dtype), -(-K // leaves)
    if layout == "NN":
        return Call(lambda: _gemm.linear_dgrad_launch(x, meta(K, N, dtype=dtype), leaf), ELEMENTS)
    return Call(lambda: _gemm.linear_fwd_launch(x, meta(N, K, dtype=dtype), None, "none", leaf), ELEMENTS)


NODES = "nodes that wait are spilt once a leaf"
CALLS = {
    "gelu_tanh": gemm(forward, "gelu_tanh"),
    "gelu": gemm(forward, "gelu"),
    "relu": gemm(forward, "relu"),
    "relu2": gemm(forward, "relu2"),
    "silu": gemm(forward, "silu"),
    "none": gemm(forward, "none"),
    "gelu_tanh 128x128": gemm(forward, "gelu_tanh", BN=128),
    "gelu_tanh K=1023": Call(fused(forward, "gelu_tanh", 1023), ELEMENTS, BY_POINTERS),
    "dgrad": gemm(_gemm.linear_dgrad_launch, meta(M, N), meta(N, K)),
    "dgrad gelu_tanh": gemm(backward, "gelu_tanh"),
    "dgrad gelu": gemm(backward, "gelu"),
    "dgrad relu": gemm(backward, "relu"),
    "dgrad relu2": gemm(backward, "relu2"),
    "dgrad silu": gemm(backward, "silu"),
    "wgrad": gemm(_gemm.linear_wgrad_launch, meta(M, N), meta(M, K), torch.bfloat16, BIAS),
    "none fp32": Call(
        fused(_gemm.linear_dgrad_launch, *(meta(*s, dtype=torch.float32) for s in ((M, N), (N, K)))), ELEMENTS
    ),
    "passes gelu_tanh": Call(lambda: passes("gelu_tanh"), ELEMENTS),
    "passes gelu": Call(lambda: passes("gelu"), ELEMENTS),
    "8 leaves": by_leaves(8),
    "1 leaf": by_leaves(1),
    "8 leaves dgrad": by_leaves(8, layout="NN"),
    "8 leaves K=7989": replace(by_leaves(8, 7989), spills={"_linear_kernel": 120}, why=NODES),
    "32 leaves": replace(by_leaves(32), spills={"_linear_kernel": 2400}, why=NODES),
    "8 leaves fp32": by_leaves(8, dtype=torch.float32),
    "one tile gelu_tanh": Call(
        lambda: _gemm.linear_fwd_launch(meta(M, K), meta(N, K), meta(N), "gelu_tanh", 0), ELEMENTS
    ),
    "column sum": Call(lambda: column_sum_launch(meta(M, N), BIAS), ELEMENTS),
}
