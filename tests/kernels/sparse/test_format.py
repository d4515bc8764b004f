"""Sparse integers as they lie in memory: packed and back, pruned, quantised; the limits of an int32."""

import pytest
import torch

from tpfuse.kernels import SparseInt
from tpfuse.kernels.sparse.format import RANGES, Vectors, pack, strips_of, unpack

INT32 = torch.int32


@pytest.mark.parametrize("bits", RANGES)
def test_every_number_is_packed_and_back(bits):
    low, high = RANGES[bits]
    numbers = torch.arange(low, high + 1).repeat_interleave(2 if bits == 4 else 1)
    numbers = torch.nn.functional.pad(numbers, (0, -len(numbers) % 16)).view(-1, 8)
    values = pack(numbers, bits)
    assert values.dtype == torch.int8 and values.shape == (1 + (bits == 16), len(numbers) // (1 + (bits == 4)), 8)
    assert torch.equal(unpack(values, bits), numbers.to(INT32))


def test_where_the_bytes_stand():
    """Vectors 2j and 2j + 1 share bytes, low half and high; of 16 bits the low plane is first."""
    numbers = torch.tensor([[1] * 8, [-8] * 8, [7] * 8, [-1] * 8])
    assert pack(numbers, 4)[0, :, 0].tolist() == [-8 * 16 + 1, -1 * 16 + 7]
    assert pack(torch.full((1, 8), 300), 16)[:, 0, 0].tolist() == [44, 1]
    assert pack(torch.full((1, 8), 200), 16)[:, 0, 0].tolist() == [-56, 1]


@pytest.mark.parametrize("V", [8, 64])
@pytest.mark.parametrize("density", [0.0, 0.1, 0.5, 1.0])
def test_the_largest_vectors_stay(density, V):
    """A share of the vectors, by sums of squares; a strip of them may have none."""
    weight = (
        torch.randn(3 * V - 3, 50, dtype=torch.float64) * torch.tensor([1.0, 1e-3, 1.0]).repeat_interleave(V)[:-3, None]
    )
    w = SparseInt.from_dense(weight, density, V)
    norms = torch.nn.functional.pad(weight, (0, 0, 0, 3)).view(3, V, 50).square().sum(1)
    chosen = torch.zeros(3, 50, dtype=torch.bool)
    chosen[strips_of(w.vectors.offsets, len(w.vectors.column_index)), w.vectors.column_index.long()] = True
    assert chosen.sum() == round(density * 150) and (density == 0.0) == (w.density == 0)
    assert density in (0.0, 1.0) or norms[chosen].min() >= norms[~chosen].max()
    kept = weight * chosen.repeat_interleave(V, 0)[: len(weight)]
    error = (w.dense() * w.scale[:, None] - kept).abs()
    assert (error <= 0.5001 * w.scale[:, None]).all()  # a rounding, and that of the scale to fp32


@pytest.mark.parametrize("bits", RANGES)
def test_a_row_reaches_the_largest_number(bits):
    weight = torch.randn(9, 30)
    weight[4] = 0
    w = SparseInt.from_dense(weight, 1.0, 8, bits)
    largest = w.dense().abs().amax(1)
    assert set(largest.tolist()) == {0, RANGES[bits][1]} and w.scale[4] == 1.0
    assert w.scale.dtype == torch.float32 and w.scale.shape == (9,)
    tiny = SparseInt.from_dense(torch.full((8, 1), 1e-44), bits=bits)
    assert (
        tiny.scale.isfinite().all() and (tiny.scale > 0).all() and tiny.density >= 1.0
    )  # of 4 bits with zeros beside it


@pytest.mark.parametrize("bits", RANGES)
def test_integers_stay_what_they_are(bits):
    """Zeros are left out, but in strips that need an even number of vectors."""
    a = torch.randint(*RANGES[bits], (45, 37)) // (1 + 50 * (bits == 16)) * (torch.rand(45, 37) < 0.1)
    w = SparseInt.from_dense(a, block=8, bits=bits)
    assert torch.equal(w.dense(), a.int()) and w.scale is None and w.shape == (45, 37)
    counts = torch.nn.functional.pad(a, (0, 0, 0, 3)).view(6, 8, 37).ne(0).any(1).sum(1)
    assert torch.equal(w.vectors.offsets.diff(), (counts + counts % 2 * (bits == 4)).int())
    again = SparseInt.from_dense(w.dense(), block=8, bits=bits)
    assert all(torch.equal(x, y) for x, y in zip(w.vectors[:3], again.vectors[:3]))


# ---- limits of an int32 ----


@pytest.mark.parametrize(
    "bits, magnitude, most", [(8, 128, 131071), (8, 127, 132104), (16, 32639, 512), (16, 1, 130055)]
)
def test_the_limit_of_a_row(bits, magnitude, most):
    """One vector more, and a sum could be beyond 2^31 - 1; signs do not help."""
    numbers = torch.full((1, most + 1), -magnitude)
    numbers[:, ::2] *= -1 if magnitude != 128 else 1
    counted = magnitude + 128 * (bits == 16)
    assert most * counted * 128 < 1 << 31 <= (most + 1) * counted * 128
    SparseInt.from_dense(numbers[:, :-1], bits=bits)
    with pytest.raises(
        ValueError, match=f"row 0 must sum up to 16777215 at most, got {(most + 1) * counted}: an int32"
    ):
        SparseInt.from_dense(numbers, bits=bits)


# ---- errors ----

INDEX, OFFSETS = torch.tensor([0, 3], dtype=INT32), torch.tensor([0, 1, 2], dtype=INT32)
VALUES = torch.zeros(1, 2, 8, dtype=torch.int8)
VECTORS = Vectors(VALUES, INDEX, OFFSETS, rows=9, bits=8)


def changed(columns=4, scale=None, **fields):
    return lambda: SparseInt(VECTORS._replace(**fields), columns, scale)


ERRORS = [
    (changed(values=VALUES[..., :4]), "block must be 8, 16, 32 or 64 rows, got 4"),
    (changed(column_index=INDEX.long()), r"column_index must be contiguous int32 \(2,\) on cpu, got torch.int64"),
    (changed(column_index=INDEX.repeat(2)[::2]), "column_index must be contiguous int32"),
    (changed(column_index=INDEX.to("meta")), "column_index must be contiguous int32 .* on cpu, got .* on meta"),
    (changed(rows=17), r"offsets must be contiguous int32 \(4,\) on cpu, got torch.int32 \(3,\)"),
    (changed(offsets=OFFSETS.flip(0)), "offsets must rise from 0 to the 2 vectors"),
    (changed(columns=3), "column_index must lie in 0 to 2"),
    (changed(column_index=-INDEX), "column_index must lie in 0 to 3"),
    (changed(bits=5), "bits must be 4, 8 or 16, got 5"),
    (changed(bits=16), r"values must be contiguous int8 \(2, 2, 8\)"),
    (changed(bits=4, values=VALUES[:, :1]), "of 4 bits a strip must have an even number"),
    (changed(scale=torch.ones(8)), r"scale must be contiguous float32 \(9,\)"),
    (lambda: SparseInt.from_dense(torch.ones(8)), r"weight must be \[rows, columns\] of numbers"),
    (lambda: SparseInt.from_dense(torch.ones(8, 2) / 0), "weight must be finite"),
    (lambda: SparseInt.from_dense(torch.ones(8, 2), 1.5), r"density must lie in \[0, 1\], got 1.5"),
    (lambda: SparseInt.from_dense(torch.ones(8, 2), block=4), "block must be 8, 16, 32 or 64 rows, got 4"),
    (lambda: SparseInt.from_dense(torch.ones(8, 2), bits=2), "bits must be 4, 8 or 16, got 2"),
    (lambda: SparseInt.from_dense(torch.full((8, 2), 200)), "8 bits must lie in -128 to 127"),
]


@pytest.mark.parametrize("call, match", ERRORS)
def test_errors(call, match):
    with pytest.raises(ValueError, match=f"SparseInt: .*{match}"):
        call()
