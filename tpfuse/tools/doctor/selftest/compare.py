"""Errors of results against their limits (:func:`tpfuse.tools.accuracy.op_limit`), as lines of the report."""

from typing import NamedTuple

import torch
from torch import Tensor

from ...accuracy import largest_error, op_limit
from ..report import FAULT, Finding

ADVICE = "Do not train here before this is mended: run the tests of tpfuse, and look at torch, Triton and the device."


class TensorError(NamedTuple):
    """One tensor's largest error against its limit."""

    dtype: torch.dtype
    tensor: str
    error: float
    limit: float

    @property
    def ok(self) -> bool:
        return self.error <= self.limit  # an error that is NaN is not


def tensor_errors(
    results: dict[str, Tensor], exact: dict[str, Tensor], dtype: torch.dtype, ops: int = 1
) -> list[TensorError]:
    """Returns every tensor's error, of results that a chain of so many ``ops`` computed."""
    limit = op_limit(dtype, ops)
    return [TensorError(dtype, name, largest_error(results[name], exact[name]), limit) for name in exact]


def findings(name: str, results: list[TensorError], cause: str = "") -> list[Finding]:
    """Returns a line with the worst error by dtype, or one for each tensor that is wrong, with its error and limit."""
    wrong = {(result.dtype, result.tensor): result for result in results if not result.ok}.values()
    if wrong:
        text = lambda r: f"error {r.error:.1e} of {r.tensor} in {short(r.dtype)}, limit {r.limit:.1e}{cause}"
        return [Finding(name, text(result), FAULT, ADVICE) for result in wrong]
    dtypes = dict.fromkeys(result.dtype for result in results)
    worst = [max((r for r in results if r.dtype == d), key=lambda r: r.error) for d in dtypes]
    return [Finding(name, "; ".join(f"{short(r.dtype)} {r.error:.1e} of {r.limit:.1e} ({r.tensor})" for r in worst))]


def short(dtype: torch.dtype) -> str:
    """float32 -> fp32"""
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}.get(dtype, str(dtype))
