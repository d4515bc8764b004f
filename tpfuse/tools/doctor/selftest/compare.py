"""How far a result may be from the exact one: what rounding explains, and no more.

A result is compared with the same function in fp64, of the same (already rounded) inputs.  Its error is the largest
difference over the largest exact value.  Each op rounds its output to the dtype, and its sums are fp32:

    limit = roundings eps(dtype) / 2 + sums eps(fp32) / 2

with eps the distance of 1 to the next number.  A kernel, forward and backward, counts 8 roundings and sums of up to 64
additions that all err to one side; a block is a chain of ops, and counts CHAIN times as much.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..report import FAULT, Finding

ROUNDINGS, ADDITIONS, CHAIN = 8, 64, 4
ADVICE = "Do not train here before this is mended: run the tests of tpfuse, and look at torch, Triton and the device."


class Checked(NamedTuple):
    """One tensor's error against its limit."""

    dtype: torch.dtype
    tensor: str
    error: float
    limit: float

    @property
    def ok(self) -> bool:
        return self.error <= self.limit  # an error that is NaN is not


def limit(dtype: torch.dtype, chain: int = 1) -> float:
    """Returns the largest error that rounding explains; where torch may multiply fp32 in TF32, inputs are rounded to
    less than bf16's spacing."""
    loose = dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    eps = lambda dtype: torch.finfo(dtype).eps / 2
    return chain * (ROUNDINGS * eps(torch.bfloat16 if loose else dtype) + ADDITIONS * eps(torch.float32))


def error(ours: Tensor, exact: Tensor) -> float:
    """Returns the largest difference over the largest exact value; NaN and another shape are errors too."""
    if ours.shape != exact.shape:
        return float("inf")
    if not exact.numel():
        return 0.0
    ours, exact = ours.detach().to("cpu", torch.float64), exact.detach().to("cpu", torch.float64)
    return ((ours - exact).abs().max() / (exact.abs().max() or 1.0)).item()


def checked(ours: dict[str, Tensor], exact: dict[str, Tensor], dtype: torch.dtype, chain: int = 1) -> list[Checked]:
    """Returns every tensor's error."""
    return [Checked(dtype, name, error(ours[name], exact[name]), limit(dtype, chain)) for name in exact]


def findings(name: str, results: list[Checked], cause: str = "") -> list[Finding]:
    """Returns a line with the worst error by dtype, or one for each tensor that is wrong, with its error and limit."""
    wrong = {(result.dtype, result.tensor): result for result in results if not result.ok}.values()
    if wrong:
        words = lambda r: f"error {r.error:.1e} of {r.tensor} in {short(r.dtype)}, limit {r.limit:.1e}{cause}"
        return [Finding(name, words(result), FAULT, ADVICE) for result in wrong]
    dtypes = dict.fromkeys(result.dtype for result in results)
    worst = [max((r for r in results if r.dtype == d), key=lambda r: r.error) for d in dtypes]
    return [Finding(name, "; ".join(f"{short(r.dtype)} {r.error:.1e} of {r.limit:.1e} ({r.tensor})" for r in worst))]


def short(dtype: torch.dtype) -> str:
    """float32 -> fp32"""
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}.get(dtype, str(dtype))
