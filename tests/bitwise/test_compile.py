"""Blocks that torch.compile traces sum by leaves as eager ones do.

Spans: tpfuse/sequence_parallel/forms/leafwise.py, tpfuse/kernels/runtime/shortcut.py.
"""

import pytest
import torch

from bench.bits.kinds import KINDS
from tpfuse import TensorParallel
from tpfuse.models import GPT


def step(kind, dtype, compiled):
    torch.compiler.reset()
    model = GPT(KINDS[kind], tp=TensorParallel(bitwise=8), seed=3).to(dtype).train()
    for block in model.blocks if compiled else ():
        block.compile(backend="eager", fullgraph=True)
    ids = torch.arange(26).view(2, 13)
    loss = model(ids, labels=ids, step=0).loss
    loss.backward()
    return loss, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["gpt2 odd", "llama"])
def test_traced_blocks(kind, dtype):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        (loss, gradients), (traced, others) = step(kind, dtype, False), step(kind, dtype, True)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(loss, traced)
    assert [name for name, gradient in gradients.items() if not torch.equal(gradient, others[name])] == []
