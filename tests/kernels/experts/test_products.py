"""Products of one expert's rows on a CPU, by each of their ways, against fp64."""

import pytest
import torch

from tests.planted import planted
from tpfuse.kernels.experts import products
from tpfuse.kernels.runtime import matmul

DTYPES = torch.float32, torch.bfloat16, torch.float16, torch.float64


def errors(rows: int, dtype: torch.dtype, width: int) -> dict[str, float]:
    """Each product's largest error over the largest value, in units of the dtype's rounding."""
    random = torch.Generator().manual_seed(rows)
    x, w = (torch.randn(n, width, generator=random).to(dtype) for n in (rows, 22))
    exact = x.double() @ w.double().t()
    plain, in_halves = x.new_empty(rows, 22), x.new_empty(rows, 2, 11)
    products.times_transposed(x, w, plain)
    products.halves(x, w, in_halves)
    unit = torch.finfo(dtype).eps * float(exact.abs().max())
    gate_and_up = exact.unflatten(1, (11, 2)).mT
    pairs = {"plain": (plain, exact), "halves": (in_halves, gate_and_up)}
    return {name: float((y.double() - truth).abs().max()) / unit for name, (y, truth) in pairs.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, products.FEW, products.FEW + 1, 40])
@pytest.mark.parametrize("tiles", [False, True], ids=["as it is", "as with AMX"])
def test_values(monkeypatch, rows, dtype, tiles):
    if tiles:
        monkeypatch.setattr(matmul, "multiplies_tiles", lambda: True)
        monkeypatch.setattr(matmul, "multiplies", lambda dtype: True)
    for width in (64, 37):
        assert max(errors(rows, dtype, width).values()) < 4


def gate_in_front_of_up(right, x, w, place):
    """As if w's rows were all of gate's and then all of up's."""
    place.copy_((x @ w.t()).view(place.shape))


def test_a_mistake_is_seen():
    with planted(f"{products.__name__}.halves", gate_in_front_of_up):
        assert errors(2, torch.float32, 64)["halves"] > 100


def test_what_begins_within_a_line_is_copied():
    memory = torch.randn(100)
    assert products.begins_a_line(memory) is memory
    for odd in (memory[1:], memory.view(10, 10).t()):
        copy = products.begins_a_line(odd)
        assert torch.equal(copy, odd) and copy.data_ptr() % products.ALIGNED == 0 and copy.is_contiguous()
