"""The GEMM kernels by leaves: ranks simulated in one process by slices of whole leaves, their nodes added as the
exchange adds them, against one rank; under Triton's interpreter or on a GPU.

Spans: tpfuse/kernels/gemm/triton_gemm.py, tpfuse/sequence_parallel/forms/leafwise.py.
"""

import functools

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.bitwise.training import bits
from tpfuse.kernels.gemm import triton_gemm
from tpfuse.kernels.gemm.op import bias_grad, linear_dgrad, linear_dgrad_act, linear_fwd, linear_wgrad
from tpfuse.kernels.runtime.leaves import tree

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("poisoned")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
V, RANKS = 8, (1, 2, 4, 8)
# M, N, the width of a leaf, what the last leaf lacks: by descriptors, with tiles of 16 x 32 x 16; then by pointers,
# a leaf ending inside a tile, a last one of fewer; one of everything.
SHAPES = [(20, 72, 16, 0), (19, 35, 21, 5), (1, 1, 1, 0)]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def slices(x: Tensor, ranks: int, leaf: int, dim: int) -> tuple[Tensor, ...]:
    """Each rank's leaves of x, contiguous as its own tensors are."""
    return tuple(part.contiguous() for part in x.split(leaf * (V // ranks), dim))


def forward(x: Tensor, w: Tensor, leaf: int) -> Tensor:
    return linear_fwd.launch(x, w, None, "none", leaf)[0]


def dgrad(x: Tensor, w: Tensor, leaf: int) -> Tensor:
    return linear_dgrad.launch(x, w.t().contiguous(), leaf)


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def summed(contraction, x: Tensor, w: Tensor, ranks: int, leaf: int, join=tree) -> Tensor:
    """The sum over ``ranks``, of which each contracts its columns of x [M, K] and of w [N, K]."""
    nodes = [contraction(*part, leaf) for part in zip(slices(x, ranks, leaf, 1), slices(w, ranks, leaf, 1))]
    assert len(nodes) == ranks
    return join(nodes)


@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("contraction", [forward, dgrad])
def test_a_split_contraction(contraction, shape, dtype):
    M, N, leaf, fewer = shape
    x, w = (random(rows, V * leaf - fewer, dtype=dtype) for rows in (M, N))
    one = summed(contraction, x, w, 1, leaf)
    assert all(same(one, summed(contraction, x, w, ranks, leaf)) for ranks in RANKS)
    exact, reference = x.double() @ w.double().t(), linear_fwd.reference(x, w, None, "none", leaf)[0]
    assert (one - exact).abs().max() <= 2 * (reference - exact).abs().max() + 1e-6


def in_rank_order(nodes: list[Tensor]) -> Tensor:
    return functools.reduce(torch.add, nodes)


@DTYPES
def test_rank_order_is_seen(dtype):
    """At four ranks: of two there is one order."""
    M, N, leaf, fewer = SHAPES[1]
    x, w = (random(rows, V * leaf - fewer, dtype=dtype) for rows in (M, N))
    one = summed(forward, x, w, 1, leaf)
    assert same(one, summed(forward, x, w, 2, leaf, in_rank_order))
    assert not same(one, summed(forward, x, w, 4, leaf, in_rank_order))


@pytest.fixture
def rows_alike(monkeypatch):
    """Triton's interpreter multiplies by numpy, whose BLAS gives a row other bits at another place of a tile on some
    processors: a sum without BLAS in its place."""
    monkeypatch.setattr(np, "matmul", functools.partial(np.einsum, "mk,kn->mn"))


@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_not_contracted(rows_alike, shape, dtype):
    """Rows of a weight, and of a batch, have the bits of whatever they share a call with."""
    M, N, leaf, _ = shape
    K, width = 37 if leaf > 1 else 1, V * leaf
    x, w, b, dy = (
        random(M, K, dtype=dtype),
        random(width, K, dtype=dtype),
        random(width, dtype=dtype),
        random(M, width, dtype=dtype),
    )
    up, z = random(K, width, dtype=dtype), random(M, width, dtype=dtype)
    results = {}
    for ranks in (1, 4):
        w_r, b_r, up_r = (slices(t, ranks, leaf, dim) for t, dim in ((w, 0), (b, 0), (up, 1)))
        dy_r, z_r = slices(dy, ranks, leaf, 1), slices(z, ranks, leaf, 1)
        forwards = [linear_fwd.launch(x, *part, "gelu", 0) for part in zip(w_r, b_r)]
        weights = [linear_wgrad.launch(part, x, dtype, torch.float32, True) for part in dy_r]
        through = [linear_dgrad_act.launch(x, *part, "gelu", True, torch.float32, True) for part in zip(up_r, z_r)]
        results[ranks] = [
            *(torch.cat(columns, 1) for columns in zip(*forwards)),
            torch.cat([linear_dgrad.launch(x, part, 0) for part in up_r], 1),
            torch.cat([linear_wgrad.launch(x, part, dtype, None, True)[0] for part in dy_r], 1),
            *(torch.cat(rows) for rows in zip(*weights)),
            *(torch.cat(pieces, -1) for pieces in zip(*through)),
            torch.cat([bias_grad.launch(part, torch.float32) for part in dy_r]),
        ]
    assert list(map(same, results[4], results[1])) == [True] * 10
    few = [linear_fwd.launch(rows, w, b, "gelu", 0)[0] for rows in x.split(7)]
    assert same(torch.cat(few), results[1][0])


@pytest.mark.parametrize("leaf", [3, 1])
def test_a_number_of_leaves_that_makes_no_tree(leaf):
    x = random(4, 64 if leaf == 1 else 9, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"leaves .* must be a power of two"):
        forward(x, x, leaf)


def test_descriptors_and_pointers_give_the_same_bits(monkeypatch):
    """Descriptors are taken where no leaf ends inside a tile."""
    M, N, leaf, _ = SHAPES[0]
    x, w = (random(rows, V * leaf, dtype=torch.bfloat16) for rows in (M, N))
    taken, launch = [], triton_gemm.launch

    def spy(*args, **named):
        taken.append(named["TMA"])
        launch(*args, **named)

    monkeypatch.setattr(triton_gemm, "launch", spy)
    by_descriptors = [forward(x, w, width) for width in (leaf, 0, leaf // 2)]
    monkeypatch.setattr(triton_gemm, "has_tma", lambda arch: False)
    by_pointers = [forward(x, w, width) for width in (leaf, 0, leaf // 2)]
    assert all(map(same, by_descriptors, by_pointers))
    assert DEVICE == "cuda" or taken == [True, True, False] + 3 * [False]


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("shape", [(512, 1024, 64, 0), (333, 200, 77, 13)], ids=str)
def test_on_a_gpu(shape, dtype):
    """Compiled, in tiles of its own size; each number of ranks compiles another kernel."""
    M, N, leaf, fewer = shape
    x, w = (random(rows, V * leaf - fewer, dtype=dtype) for rows in (M, N))
    for contraction in forward, dgrad:
        one = summed(contraction, x, w, 1, leaf)
        assert all(same(one, summed(contraction, x, w, ranks, leaf)) for ranks in RANKS)
        assert not same(one, summed(contraction, x, w, 4, leaf, in_rank_order))
    wide = linear_fwd.launch(x, w, None, "gelu", 0)
    assert same(wide[0][:5], linear_fwd.launch(x[:5], w, None, "gelu", 0)[0])
    assert same(wide[0][:, :72], linear_fwd.launch(x, w[:72], None, "gelu", 0)[0])
