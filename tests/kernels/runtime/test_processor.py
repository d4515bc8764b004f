"""What decides the order of a sum on a CPU is read where the system says it."""

import json

import pytest
import torch

from tpfuse.kernels.runtime import processor


def test_what_is_said(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setitem(processor.LIMITS, "MKL_CBWR", "AVX2")
    said = processor.order_of_sums()
    assert said["threads"] == 7 and said["MKL_CBWR"] == "AVX2"
    assert said["instructions"].split()[0] == torch.backends.cpu.get_cpu_capability()
    assert ("MKL " in said["libraries"]) == torch.backends.mkl.is_available()
    assert json.loads(json.dumps(said)) == said


@pytest.mark.parametrize("text, expected", [("vendor_id : x\nmodel name\t: A 1\nmodel name\t: B\n", "A 1"), ("", None)])
def test_the_model(text, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(processor.platform, "machine", lambda: "riscv")
    (tmp_path / "cpuinfo").write_text(text)
    assert processor.model_name(tmp_path) == (expected or "riscv")
    assert processor.model_name(tmp_path / "absent") == "riscv"


@pytest.mark.parametrize(
    "flags, limit, expected",
    [
        (("AVX512", "amx_bf16"), None, True),
        (("AVX512", "amx_bf16"), "avx512_core_amx", True),
        (("AVX512", "amx_bf16"), "ALL", True),
        (("AVX512", "amx_bf16"), "AVX512_CORE_BF16", False),
        (("AVX512", "avx512_bf16"), None, False),
    ],
)
def test_tiles_of_bf16(monkeypatch, flags, limit, expected):
    monkeypatch.setattr(processor, "instructions", lambda: flags)
    monkeypatch.setitem(processor.LIMITS, "ONEDNN_MAX_CPU_ISA", limit)
    monkeypatch.setitem(processor.LIMITS, "DNNL_MAX_CPU_ISA", None)
    assert processor.multiplies_tiles.__wrapped__() is expected
