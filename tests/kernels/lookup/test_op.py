import itertools
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from tests.kernels import common
from tests.kernels.common import gradcheck, leaf, run
from tpfuse.kernels import embedding
from tpfuse.kernels.lookup import triton as _lookup
from tpfuse.kernels.lookup.op import embedding_bwd, embedding_fwd
from tpfuse.kernels.runtime import launch as _launch

FP32, BF16 = torch.float32, torch.bfloat16
W, IDS, D = torch.randn(5, 7), torch.tensor([4, 0, 9]), torch.randn(3, 7)
SAMPLES = [
    (embedding_fwd, (W, IDS, 2)),
    (embedding_bwd, (D, IDS, 2, 5, FP32)),
    (embedding_bwd, (D.bfloat16(), IDS, 0, 10, BF16)),
]
test_opcheck = common.opcheck(SAMPLES)


# ---- embedding ----


@pytest.mark.parametrize(
    "ids",
    [torch.tensor([3, 0, 3, 4]), torch.zeros(0).long(), torch.tensor([[1, 1], [4, 0]])],
    ids=["ids", "none", "2-d"],
)
def test_embedding_against_torch(ids):
    common.assert_same(lambda w: embedding(w, ids), lambda w: F.embedding(ids, w), leaf(5, 3))
    if ids.numel():
        gradcheck(lambda w: embedding(w, ids), leaf(5, 3))


@pytest.mark.parametrize("bounds", [(0, 3, 5), (0, 2, 4, 5)])
def test_slices_add_up(bounds):
    """Each rank looks up what is its own; the slices' results sum to the whole, the slices of the gradient concatenate
    to it."""
    weight, ids, dy = leaf(5, 4), torch.tensor([4, 1, 0, 1, 3]), torch.randn(5, 4).double()
    slices = [weight[a:e].detach().requires_grad_() for a, e in itertools.pairwise(bounds)]
    parts = torch.stack([embedding(w, ids, first=a) for w, a in zip(slices, bounds)])
    assert torch.equal(parts.sum(0), weight[ids]) and (parts != 0).any(-1).sum() == len(ids)
    grads = torch.autograd.grad(list(parts), slices, [dy] * len(slices))
    torch.testing.assert_close(torch.cat(grads), torch.autograd.grad(F.embedding(ids, weight), weight, dy)[0])


def test_other_ids_are_zero_whatever_the_table_holds():
    weight = torch.tensor([[float("nan"), -float("inf")], [-1.0, 2.0]])
    rows = embedding(weight, torch.tensor([7, 4, 3]), first=3)
    torch.testing.assert_close(rows, torch.tensor([[0.0, 0.0], [-1.0, 2.0], weight[0].tolist()]), equal_nan=True)
    assert not rows[0].signbit().any()


def test_embedding_gradient_is_summed_in_fp32():
    """512 rows of ones on one token: a running sum in bf16 stops at 256."""
    dw = embedding_bwd(torch.ones(512, 3).bfloat16(), torch.zeros(512).long(), 0, 2, BF16)
    assert torch.equal(dw, torch.tensor([[512.0] * 3, [0.0] * 3]).bfloat16())


def test_embedding_autocast_and_compile():
    weight = leaf(5, 3, dtype=FP32)
    with torch.autocast("cpu", BF16):
        outputs, (dw,) = run(lambda w: embedding(w, IDS, first=2), (weight,))
        common.assert_compiles(lambda w: embedding(w, IDS, first=2), weight)
    assert outputs[0].dtype == BF16 and dw.dtype == FP32
    common.assert_compiles(lambda w: embedding(w, IDS, first=2), weight)


def test_embedding_non_contiguous():
    common.assert_same(
        lambda w: embedding(w, IDS % 5),
        lambda w: F.embedding(IDS % 5, w),
        leaf(3, 5).T.detach().requires_grad_(),
        non_contiguous=True,
    )


# ---- the lookup's kernels; under the interpreter where there is no GPU ----

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def ids_of(kind, M, V):
    """Over a table of V rows: as good as all different, all one, many of few, outside too."""
    low, high = dict(spread=(0, V), one=(V // 2, V // 2 + 1), few=(1, 4), outside=(-3, 3 * V))[kind]
    return torch.randint(low, high, (M,), device=DEVICE)


# no token, one token and one column, ragged columns beyond one tile; fewer and more than a chunk of 32 tokens, whole
# chunks and cut ones
@pytest.mark.parametrize("M, V, D", [(0, 3, 8), (1, 1, 1), (7, 5, 3), (100, 6, 65), (128, 20, 16)])
@pytest.mark.parametrize("kind", ["spread", "one", "few", "outside"])
@pytest.mark.parametrize("first", [0, 2])
def test_lookup_kernels(poisoned, M, V, D, kind, first):
    weight, dy, ids = torch.randn(V, D, device=DEVICE), torch.randn(M, D, device=DEVICE), first + ids_of(kind, M, V)
    assert torch.equal(embedding_fwd.launch(weight, ids, first), embedding_fwd.reference(weight, ids, first))
    dw = embedding_bwd.launch(dy, ids, first, V, FP32)
    torch.testing.assert_close(dw, embedding_bwd.reference(dy, ids, first, V, FP32), rtol=1e-5, atol=1e-5)
    assert (dw[~torch.isin(torch.arange(first, first + V, device=DEVICE), ids)] == 0).all()


@pytest.mark.parametrize("dtype, out", [(BF16, BF16), (BF16, FP32), (torch.float16, torch.float16)])
def test_lookup_kernels_in_low_precision(poisoned, dtype, out):
    """A sum in fp32, rounded once: as far from fp64 as its own rounding."""
    weight, dy, ids = (
        torch.randn(5, 40, device=DEVICE).to(dtype),
        torch.randn(150, 40, device=DEVICE).to(dtype),
        ids_of("few", 150, 5),
    )
    assert torch.equal(embedding_fwd.launch(weight, ids, 0), weight[ids])
    dw, exact = embedding_bwd.launch(dy, ids, 0, 5, out), embedding_bwd.reference(dy.double(), ids, 0, 5, torch.float64)
    assert dw.dtype == out
    torch.testing.assert_close(dw.double(), exact, rtol=torch.finfo(out).eps / 2 + 1e-6, atol=1e-5)


def test_lookup_gradient_is_the_same_bits_for_every_slice():
    """Where a sum is cut depends on the sorted ids, which all ranks have.  The order is a stable one: other rows, other
    bits."""
    ids, dy = torch.cat([ids_of("few", 100, 8), ids_of("spread", 28, 8)]), torch.randn(128, 5, device=DEVICE)
    whole = embedding_bwd.launch(dy, ids, 0, 8, FP32)
    for bounds in ((0, 4, 8), (0, 1, 3, 8)):
        assert torch.equal(
            torch.cat([embedding_bwd.launch(dy, ids, a, e - a, FP32) for a, e in itertools.pairwise(bounds)]), whole
        )
    turned = embedding_bwd.launch(dy.flip(0), ids.flip(0), 0, 8, FP32)
    torch.testing.assert_close(turned, whole)
    assert not torch.equal(turned, whole)


def test_a_frequent_token_is_split():
    """A program a whole chunk sums what is 288 of these 300 tokens; take their sums away, and the table row's own
    program has the rest."""
    M, chunk, start = 300, _lookup.chunk_of(300), _launch._start
    dy, grids = torch.randn(M, 4, device=DEVICE), []

    def without_chunks(kernel, grid, device, args, config):
        grids.append(grid)
        if kernel is _lookup._chunk_sums_kernel:
            args[3].zero_()
        else:
            start(kernel, grid, device, args, config)

    with mock.patch.object(_launch, "_start", without_chunks):
        dw = embedding_bwd.launch(dy, torch.ones(M, device=DEVICE).long(), 0, 3, FP32)
    assert grids[0] == (M // chunk, 1) and M % chunk == 12
    torch.testing.assert_close(dw[1], dy[-12:].sum(0))


def test_lookup_strides(poisoned):
    """A table and a gradient that are not contiguous, ids of two dimensions, rows beyond 2^31 elements."""
    ids = torch.tensor([[3, 1], [9, 3]], device=DEVICE)
    weight, dy = torch.randn(6, 4, device=DEVICE).T, torch.randn(6, 2, 2, device=DEVICE).permute(1, 2, 0)
    assert torch.equal(embedding_fwd.launch(weight, ids, 0), embedding_fwd.reference(weight, ids, 0))
    torch.testing.assert_close(embedding_bwd.launch(dy, ids, 0, 4, FP32), embedding_bwd.reference(dy, ids, 0, 4, FP32))
    far = torch.empty((3 << 30) + 8, dtype=torch.float16, device=DEVICE).as_strided((4, 8), (1 << 30, 1))
    far.copy_(torch.randn(4, 8))
    assert torch.equal(embedding_fwd.launch(far, ids, 0), embedding_fwd.reference(far.contiguous(), ids, 0))


@pytest.mark.skipif(DEVICE == "cuda", reason="counted by the interpreter")
def test_lookup_declared_bytes():
    """At most what is declared, and that where ids are as different (forward), as equal (backward) as they can be."""
    from tests.kernels.interpreter_bytes import assert_declared, count_bytes

    weight, dy = torch.randn(80, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    assert_declared(embedding_fwd, (weight, torch.randperm(80)[:64], 0))
    assert_declared(embedding_bwd, (dy, torch.full((64,), 3), 0, 16, BF16))
    args = dy, ids_of("outside", 64, 16), 0, 16, BF16
    with count_bytes() as moved:
        dw = embedding_bwd.launch(*args)
    declared = embedding_bwd.cost(args, dw)
    assert moved.read < declared.read and moved.written < declared.written


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("M, V, D", [(4096, 50257, 768), (16384, 2, 1024), (8192, 32000, 4097)])
@pytest.mark.parametrize("kind", ["spread", "one"])
def test_lookup_on_a_gpu(poisoned, M, V, D, kind, dtype):
    weight, dy, ids = (
        torch.randn(V, D, device=DEVICE).to(dtype),
        torch.randn(M, D, device=DEVICE).to(dtype),
        ids_of(kind, M, V),
    )
    assert torch.equal(embedding_fwd.launch(weight, ids, 0), weight[ids])
    dw, exact = (
        embedding_bwd.launch(dy, ids, 0, V, dtype),
        embedding_bwd.reference(dy.double(), ids, 0, V, torch.float64),
    )
    torch.testing.assert_close(dw.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-3)
    assert torch.equal(dw, embedding_bwd.launch(dy, ids, 0, V, dtype))
