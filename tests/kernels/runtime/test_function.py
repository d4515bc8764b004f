"""The library's Function is torch's in all but the host time of a call."""

import importlib
import pkgutil

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tpfuse
from tests.models.common import MODELS, batch, body_loss
from tpfuse.kernels.runtime.function import Function, once_differentiable
from tpfuse.kernels.runtime.op import NAMESPACE, OPS


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


@pytest.mark.parametrize("needs", [True, False])
def test_a_second_derivative_is_refused(needs):
    """Before the first is given, whether or not the incoming gradient is a part of the graph."""
    x, dy = torch.randn(5, requires_grad=True), torch.randn(5, requires_grad=needs)
    with pytest.raises(RuntimeError, match=r"^tpfuse: .*Cube.backward has no second derivative.*create_graph"):
        torch.autograd.grad(Cube.apply(x), x, dy, create_graph=True)
    with torch.enable_grad():  # the mode of who asks does not matter
        assert torch.equal(torch.autograd.grad(Cube.apply(x), x, dy)[0], 3 * x * x * dy)


def subclasses(cls):
    return {sub for direct in cls.__subclasses__() for sub in (direct, *subclasses(direct))}


def library():
    """Every Function of the library, of whichever base."""
    for module in pkgutil.walk_packages(tpfuse.__path__, "tpfuse."):
        if module.name != "tpfuse.__main__":
            importlib.import_module(module.name)
    every = subclasses(torch.autograd.Function) - {Function}
    return sorted((cls for cls in every if cls.__module__.startswith("tpfuse.")), key=lambda cls: cls.__qualname__)


def test_every_function_refuses():
    classes = library()
    assert len(classes) > 15 and all(issubclass(cls, Function) for cls in classes)
    for cls in classes:
        with torch.enable_grad(), pytest.raises(RuntimeError, match=f"{cls.__qualname__}.backward has no second"):
            cls.backward(None, None)


def test_no_op_has_a_derivative_of_its_own():
    """A Function is the only way to a gradient, so that refusing in Functions refuses everywhere."""
    library()
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    assert len(OPS) > 20
    assert not [name for name in OPS for key in ("Autograd", "AutogradCPU") if has(f"{NAMESPACE}::{name}", key)]


@pytest.mark.parametrize("saving", ["fastest", "smallest"])
@pytest.mark.parametrize("name", MODELS)
def test_a_penalty_on_a_models_gradients_is_refused(name, saving):
    cls, config, options = MODELS[name]
    model = cls(config, saving=saving, **options)
    call = batch(config)
    out = model(**(call if model.head is not None else dict(input_ids=call["input_ids"])))
    loss = body_loss(out.last_hidden_state, out.pooler_output) if out.loss is None else out.loss
    for p in model.parameters():
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(loss, p, create_graph=True, retain_graph=True, allow_unused=True)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_is_no_second_derivative(reentrant):
    """Forward runs again inside backward, and records a graph there."""
    x = torch.randn(5, requires_grad=True)
    checkpoint(lambda x: Cube.apply(x) * 2, x, use_reentrant=reentrant).sum().backward()
    torch.testing.assert_close(x.grad, 6 * x * x)


def test_transforms_are_refused_in_torchs_words():
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.vmap(Cube.apply)(torch.randn(3, 2))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend):
    x = torch.randn(5, requires_grad=True)
    y = torch.compile(lambda x: Cube.apply(x), backend=backend, fullgraph=True)(x)
    assert torch.equal(y, x**3)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], 3 * x * x)
