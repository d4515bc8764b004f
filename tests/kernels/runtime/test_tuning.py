"""Launch parameters are a pure function of kernel, arch, dtype and shape bucket."""

import json

import pytest
import torch

from tpfuse.kernels.runtime import tuning as _tuning
from tpfuse.kernels.runtime.tuning import TABLE, bucket, tuned


@pytest.mark.parametrize(
    "dtype, shape, name",
    [
        (torch.bfloat16, (4000, 1024), "bf16 4096x1024"),
        (torch.float32, (1,), "fp32 1"),
        (torch.float16, (0, 5), "fp16 1x8"),
    ],
)
def test_a_bucket_rounds_up(dtype, shape, name):
    assert bucket(dtype, shape) == name


def test_what_was_measured_goes_over_the_default(monkeypatch):
    table = {"sm_90": {"k": {"bf16 4096x1024": {"num_warps": 8}}}}
    monkeypatch.setattr(_tuning, "_table", lambda: table)
    default = {"num_warps": 4, "A": 128}
    assert tuned("k", "sm_90", torch.bfloat16, (3000, 1000), default) == {"num_warps": 8, "A": 128}
    for kernel, arch, dtype, shape in (
        ("other", "sm_90", torch.bfloat16, (3000, 1000)),
        ("k", "sm_80", torch.bfloat16, (3000, 1000)),
        ("k", "sm_90", torch.float16, (3000, 1000)),
        ("k", "sm_90", torch.bfloat16, (3000, 1025)),
    ):
        assert tuned(kernel, arch, dtype, shape, default) == default


def test_the_table_is_well_formed():
    for arch, kernels in json.loads(TABLE.read_text()).items():
        assert arch.startswith(("sm_", "gfx")) or (arch == "cpu" and list(kernels) == ["overlap"])
        for buckets in kernels.values():
            assert all(isinstance(parameters, dict) for parameters in buckets.values())
