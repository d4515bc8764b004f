"""Parts that tests of benchmarks share."""

import torch

from tpfuse.tools.bench.definition import Random, load
from tpfuse.tools.bench.roofline import Card

CPU = torch.device("cpu")
CARD = Card("a card", 1000.0, {"bf16": 100.0, "fp32": 10.0})
LAYER_NORM = load("layer_norm")


def declared(counted):
    """The bytes that a call's ops move, second reads and partial sums included."""
    return sum(call.cost.read + call.cost.written for call in counted.calls)


def random(seed=0, dtype=torch.float32):
    return Random(dtype, CPU, seed)
