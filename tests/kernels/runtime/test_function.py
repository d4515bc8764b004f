"""The library's Function is torch's in all but the host time of a call."""

import pytest
import torch

from tpfuse.kernels.runtime.function import Function, once_differentiable


class Cube(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return 3 * x * x * dy


def test_gradient():
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(Cube.apply, x)


def test_a_second_derivative_is_refused():
    x, dy = torch.randn(5, requires_grad=True), torch.randn(5, requires_grad=True)
    (dx,) = torch.autograd.grad(Cube.apply(x), x, dy, create_graph=True)
    assert torch.equal(dx, 3 * x * x * dy)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_transforms_are_refused_in_torchs_words():
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.vmap(Cube.apply)(torch.randn(3, 2))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend):
    x = torch.randn(5, requires_grad=True)
    y = torch.compile(lambda x: Cube.apply(x), backend=backend, fullgraph=True)(x)
    assert torch.equal(y, x**3)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], 3 * x * x)
