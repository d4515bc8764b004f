"""reduce_bias_dropout_add_norm: every width that has launch parameters of its own, one rank and eight; peers' buffers; what is left out.

Vectors are fp32, and the key comes from rng, a tensor (1.3 instructions an element).  A loop over few chunks is unrolled and counts whole.
"""

import torch
from torch import Tensor

from bench.compile._compile import Call, meta
from tpfuse.kernels._fused_norm import Peers, fwd_launch, reduce_launch
from tpfuse.kernels._fused_norm_bwd import bwd_launch

M = 4096
WHERE = 0.1, 3, 0, 8
ROW = lambda c: c["ROWS"] * (c["A"] + c["B"])  # noqa: E731
COLUMNS = lambda c: c.get("ROWS", 1) * c["A"]  # noqa: E731
ELEMENTS = dict(_fwd_kernel=ROW, _bwd_kernel=ROW, _fwd_chunks_kernel=COLUMNS, _bwd_rows_kernel=COLUMNS, _bwd_columns_kernel=COLUMNS)
ELEMENTS |= dict(_reduce_vectors_kernel=COLUMNS, _apply_kernel=COLUMNS)
RNG = meta(3, dtype=torch.int64)


def vector(n: int) -> Tensor:
    return meta(n, dtype=torch.float32)


def both(D: int, R: int, rms: bool = False, post: bool = False, peers: bool = False):
    def run():
        h, mean, rstd, gamma = meta(M, D), vector(M), vector(M), vector(D)
        beta = None if rms else gamma
        parts = Peers(meta(R, dtype=torch.int64), M, D, h.dtype) if peers else meta(R, M, D)
        fwd_launch(parts, gamma, h, gamma, beta, RNG, *WHERE, 1e-5, rms)
        bwd_launch(parts, h, h, mean, rstd, gamma, RNG, *WHERE, rms, post, True, not rms, h.dtype, h.dtype)

    return run


def without_norm(D: int):
    def run():
        h = meta(M, D)
        reduce_launch(meta(8, M, D))
        fwd_launch(meta(8, M, D), None, h, None, None, RNG, *WHERE, 1e-5, False)
        bwd_launch(meta(8, M, D), h, None, None, None, None, RNG, *WHERE, False, False, True, False, h.dtype, h.dtype)

    return run


WIDTHS = 1024, 64, 768, 1000, 2560, 4096, 5120, 8192, 12288, 16384, 20480, 32768, 65537
CALLS = {f"D={D} R={R}": Call(both(D, R), ELEMENTS) for D in WIDTHS for R in (1, 8)}
SPILLS = dict(
    spills=dict(_bwd_kernel=8), why="two registers a thread, under Triton 3.6; without the limit of 128 half as many programs fit"
)
CALLS["D=1024 R=1"] = Call(both(1024, 1), ELEMENTS, **SPILLS)
CALLS |= {f"D={D} R=8 post rms": Call(both(D, 8, rms=True, post=True), ELEMENTS) for D in (768, 8192, 16384, 32768)}
CALLS |= {f"D={D} R=8 peers": Call(both(D, 8, peers=True), ELEMENTS) for D in (4096, 32768)}
CALLS |= {f"D={D} R=8 without norm": Call(without_norm(D), ELEMENTS) for D in (4096, 32768)}
