"""swiglu and geglu on their own, and through linear, against the same lines of torch."""

import pytest
import torch
import torch.nn.functional as F

from tests.kernels import common
from tests.kernels.common import gradcheck, leaf
from tpfuse.kernels import linear, swiglu
from tpfuse.kernels.gemm.op import activation_bwd, activation_fwd

GATES = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}
GATE = pytest.mark.parametrize("gate", GATES)


def ours(gate):
    return lambda x: swiglu(x, gate)


def oracle(gate):
    return lambda x: GATES[gate](x[..., 0]) * x[..., 1]


# one of everything, no rows, no columns, no leading dimension, ragged, more than a block of the CPU implementation
@pytest.mark.parametrize("shape", [(1, 1), (0, 3), (3, 0), (4,), (2, 3, 5), (3, 1 << 16)], ids=str)
@GATE
def test_against_torch(gate, shape):
    common.assert_same(ours(gate), oracle(gate), leaf(*shape, 2))


@GATE
def test_gradcheck(gate):
    gradcheck(ours(gate), leaf(3, 4, 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@GATE
def test_low_precision(gate, dtype):
    common.assert_accurate(ours(gate), oracle(gate), leaf(33, 64, 2), dtype=dtype)


def test_it_is_rounded_once():
    """The product of what was not rounded, to the nearest bf16."""
    x = torch.randn(64, 64, 2).bfloat16()
    assert torch.equal(swiglu(x), oracle("silu")(x.float()).bfloat16())
    assert not torch.equal(swiglu(x), oracle("silu")(x))


def test_default_is_silu():
    x = leaf(3, 4, 2)
    assert torch.equal(swiglu(x), swiglu(x, "silu"))
    assert not torch.allclose(swiglu(x), swiglu(x.flip(-1)))  # the gate comes first


def test_a_gemm_and_its_gate():
    """A parameter [F, 2, D] seen flat: linear with the gate is the GEMM and then swiglu, gradients included."""
    x, w, b = leaf(5, 6), leaf(4, 2, 6), leaf(4, 2)
    fused = lambda x, w, b: linear(x, w.flatten(0, 1), b.flatten(), "swiglu")
    common.assert_same(
        fused, lambda x, w, b: swiglu(linear(x, w.flatten(0, 1), b.flatten()).unflatten(1, (4, 2))), x, w, b
    )
    common.assert_same(
        fused, lambda x, w, b: F.silu(F.linear(x, w[:, 0], b[:, 0])) * F.linear(x, w[:, 1], b[:, 1]), x, w, b
    )


def test_backward_gives_the_bias_gradient_and_the_product():
    z, dy = torch.randn(7, 12), torch.randn(7, 6)
    dz, db, y = activation_bwd(dy, z, "geglu", True, dy.dtype)
    torch.testing.assert_close(db, dz.sum(0))
    assert torch.equal(y, activation_fwd(z, "geglu"))


@GATE
def test_autocast(gate):
    common.assert_autocast(ours(gate), oracle(gate), leaf(33, 50, 2), size=33 * 100)


def test_non_contiguous():
    x = leaf(2, 5, 3).detach().permute(2, 1, 0).requires_grad_()
    assert not x.is_contiguous()
    common.assert_same(ours("silu"), oracle("silu"), x, non_contiguous=True)


@GATE
def test_compile(gate):
    common.assert_compiles(ours(gate), leaf(3, 5, 2, dtype=torch.float32))


def test_once_differentiable():
    common.assert_once_differentiable(ours("gelu"), leaf(3, 4, 2))


@pytest.mark.parametrize(
    "shape, activation, match",
    [
        ((3, 4, 2), "swiglu", "activation must be one of silu, gelu, gelu_tanh, got 'swiglu'"),
        ((3, 8), "silu", r"gate_up must be \[..., F, 2\], got \(3, 8\)"),
        ((2,), "silu", r"gate_up must be \[..., F, 2\], got \(2,\)"),
    ],
)
def test_errors(shape, activation, match):
    with pytest.raises(ValueError, match="swiglu: " + match):
        swiglu(torch.zeros(shape), activation)
