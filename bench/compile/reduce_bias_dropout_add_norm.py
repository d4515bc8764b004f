"""reduce_bias_dropout_add_norm: every width that has launch parameters of its own, one rank and eight; without a norm.

Vectors are fp32, and the key comes from rng, a tensor (1.3 instructions an element).  A loop over few chunks is
unrolled and counts whole.
"""

import dataclasses
from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor

from bench.compile._compile import Call, meta
from tpfuse.kernels.norm import triton_backward
from tpfuse.kernels.norm.records import POST, PRE, Add, NormVectors, Saved, Wanted
from tpfuse.kernels.norm.triton_backward import bwd_launch
from tpfuse.kernels.norm.triton_forward import fwd_launch, reduce_launch
from tpfuse.kernels.runtime.philox import Mask

M = 4096
ROW = lambda c: c["ROWS"] * (c["A"] + c["B"])
COLUMNS = lambda c: c.get("ROWS", 1) * c["A"]
ELEMENTS = dict(
    _fwd_kernel=ROW, _bwd_kernel=ROW, _fwd_chunks_kernel=COLUMNS, bwd_rows_kernel=COLUMNS, bwd_columns_kernel=COLUMNS
)
ELEMENTS |= dict(bwd_once_kernel=lambda c: 4 * c["A"])
ELEMENTS |= dict(_reduce_vectors_kernel=COLUMNS, _apply_kernel=COLUMNS)
MASK = Mask(meta(3, dtype=torch.int64), 0.1, site=3, first_row=0, batch=8)


def vector(n: int) -> Tensor:
    return meta(n, dtype=torch.float32)


def both(D: int, R: int, kind: str = "layer", order: str = PRE, leaves: int = 0, mask: Mask = MASK):
    def run():
        h, gamma = meta(M, D), vector(D)
        beta = gamma if kind == "layer" else None
        norm = NormVectors(gamma, beta, 1e-5, kind)
        fwd_launch(meta(R, M, D), Add(bias=gamma, residual=h), norm, mask, order, leaves)
        backward(D, R, kind, order, leaves, mask)()

    return run


def backward(D: int, R: int, kind: str = "layer", order: str = PRE, leaves: int = 0, mask: Mask = MASK):
    def run():
        h = meta(M, D)
        saved = Saved(h, vector(M), vector(M), vector(D), kind)
        wanted = Wanted(h.dtype, kind == "layer", h.dtype, h.dtype, leaves)
        bwd_launch(meta(R, M, D), h, saved, mask, order, wanted)

    return run


def without_norm(D: int):
    def run():
        h = meta(M, D)
        reduce_launch(meta(8, M, D))
        fwd_launch(meta(8, M, D), Add(residual=h), NormVectors(), MASK, PRE)
        saved = Saved(None, None, None, None, "layer")
        bwd_launch(meta(8, M, D), h, saved, MASK, PRE, Wanted(h.dtype, False, h.dtype, h.dtype))

    return run


EARLY = dict(_reduce_vectors_kernel=("ACQBULK",))  # the sum of partials waits on the GPU


def measured(run: Callable[[], None], uses: dict[str, tuple[str, ...]], **parameters) -> Call:
    """Backward as a measured table would ask for it, with ``parameters`` where a kernel has them."""

    def tuned(*lookup, default: dict) -> dict:
        return default | {name: value for name, value in parameters.items() if name in default}

    def measured_run():
        with mock.patch.object(triton_backward, "tuned", tuned):
            run()

    return Call(measured_run, ELEMENTS, uses, archs=("sm_90",))


def ahead(run: Callable[[], None]) -> Call:
    """A row's loads begin before its turn, and the sum of partials before they are all there."""
    return measured(run, EARLY | dict(_bwd_kernel=("LDGSTS", "PREEXIT")), STAGES=2, EARLY=True)


def by_the_last(run: Callable[[], None], **spills) -> Call:
    """One kernel, whose last programs sum the partials."""
    return dataclasses.replace(measured(run, {}, LAST=True), archs=("sm_90", "sm_80"), **spills)


WIDTHS = 1024, 64, 768, 1000, 2560, 4096, 5120, 8192, 12288, 16384, 20480, 32768, 65537
CALLS = {f"D={D} R={R}": Call(both(D, R), ELEMENTS) for D in WIDTHS for R in (1, 8)}
SPILLS = dict(
    spills=dict(_bwd_kernel=8),
    why="two registers a thread, under Triton 3.6; without the limit of 128 half as many programs fit",
)
CALLS["D=1024 R=1"] = Call(both(1024, 1), ELEMENTS, **SPILLS)
CALLS |= {f"D={D} R=8 post rms": Call(both(D, 8, "rms", POST), ELEMENTS) for D in (768, 8192, 16384, 32768)}
LEAVES = dict(
    spills=dict(_bwd_kernel=16),
    why="up to four registers a thread, for a leaf's first row; without the limit of 128 half as many programs fit",
)
CALLS |= {
    f"D={D} R={R} {8 // R} leaves": Call(both(D, R, leaves=8 // R), ELEMENTS, **(LEAVES if D == 1024 else {}))
    for D in (1024, 12288)
    for R in (1, 8)
}
TWO_PIECES = MASK._replace(split=M // 2, second_row=3 * M)
CALLS["D=12288 R=8 two pieces"] = Call(both(12288, 8, mask=TWO_PIECES), ELEMENTS)
CALLS["D=1024 R=8 two pieces"] = Call(
    both(1024, 8, mask=TWO_PIECES),
    ELEMENTS,
    spills=dict(_bwd_kernel=8),
    why="two registers a thread on sm_80; without the limit of 128 half as many programs fit",
)
CALLS |= {f"D={D} R=8 without norm": Call(without_norm(D), ELEMENTS) for D in (4096, 32768)}
CALLS |= {f"D={D} R={R} ahead": ahead(backward(D, R)) for D in (1024, 8192) for R in (1, 8)}
CALLS |= {f"D={D} R=1 by the last": by_the_last(backward(D, 1)) for D in (768, 4096, 8192)}
CALLS["D=1024 R=1 by the last"] = by_the_last(backward(1024, 1), **SPILLS)
