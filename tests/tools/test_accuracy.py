"""Rounding stays within the limits, and what is wrong in a thousandth does not."""

import math

import pytest
import torch

from tpfuse.tools.accuracy import kernel_limit, largest_error, op_limit, rms_error, split_limit

EXACT = torch.randn(64, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
ERRORS = [rms_error, largest_error]


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_is_relative(error):
    assert error(1.001 * EXACT, EXACT) == pytest.approx(1e-3) == error(1.001e6 * EXACT, 1e6 * EXACT)
    assert error(EXACT, EXACT) == error(EXACT[:0], EXACT[:0]) == 0.0
    assert error(torch.full((1,), 1e-3), torch.zeros(1)) == pytest.approx(1e-3)


@pytest.mark.parametrize("error", ERRORS)
def test_no_number_and_another_shape_are_above_every_limit(error):
    assert math.isnan(error(EXACT * float("nan"), EXACT)) and error(EXACT[:1], EXACT) == float("inf")


def test_one_wrong_element_is_the_largest_error():
    wrong = EXACT.clone()
    wrong[3, 5] += EXACT.abs().max()
    assert largest_error(wrong, EXACT) == pytest.approx(1.0) and rms_error(wrong, EXACT) < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rounding_is_within_the_limits(dtype):
    rounded = EXACT.to(dtype)
    error = rms_error(rounded, EXACT)
    assert 0 < error < min(split_limit(error, dtype), kernel_limit(error, dtype, 4096))
    assert 0 < largest_error(rounded, EXACT) < op_limit(dtype) < op_limit(dtype, 2)
    assert max(kernel_limit(0.0, dtype, 4096), split_limit(0.0, dtype)) < 0.2


def test_a_sum_one_by_one_is_within_the_limit_of_a_kernel():
    """A row at a time, as a plain kernel adds a column; torch adds in pairs."""
    x = torch.randn(8192, 64, generator=torch.Generator().manual_seed(0))
    exact, one_by_one = x.double().sum(0), torch.zeros(64)
    for row in x:
        one_by_one += row
    assert rms_error(one_by_one, exact) <= kernel_limit(rms_error(x.sum(0), exact), torch.float32, 64)


def test_a_thousandth_in_fp32_is_above_the_limits():
    error = rms_error(EXACT.float(), EXACT)
    assert 1e-3 > 100 * max(split_limit(error, torch.float32), kernel_limit(error, torch.float32, 4096))
    assert 1e-3 > 100 * op_limit(torch.float32, 2)


@pytest.mark.parametrize("numbers", [1, 9, 100])
def test_a_unit_in_the_last_place_of_one_number_is_within_the_limit_of_a_kernel(numbers):
    """Where torch happens to have none; four units are beyond it."""
    exact = torch.ones(numbers, dtype=torch.float64)
    other = exact.clone()
    other[0] += torch.finfo(torch.bfloat16).eps
    assert rms_error(other, exact) <= kernel_limit(0.0, torch.bfloat16, numbers) < rms_error(1 + 4 * (other - 1), exact)


def test_limits_as_the_documents_have_them():
    assert op_limit(torch.float32) == pytest.approx(4.3e-6, rel=0.01)
    assert op_limit(torch.bfloat16) == pytest.approx(0.031, rel=0.01)


def test_tf32_counts_as_bf16(monkeypatch):
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert op_limit(torch.float32) == pytest.approx(0.031, rel=0.01)
