"""Public kernels take the four dtypes that they compute in, and name the argument that has another one."""

import pytest
import torch

from tpfuse import kernels
from tpfuse.kernels import Routing


def ones(*shape):
    return lambda dtype: torch.ones(shape, dtype=dtype)


ROWS, MATRIX, VECTOR = ones(4, 6), ones(8, 6), ones(6)
ANGLES = torch.ones(4, 2)
IDS = torch.zeros(4, dtype=torch.int64)

CALLS = {  # by name: the argument that is named, and the call with tensors of a dtype
    "linear": ("x", lambda d: kernels.linear(ROWS(d), MATRIX(d), activation="swiglu")),
    "layer_norm": ("x", lambda d: kernels.layer_norm(ROWS(d), VECTOR(d))),
    "rms_norm": ("x", lambda d: kernels.rms_norm(ROWS(d), VECTOR(d))),
    "reduce_bias_dropout_add_norm": (
        "parts",
        lambda d: kernels.reduce_bias_dropout_add_norm(ones(2, 4, 6)(d), weight=VECTOR(d)),
    ),
    "embed_finish": ("parts", lambda d: kernels.embed_finish(ones(1, 4, 6)(d))),
    "dropout": ("x", lambda d: kernels.dropout(ROWS(d), 0.1, rng=torch.zeros(3, dtype=torch.int64))),
    "attention": ("qkv", lambda d: kernels.attention(ones(4, 1, 3, 8)(d), batch=1, causal=True)),
    "rope": ("x", lambda d: kernels.rope(ones(4, 2, 4)(d), ANGLES, ANGLES)),
    "swiglu": ("gate_up", lambda d: kernels.swiglu(ones(4, 6, 2)(d))),
    "cross_entropy": ("logits", lambda d: kernels.cross_entropy(ROWS(d), IDS)),
    "linear_cross_entropy": ("x", lambda d: kernels.linear_cross_entropy(ROWS(d), MATRIX(d), IDS)),
    "expert_mlps": (
        "x",
        lambda d: kernels.expert_mlps(
            ROWS(d),
            torch.ones(4, 1),
            torch.zeros(4, 1, dtype=torch.int32),
            fc1=ones(1, 3, 2, 6)(d),
            fc2=ones(1, 6, 3)(d),
        ),
    ),
    "route": ("x", lambda d: kernels.route(ROWS(d), MATRIX(d), routing=Routing(k=2))),
    "embedding": ("weight", lambda d: kernels.embedding(MATRIX(d), IDS)),
}


@pytest.mark.parametrize("name", CALLS)
def test_other_dtypes_are_refused(name):
    """The library's casts would drop the imaginary part of complex numbers, with a warning."""
    label, call = CALLS[name]
    call(torch.bfloat16)
    for dtype in torch.complex64, torch.int64, torch.float8_e4m3fn:
        with pytest.raises(ValueError, match=rf"^{name}: {label} must be float32, bfloat16, float16 or float64, got"):
            call(dtype)


@pytest.mark.parametrize("name", ["linear", "layer_norm", "rms_norm", "cross_entropy", "route"])
def test_a_number_has_no_rows(name):
    arguments = {
        "linear": lambda x: kernels.linear(x, MATRIX(torch.float32)),
        "layer_norm": lambda x: kernels.layer_norm(x, VECTOR(torch.float32)),
        "rms_norm": lambda x: kernels.rms_norm(x, VECTOR(torch.float32)),
        "cross_entropy": lambda x: kernels.cross_entropy(x, IDS),
        "route": lambda x: kernels.route(x, MATRIX(torch.float32), routing=Routing(k=2)),
    }
    with pytest.raises(ValueError, match=rf"^{name}: {CALLS[name][0]} must be \[\.\.\., D\], got a tensor without dim"):
        arguments[name](torch.ones(()))


@pytest.mark.parametrize("activation", ["none", "gelu", "swiglu"])
def test_a_product_over_no_columns_is_the_bias(activation):
    """[2, 3, 0] times [N, 0], as torch.nn.functional.linear has it."""
    x, weight = torch.ones(2, 3, 0, requires_grad=True), torch.ones(8, 0, requires_grad=True)
    bias = torch.arange(8.0, requires_grad=True)
    y = kernels.linear(x, weight, bias, activation=activation)
    y.sum().backward()
    rows = torch.zeros(6, 1, requires_grad=True)
    one, same = torch.zeros(8, 1), torch.arange(8.0, requires_grad=True)
    want = kernels.linear(rows, one, same, activation=activation)
    want.sum().backward()
    assert torch.equal(y.flatten(0, 1), want) and torch.equal(bias.grad, same.grad)
    assert x.grad.shape == x.shape and weight.grad.shape == weight.shape
