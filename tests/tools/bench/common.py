"""Parts that tests of benchmarks share."""

import torch

from tpfuse.tools.bench.definition import Random, load
from tpfuse.tools.bench.roofline import Card

CPU = torch.device("cpu")
CARD = Card("a card", 1000.0, {"bf16": 100.0, "fp32": 10.0})
LAYER_NORM = load("layer_norm")


def random(seed=0, dtype=torch.float32):
    return Random(dtype, CPU, seed)
