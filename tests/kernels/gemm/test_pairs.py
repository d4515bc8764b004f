"""Columns of gate and up taken apart and put together: moves, which change no bit."""

import pytest
import torch

from tpfuse.kernels.gemm.pairs import apart, together

DTYPES = torch.bfloat16, torch.float16, torch.float32, torch.float64
SPECIAL = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40, -1.5, 3.0]


def bits(x):
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def at(offset, rows, columns, dtype):
    """Numbers of every kind at an address that is ``offset`` elements behind a storage's begin"""
    x = torch.randn(offset + rows * columns, dtype=torch.float64).to(dtype)
    x[offset : offset + len(SPECIAL)] = torch.tensor(SPECIAL).to(dtype)[: rows * columns]
    return x[offset:].view(rows, columns)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, 1, 2])
@pytest.mark.parametrize("shape", [(3, 10), (5, 34), (1, 8)])
def test_pairs_keep_their_bits(dtype, offset, shape):
    z = at(offset, *shape, dtype)
    gate, up = apart(z)
    wide = z.float() if dtype.itemsize < 4 else z
    assert torch.equal(bits(gate), bits(wide[:, ::2])) and torch.equal(bits(up), bits(wide[:, 1::2]))
    assert gate.is_contiguous() and up.is_contiguous()
    assert torch.equal(bits(together(gate, up)), bits(wide))


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows_and_rows_that_are_apart(dtype):
    assert [x.shape for x in apart(torch.empty(0, 6, dtype=dtype))] == [(0, 3), (0, 3)]
    z = at(0, 4, 7, dtype)[:, :6]  # rows begin at odd places
    for ours, theirs in zip(apart(z), (z[:, ::2], z[:, 1::2]), strict=True):
        assert torch.equal(bits(ours), bits(theirs.to(ours.dtype)))
    gate, up = apart(z)
    gate.zero_(), up.zero_()
    assert z.abs().sum() != 0  # they are new
