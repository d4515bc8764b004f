import itertools
import re

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.kernels import common
from tests.kernels.common import RNG, gradcheck, leaf, run
from tpfuse.kernels import reduce_bias_dropout_add_norm as fused
from tpfuse.kernels.norm import norm_apply
from tpfuse.kernels.norm.records import POST, PRE, Add, NormVectors, Saved, Wanted
from tpfuse.kernels.norm.verbs import REDUCE_BIAS_DROPOUT_ADD_NORM
from tpfuse.kernels.runtime.op import NAMESPACE
from tpfuse.kernels.runtime.philox import Mask, RowPieces, keep_rows, make_rng, scale

P, D, V, STAT = torch.randn(2, 3, 7), torch.randn(3, 7), torch.randn(7), torch.rand(3)
MASK = Mask(RNG, 0.3, site=2, first_row=1, batch=2)
FP32, BF16 = torch.float32, torch.bfloat16
_, FWD, BWD = REDUCE_BIAS_DROPOUT_ADD_NORM
LAYER, RMS = (Saved(D, STAT[:n], STAT, V, kind) for n, kind in ((3, "layer"), (0, "rms")))
NONE = Saved(None, None, None, None, "layer")
ALL = Wanted(FP32, True, FP32, FP32)
SAMPLES = [
    (FWD, (P, Add(bias=V, residual=D), NormVectors(V, V, 1e-5), MASK, PRE)),
    (FWD, (P[:1].expand(2, 3, 7).bfloat16(), Add(residual=D), NormVectors(V, None, 1e-5, "rms"), MASK, POST)),
    (FWD, (P, Add(), NormVectors(), Mask(), PRE)),
    (BWD, (P, D, LAYER, MASK, PRE, ALL)),
    (BWD, (P, D, LAYER, MASK, POST, Wanted(FP32, True, BF16, FP32))),
    (BWD, (P, D, LAYER, MASK, PRE, ALL, torch.empty(3, 9)[:, :7])),
    (BWD, (P.bfloat16(), None, RMS, MASK, POST, Wanted(None, False, FP32, BF16))),
    (BWD, (None, D, LAYER, MASK, PRE, ALL)),
    (BWD, (P, D, NONE, Mask(), PRE, Wanted(None, False, None, FP32))),
]
test_opcheck = common.opcheck(SAMPLES)

WHERE = dict(p=0.3, rng=RNG, site=2, first_row=1, batch=2)


def oracle(
    parts, bias=None, residual=None, weight=None, norm_bias=None, *, norm="layer", post_norm=False, ranks=1, **where
):
    """The same in torch's own ops, differentiated by autograd; the mask is what test_philox.py holds."""
    z = parts.sum(0) if bias is None else parts.sum(0) + bias
    if where:
        z = z * keep_rows(Mask(**where), *z.shape, z.dtype) * scale(where["p"])
    h = z if residual is None else residual + z
    n = h
    if weight is not None:
        n = (
            F.rms_norm(h, h.shape[-1:], weight, 1e-5)
            if norm == "rms"
            else F.layer_norm(h, h.shape[-1:], weight, norm_bias)
        )
    return (n if post_norm else h) * 1, torch.stack([n] * ranks)


def bind(fn, **options):
    return lambda *tensors: fn(*tensors, **options)[:2]


def inputs(R=2, m=3, D=4, bias=True, residual=True, norm=True, norm_bias=True, dtype=torch.float64):
    def make(wanted, *shape):
        return leaf(*shape, dtype=dtype) if wanted else None

    return leaf(R, m, D, dtype=dtype), make(bias, D), make(residual, m, D), make(norm, D), make(norm and norm_bias, D)


NORMS = {  # name: (inputs, options)
    "no norm": (dict(norm=False), {}),
    "pre": ({}, {}),
    "pre, no beta": (dict(norm_bias=False), {}),
    "rms": (dict(norm_bias=False), dict(norm="rms")),
    "post": ({}, dict(post_norm=True)),
    "post rms": (dict(norm_bias=False), dict(norm="rms", post_norm=True)),
}
NORM = pytest.mark.parametrize("norm", NORMS)
DROPOUT = pytest.mark.parametrize("where", [{}, WHERE], ids=["p=0", "dropout"])


@NORM
@DROPOUT
def test_against_torch(norm, where):
    """Every optional part on and off, one to three parts, as many unsummed gradients."""
    present, options = NORMS[norm]
    for R, bias, residual in itertools.product((1, 2, 3), (False, True), (False, True)):
        tensors = inputs(R, bias=bias, residual=residual, **present)
        common.assert_same(
            bind(fused, **where, **options, ranks=R), bind(oracle, **where, **options, ranks=R), *tensors
        )


@NORM
@DROPOUT
def test_gradcheck(norm, where):
    present, options = NORMS[norm]
    gradcheck(bind(fused, **where, **options, ranks=3), *inputs(R=2, m=2, D=3, **present))


# no rows, one row, a width of one, widths on both sides of a call of Philox
@pytest.mark.parametrize("m, D", [(0, 4), (1, 5), (3, 1), (5, 7), (5, 9)])
@pytest.mark.parametrize("norm", ["pre", "post", "rms"])
def test_sizes(m, D, norm):
    present, options = NORMS[norm]
    common.assert_same(bind(fused, **WHERE, **options), bind(oracle, **WHERE, **options), *inputs(2, m, D, **present))


@NORM
@pytest.mark.parametrize("used", [0, 1])
def test_one_output_used(norm, used):
    """The other one's gradient is undefined."""
    present, options = NORMS[norm]
    tensors = [
        t for t in inputs(**present)[:3] if t is not None
    ]  # norm parameters have no gradient where n is not used
    rest = inputs(**present)[3:]
    one = lambda fn: lambda *ts: fn(*ts, *rest, **WHERE, **options)[used]
    common.assert_same(one(fused), one(oracle), *tensors)


def test_a_matrix_is_one_part():
    parts, *rest = inputs(R=1)
    for a, b in zip(fused(parts[0], *rest, **WHERE)[:2], fused(parts, *rest, **WHERE)[:2]):
        assert torch.equal(a, b)


def test_strides():
    """n goes out, and dparts back, expanded: what follows each of them is an all-gather."""
    parts, *rest = inputs(R=3)
    h, n, _ = fused(parts, *rest, **WHERE, ranks=3)
    (dparts,) = torch.autograd.grad((h, n), parts, (torch.randn_like(h), torch.randn(n.shape).double()))
    assert n.shape == dparts.shape == (3, 3, 4) and n.stride(0) == dparts.stride(0) == 0


class _Aten(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.seen.append((func._schema.name, max(t.numel() for t in tree_leaves(out))))
        return out


def test_backward_is_one_op():
    """Between the gradients that arrive and those that leave, aten touches nothing of activation size but by views."""

    def seen_in_backward(outputs):
        dys = [torch.randn(y.shape).double() for y in outputs]
        with _Aten() as mode:
            torch.autograd.grad(outputs, parts, dys)
        return [name for name, size in mode.seen if size >= 40 and name != "aten::detach"]

    parts, *rest = inputs(R=3, m=5, D=8)
    h, n, _ = fused(parts, *rest, **WHERE, ranks=3)
    ours = f"{NAMESPACE}::reduce_bias_dropout_add_norm_bwd"
    assert seen_in_backward([h, n]) == [ours, "aten::expand"]
    h, n, _ = fused(parts, *rest, **WHERE, ranks=3)
    assert "aten::add" in seen_in_backward([h * 2 + h, n])  # a sum that autograd takes would be seen


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_shards_of_rows(norm):
    """Rows split over ranks, or a batch split into samples: bitwise the same rows."""
    present, options = NORMS[norm]
    parts, bias, residual, *rest = inputs(R=2, m=12, D=9, dtype=FP32, **present)
    draw = lambda p, r, rng=RNG, **where: fused(p, bias, r, *rest, rng=rng, p=0.4, **options, **where)[:2]
    for whole, *shards in zip(
        draw(parts, residual, batch=3),
        *(draw(parts[:, a:e], residual[a:e], first_row=a, batch=3) for a, e in ((0, 5), (5, 12))),
    ):
        assert torch.equal(torch.cat(shards, -2), whole)
    h = draw(parts, residual, batch=3)[0]
    for b in range(3):
        sample = draw(parts[:, b::3], residual[b::3], rng=RNG + torch.tensor([0, 0, b]))[0]
        assert torch.equal(sample, h[b::3])
    for other in (dict(site=1), dict(first_row=3), dict(rng=make_rng(1, 4, 2))):
        assert not torch.equal(draw(parts, residual, batch=3, **other)[0], h)


@pytest.mark.parametrize("leaves", [0, 2])
@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("width", [9, pytest.param(40000, marks=pytest.mark.slow)])
def test_rows_in_two_pieces(norm, width, leaves):
    """Those of two calls bitwise, rows' gradients too: a leaf and a block of rows of a CPU have theirs in either."""
    present, options = NORMS[norm]
    parts, bias, residual, *rest = inputs(R=2, m=12, D=width, dtype=FP32, **present)
    calls = (slice(0, 12), RowPieces(5, split=7, second_row=60)), (slice(0, 7), 5), (slice(7, 12), 60)
    made = []
    for rows, first_row in calls:
        p, r = parts[:, rows].detach().requires_grad_(), residual[rows].detach().requires_grad_()
        sums = leaves if rows == slice(0, 12) else 0
        where = dict(rng=RNG, p=0.4, batch=3, first_row=first_row, leaves=sums)
        h, n, _ = fused(p, bias, r, *rest, **options, **where)
        made.append((h, n[0], *torch.autograd.grad((h * h).sum() + n.sin().sum(), (p, r))))
    close = dict(rtol=0, atol=0) if leaves == 0 else dict(rtol=1e-5, atol=1e-5)  # leaves add parts as a tree
    for whole, *pieces in zip(*made, strict=True):
        torch.testing.assert_close(torch.cat(pieces, -2), whole, **close)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@NORM
def test_low_precision(norm, dtype):
    present, options = NORMS[norm]
    tensors = [t for t in inputs(4, 33, 100, **present) if t is not None]
    ours, theirs = bind(fused, **WHERE, **options), bind(oracle, **WHERE, **options)
    common.assert_accurate(ours, theirs, *tensors, dtype=dtype)
    common.assert_accurate(
        ours, theirs, *tensors, dtype=dtype, keep=(1, 3, 4)
    )  # fp32 vectors beside 16-bit activations


def test_rounded_once():
    """256 + 1 + 1 + 1 over four parts: 260 in bf16, where a sum in bf16 stays 256; the bias and the residual enter
    before rounding."""
    parts = torch.tensor([256.0, 1, 1, 1]).bfloat16()[:, None, None].expand(4, 1, 8)
    assert torch.equal(fused(parts)[0], torch.full((1, 8), 260.0).bfloat16())
    one = torch.ones(8).bfloat16()
    assert torch.equal(fused(parts, one, one[None])[0], torch.full((1, 8), 260.0).bfloat16())
    assert torch.equal(
        fused(parts, one, torch.ones(1, 8))[0], torch.full((1, 8), 261.0)
    )  # an fp32 residual stream stays fp32


@pytest.mark.parametrize("norm", ["pre", "post", "rms"])
def test_autocast(norm):
    present, options = NORMS[norm]
    ours, theirs = bind(fused, **WHERE, **options), bind(oracle, **WHERE, **options)
    common.assert_autocast(ours, theirs, *(t for t in inputs(2, 33, 100, **present) if t is not None), size=3300)


def test_fp32_residual_beside_bf16_parts():
    """n has parts' dtype, h and its gradient the residual's."""
    parts, bias, residual, *rest = inputs(dtype=FP32)
    h, n, _ = fused(parts.bfloat16(), bias, residual, *rest, **WHERE)
    dresidual, dbias = torch.autograd.grad((h, n), (residual, bias), (torch.randn_like(h), torch.randn_like(n)))
    assert (h.dtype, n.dtype, dresidual.dtype, dbias.dtype) == (FP32, BF16, FP32, FP32)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("norm", ["pre", "rms", "post", "post rms"])
def test_recompute_is_bitwise_the_first(norm, dtype):
    """Also where the residual, and so h, is fp32 beside bf16 parts: n is rounded, h is not."""
    present, options = NORMS[norm]
    parts, bias, residual, *rest = inputs(2, 17, 33, dtype=FP32, **present)
    given = parts.to(dtype), bias, residual, *rest
    _, n, recompute = fused(*given, **WHERE, **options, recompute=True)
    assert n.dtype == dtype and torch.equal(norm_apply(recompute), n[0])
    assert fused(*given, **WHERE, **options)[2] is fused(parts, recompute=True)[2] is None


@NORM
def test_non_contiguous(norm):
    present, options = NORMS[norm]
    parts, bias, residual, *rest = inputs(2, 3, 4, **present)
    parts, residual = (
        parts.detach().mT.contiguous().mT.requires_grad_(),
        residual.detach().mT.contiguous().mT.requires_grad_(),
    )
    ours, theirs = (bind(fn, **WHERE, **options, ranks=2) for fn in (fused, oracle))
    common.assert_same(ours, theirs, parts, bias, residual, *rest, non_contiguous=True)
    common.assert_same(ours, theirs, parts[:1].detach().expand(3, 3, 4).requires_grad_(), bias, residual, *rest)


@NORM
def test_compile(norm):
    present, options = NORMS[norm]
    common.assert_compiles(bind(fused, **WHERE, **options, ranks=2), *inputs(dtype=FP32, **present))


@pytest.mark.slow
def test_compile_inductor():
    common.assert_compiles(bind(fused, **WHERE, ranks=2), *inputs(dtype=FP32), backend="inductor")


def test_only_what_is_needed():
    """A frozen residual stream, frozen parameters."""
    parts, *rest = inputs()
    frozen = [t.detach() for t in rest]
    whole = run(bind(fused, **WHERE), (parts, *rest))[1]
    assert torch.equal(run(bind(fused, **WHERE), (parts, *frozen))[1][0], whole[0])
    assert torch.equal(run(bind(fused, **WHERE), (parts.detach(), rest[0], *frozen[1:]))[1][0], whole[1])


def test_once_differentiable():
    parts, *rest = inputs()
    common.assert_once_differentiable(lambda parts: fused(parts, *rest)[1], parts)


@pytest.mark.parametrize(
    "options, match",
    [
        (dict(bias=torch.ones(3)), r"bias must have shape \(4,\), got \(3,\)"),
        (dict(residual=torch.ones(2, 4)), r"residual must have shape \(3, 4\), got .*\[2, 4\]"),
        (dict(norm_bias=torch.ones(4)), "norm_bias and post_norm need weight"),
        (dict(post_norm=True), "norm_bias and post_norm need weight"),
        (dict(p=1.0, rng=RNG), r"p must lie in \[0, 1 - 2\*\*-17\), got 1.0"),
        (dict(p=0.1), "dropout needs rng, an int64 tensor .*, got None"),
        (dict(p=0.1, rng=RNG, batch=0), "reduce_bias_dropout_add_norm: batch must be at least 1, got 0"),
        (dict(p=0.1, rng=RNG, site=1 << 16), "reduce_bias_dropout_add_norm: site must lie in 0 to 65534, got 65536"),
    ],
)
def test_errors(options, match):
    with pytest.raises(ValueError, match=match):
        fused(torch.randn(2, 3, 4), **options)


@pytest.mark.parametrize("shape", [(1, 2, 3, 4), (0, 3, 4)], ids=["four dimensions", "of no rank"])
def test_parts_that_are_none(shape):
    rule = "reduce_bias_dropout_add_norm: parts must be [R, m, D] with R at least 1, or [m, D], got"
    with pytest.raises(ValueError, match=re.escape(f"{rule} {shape}")):
        fused(torch.randn(shape))
