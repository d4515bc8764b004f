"""Products of sparse integers: an MLP of width 1024 at a density of a tenth, every number of bits and every length of
vectors; odd sizes."""

import torch

from bench.compile._compile import Call, meta
from tpfuse.kernels.sparse.format import Vectors
from tpfuse.kernels.sparse.triton import sampled_matmul_launch, sparse_matmul_launch

ELEMENTS = dict(
    _sparse_matmul_kernel=lambda c: c["BK"] * c["V"] * (2 if c["BITS"] == 4 else 1),
    _sampled_matmul_kernel=lambda c: c["BI"] * c["V"],
)


def places(M: int, K: int, V: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Index and offsets of a tenth of the vectors."""
    strips = -(-M // V)
    return meta(strips * (K // 10), dtype=torch.int32), meta(strips + 1, dtype=torch.int32)


def product(V: int, bits: int, M: int = 4096, N: int = 4096, K: int = 1024):
    index, offsets = places(M, K, V)
    bytes_of = (2 if bits == 16 else 1), len(index) // (2 if bits == 4 else 1), V
    w = Vectors(meta(*bytes_of, dtype=torch.int8), index, offsets, M, bits)
    return lambda: sparse_matmul_launch(w, meta(K, N, dtype=torch.int8))


def sampled(V: int, E: int, S: int = 4096):
    q, k = meta(S, E, dtype=torch.int8), meta(S, E, dtype=torch.int8)
    return lambda: sampled_matmul_launch(q, k, *places(S, S, V), V)


CALLS = {
    label: Call(run, ELEMENTS, dict.fromkeys(ELEMENTS, ("IGMMA",)))
    for label, run in {
        **{f"V={V} bits={bits}": product(V, bits) for V in (8, 16, 32, 64) for bits in (8, 16, 4)},
        "V=8 odd sizes": product(8, 8, 4095, 4093, 1021),
        **{f"sampled V={V} E={E}": sampled(V, E) for V, E in ((8, 64), (8, 77), (64, 128))},
    }.items()
}
