"""The interpreter's bf16, mended by tests/interpreter_bf16.py, against torch's, bit for bit."""

import os

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="compiled kernels need no mending")


@triton.jit
def _cast_kernel(x_ptr, y_ptr, N: tl.constexpr):  # [N] in, [N] out
    i = tl.arange(0, N)
    tl.store(y_ptr + i, tl.load(x_ptr + i).to(y_ptr.dtype.element_ty))


@triton.jit
def _arithmetic_kernel(x_ptr, y_ptr, out_ptr, N: tl.constexpr):  # [N] in, [N] in, [4, N] out
    i = tl.arange(0, N)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    tl.store(out_ptr + i, x + y)
    tl.store(out_ptr + N + i, x * y)
    tl.store(out_ptr + 2 * N + i, -x)
    tl.store(out_ptr + 3 * N + i, tl.where(x < y, x, y))


@triton.jit
def _dot_kernel(a_ptr, b_ptr, c_ptr, N: tl.constexpr):  # [N, N] each
    i = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(c_ptr + i, tl.dot(tl.load(a_ptr + i), tl.trans(tl.load(b_ptr + i))))


def same_bits(x, y):
    return torch.equal(x.view(torch.int16), y.view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int32])
def test_a_cast_rounds_to_nearest_even(dtype):
    x = (torch.randn(64) * 300).to(dtype)
    if dtype == torch.float32:  # ties both ways, a carry into the exponent, overflow, subnormals, signed zeros
        special = [1 + 2**-8, 1 + 3 * 2**-8, 2 - 2**-9, 3.4e38, -1e-40, 0.0, -0.0, float("inf"), -float("inf")]
        x[: len(special)] = torch.tensor(special)
    y = torch.empty(64, dtype=torch.bfloat16)
    _cast_kernel[(1,)](x, y, 64)
    assert same_bits(y, x.bfloat16())
    if dtype.is_floating_point:
        back = torch.empty(64, dtype=dtype)
        _cast_kernel[(1,)](y, back, 64)
        assert torch.equal(back, y.to(dtype))


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, 0x7F800001, -1])
def test_a_nan_stays_one(bits):
    x = torch.full((16,), bits, dtype=torch.int32).view(torch.float32)
    y = torch.empty(16, dtype=torch.bfloat16)
    _cast_kernel[(1,)](x, y, 16)
    assert y.isnan().all()


def test_arithmetic():
    x, y = torch.randn(2, 64).bfloat16()
    out = torch.empty(4, 64, dtype=torch.bfloat16)
    _arithmetic_kernel[(1,)](x, y, out, 64)
    assert same_bits(out, torch.stack([x + y, x * y, -x, torch.minimum(x, y)]))


def test_dot_accumulates_in_fp32():
    a, b = torch.randint(-8, 9, (2, 16, 16)).bfloat16()  # small integers: every order of summation is exact
    c = torch.empty(16, 16)
    _dot_kernel[(1,)](a, b, c, 16)
    assert torch.equal(c, a.float() @ b.float().T)
