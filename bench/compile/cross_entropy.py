"""cross_entropy: vocabularies of a power of two, of an odd size, and smaller than a chunk."""

import torch

from bench.compile._compile import Call, meta
from tpfuse.kernels.losses.options import Loss, Rows
from tpfuse.kernels.losses.triton import bwd_launch, stats_launch

M = 4096
CHUNK = lambda c: c["LANES"] * c["WIDTH"]


def both(V: int, dtype: torch.dtype = torch.bfloat16):
    def run():
        logits, labels, lse = meta(M, V, dtype=dtype), meta(M, dtype=torch.int64), meta(M, dtype=torch.float32)
        loss = Loss(V, label_smoothing=0.1, z_loss=1e-4)
        stats_launch(logits, labels, loss)
        bwd_launch(logits, Rows(labels, lse, dloss=lse[:1].expand(M)), loss)

    return run


CALLS = {f"V={V}": Call(both(V), dict(_stats_kernel=CHUNK, _bwd_kernel=CHUNK)) for V in (131072, 50257, 1000, 100)}
CALLS["V=131072 fp32"] = Call(both(131072, torch.float32), dict(_stats_kernel=CHUNK, _bwd_kernel=CHUNK))
