"""layer_norm, rms_norm and what makes n again."""

from bench.compile._compile import Call, meta
from bench.compile.reduce_bias_dropout_add_norm import ELEMENTS, M, vector
from tpfuse.kernels._fused_norm import apply_launch, norm_launch
from tpfuse.kernels._fused_norm_bwd import norm_bwd_launch


def every(D: int, rms: bool):
    def run():
        x, mean, rstd, gamma = meta(M, D), vector(0 if rms else M), vector(M), vector(D)
        beta = None if rms else gamma
        norm_launch(x, gamma, beta, 1e-5, rms, x.dtype)
        apply_launch(x, mean, rstd, gamma, beta, 1e-5, rms, x.dtype)
        norm_bwd_launch(x[None], x, x, mean, rstd, gamma, not rms, rms)

    return run


KINDS = dict(layer=False, rms=True)
CALLS = {f"{kind} D={D}": Call(every(D, rms), ELEMENTS) for kind, rms in KINDS.items() for D in (1024, 128, 768, 4096, 8192, 16384, 65537)}
