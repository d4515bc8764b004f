"""What the tests of launchers share: when a launcher counts as equal to its op's reference."""

import torch
from torch import Tensor

from tpfuse.kernels.norm import triton_backward, triton_forward
from tpfuse.kernels.runtime.op import Op, tensors

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def narrow(monkeypatch, wide: bool) -> None:
    """``wide``: rows of more than 64 columns take the path of wide rows, which at their true widths costs seconds."""
    if wide:
        monkeypatch.setattr(triton_forward, "FWD_ROW", 64)
        monkeypatch.setattr(triton_backward, "BWD_ROW", 64)


def like(x: Tensor) -> Tensor:
    return torch.randn(x.shape, device=x.device).to(x.dtype)


def far_apart(x: Tensor, stride: int) -> Tensor:
    """x with ``stride`` elements and a few from one index of dimension 0 to the next, in memory that is never touched
    between."""
    far = torch.empty(x.shape[0] * (stride + x[0].numel()), dtype=x.dtype, device=x.device)
    return far.as_strided(x.shape, (stride + 8, *x[0].contiguous().stride())).copy_(x)


def outputs(y: Tensor | tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
    """Returns the tensors of a result; none of an op that only fills an argument."""
    return (y,) if isinstance(y, Tensor) else tuple(y or ())


def assert_same(got, want) -> None:
    """fp32 to rounding; dtypes, shapes and strides exactly."""
    got, want = outputs(got), outputs(want)
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5, check_stride=True)


def in_fp64(argument):
    """Returns an argument, a dtype given as one or a record of them in fp64."""
    if isinstance(argument, tuple):
        return type(argument)._make(map(in_fp64, argument))
    if isinstance(argument, Tensor) and argument.is_floating_point():
        return argument.double()
    return torch.float64 if isinstance(argument, torch.dtype) else argument


def assert_accurate_launch(op: Op, arguments: tuple) -> None:
    """error(kernel, fp64) <= 2 error(reference in the same dtype, fp64) + 1e-6"""
    exact = op.reference(*map(in_fp64, arguments))
    for got, theirs, truth in zip(
        outputs(op.launch(*arguments)), outputs(op.reference(*arguments)), outputs(exact), strict=True
    ):
        assert got.dtype == theirs.dtype and got.shape == theirs.shape
        if got.numel():
            error, allowed = (got.double() - truth).abs().max(), (theirs.double() - truth).abs().max()
            assert error <= 2 * allowed + 1e-6, (error, allowed)


def on_a_gpu(op: Op, arguments: tuple) -> None:
    """Compiled against the reference, in bf16 to a rounding or two; and twice the same bits."""
    low = any(a.dtype == torch.bfloat16 for a in tensors(arguments))
    rounding = dict(rtol=2e-2, atol=2e-2) if low else dict(rtol=1e-4, atol=1e-4)
    first = outputs(op.launch(*arguments))
    torch.testing.assert_close(first, outputs(op.reference(*arguments)), **rounding)
    assert all(torch.equal(a, b) for a, b in zip(first, outputs(op.launch(*arguments)), strict=True))
