"""What it costs to hold replicated values equal: tpfuse.check_replicas beside a training step.

    python -m bench.replicas

Processor time of one rank on one core, best of five: the bits of a tensor, and those of all parameters and AdamW's
state of a GPT, which is what a check over data-parallel replicas reads; over tensor-parallel ranks alone it reads what
is not split.  The messages of a check without a difference are two heads of 24 bytes to each other rank of an axis.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from tpfuse.models import GPT, GPTConfig
from tpfuse.training.checkpoint.replicas import bits_held, bits_of

CONFIG = GPTConfig(vocab_size=8192, max_positions=256, hidden_size=384, num_layers=6, num_heads=6)
EVERY = 100  # calls: the default of tpfuse.watch_replicas


def seconds(action: Callable[[], Any]) -> float:
    times = []
    for _ in range(5):
        start = time.process_time()
        action()
        times.append(time.process_time() - start)
    return min(times)


def main() -> None:
    torch.set_num_threads(1)
    for dtype in torch.float32, torch.bfloat16:
        x = torch.randn(1 << 24).to(dtype)
        print(f"bits of {dtype}: {x.numel() * x.element_size() / seconds(lambda x=x: bits_of(x)) / 1e9:.1f} GB/s")
    model = GPT(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(CONFIG.vocab_size, (4, 256))

    def step() -> None:
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    count = sum(p.numel() for p in model.parameters())
    one_step = seconds(step)
    check = seconds(lambda: bits_held(model, optimizer, "all"))
    print(f"a check: {check:.3f} s for {count / 1e6:.1f} million parameters and AdamW; a step of 1,024 tokens takes")
    print(f"    {one_step:.2f} s, so that one check in {EVERY} steps costs {100 * check / EVERY / one_step:.2f} %")


if __name__ == "__main__":
    main()
