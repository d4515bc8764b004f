"""Counters belong to a stream; a kernel that is captured has its own."""

from contextlib import nullcontext
from types import SimpleNamespace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tpfuse.kernels.runtime.counters import COUNTERS, address, are_counters, counters

GPU = torch.device("cuda", 0)


def test_a_stream_has_one_set(monkeypatch):
    stream, capturing = 7, False
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=stream))
    monkeypatch.setattr("tpfuse.kernels.runtime.counters._made", {})
    with FakeTensorMode():  # GPU tensors without a GPU; made beneath it, they would need one
        monkeypatch.setattr("tpfuse.kernels.runtime.counters._disable_current_modes", nullcontext)
        first = counters(GPU)
        assert first.shape == (COUNTERS,) and first.dtype == torch.int32 and first.device == GPU
        assert counters(GPU) is first and are_counters(first)
        stream = 8
        assert counters(GPU) is not first
        stream, capturing = 7, True
        own, other = counters(GPU), counters(GPU)
        assert len({id(own), id(other), id(first)}) == 3 and own.shape == (COUNTERS,)
        assert not are_counters(own)  # so that the graph clears them, as a tensor that the call made


def test_outside_the_modes_of_a_call(monkeypatch):
    """What a recorder sees is made anew in each replay, and counters must stay."""
    monkeypatch.setattr("tpfuse.kernels.runtime.counters._made", {})
    device = torch.device("cpu")
    with FakeTensorMode():
        made = counters(device)
    assert type(made) is torch.Tensor and not made.any()
    assert address(device, 0) == made.data_ptr()
