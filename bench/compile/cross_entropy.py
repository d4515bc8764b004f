"""cross_entropy: vocabularies of a power of two, of an odd size, and smaller than a chunk."""

import torch

from bench.compile._compile import Call, meta
from tpfuse.kernels._cross_entropy import bwd_launch, stats_launch

M = 4096
CHUNK = lambda c: c["LANES"] * c["WIDTH"]  # noqa: E731


def both(V: int, dtype: torch.dtype = torch.bfloat16):
    def run():
        logits, labels, rows = meta(M, V, dtype=dtype), meta(M, dtype=torch.int64), meta(M, dtype=torch.float32)
        stats_launch(logits, labels, 0, True)
        bwd_launch(logits, labels, rows, rows[:1].expand(M), 0, V, -100, 0.1, 1e-4)

    return run


CALLS = {f"V={V}": Call(both(V), dict(_stats_kernel=CHUNK, _bwd_kernel=CHUNK)) for V in (131072, 50257, 1000, 100)}
CALLS["V=131072 fp32"] = Call(both(131072, torch.float32), dict(_stats_kernel=CHUNK, _bwd_kernel=CHUNK))
