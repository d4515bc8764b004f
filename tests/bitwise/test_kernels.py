"""A step of a whole model by leaves whose ops run their launchers, under Triton's interpreter: one rank, against the
CPU's definition.  (At several ranks each kernel is compared by itself: tests/kernels.)

Spans: tpfuse/kernels/runtime/leaves.py and all kernels that sum by leaves.
"""

import pytest
import torch

from bench.bits.kinds import ALL_KINDS
from tests.bitwise.training import train
from tpfuse.kernels import replay
from tpfuse.kernels.runtime.leaves import check_device
from tpfuse.models import GPTConfig

pytest.importorskip("triton")
SMALL = GPTConfig(
    hidden_size=24, ffn_size=20, vocab_size=19, num_heads=4, num_layers=1, max_positions=16, dropout=0.1,
    embedding_dropout=0.1, attention_dropout=0.1,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled, not interpreted")
@pytest.mark.parametrize("saving", ["smallest", "fastest"])
def test_a_model_of_kernels(monkeypatch, saving):
    monkeypatch.setitem(ALL_KINDS, "small", SMALL)
    options = dict(dtype=torch.float32, saving=saving, bitwise=4, steps=1)
    defined = train(None, "small", **options)
    monkeypatch.setattr(replay, "REPLAY", False)
    replay.calls.LAUNCHED.add("cpu")
    try:
        launched = train(None, "small", **options)
    finally:
        replay.calls.LAUNCHED.discard("cpu")
    torch.testing.assert_close(launched.losses + launched.norms, defined.losses + defined.norms)
    for name, t in defined.tensors.items():
        if name.startswith("gradient"):
            torch.testing.assert_close(
                launched.tensors[name], t, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: name + m
            )


def test_fp64_on_a_gpu_is_refused():
    class OnGPU:
        is_cuda, device = True, torch.device("cuda:0")

        def __init__(self, dtype):
            self.dtype = dtype

    check_device("op", OnGPU(torch.bfloat16))
    with pytest.raises(ValueError, match="op: bitwise sums of fp64 are not built for GPUs, got a tensor on cuda:0"):
        check_device("op", OnGPU(torch.float64))
