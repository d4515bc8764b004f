"""layer_norm, rms_norm and what recomputes n; backward in the forms that no call takes before they are measured."""

from bench.compile._compile import Call, meta
from bench.compile.reduce_bias_dropout_add_norm import EARLY, ELEMENTS, M, ahead, by_the_last, measured, vector
from tpfuse.kernels.norm.kinds import KINDS
from tpfuse.kernels.norm.records import ALONE, Add, NormVectors, Recompute, Saved, Wanted
from tpfuse.kernels.norm.triton_backward import bwd_launch
from tpfuse.kernels.norm.triton_forward import apply_launch, fwd_launch
from tpfuse.kernels.runtime.philox import Mask


def forward_and_backward(D: int, kind: str):
    def run():
        x, gamma, beta = meta(M, D), vector(D), vector(D) if KINDS[kind].centred else None
        norm, mean, rstd = NormVectors(gamma, beta, 1e-5, kind), vector(M if KINDS[kind].centred else 0), vector(M)
        fwd_launch(x[None], Add(), norm, Mask(), ALONE)
        apply_launch(Recompute(x, mean, rstd, *norm, x.dtype))
        backward(D, kind)()

    return run


def backward(D: int, kind: str):
    def run():
        x, centred = meta(M, D), KINDS[kind].centred
        saved = Saved(x, vector(M if centred else 0), vector(M), vector(D), kind)
        bwd_launch(x[None], x, saved, Mask(), ALONE, Wanted(None, centred, None, x.dtype))

    return run


WIDTHS = 1024, 128, 768, 4096, 8192, 16384, 65537
FEW = 1024, 768  # for a kind that differs from "rms" in a constant: a whole row of tiles, and a ragged one
CALLS = {
    f"{kind} D={D}": Call(forward_and_backward(D, kind), ELEMENTS)
    for kind in KINDS
    for D in (WIDTHS if kind in ("layer", "rms") else FEW)
}
CALLS |= {f"{kind} D={D} ahead": ahead(backward(D, kind)) for kind in ("layer", "rms") for D in (1024, 4096, 8192)}
CALLS |= {
    f"{kind} D={D} once": measured(backward(D, kind), EARLY | dict(bwd_once_kernel=("PREEXIT",)), ONCE=True, EARLY=True)
    for kind in ("layer", "rms")
    for D in (16384, 12288)
}
CALLS |= {
    f"{kind} D={D} by the last": by_the_last(backward(D, kind)) for kind in ("layer", "rms") for D in (1024, 4096)
}
