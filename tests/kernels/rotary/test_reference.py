"""The rotation in plain torch has the same bits however many positions it is given."""

import pytest
import torch

from tpfuse.kernels.rotary.reference import ROTATED, rotate


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("samples, width", [(1, 20), (2, 12)], ids=["a table", "a table a sample, and other columns"])
def test_many_positions_are_turned_as_few(samples, width, dtype, interleaved):
    S, acc = 700, torch.float64 if dtype == torch.float64 else torch.float32
    x = torch.randn(S, 2, 3, 20).to(dtype).permute(1, 2, 0, 3)[:, :, None]  # [B, G, 1, S, E], a view of rows
    angles = torch.rand(samples, 1, 1, S, width // 2, dtype=acc)
    cos, sin = angles.cos(), angles.sin()
    y = rotate(x, cos, sin, interleaved)
    assert x.numel() > ROTATED and y.is_contiguous() and torch.equal(y[..., width:], x[..., width:])
    for at in 0, 1, 546, 547, 699:  # ROTATED are 546 positions, of one thread
        place = slice(at, at + 1)
        one = rotate(x[..., place, :], cos[..., place, :], sin[..., place, :], interleaved)
        assert torch.equal(y[..., place, :], one) and not torch.equal(one, x[..., place, :])
    rows = x[0, :, 0].transpose(0, 1).repeat(1, 2, 1)  # [M, H, E], as the op has them, more than ROTATED elements
    tables = (t[0, 0, 0][:, None] for t in (cos, sin))
    assert torch.equal(rotate(rows, *tables, interleaved), y[0, :, 0].transpose(0, 1).repeat(1, 2, 1))


@pytest.mark.parametrize("shape", [(400, 3, 1, 1, 64), (1, 3, 400, 1, 64)], ids=["samples", "heads"])
def test_one_position_of_many(shape):
    x, cos, sin = torch.randn(shape), torch.full((1, 1, 1, 1, 32), 0.6), torch.full((1, 1, 1, 1, 32), 0.8)
    y, few = rotate(x, cos, sin, False), rotate(x[:1, :, :1], cos, sin, False)
    assert x.numel() > ROTATED and torch.equal(y[:1, :, :1], few)


def test_gradients_are_recorded():
    x = torch.randn(1, 1, 1, ROTATED // 2, 4, requires_grad=True)
    cos, sin = torch.full((1, 1, 1, ROTATED // 2, 2), 0.6), torch.full((1, 1, 1, ROTATED // 2, 2), 0.8)
    (gradient,) = torch.autograd.grad(rotate(x, cos, sin, False).sum(), x)
    torch.testing.assert_close(gradient, torch.tensor([1.4, 1.4, -0.2, -0.2]).expand_as(x))
