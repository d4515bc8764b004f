"""reduce_bias_dropout_add_norm: every width that has launch parameters of its own, one rank and eight."""

import torch

from bench.compile._compile import Call, meta
from tpfuse.kernels._fused_norm import bwd_launch, fwd_launch

M = 4096
ROW = lambda c: c["ROWS"] * (c["A"] + c["B"])  # noqa: E731
COLUMNS = lambda c: c.get("ROWS", 1) * c["A"]  # noqa: E731
ELEMENTS = dict(_fwd_kernel=ROW, _bwd_kernel=ROW, _fwd_chunks_kernel=COLUMNS, _bwd_rows_kernel=COLUMNS, _bwd_columns_kernel=COLUMNS)
ELEMENTS |= dict(_reduce_kernel=COLUMNS)


def both(D: int, R: int):
    def run():
        h, mean, rstd, gamma = meta(M, D), *(meta(n, dtype=torch.float32) for n in (M, M, D))
        rng = meta(3, dtype=torch.int64)
        fwd_launch(meta(R, M, D), gamma, h, gamma, gamma, rng, 0.1, 3, 0, 8, 1e-5, False)
        bwd_launch(meta(R, M, D), h, h, mean, rstd, gamma, rng, 0.1, 3, 0, 8, False, False, True, True, h.dtype, h.dtype)

    return run


CALLS = {f"D={D} R={R}": Call(both(D, R), ELEMENTS) for D in (1024, 768, 4096, 5120, 8192, 16384, 32768, 65537) for R in (1, 8)}
