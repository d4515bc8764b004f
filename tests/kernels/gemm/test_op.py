import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from transformers.activations import ACT2FN

from tests.kernels import common
from tests.kernels.common import gradcheck, leaf
from tpfuse.kernels import linear
from tpfuse.kernels.gemm.activation import ACTIVATIONS, GATED, PLAIN, width
from tpfuse.kernels.gemm.op import (
    activation_bwd,
    activation_fwd,
    bias_grad,
    linear_dgrad,
    linear_dgrad_act,
    linear_fwd,
    linear_wgrad,
    linear_wgrad_add,
)
from tpfuse.kernels.runtime.op import acc_dtype

X, W, B, Z = torch.randn(3, 5), torch.randn(4, 5), torch.randn(4), torch.randn(3, 4)
ALL = *PLAIN, *GATED
FP32, BF16 = torch.float32, torch.bfloat16
SAMPLES = [
    *((activation_fwd, (Z, activation)) for activation in (*ACTIVATIONS, *GATED)),
    *(
        (activation_bwd, (Z[:, :: width(activation)].contiguous(), Z, activation, rebuild, FP32))
        for activation in (*ACTIVATIONS, *GATED)
        for rebuild in (False, True)
    ),
    (linear_fwd, (X, W, B, "none")),
    (linear_fwd, (X.bfloat16(), W.bfloat16(), B, "gelu_tanh")),
    (linear_fwd, (X, W, None, "relu")),
    (linear_fwd, (X, W, B, "swiglu")),
    (linear_fwd, (X.bfloat16(), W.bfloat16(), None, "geglu")),
    (linear_fwd, (X, W, B, "swiglu", 3)),
    (activation_fwd, (Z.view(3, 2, 2), "swiglu")),
    (activation_bwd, (Z[:, :2].contiguous(), Z.view(3, 2, 2), "swiglu", True, FP32)),
    (linear_dgrad_act, (Z, W[:, :2].contiguous(), Z.view(3, 2, 2), "geglu", True, BF16)),
    (linear_dgrad, (Z, W)),
    (linear_dgrad_act, (Z, W, X, "gelu_tanh", True, FP32)),
    (linear_dgrad_act, (Z, W, X, "gelu", False, None)),
    (linear_dgrad_act, (Z, W[:, :2].contiguous(), Z, "geglu", True, BF16)),
    (linear_wgrad, (Z, X, FP32, FP32)),
    (linear_wgrad, (Z.bfloat16(), X.bfloat16(), FP32, None)),
    (linear_wgrad_add, (Z, X, torch.randn(4, 5), FP32)),
    (linear_wgrad_add, (Z.bfloat16(), X.bfloat16(), torch.randn(4, 5), None)),
    (bias_grad, (Z, FP32)),
    (linear_fwd, (X, W, None, "none", 3)),
    (linear_dgrad, (Z, W, 2)),
    (linear_wgrad, (Z, X, FP32, FP32, True)),
]
test_opcheck = common.opcheck(SAMPLES)

TORCH = {
    "none": lambda z: z,
    "relu": F.relu,
    "relu2": ACT2FN["relu2"],
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
    "swiglu": lambda z: F.silu(z[..., ::2]) * z[..., 1::2],
    "geglu": lambda z: F.gelu(z[..., ::2]) * z[..., 1::2],
    "geglu_tanh": lambda z: F.gelu(z[..., ::2], approximate="tanh") * z[..., 1::2],
}
ACTIVATION = pytest.mark.parametrize("activation", ALL)


def ours(activation):
    return lambda x, w, b=None: linear(x, w, b, activation)


def oracle(activation):
    return lambda x, w, b=None: TORCH[activation](F.linear(x, w, b))


# no rows, one of everything, ragged, three dimensions, more rows than a block of the CPU activation (128)
@pytest.mark.parametrize("shape, N", [((0, 5), 3), ((1, 1), 1), ((3, 5), 7), ((2, 3, 4), 5), ((130, 3), 2)], ids=str)
@ACTIVATION
def test_against_torch(activation, shape, N):
    for bias in (True, False):
        rows = N * width(activation)
        tensors = leaf(*shape), leaf(rows, shape[-1]), *([leaf(rows)] if bias else [])
        common.assert_same(ours(activation), oracle(activation), *tensors)


@pytest.mark.parametrize("bias", [False, True])
@ACTIVATION
def test_gradcheck(activation, bias):
    gradcheck(ours(activation), leaf(3, 4), leaf(2, 4), *([leaf(2)] if bias else []))


@pytest.mark.parametrize("rows", [0, 1, 128, 130])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_cpu_gelu(rows, dtype):
    """One sigmoid serves value and derivative, in the tails too, where it is 0 or 1.  bf16 is rounded once.  In fp32
    the value is as exact; the derivative has y - y s times d(2u)/dz, and so up to half an eps of y times 8 where the
    difference cancels (|z| near 5): at most 32 eps of dy."""
    z, dy = 3 * torch.randn(2, rows, 8).to(dtype)
    z[:1] = torch.tensor([-1e4, -20, -5, -0.0, 0, 5, 20, 1e4]).to(dtype)
    eps = torch.finfo(dtype).eps
    right = activation_fwd.reference(z.double(), "gelu_tanh")
    right_dz, *_ = activation_bwd.reference(dy.double(), z.double(), "gelu_tanh", True, FP32)
    dz, _, rebuilt = activation_bwd.cpu(dy, z, "gelu_tanh", True, FP32)
    assert torch.equal(activation_fwd.cpu(z, "gelu_tanh"), rebuilt)
    assert ((rebuilt - right).abs() <= 2 * eps * (1 + right.abs())).all()
    assert ((dz - right_dz).abs() <= (1 if dtype == BF16 else 32) * eps * (dy.abs() + right_dz.abs())).all()
    dz, db, nothing = activation_bwd.cpu(dy, z, "gelu_tanh", False, FP32)
    assert nothing.shape == (0,) and torch.equal(dz, activation_bwd.cpu(dy, z, "gelu_tanh", True, FP32)[0])
    torch.testing.assert_close(db, dz.sum(0, dtype=FP32))


def test_cpu_gelu_is_the_reference_in_fp64():
    z, dy = torch.randn(2, 130, 5, dtype=torch.float64)
    for got, exact in zip(
        *(f(dy, z, "gelu_tanh", True, z.dtype) for f in (activation_bwd.cpu, activation_bwd.reference))
    ):
        torch.testing.assert_close(got, exact, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(33, 40, 24), (1, 3, 5), (0, 8, 8), (4, 0, 8)], ids=str)
def test_a_cpu_keeps_gate_and_up_apart(shape, dtype):
    """z [M, 2, N] of two GEMMs, with the numbers of the reference's [M, 2N], which are in turns."""
    M, K, N = shape
    x, w, b = torch.randn(M, K).to(dtype), torch.randn(2 * N, K).to(dtype), torch.randn(2 * N)
    for bias in (None, b):
        (y, z), (exact_y, exact_z) = (f(x, w, bias, "swiglu") for f in (linear_fwd.cpu, linear_fwd.reference))
        assert z.shape == (M, 2, N) and z.is_contiguous()
        torch.testing.assert_close(z.mT.flatten(1), exact_z)
        torch.testing.assert_close(y, exact_y)


def test_dgrad_act_is_dgrad_and_activation_bwd():
    dz, db, a = linear_dgrad_act(Z, W, X, "gelu_tanh", True, FP32)
    for got, exact in zip((dz, db, a), activation_bwd(linear_dgrad(Z, W), X, "gelu_tanh", True, FP32)):
        assert torch.equal(got, exact)
    torch.testing.assert_close(a, F.gelu(X, approximate="tanh"))


@pytest.mark.parametrize("dtype", [torch.float64, BF16])
@pytest.mark.parametrize("activation", GATED)
def test_cpu_gated(activation, dtype):
    """In blocks of 2 rows here (and a row wider than a block): the reference's numbers in fp64, rounded once to bf16.
    What cancels (erf's tail, act' near its zero) is as exact as the terms, of which none is larger than 64."""

    def close(x, exact):
        rounding = torch.finfo(dtype).eps * exact.abs() + 64 * torch.finfo(acc_dtype(x)).eps
        return ((x - exact).abs() <= rounding).all()

    for rows, columns in (0, 4), (5, 1 << 16), (1, 1 << 18):
        z, dy = torch.randn(rows, columns, dtype=dtype), torch.randn(rows, columns // 2, dtype=dtype)
        y, exact = activation_fwd.cpu(z, activation), activation_fwd.reference(z.double(), activation)
        assert close(y, exact)
        for rebuild in (False, True):
            dz, db, a = activation_bwd.cpu(dy, z, activation, rebuild, acc_dtype(z))
            exact, *_ = activation_bwd.reference(dy.double(), z.double(), activation, rebuild, torch.float64)
            assert close(dz, exact)
            assert torch.equal(a, y if rebuild else a.new_empty(0))
            torch.testing.assert_close(db, dz.sum(0, dtype=acc_dtype(z)))


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@ACTIVATION
def test_low_precision(activation, dtype):
    tensors = leaf(33, 64), leaf(50, 64), leaf(50)
    common.assert_accurate(ours(activation), oracle(activation), *tensors, dtype=dtype)
    common.assert_accurate(ours(activation), oracle(activation), *tensors, dtype=dtype, keep=(2,))  # an fp32 bias


def test_bias_gradient_is_summed_in_fp32():
    """4096 ones: a running sum in bf16 stops at 256."""
    dy = torch.ones(4096, 1).bfloat16()
    assert linear_wgrad(dy, dy, FP32, FP32)[1].item() == 4096
    assert activation_bwd(dy, dy, "relu", False, FP32)[1].item() == 4096


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("of_bias", [None, FP32], ids=["", "an fp32 bias"])
def test_a_bias_gradient_copies_no_input(dtype, of_bias):
    """On a CPU the sum is the one in fp32, rounded once, without a copy of its input in fp32."""
    dy = torch.randn(8192, 96).to(dtype)
    db, held = common.peak(lambda: bias_grad(dy, of_bias or dtype))
    exact = dy.double().sum(0)
    assert held < dy.numel() and (db.double() - exact).abs().max() <= (
        1e-3 if of_bias else torch.finfo(dtype).eps * 300
    )


@ACTIVATION
def test_autocast(activation):
    common.assert_autocast(ours(activation), oracle(activation), leaf(33, 64), leaf(50, 64), leaf(50), size=33 * 50)


def test_non_contiguous():
    x, w, b = leaf(4, 3).T, leaf(4, 5).T, leaf(10)[::2]
    tensors = [t.detach().requires_grad_() for t in (x, w, b)]
    assert not any(t.is_contiguous() for t in tensors)
    common.assert_same(ours("gelu_tanh"), oracle("gelu_tanh"), *tensors, non_contiguous=True)
    common.assert_same(ours("none"), oracle("none"), *tensors, non_contiguous=True)


@ACTIVATION
def test_compile(activation):
    common.assert_compiles(ours(activation), *(leaf(*s, dtype=FP32) for s in ((3, 5), (4, 5), (4,))))


@pytest.mark.parametrize("activation", ["none", "gelu", "swiglu"])
def test_one_graph_for_any_number_of_rows(activation):
    """Fake results keep a symbolic size, which len() would make a number."""
    counted = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x, w: linear(x, w, None, activation), fullgraph=True, dynamic=True, backend=counted)
    w = leaf(10, 6)
    for rows in 4, 5, 9, 17:
        compiled(torch.randn(rows, 6, dtype=w.dtype), w).sum().backward()
    assert counted.frame_count == 1


class Gated(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(10, 6))

    def forward(self, x):
        return linear(x, self.weight, None, "swiglu")


def test_an_exported_graph_runs_with_gradients_on():
    """It calls the op itself, whose products go into their places."""
    module, x = Gated(), torch.randn(4, 6)
    exported = torch.export.export(module, (x,)).module()
    assert torch.equal(exported(x), module(x))


def test_tiles_compile():
    x, w = torch.randn(8, 24), torch.randn(10, 24)
    tiled = lambda x, w: linear(x, w, None, "gelu", tile=12)
    assert torch.equal(torch.compile(tiled, backend="aot_eager", fullgraph=True)(x, w), tiled(x, w))


def test_compile_under_autocast():
    with torch.autocast("cpu", BF16):
        common.assert_compiles(ours("gelu_tanh"), *(leaf(*s, dtype=FP32) for s in ((3, 5), (4, 5), (4,))))


def test_once_differentiable():
    common.assert_once_differentiable(ours("gelu"), leaf(3, 4), leaf(2, 4))


@pytest.mark.parametrize(
    "w, b, activation, match",
    [
        (
            W,
            B,
            "swish",
            "activation must be one of "
            "none, gelu, gelu_tanh, relu, relu2, silu, swiglu, geglu, geglu_tanh, got 'swish'",
        ),
        (W[:3], B[:3], "swiglu", "swiglu takes pairs of rows of weight, gate and up in turns, got 3 rows"),
        (W.T, B, "none", r"weight must be \[N, 5\], got \(5, 4\)"),
        (W, B[:3], "none", r"bias must be \[4\], got .*\[3\]"),
        (
            W.double(),
            B,
            "none",
            "x and weight must have one dtype outside autocast, got torch.float32 and torch.float64",
        ),
    ],
)
def test_errors(w, b, activation, match):
    with pytest.raises(ValueError, match="linear: " + match):
        linear(X, w, b, activation)
