"""Launch parameters: what ``bench.tune`` measured for this arch, dtype and shape bucket, otherwise the kernel's own
safe default.

tuned.json is {arch: {kernel: {"bf16 4096x1024": {parameter: value}}}}; every size of a bucket is rounded up to a
power of two.  The lookup is a pure function of its arguments, so all ranks launch alike, and nothing is tuned while a
program runs.
"""

import functools
import json
import pathlib
from typing import Any

import torch

from .launch import next_power_of_2

LaunchConfig = dict[str, Any]  # constants and options of a launch, by their names
TABLE = pathlib.Path(__file__).with_name("tuned.json")
_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def bucket(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    """(torch.bfloat16, (4000, 1024)) -> "bf16 4096x1024" """
    return f"{_SHORT.get(dtype, str(dtype)[6:])} {'x'.join(str(next_power_of_2(size)) for size in shape)}"


def tuned(kernel: str, arch: str, dtype: torch.dtype, shape: tuple[int, ...], default: LaunchConfig) -> LaunchConfig:
    """``default`` with the parameters over it that were measured to be faster; an entry may name only some of them."""
    entries = _table().get(arch, {}).get(kernel)
    return default | entries.get(bucket(dtype, shape), {}) if entries else default


@functools.cache
def _table() -> dict[str, Any]:
    return json.loads(TABLE.read_text())
