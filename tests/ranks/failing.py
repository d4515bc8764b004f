"""One rank of several raises: ``python failing.py WHERE``, under torchrun, by tests/ranks/test_failure.py."""

import sys
import time

import torch.distributed as dist

from tests.models.common import GPT_CONFIG, batch
from tpfuse import TensorParallel
from tpfuse.models import GPT


def fail(*_):
    if dist.get_rank() == 1:
        raise KeyError("document 7 has no text")


def main(where: str) -> None:
    dist.init_process_group("gloo")
    model, call = GPT(GPT_CONFIG, tp=TensorParallel(dist.group.WORLD, sequence_parallel=True)), batch(GPT_CONFIG)
    loss = model(**call).loss
    if where == "between calls":
        fail()
    if where == "forward":
        model.blocks[1].register_forward_pre_hook(fail)
        model(**call)
    if where == "backward":
        loss.register_hook(fail)
    began = time.monotonic()
    try:
        loss.backward()
        model(**call)
    finally:
        print(f"rank {dist.get_rank()} waited for {time.monotonic() - began:.0f} s", flush=True)


main(sys.argv[1])
