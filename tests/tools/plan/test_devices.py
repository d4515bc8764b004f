"""A device's seconds: the lines of its roofline, its launch, and this machine's calibrated lines."""

import pytest
import torch

from tpfuse.tools.ledger.aten import ATTENTION, COMMUNICATION, ELEMENTWISE, GEMM
from tpfuse.tools.ledger.machine import Line, Machine, Speeds
from tpfuse.tools.ledger.recorder import Entry
from tpfuse.tools.plan.devices import DEVICES, Device, device, local_cpu

A100 = DEVICES["a100-80gb"]
BF16 = torch.bfloat16


def entry(kind, *, flops=0, moved=0, op="linear", wire=0, scores=0):
    return Entry(op, kind, "forward", moved, 0, moved, flops=flops, wire=wire, scores=scores)


def test_a_call_takes_the_longer_of_its_flops_and_its_bytes():
    busy = entry(GEMM, flops=10**15, moved=10)
    assert A100.seconds(busy, BF16) == pytest.approx(3e-6 + 1e15 / (0.75 * 312e12))
    assert A100.seconds(busy._replace(kind=ATTENTION), BF16) == pytest.approx(3e-6 + 1e15 / (0.5 * 312e12))
    idle = entry(ELEMENTWISE, moved=10**12)
    assert A100.seconds(idle, BF16) == pytest.approx(3e-6 + 1 / (0.8 * 2.039))
    assert A100.seconds(entry(GEMM, flops=10**9, moved=10**12), BF16) == A100.seconds(idle, BF16)
    assert A100.seconds(entry(COMMUNICATION, moved=10**12, wire=10**9), BF16) == 0


def test_the_launch_is_hockneys_half_length():
    """A product of n_1/2 = launch x share x peak flops reaches half of what large ones do."""
    half = 3e-6 * 0.75 * 312e12
    assert half / A100.seconds(entry(GEMM, flops=half), BF16) == pytest.approx(0.75 * 312e12 / 2)


def test_the_last_wave_of_tiles_takes_as_long_as_a_full_one():
    product = lambda tiles: entry(GEMM, flops=10**12 * tiles)._replace(tiles=tiles)
    seconds = lambda tiles: A100.seconds(product(tiles), BF16) - A100.launch
    wave = 108e12 / (0.75 * 312e12)
    assert [seconds(t) for t in (1, 108, 109, 216)] == pytest.approx([wave, wave, 2 * wave, 2 * wave])
    unknown = A100._replace(multiprocessors=0)
    assert unknown.seconds(product(1), BF16) - A100.launch == pytest.approx(wave / 108)


def test_a_dtype_without_a_peak():
    flops = entry(GEMM, flops=1)
    with pytest.raises(ValueError, match="v100 has no peak for bfloat16, only for float16, float32"):
        DEVICES["v100"].seconds(flops, BF16)
    assert DEVICES["v100"].seconds(entry(ELEMENTWISE, moved=9), BF16) > 0  # bytes need none


@pytest.mark.parametrize("name", DEVICES)
def test_presets_are_whole(name):
    d = device(name)
    assert d.name == name and d.peak["float16"] > d.peak["float32"] > 1e13 and 1e10 < d.memory < d.bandwidth
    assert all(0 < share <= 1 for share in (d.gemm, d.attention, d.reached)) and 0 < d.launch < 1e-4


def test_an_unknown_device():
    with pytest.raises(ValueError, match="plan: device must be one of v100, a100-80gb, .*, got 'a1000'"):
        device("a1000")


LINES = {"linear": Line(1e-5, 1e-10, 1e-9), GEMM: Line(1e-3, 0, 0), ATTENTION: Line(0, 1e-10, 0, 1e-8)}
MACHINE = Machine(2, {"float32": {1: Speeds(LINES, {}, 1e-6), 2: Speeds(LINES, {}, 2e-6)}})


def test_local_cpu_as_calibrated():
    cpu = local_cpu(MACHINE, 2)
    seconds = cpu.seconds(entry(GEMM, flops=10**6, moved=10**4), torch.float32)
    assert seconds == pytest.approx(2e-6 + 1e-5 + 1e-4 + 1e-5)
    assert cpu.seconds(entry(GEMM, op="other"), torch.float32) == pytest.approx(1e-3 + 2e-6)  # a kind's own line
    assert cpu.seconds(entry(ATTENTION, op="other", scores=100), torch.float32) == pytest.approx(3e-6)
    assert cpu.seconds(entry(COMMUNICATION, wire=9), torch.float32) == 0
    assert cpu.memory == local_cpu(MACHINE, 1).memory / 2 > 1e8
    # more ranks than cores share them
    assert local_cpu(MACHINE, 4).seconds(entry(GEMM, op="other"), torch.float32) == pytest.approx(2 * (1e-3 + 2e-6))


def test_local_cpu_refuses_what_was_not_calibrated():
    with pytest.raises(ValueError, match="bfloat16 was not calibrated"):
        local_cpu(MACHINE, 1).seconds(entry(GEMM), BF16)
    with pytest.raises(ValueError, match="'add' was not calibrated; run python -m tpfuse calibrate"):
        local_cpu(MACHINE, 1).seconds(entry(ELEMENTWISE, op="add"), torch.float32)


def test_a_device_is_a_record():
    custom = Device("custom", {"float32": 1e12}, 1e11, 1e9, launch=0.0)
    assert custom.seconds(entry(GEMM, flops=75 * 10**10), torch.float32) == pytest.approx(1.0)
