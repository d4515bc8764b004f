"""Sparse integers as they lie in memory: packed and back, pruned, cut and joined; the limits of an int32."""

import pytest
import torch

from tpfuse.kernels import Pattern, SparseInt
from tpfuse.kernels.sparse.format import RANGES, pack, unpack

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
    chosen[w.pattern.strips, w.pattern.index.long()] = True
    assert chosen.sum() == round(density * 150) and (density == 0.0) == (w.pattern.density == 0)
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
    assert tiny.scale.isfinite().all() and (tiny.scale > 0).all()


@pytest.mark.parametrize("bits", RANGES)
def test_cut_and_joined(bits):
    """By strips of rows and by any columns; of 4 bits each piece has zeros of its own."""
    a = torch.randint(*RANGES[bits], (45, 37)) // (1 + 50 * (bits == 16))
    a *= torch.rand(45, 37) < 0.3
    w = SparseInt.from_dense(a, block=8, bits=bits)
    for dim, borders in ((0, [0, 8, 24, 45]), (1, [0, 1, 20, 37])):
        pieces = [w.narrow(dim, first, end) for first, end in zip(borders, borders[1:])]
        for piece, first, end in zip(pieces, borders, borders[1:]):
            assert torch.equal(piece.dense(), a.narrow(dim, first, end - first).to(INT32))
        again = SparseInt.join(pieces, dim)
        same = zip(
            (w.values, w.pattern.index, w.pattern.offsets), (again.values, again.pattern.index, again.pattern.offsets)
        )
        assert again.shape == w.shape and (bits == 4 or all(torch.equal(x, y) for x, y in same))
        assert torch.equal(again.dense(), w.dense())


def test_scales_go_with_their_rows():
    w = SparseInt.from_dense(torch.randn(24, 10))
    assert torch.equal(w.narrow(0, 8, 24).scale, w.scale[8:]) and torch.equal(w.narrow(1, 3, 9).scale, w.scale)
    assert torch.equal(SparseInt.join([w.narrow(0, 0, 8), w.narrow(0, 8, 24)], 0).scale, w.scale)


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
PATTERN = Pattern(INDEX, OFFSETS, (9, 4), 8)
VALUES = torch.zeros(1, 2, 8, dtype=torch.int8)
ERRORS = [
    (lambda: Pattern(INDEX, OFFSETS, (9, 4), 12), "block must be 8, 16, 32 or 64 rows, got 12"),
    (lambda: Pattern(INDEX.long(), OFFSETS, (9, 4), 8), "index must be contiguous int32"),
    (lambda: Pattern(INDEX.repeat(2)[::2], OFFSETS, (9, 4), 8), "index must be contiguous int32"),
    (lambda: Pattern(INDEX, OFFSETS, (17, 4), 8), r"offsets must be contiguous int32 \[4\] for 17 rows in strips of 8"),
    (lambda: Pattern(INDEX, OFFSETS.flip(0), (9, 4), 8), "offsets must rise from 0 to the 2 vectors"),
    (lambda: Pattern(INDEX, OFFSETS, (9, 3), 8), "index must lie in 0 to 2, the columns"),
    (lambda: Pattern(-INDEX, OFFSETS, (9, 4), 8), "index must lie in 0 to 3"),
    (lambda: Pattern(INDEX, OFFSETS.to("meta"), (9, 4), 8), "index is on cpu, offsets on meta"),
    (lambda: Pattern.from_mask(torch.ones(2, 4), 9), "mask must be bool"),
    (lambda: SparseInt(PATTERN, VALUES, 5), "bits must be 4, 8 or 16, got 5"),
    (lambda: SparseInt(PATTERN, VALUES, 16), r"values must be contiguous int8 \(2, 2, 8\)"),
    (lambda: SparseInt(PATTERN, VALUES[:, :1], 4), "of 4 bits a strip must have an even number of vectors"),
    (lambda: SparseInt(PATTERN, VALUES, 8, torch.ones(8)), r"scale must be float32 \[9\] or None"),
    (lambda: SparseInt.from_vectors(PATTERN, torch.full((2, 8), 8), 4), "numbers of 4 bits must lie in -8 to 7"),
    (
        lambda: SparseInt.from_vectors(PATTERN, torch.ones(2, 8)),
        r"numbers must be integers \(2, 8\), got torch.float32",
    ),
    (lambda: SparseInt.from_dense(torch.ones(8)), r"weight must be \[rows, columns\] of numbers"),
    (lambda: SparseInt.from_dense(torch.ones(8, 2) / 0), "weight must be finite"),
    (lambda: SparseInt.from_dense(torch.ones(8, 2), 1.5), r"density must lie in \[0, 1\], got 1.5"),
    (lambda: SparseInt.from_dense(torch.ones(8, 2), block=4), "block must be 8, 16, 32 or 64 rows, got 4"),
    (lambda: SparseInt.from_dense(torch.ones(8, 2), bits=2), "bits must be 4, 8 or 16, got 2"),
    (lambda: SparseInt.from_dense(torch.full((8, 2), 200)), "numbers of 8 bits must lie in -128 to 127"),
    (lambda: SparseInt.from_dense(torch.ones(24, 2)).narrow(0, 4, 16), "rows 4 to 16 do not lie between strips of 8"),
]


@pytest.mark.parametrize("call, match", ERRORS)
def test_errors(call, match):
    with pytest.raises(ValueError, match=f"(Pattern|SparseInt): .*{match}"):
        call()
