"""The embedding lookup: a vocabulary, a long batch (whose chunks are longer), widths that are not aligned."""

import torch

from bench.compile._compile import Call, meta
from tpfuse.kernels.lookup.triton import bwd_launch, fwd_launch

TILE = lambda c: c["ROWS"] * c["A"]
ELEMENTS = dict(_lookup_kernel=TILE, _chunk_sums_kernel=TILE, _row_sums_kernel=TILE)


def both(M: int, V: int, D: int, dtype: torch.dtype = torch.bfloat16):
    def run():
        ids = meta(M, dtype=torch.int64)
        fwd_launch(meta(V, D, dtype=dtype), ids, 0)
        bwd_launch(meta(M, D, dtype=dtype), ids, 0, V, dtype)

    return run


SHAPES = [(8192, 50304, 1024), (1 << 20, 32000, 768), (8192, 32000, 100), (8192, 32000, 4097)]
CALLS = {f"M={M} V={V} D={D}": Call(both(M, V, D), ELEMENTS) for M, V, D in SHAPES}
CALLS |= {f"M={M} V={V} D={D} fp32": Call(both(M, V, D, torch.float32), ELEMENTS) for M, V, D in SHAPES[:1]}
