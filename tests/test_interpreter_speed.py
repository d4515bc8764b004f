"""The interpreter's patching, done once a launch by tests/interpreter_speed.py: the same results, and all put back."""

import os

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
interpreter = pytest.importorskip("triton.runtime.interpreter")

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or not hasattr(interpreter, "_LangPatchScope"),
    reason="kernels are compiled, or this Triton never puts the language back",
)


@triton.jit
def _squared(x):
    return x * x


@triton.jit
def _norm_kernel(x_ptr, y_ptr, N: tl.constexpr):  # [N] in, [1] out
    x = tl.load(x_ptr + tl.arange(0, N))
    tl.store(y_ptr, tl.sqrt(tl.sum(_squared(x) + _squared(0 * x), 0)))  # tl.sum is a device function of Triton's own


def test_the_language_is_patched_once_a_launch_and_put_back(monkeypatch):
    patched, patch = [], interpreter._patch_attr

    def spy(owner, name, *rest):
        patched.append((owner, name))
        patch(owner, name, *rest)

    monkeypatch.setattr(interpreter, "_patch_attr", spy)
    load, x, y = tl.load, torch.tensor([3.0, 4.0]), torch.zeros(1)
    for _ in range(2):
        patched.clear()
        _norm_kernel[(2,)](x, y, 2)
        assert y.item() == 5 and tl.load is load and tl.core.is_builtin(load)
        assert (tl, "load") in patched and len(patched) == len(set(patched))


def test_an_error_in_a_kernel_puts_it_back_too():
    load = tl.load
    with pytest.raises(Exception):  # noqa: B017 -- the interpreter's own
        _norm_kernel[(1,)](torch.ones(2), None, 2)
    assert tl.load is load
    y = torch.zeros(1)
    _norm_kernel[(1,)](torch.tensor([3.0, 4.0]), y, 2)
    assert y.item() == 5
