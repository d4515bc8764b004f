import pytest
import torch

from tests.kernels import common
from tests.kernels.common import RNG, gradcheck, leaf
from tests.kernels.interpreter_bytes import assert_declared
from tests.kernels.kernel_rules import DEVICE, on_a_gpu
from tpfuse.kernels import dropout
from tpfuse.kernels.norm.verbs import dropout_fwd
from tpfuse.kernels.runtime.philox import Mask, RowPieces, keep_rows, make_rng, scale

MASK = Mask(RNG.to(DEVICE), 0.3, site=2, first_row=5, batch=3)
SAMPLES = [
    (dropout_fwd, (torch.randn(3, 7).to(dtype), MASK._replace(rng=RNG))) for dtype in (torch.float32, torch.bfloat16)
]
test_opcheck = common.opcheck(SAMPLES)


def ours(x, **where):
    return dropout(x, 0.3, rng=RNG, **where)


def oracle(x, site=0, first_row=0, batch=1):
    rows = x.reshape(-1, x.shape[-1])
    return (rows * keep_rows(Mask(RNG, 0.3, site, first_row, batch), *rows.shape, x.dtype) * scale(0.3)).view(x.shape)


# no rows, one element, one row, a width that is no multiple of 8, three dimensions
@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (5,), (3, 13), (2, 3, 4)], ids=str)
def test_against_torch(shape):
    common.assert_same(ours, oracle, leaf(*shape))
    if 0 not in shape:
        gradcheck(ours, leaf(*shape))


def test_where():
    x, where = leaf(6, 13), dict(site=2, first_row=4, batch=3)
    common.assert_same(lambda x: ours(x, **where), lambda x: oracle(x, **where), x)
    for key, other in (("site", 1), ("first_row", 5), ("batch", 2)):
        assert not torch.equal(ours(x, **{**where, key: other}), ours(x, **where))
    assert not torch.equal(dropout(x, 0.3, rng=make_rng(1, 4, 2)), ours(x))
    assert torch.equal(torch.cat([ours(x[:2]), ours(x[2:], first_row=2)]), ours(x))


def test_rows_in_two_pieces():
    """Forward and backward those of two calls; and under torch.compile."""
    x, two = leaf(7, 13), RowPieces(4, split=3, second_row=30)
    apart = lambda x: torch.cat([ours(x[:3], first_row=4, batch=2), ours(x[3:], first_row=30, batch=2)])
    together = lambda x: ours(x, first_row=two, batch=2)
    common.assert_same(together, apart, x)
    common.assert_compiles(together, leaf(7, 13, dtype=torch.float32))


def test_recompute_draws_the_same_mask():
    x = leaf(4, 9)
    (first,) = torch.autograd.grad(ours(x).sum(), x)
    (again,) = torch.autograd.grad(torch.utils.checkpoint.checkpoint(ours, x, use_reentrant=False).sum(), x)
    assert torch.equal(first, again)


def test_nothing_but_rng_is_saved():
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ours(leaf(4, 9))
    assert [t.shape for t in saved] == [(3,)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype):
    common.assert_accurate(ours, oracle, leaf(33, 100), dtype=dtype)


def test_autocast():
    x = leaf(33, 100, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = ours(x)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert y.dtype == torch.bfloat16 and dx.dtype == torch.float32
    assert torch.equal(y, ours(x.bfloat16()))


def test_non_contiguous():
    common.assert_same(ours, oracle, leaf(4, 5).T.detach().requires_grad_(), non_contiguous=True)


def test_compile():
    common.assert_compiles(ours, leaf(3, 13, dtype=torch.float32))


def test_no_dropout():
    x = torch.randn(3, 4)
    assert dropout(x, 0.0, rng=RNG) is x and dropout(x, 1e-9, rng=None) is x


@pytest.mark.parametrize(
    "options, match",
    [
        (dict(p=1.0), "p must lie"),
        (dict(p=-0.1), "got -0.1"),
        (dict(rng=None), "dropout: dropout needs rng"),
        (dict(batch=0), "dropout: batch must be at least 1, got 0"),
        (dict(site=-1), "dropout: site must lie in 0 to 65534, got -1"),
        (dict(site=65535), "dropout: site must lie in 0 to 65534, got 65535"),
    ],
)
def test_errors(options, match):
    with pytest.raises(ValueError, match=match):
        dropout(torch.randn(3, 4), **dict(p=0.5, rng=RNG) | options)


def test_rows_that_are_not_there():
    assert dropout(torch.ones(3, 0), 0.5, rng=RNG).shape == (3, 0)
    with pytest.raises(ValueError, match="dropout: x must be .* got a tensor without dimensions"):
        dropout(torch.ones(()), 0.5, rng=RNG)


# ---- the Triton side: launcher == reference under the interpreter, or compiled on a GPU ----

SHAPES = [(0, 4), (1, 1), (37, 20), (3, 768), (2, 17000)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_launcher(poisoned, shape, dtype):
    """Bitwise: one product and one rounding."""
    arguments = torch.randn(shape, device=DEVICE).to(dtype), MASK
    assert torch.equal(dropout_fwd.launch(*arguments), dropout_fwd.reference(*arguments))


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_launcher_on_shards(poisoned, shards):
    x, whole = torch.randn(8, 100, device=DEVICE), MASK._replace(first_row=0)
    cut = [
        dropout_fwd.launch(x[rows], whole._replace(first_row=int(rows[0]))) for rows in torch.arange(8).chunk(shards)
    ]
    assert torch.equal(torch.cat(cut), dropout_fwd.reference(x, whole))


@pytest.mark.parametrize("split", [0, 3, 8])
def test_launcher_of_two_pieces(poisoned, split):
    x, mask = torch.randn(8, 100, device=DEVICE), MASK._replace(split=split, second_row=40)
    assert torch.equal(dropout_fwd.launch(x, mask), dropout_fwd.reference(x, mask))


def test_declared_bytes():
    assert_declared(dropout_fwd, (torch.randn(4, 256, device=DEVICE).bfloat16(), MASK))


@pytest.mark.gpu
@pytest.mark.parametrize("D", [13, 1024, 32768])
def test_on_a_gpu(D):
    on_a_gpu(dropout_fwd, (torch.randn(67, D, device=DEVICE).bfloat16(), MASK))
