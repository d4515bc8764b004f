"""embed_finish: GPT (dropout, then norm) and BERT (norm, then dropout)."""

import torch

from bench.compile._compile import Call, meta
from bench.compile.reduce_bias_dropout_add_norm import ELEMENTS, RNG, WHERE, M, vector
from tpfuse.kernels._embed_finish import bwd_launch, fwd_launch


def both(D: int, R: int, post: bool):
    def run():
        h, mean, rstd, gamma, index = meta(M, D), vector(M), vector(M), vector(D), meta(M, dtype=torch.int64)
        tables = meta(1024, D), index, *((meta(2, D), index) if post else (None, None))
        fwd_launch(meta(R, M, D), *tables, gamma, gamma, RNG, *WHERE, 1e-5, False, post)
        bwd_launch(meta(R, M, D), h, h, mean, rstd, gamma, RNG, *WHERE, False, post, True, h.dtype)

    return run


KINDS = dict(bert=True, gpt=False)
CALLS = {
    f"{kind} D={D} R={R}": Call(both(D, R, post), ELEMENTS)
    for kind, post in KINDS.items()
    for D in (1024, 768, 8192, 32768)
    for R in (1, 8)
}
