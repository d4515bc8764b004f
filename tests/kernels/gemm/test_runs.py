"""Activations on a CPU in runs: no element is rounded in a way of its own; gate and up are moved bit by bit."""

import pytest
import torch

from tpfuse.kernels.gemm.activation import GATED, PLAIN, width
from tpfuse.kernels.gemm.op import activation_bwd, activation_fwd
from tpfuse.kernels.gemm.runs import VECTORS, apart, in_runs, store_pairs

DTYPES = torch.bfloat16, torch.float16, torch.float32, torch.float64
SPECIAL = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40, -1.5, 3.0]


def bits(x):
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def at(offset, n, dtype):
    """n numbers of every kind, ``offset`` elements behind a storage's begin"""
    x = torch.randn(offset + n, dtype=torch.float64).to(dtype)
    x[offset : offset + len(SPECIAL)] = torch.tensor(SPECIAL).to(dtype)
    return x[offset:]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, 1, 2])
def test_pairs_keep_their_bits(dtype, offset):
    z = at(offset, 132, dtype).view(3, 44)
    (((gate, padded), place), *_), *_ = in_runs(2, z)
    up, wide = apart(z, gate, place.rows), z.float() if dtype.itemsize < 4 else z
    assert len(padded) % VECTORS == 0 and not padded[66:].any() and torch.equal(bits(padded[:66]), bits(gate).flatten())
    assert torch.equal(bits(gate), bits(wide[:, ::2])) and torch.equal(bits(up), bits(wide[:, 1::2]))
    for place in (torch.empty_like(z), torch.empty(1 + z.numel(), dtype=dtype)[1:].view(3, 44)):
        store_pairs(gate.clone(), up.clone(), place)
        assert torch.equal(bits(place), bits(z))
    gate.zero_(), up.zero_()
    assert wide.flatten()[len(SPECIAL) :].abs().sum() > 0  # they are new


@pytest.fixture(params=[1, 2, 3, 5])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("activation", [*PLAIN[1:], *GATED])
def test_the_last_elements_are_rounded_as_the_others(activation, dtype, threads):
    """Rows one by one, of a width that is no whole number of vectors, and many rows, which threads share"""
    pairs = width(activation)
    z, dy = 3 * torch.randn(3000, 37 * pairs).to(dtype), torch.randn(3000, 37).to(dtype)
    call = lambda rows: activation_bwd.cpu(dy[rows], z[rows], activation, True, None)
    dz, _, y = call(slice(None))
    assert torch.equal(y, activation_fwd.cpu(z, activation))
    for i in 0, 1, 1777, 2999:
        dz_row, _, y_row = call(slice(i, i + 1))
        assert torch.equal(dz_row, dz[i : i + 1]) and torch.equal(y_row, y[i : i + 1])
    assert torch.equal(call(slice(1500, None))[0], dz[1500:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", GATED)
@pytest.mark.parametrize("shape", [(300, 37), (70, 2048), (5, 1376), (1, 70000), (0, 8), (3, 0)], ids=str)
def test_halves_have_the_bits_of_pairs(shape, activation, dtype, threads):
    """z [M, 2, N] in place of [M, 2N]; dz is in pairs of both."""
    (M, N), dy = shape, torch.randn(shape).to(dtype)
    z = 3 * torch.randn(M, N, 2).to(dtype)
    pairs, halves = z.flatten(1), z.mT.contiguous()
    assert torch.equal(activation_fwd.cpu(halves, activation), activation_fwd.cpu(pairs, activation))
    for rebuild in False, True:
        results = [activation_bwd.cpu(dy, x, activation, rebuild, None) for x in (halves, pairs)]
        assert all(map(torch.equal, *results)) and results[0][0].shape == (M, 2 * N)
    for op, args in ((activation_fwd, ()), (activation_bwd, (dy,))) if dtype == torch.float64 else ():
        options = (activation,) if op is activation_fwd else (activation, True, torch.float32)
        torch.testing.assert_close(*(op.reference(*args, x, *options) for x in (halves, pairs)))
