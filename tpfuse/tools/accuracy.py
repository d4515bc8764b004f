"""Errors that rounding explains: the limits of :func:`tpfuse.check_parity`, the doctor and the benchmarks.

A result is compared with the same computation in fp64 of the same, already rounded inputs.  An error is the size of the
difference over the size of the exact value: sizes are RMS norms (:func:`rms_error`) where a typical element counts, and
largest elements (:func:`largest_error`) where a single wrong element must show.  With eps the distance of 1 to the next
number of a dtype, rounding explains an error up to

    split_limit    max(4 e, 16 eps)                        of a model split over ranks; e: its error on one rank.  The
                                                           same terms are summed in another order, so errors are of one
                                                           size, but not equal: 4 times.  Where one rank happens to have
                                                           next to none (sums of few terms), 16 units in the last place
    kernel_limit   2 e + eps / sqrt(min(m, 100))           of m numbers of a kernel; e: torch's error in the same dtype,
                   + 64 eps(fp32) / 2                      of the same arithmetic in one order or another.  The second
                                                           term is the RMS of a unit in the last place of one number,
                                                           or of one in each hundred, where torch has none; the last is
                                                           of sums in fp32, as below: n random terms one by one err by
                                                           sqrt(n / 6) eps(fp32) / 2, where torch adds in pairs
    op_limit       n (8 eps / 2 + 64 eps(fp32) / 2)        of n ops in a chain, where nothing computes in the same dtype
                                                           beside it: largest elements, of a kernel forward and backward
                                                           that rounds 8 times to its dtype, and sums in fp32, of 64
                                                           additions that all err to one side.  No rounding may grow on
                                                           its way: that of z is multiplied by |z| in exp(z), so that
                                                           logits and scores must be of unit size
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

SUMS = 64 * torch.finfo(torch.float32).eps / 2  # of sums in fp32


def rms_error(result: Tensor, exact: Tensor) -> float:
    """Returns the RMS of the difference over that of the exact values; absolute where all of these are 0."""
    return _ratio(result, exact, lambda x: float(x.norm()))


def rms_errors(results: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    """Returns the :func:`rms_error` of each tensor."""
    return [rms_error(a, b) for a, b in zip(results, exact, strict=True)]


def largest_error(result: Tensor, exact: Tensor) -> float:
    """Returns the largest difference over the largest exact value; absolute where all of these are 0."""
    return _ratio(result, exact, lambda x: float(x.abs().max()))


def _ratio(result: Tensor, exact: Tensor, size: Callable[[Tensor], float]) -> float:
    """Returns the error: inf for another shape, NaN where a value is; no limit is above either."""
    if result.shape != exact.shape:
        return float("inf")
    if not exact.numel():
        return 0.0
    exact = exact.detach().double()
    difference = result.detach().to(exact.device, torch.float64) - exact
    return size(difference) / (size(exact) or 1.0)


def split_limit(one_rank: float, dtype: torch.dtype) -> float:
    """Returns the largest :func:`rms_error` of a split model; ``one_rank``: that of the same model on one rank."""
    return max(4.0 * one_rank, 16.0 * torch.finfo(dtype).eps)


def kernel_limit(torch_error: float, dtype: torch.dtype, numbers: int) -> float:
    """Returns the largest :func:`rms_error` of so many numbers of a kernel; ``torch_error``: that of plain torch in the
    same dtype."""
    return 2.0 * torch_error + torch.finfo(dtype).eps / min(max(numbers, 1), 100) ** 0.5 + SUMS


def op_limit(dtype: torch.dtype, ops: int = 1) -> float:
    """Returns the largest :func:`largest_error` of a chain of ``ops``.

    Where torch may multiply fp32 in TF32, fp32 counts as bf16: inputs are rounded to less than bf16's spacing.
    """
    tf32 = dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    rounding = torch.finfo(torch.bfloat16 if tf32 else dtype).eps / 2
    return ops * (8 * rounding + SUMS)
