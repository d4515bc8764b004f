import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels import common
from tests.no_sync import GPU, no_sync
from tpfuse.kernels import select_large
from tpfuse.kernels.runtime.op import OPS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP32, BF16 = torch.float32, torch.bfloat16
SELECT = OPS["select_large"]
X = torch.tensor([0.0, -3.0, 1.0, math.nan, 2.0, -0.0, -math.inf, 1.5])
SAMPLES = [(SELECT, (X, 1.5, 3)), (SELECT, (X.bfloat16(), 0.0, 10))]
test_opcheck = common.opcheck(SAMPLES)


def one_by_one(x, threshold, most):
    """-> index, value, count as Python's lists and numbers have them"""
    n, every = len(x), [(i, v) for i, v in enumerate(x.tolist()) if abs(v) >= threshold and v != 0]
    room = every[:most] + [(n, 0.0)] * (most - len(every))
    return [i for i, _ in room], [v for _, v in room], len(every)


def assert_selected(found, x, threshold, most):
    index, value, count = found
    assert (index.dtype, value.dtype, count.dtype) == (torch.int64, x.dtype, torch.int64)
    assert (index.tolist(), value.tolist(), count.item()) == one_by_one(x, threshold, most)


# ---- the op ----


@pytest.mark.parametrize("most", [0, 3, 8, 20])
@pytest.mark.parametrize("threshold", [0, 1.5, math.inf])
def test_entries_come_in_their_order(threshold, most):
    for dtype in (FP32, BF16, torch.float64):
        assert_selected(select_large(X.to(dtype), threshold, most), X.to(dtype), threshold, most)


def test_bf16_is_compared_in_fp32():
    """A threshold is not rounded to x's dtype: 1.001 would be 1 there."""
    assert select_large(torch.ones(3).bfloat16(), 1.001, 3)[2] == 0
    assert select_large(torch.full((3,), 0.1), 0.1, 3)[2] == 3


def test_zeros_are_not_counted_whatever_the_threshold():
    """1e-50 is 0 in fp32."""
    assert select_large(torch.zeros(4), 1e-50, 4)[2] == 0


def test_nothing_is_differentiated():
    assert not any(t.requires_grad for t in select_large(X.clone().requires_grad_(), 1.0, 3))


def test_compile():
    compiled = torch.compile(lambda x: select_large(x, 1.0, 3), fullgraph=True, backend="aot_eager")
    for ours, eager in zip(compiled(X), select_large(X, 1.0, 3), strict=True):
        assert torch.equal(ours, eager)


def test_the_launcher_waits_for_nothing():
    with no_sync() as watch:
        select_large(torch.empty(10_000, device=GPU), 1.0, 100)
    assert watch.started["_mark_kernel"] == watch.started["_place_kernel"] == 1


ERRORS = [
    (X[None], {}, r"x must be \[n\] of floating numbers, got \[1, 8\] torch.float32"),
    (X.long(), {}, "got .* torch.int64"),
    (X, dict(threshold=-1.0), r"threshold must lie in \[0, inf\], got -1.0"),
    (X, dict(threshold=math.nan), r"threshold must lie in \[0, inf\], got nan"),
    (X, dict(most=-1), "most must be at least 0, got -1"),
    (X, dict(most=1.5), "most must be an integer, got 1.5"),
]


@pytest.mark.parametrize("x, options, match", ERRORS)
def test_errors(x, options, match):
    with pytest.raises(ValueError, match=f"select_large: .*{match}"):
        select_large(x, **dict(threshold=1.0, most=3) | options)


# ---- the kernels; under the interpreter where there is no GPU ----


def drawn(n, dtype=FP32):
    """NaN, infinities and zeros among normal numbers."""
    x = torch.randn(n, device=DEVICE)
    for i, odd in enumerate((math.nan, 0.0, math.inf, -0.0, -math.inf, 1e-42)):
        x[i::61] = odd
    return x.to(dtype)


def assert_launched(*arguments):
    """Bitwise, and twice the same."""
    for _ in range(2):
        for ours, theirs in zip(SELECT.launch(*arguments), SELECT.reference(*arguments), strict=True):
            assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


# nothing, one entry, less than an octet, a prime, a block and one entry beside it, ends within an octet of a third
@pytest.mark.parametrize("n", [0, 1, 7, 1009, 4096, 4097, 10_007])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_kernels(poisoned, n, dtype):
    for threshold in (0.0, 1.7, 1e30):  # nearly all, a tenth, infinities
        for most in (0, n // 20, n + 5000):
            assert_launched(drawn(n, dtype), threshold, most)


def test_kernels_on_equal_entries(poisoned):
    """All, none, all of the last block alone; 0.1 is the nearest in fp32 on both sides."""
    x = torch.full((9000,), 0.1, device=DEVICE)
    for given_ in (
        (x, 0.1, 9000),
        (x, 0.1, 100),
        (x, 0.2, 100),
        (x * (torch.arange(9000, device=DEVICE) > 8191), 0.1, 50),
    ):
        assert_launched(*given_)


@pytest.mark.skipif(DEVICE == "cuda", reason="a launch a case under the interpreter")
@settings(max_examples=25, deadline=None)
@given(
    values=st.lists(st.floats(width=32) | st.sampled_from([0.0, -0.0, 1.0, -1.0]), max_size=40),
    threshold=st.floats(0, 2, width=32) | st.just(math.inf),
    most=st.integers(0, 50),
)
def test_kernels_on_any_numbers(values, threshold, most):
    x = torch.tensor(values, dtype=FP32)
    assert_selected(SELECT.launch(x, threshold, most), x, threshold, most)


@pytest.mark.skipif(DEVICE == "cuda", reason="counted by the interpreter")
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_declared_bytes(dtype):
    """Where fewer are chosen than there is room for, fewer are read again."""
    from tests.kernels.interpreter_bytes import assert_declared

    x = torch.ones(10_000, dtype=dtype)
    for most in (100, 10_000):
        assert_declared(SELECT, (x, 1.0, most))
    with pytest.raises(AssertionError, match="declared"):
        assert_declared(SELECT, (x, 2.0, 100))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("n, most", [(6_553_600, 81_920), (6_553_601, 200_000), (1 << 20, 1 << 20)])
def test_on_a_gpu(poisoned, n, most, dtype):
    assert_launched(drawn(n, dtype), 2.3, most)


@pytest.mark.gpu
def test_far_entries_on_a_gpu():
    at = torch.tensor([5, (1 << 31) - 1, 1 << 31, (1 << 31) + 4096], device=DEVICE)
    x = torch.zeros((1 << 31) + 4097, dtype=BF16, device=DEVICE)
    x[at] = 3.0
    index, value, count = SELECT.launch(x, 3.0, 4)
    assert torch.equal(index, at) and torch.equal(value, x[at]) and count == 4
