"""MFU and HFU against the published table, flops against what runs, and the meter."""

from dataclasses import replace

import pytest
import torch

from tpfuse.models import GPTConfig
from tpfuse.tools.ledger import ThroughputMeter, hardware_flops, known_peak, mfu, model_flops, utilization
from tpfuse.tools.ledger.dryrun import Plan, run

SMALL = GPTConfig(vocab_size=512, max_positions=128, hidden_size=64, num_layers=3, num_heads=4)


@pytest.mark.parametrize("row", mfu.PUBLISHED, ids=lambda row: row.name)
def test_the_published_table(row):
    """To 0.2 points of MFU and HFU as printed there, with one decimal."""
    found = row.recomputed()
    assert abs(round(found.mfu, 1) - row.mfu) < 0.2 + 1e-9 and abs(round(found.hfu, 1) - row.hfu) < 0.2 + 1e-9


@pytest.mark.parametrize("row", mfu.PUBLISHED, ids=lambda row: row.name)
def test_the_papers_formula(row):
    B, s, L, h, V = row.batch, 2048, row.layers, row.width, 51200
    assert model_flops(row.config, s, B) == pytest.approx(72 * B * s * L * h * h * (1 + s / (6 * h) + V / (12 * L * h)))
    assert hardware_flops(row.config, s, B, "selective") == pytest.approx(
        72 * B * s * L * h * h * (1 + s / (3 * h) + V / (12 * L * h))
    )


def test_model_flops_are_those_that_run():
    """GEMMs to the flop; attention's products are all keys here, while the causal kernel computes half, and its own S
    again backward."""
    done = run(SMALL, Plan(seq=128, micro_batch=2, dtype=torch.float32))
    attention = 12 * 3 * 2 * 128 * 128 * 64
    assert done.work.gemm_flops == model_flops(SMALL, 128, 2) - attention
    assert done.work.attention_flops == pytest.approx(attention * 7 / 6 / 2, rel=0.01)


def test_model_flops_of_experts_are_those_that_run():
    experts = dict(gated=True, activation="silu", mlp_bias=False, num_experts=8, experts_per_token=2, ffn_size=48)
    model = replace(SMALL, **experts)
    done = run(model, Plan(seq=128, micro_batch=2, dtype=torch.float32))
    assert done.work.gemm_flops == model_flops(model, 128, 2) - 12 * 3 * 2 * 128 * 128 * 64
    dense = replace(SMALL, gated=True, activation="silu", mlp_bias=False, ffn_size=2 * 48)
    routers = 6 * 3 * 2 * 128 * 64 * 8
    assert model_flops(model, 128, 2) == model_flops(dense, 128, 2) + routers  # of two experts, one twice as wide
    shared = replace(SMALL, **experts, shared_size=40, shared_gate=True)
    more = run(shared, Plan(seq=128, micro_batch=2, dtype=torch.float32)).work.gemm_flops - done.work.gemm_flops
    assert more == model_flops(shared, 128, 2) - model_flops(model, 128, 2)


def test_recompute_has_a_name():
    with pytest.raises(ValueError, match="recompute must be one of none, selective, full, got 'some'"):
        hardware_flops(SMALL, 128, 1, "some")


def test_nothing_takes_no_time():
    with pytest.raises(ValueError, match="seconds must be positive, got 0"):
        utilization(SMALL, seq=128, batch=1, seconds=0, devices=1, peak=1e12)


@pytest.mark.parametrize(
    "name, peak",
    [
        *(("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA A100-PCIE-40GB", 312e12), ("NVIDIA A100 80GB PCIe", 312e12)),
        *(("NVIDIA H200", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA H100 80GB HBM3", 989e12)),
        *(("NVIDIA GH200 144G HBM3e", 989e12), ("Tesla V100-SXM2-32GB", 125e12), ("AMD Instinct MI300X", 1307e12)),
        *(("NVIDIA L4", 121e12), ("NVIDIA L40S", 362e12), ("NVIDIA A10", 125e12)),
        *((name, None) for name in ("", "NVIDIA L40", "NVIDIA A10G", "NVIDIA RTX A1000 Laptop GPU", "NVIDIA H100 NVL")),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
    ],
)
def test_peaks_that_are_known(name, peak):
    assert known_peak(name) == peak


def test_the_meter(monkeypatch):
    clock = iter([0.0, 2.0, 10.0, 11.0, 20.0, 21.0])  # steps of 2, 1 and 1 s; what lies between is not counted
    monkeypatch.setattr(mfu.time, "perf_counter", lambda: next(clock))
    meter = ThroughputMeter(SMALL, seq=128, batch=4, devices=2, peak=1e9, window=2)
    assert str(meter) == "- tokens/s" and meter.mfu is None
    for expected in (2.0, 1.5, 1.0):
        meter.start()
        meter.stop()
        assert meter.seconds == expected
    assert meter.tokens_per_s == meter.last_tokens_per_s == 512
    assert meter.flops_per_s == model_flops(SMALL, 128, 4) / 2
    assert meter.mfu == pytest.approx(100 * meter.flops_per_s / 1e9)
    assert str(meter).startswith("512 tokens/s, ") and "FLOP/s a device, MFU " in str(meter)
    with pytest.raises(ValueError, match="without start"):
        meter.stop()


def test_no_peak_no_mfu():
    meter = ThroughputMeter(SMALL, seq=128, batch=4)
    meter.start()
    meter.stop()
    assert meter.mfu is None and "MFU" not in str(meter)
