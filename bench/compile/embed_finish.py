"""embed_finish: GPT (dropout, then norm) and BERT (norm, then dropout)."""

import torch

from bench.compile._compile import Call, meta
from bench.compile.reduce_bias_dropout_add_norm import ELEMENTS, MASK, M, vector
from tpfuse.kernels.norm.records import DROP, PRE, Add, NormVectors, Saved, Wanted
from tpfuse.kernels.norm.triton_backward import bwd_launch
from tpfuse.kernels.norm.triton_forward import fwd_launch


def both(D: int, R: int, order: str):
    def run():
        h, gamma, index = meta(M, D), vector(D), meta(M, dtype=torch.int64)
        add = Add(None, meta(1024, D), index, *((meta(2, D), index) if order == DROP else (None, None)))
        fwd_launch(meta(R, M, D), add, NormVectors(gamma, gamma, 1e-5), MASK, order)
        saved = Saved(h, vector(M), vector(M), gamma, "layer")
        bwd_launch(meta(R, M, D), h, saved, MASK, order, Wanted(None, True, None, h.dtype))

    return run


# each with one number of ranks: reduce_bias_dropout_add_norm compiles the same kernels, less the tables, with both
KINDS = dict(bert=(DROP, 8), gpt=(PRE, 1))
CALLS = {
    f"{kind} D={D} R={R}": Call(both(D, R, order), ELEMENTS)
    for kind, (order, R) in KINDS.items()
    for D in (1024, 768, 8192, 32768)
}
