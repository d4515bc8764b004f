"""Products of sparse integers: every implementation equals a sum of Python's integers, and torch's of int64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels import common
from tests.kernels.kernel_rules import DEVICE
from tests.kernels.samples import int8
from tpfuse.kernels import SparseInt, sampled_matmul, sparse_matmul
from tpfuse.kernels.runtime.op import OPS
from tpfuse.kernels.sparse.format import RANGES, strips_of

SPARSE, SAMPLED = OPS["sparse_matmul"], OPS["sampled_matmul"]
LAUNCHES = ["launch"] if DEVICE == "cuda" else ["launch", "cpu"]


def integers(M: int, K: int, density: float, V: int, bits: int) -> torch.Tensor:
    """A matrix of which a share of the vectors is not zero; of 16 bits numbers whose sums fit."""
    low, high = RANGES[bits] if bits < 16 else (-9000, 9001)
    chosen = (torch.rand(-(-M // V), K) < density).repeat_interleave(V, 0)[:M]
    return torch.randint(low, high + 1, (M, K)) * chosen


W = SparseInt.from_dense(integers(21, 40, 0.5, 8, 8))
SAMPLES = [(SPARSE, (W.vectors, int8(40, 5))), (SAMPLED, (int8(21, 6), int8(40, 6), *W.vectors[1:3], 8))]
test_opcheck = common.opcheck(SAMPLES)

# odd sizes, one row, one column of x, more than one tile of columns and of vectors
SHAPES = [(21, 40, 5), (1, 1, 1), (70, 301, 131)]


def assert_product(a, w, x, implementations=("reference", *LAUNCHES)):
    want = (a @ x.long()).int()
    w, x = w.to(DEVICE), x.to(DEVICE)
    for name in implementations:
        y = getattr(SPARSE, name)(w.vectors, x)
        assert y.dtype == torch.int32 and torch.equal(y.cpu(), want), name


@pytest.mark.parametrize("density", [0.0, 0.02, 0.3, 1.0])
@pytest.mark.parametrize("bits", RANGES)
@pytest.mark.parametrize("V", [8, 16, 32, 64])
def test_the_product_is_exact(V, bits, density):
    for M, K, N in SHAPES:
        a, x = integers(M, K, density, V, bits), int8(K, N)
        w = SparseInt.from_dense(a, block=V, bits=bits)
        assert_product(a, w, x)
        assert torch.equal(sparse_matmul(w.to(DEVICE), x.to(DEVICE)).cpu(), (a @ x.long()).int())


@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("V", [8, 16, 32, 64])
def test_the_sampled_product_is_exact(V, density):
    for M, N, E in SHAPES:
        strips = -(-M // V)
        mask = (torch.rand(strips, N) < density).repeat_interleave(V, 0)[:M]
        pattern = SparseInt.from_dense(mask.int(), block=V)
        vectors = pattern.vectors
        q, k = int8(M, E), int8(N, E)
        whole = torch.nn.functional.pad(q.long() @ k.long().t(), (0, 0, 0, strips * V - M)).view(strips, V, N)
        want = whole[strips_of(vectors.offsets, len(vectors.column_index)), :, vectors.column_index.long()].int()
        args = (q, k, vectors.column_index, vectors.offsets, V)
        for name in ("reference", *LAUNCHES):
            y = getattr(SAMPLED, name)(*(t.to(DEVICE) if isinstance(t, torch.Tensor) else t for t in args))
            assert y.dtype == torch.int32 and torch.equal(y.cpu(), want), name
        assert torch.equal(sampled_matmul(q.to(DEVICE), k.to(DEVICE), pattern.to(DEVICE)).cpu(), want)


@pytest.mark.parametrize("V, bits", [(8, 4), (8, 8), (16, 16)])
def test_strips_without_vectors_and_sizes_of_zero(V, bits):
    """The first, one in the middle and the last have none."""
    a = integers(5 * V, 30, 1.0, V, bits)
    for strip in (0, 2, 4):
        a[strip * V : (strip + 1) * V] = 0
    assert_product(a, SparseInt.from_dense(a, block=V, bits=bits), int8(30, 9))
    for M, K, N in ((0, 30, 9), (5, 30, 0), (5, 0, 9)):
        a = torch.ones(M, K, dtype=torch.int64)
        assert_product(a, SparseInt.from_dense(a, block=V, bits=bits), int8(K, N))


@pytest.mark.parametrize("bits", RANGES)
def test_the_largest_sums(bits):
    """The most that an int32 takes, of either sign, and in the second row of its strip."""
    magnitude = 32639 if bits == 16 else -RANGES[bits][0]
    counts = {4: 1000, 8: 131071, 16: 16777215 // (32639 + 128)}
    a = torch.full((2, counts[bits]), magnitude if bits == 16 else -magnitude)
    a[0] = 0
    w, x = SparseInt.from_dense(a, bits=bits), torch.full((counts[bits], 2), -128, dtype=torch.int8)
    if bits == 8:
        assert int((a @ x.long()).max()) == 131071 << 14 == (1 << 31) - (1 << 14)
    x[:, 1] = 127
    assert_product(a, w, x, ("reference", "cpu") if DEVICE == "cpu" else ("reference", "launch"))


def test_a_matrix_of_few_vectors_is_multiplied_as_csr():
    """Both ways of a CPU, in fp32 and in fp64, which a row's sum decides."""
    for density, magnitude in ((0.02, 127), (0.9, 127), (0.02, 32639), (0.9, 300)):
        a = integers(96, 700, density, 8, 8).sign() * magnitude
        w = SparseInt.from_dense(a, bits=8 if magnitude < 128 else 16)
        assert_product(a, w, int8(700, 11), ("cpu",) if DEVICE == "cpu" else ("launch",))


def test_fp32_products_in_bf16_are_exact_too():
    """torch may multiply fp32 in bf16, which holds 8 bits and not 16."""
    a, b = integers(64, 512, 1.0, 8, 8), integers(64, 512, 1.0, 8, 16) % 8000
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        for numbers, bits in ((a, 8), (b, 16)):
            assert_product(numbers, SparseInt.from_dense(numbers, bits=bits), int8(512, 64), ("cpu",))
    finally:
        torch.set_float32_matmul_precision(precision)


@pytest.mark.skipif(DEVICE == "cuda", reason="a launch a case under the interpreter")
@settings(max_examples=25, deadline=None)
@given(data=st.data(), V=st.sampled_from([8, 16]), bits=st.sampled_from([4, 8, 16]))
def test_any_numbers(data, V, bits):
    """One by one, in Python's integers."""
    M, K, N = (data.draw(st.integers(1, n)) for n in (20, 6, 3))
    draw = lambda low, high, n: data.draw(st.lists(st.integers(low, high), min_size=n, max_size=n))
    a, x = draw(*RANGES[bits], M * K), draw(-128, 127, K * N)
    w = SparseInt.from_dense(torch.tensor(a).view(M, K), block=V, bits=bits)
    want = [[sum(a[m * K + k] * x[k * N + n] for k in range(K)) for n in range(N)] for m in range(M)]
    for name in ("reference", *LAUNCHES):
        assert getattr(SPARSE, name)(w.vectors, torch.tensor(x, dtype=torch.int8).view(K, N)).tolist() == want


def test_a_row_that_a_kernel_leaves_out_is_seen(planted):
    def without_the_last(right, w, x):
        return right(
            w._replace(column_index=w.column_index.clone().index_fill_(0, torch.tensor([len(w.column_index) - 1]), 0)),
            x,
        )

    a, x = integers(21, 40, 1.0, 8, 8), int8(40, 5)
    planted("sparse_matmul", without_the_last)
    assert not torch.equal(sparse_matmul(SparseInt.from_dense(a), x), (a @ x.long()).int())


def test_compile():
    x, q, k = int8(40, 5), int8(21, 6), int8(40, 6)
    f = lambda x, q, k: (sparse_matmul(W, x), sampled_matmul(q, k, W))
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for ours, eager in zip(compiled(x, q, k), f(x, q, k), strict=True):
        assert torch.equal(ours, eager)


X = r"x must be int8 \[40, \.\] on cpu, where the sparse matrix is, got"
ERRORS = [
    (lambda: sparse_matmul(W, int8(39, 5)), rf"sparse_matmul: {X} torch.int8 \(39, 5\)"),
    (lambda: sparse_matmul(W, torch.zeros(40, 5)), rf"{X} torch.float32 \(40, 5\)"),
    (lambda: sparse_matmul(W, int8(40)), rf"{X} torch.int8 \(40,\)"),
    (lambda: sparse_matmul(W, int8(40, 5).to("meta")), rf"{X} torch.int8 \(40, 5\) on meta"),
    (
        lambda: sampled_matmul(int8(20, 6), int8(40, 6), W),
        r"sampled_matmul: q must be int8 \[21, .*, got torch.int8 \(20",
    ),
    (lambda: sampled_matmul(int8(21, 6), int8(39, 6), W), r"k must be int8 \[40, .*, got torch.int8 \(39, 6\)"),
    (lambda: sampled_matmul(int8(21, 6), int8(40, 7), W), "q and k must be equally wide, got 6 and 7"),
    (lambda: sampled_matmul(int8(21, 6).int(), int8(40, 6), W), "q must be int8"),
    (
        lambda: sampled_matmul(*(torch.empty(n, 131072, dtype=torch.int8) for n in W.shape), W),
        "q must have at most 131071 columns, or a sum may overflow, got 131072",
    ),
]


@pytest.mark.parametrize("call, match", ERRORS)
def test_errors(call, match):
    with pytest.raises(ValueError, match=match):
        call()


@pytest.mark.gpu
@pytest.mark.parametrize("V, bits", [(8, 8), (8, 4), (16, 16), (64, 8)])
def test_on_a_gpu(V, bits):
    """Twice the same, and exactly the reference, at the sizes of a layer."""
    a = integers(4095, 1021, 0.1, V, bits)
    w, x = SparseInt.from_dense(a, block=V, bits=bits).to(DEVICE), int8(1021, 2051).to(DEVICE)
    y = SPARSE.launch(w.vectors, x)
    assert torch.equal(y, SPARSE.reference(w.vectors, x)) and torch.equal(y, SPARSE.launch(w.vectors, x))
    q, k = int8(4095, 200).to(DEVICE), int8(1021, 200).to(DEVICE)
    places = *w.vectors[1:3], V
    assert torch.equal(SAMPLED.launch(q, k, *places), SAMPLED.reference(q, k, *places))
