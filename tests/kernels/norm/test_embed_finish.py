import functools
import itertools
import re

import pytest
import torch
import torch.nn.functional as F

from tests.kernels import common
from tests.kernels.common import RNG, gradcheck, leaf
from tests.kernels.interpreter_bytes import assert_declared
from tests.kernels.kernel_rules import DEVICE, assert_accurate_launch, assert_same, like, narrow, on_a_gpu
from tpfuse.kernels import embed_finish
from tpfuse.kernels.norm import norm_apply
from tpfuse.kernels.norm.records import DROP, PRE, Add, NormVectors, Saved, Wanted
from tpfuse.kernels.norm.verbs import EMBED_FINISH
from tpfuse.kernels.runtime.philox import Mask, RowPieces, keep_rows, make_rng, scale

_, fwd, bwd = EMBED_FINISH
FP32, BF16 = torch.float32, torch.bfloat16
W, IDS, P, V, D, STAT = (
    torch.randn(5, 7),
    torch.tensor([4, 0, 9]),
    torch.randn(2, 3, 7),
    torch.randn(7),
    torch.randn(3, 7),
    torch.rand(3),
)
POSITIONS, TYPES, MASK = torch.tensor([0, 0, 4]), torch.tensor([1, 0, 1]), Mask(RNG, 0.3, 2, first_row=1, batch=2)
LAYER, RMS = (Saved(D, STAT[:n], STAT, V, kind) for n, kind in ((3, "layer"), (0, "rms")))
NONE = Saved(None, None, None, None, "layer")
BOTH, POSITION = Add(None, W, POSITIONS, W, TYPES), Add(None, W, POSITIONS)
SAMPLES = [
    (fwd, (P, BOTH, NormVectors(V, V, 1e-5), MASK, PRE)),
    (fwd, (P.bfloat16(), POSITION, NormVectors(V, None, 1e-5, "rms"), MASK, DROP)),
    (fwd, (P, Add(), NormVectors(), Mask(), PRE)),
    (bwd, (P, D, LAYER, MASK, PRE, Wanted(None, True, None, FP32))),
    (bwd, (P.bfloat16(), None, RMS, MASK, DROP, Wanted(None, False, None, BF16))),
    (bwd, (None, D, LAYER, MASK, DROP, Wanted(None, True, None, FP32))),
    (bwd, (None, D, NONE, Mask(), PRE, Wanted(None, False, None, FP32))),
]
test_opcheck = common.opcheck(SAMPLES)

WHERE = dict(p=0.3, rng=RNG, site=2, first_row=1, batch=2)
NORMS = {  # name: (norm weight, norm bias, options)
    "no norm": (False, False, {}),
    "pre": (True, True, {}),
    "rms": (True, False, dict(norm="rms")),
    "post": (True, True, dict(post_norm=True)),
    "post, no beta": (True, False, dict(post_norm=True)),
}
NORM = pytest.mark.parametrize("norm", NORMS)
DROPOUT = pytest.mark.parametrize("where", [{}, WHERE], ids=["p=0", "dropout"])


def ours(parts, position_weight, type_weight, weight, norm_bias, *, positions, types, **options):
    return embed_finish(
        parts,
        position_weight=position_weight,
        positions=None if position_weight is None else positions,
        type_weight=type_weight,
        types=None if type_weight is None else types,
        weight=weight,
        norm_bias=norm_bias,
        **options,
    )[:2]


def oracle(
    parts,
    position_weight,
    type_weight,
    weight,
    norm_bias,
    *,
    positions,
    types,
    norm="layer",
    post_norm=False,
    ranks=1,
    **where,
):
    def drop(x):
        if not where:
            return x
        return x * keep_rows(Mask(**where), *x.shape, x.dtype) * scale(where["p"])

    x = parts.sum(0)
    x = x if position_weight is None else x + F.embedding(positions, position_weight)
    x = x if type_weight is None else x + F.embedding(types, type_weight)
    h = n = x if post_norm else drop(x)
    if weight is not None:
        n = (
            F.rms_norm(h, h.shape[-1:], weight, 1e-5)
            if norm == "rms"
            else F.layer_norm(h, h.shape[-1:], weight, norm_bias)
        )
    n = drop(n) if post_norm else n
    return (n if post_norm else h) * 1, torch.stack([n] * ranks)


def bind(fn, m=3, **options):
    """Positions and types that repeat, so that their gradients are sums."""
    return functools.partial(fn, positions=torch.arange(m) // 2, types=torch.arange(m) % 2, **options)


def inputs(R=2, m=3, D=4, position=True, kind=True, norm=True, norm_bias=True, dtype=torch.float64):
    shapes = ((R, m, D), True), ((m // 2 + 1, D), position), ((2, D), kind), ((D,), norm), ((D,), norm_bias)
    return [leaf(*shape, dtype=dtype) if wanted else None for shape, wanted in shapes]


@NORM
@DROPOUT
def test_against_torch(norm, where):
    *present, options = NORMS[norm]
    for R, position, kind in itertools.product((1, 2, 3), (False, True), (False, True)):
        tensors = inputs(R, 3, 4, position, kind, *present)
        common.assert_same(bind(ours, **where, **options, ranks=R), bind(oracle, **where, **options, ranks=R), *tensors)


@NORM
@DROPOUT
def test_gradcheck(norm, where):
    *present, options = NORMS[norm]
    gradcheck(bind(ours, 2, **where, **options, ranks=3), *inputs(2, 2, 3, True, True, *present))


# no rows, one row, a width of one, widths on both sides of a call of Philox
@pytest.mark.parametrize("m, D", [(0, 4), (1, 5), (3, 1), (5, 7), (5, 9)])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_sizes(m, D, norm):
    *present, options = NORMS[norm]
    common.assert_same(
        *(bind(f, m, **WHERE, **options) for f in (ours, oracle)), *inputs(2, m, D, True, True, *present)
    )


@NORM
@pytest.mark.parametrize("used", [0, 1])
def test_one_output_used(norm, used):
    *present, options = NORMS[norm]
    *tensors, gamma, beta = inputs(2, 3, 4, True, True, *present)
    one = lambda f: lambda *ts: bind(f, **WHERE, **options)(*ts, gamma, beta)[used]
    common.assert_same(one(ours), one(oracle), *tensors)


@NORM
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_low_precision(norm, dtype):
    *present, options = NORMS[norm]
    tensors = inputs(4, 33, 100, True, True, *present)
    count = sum(t is not None for t in tensors)
    fns = (lambda *ts, f=f: bind(f, 33, **WHERE, **options)(*ts, *[None] * (5 - count)) for f in (ours, oracle))
    a, b = fns
    common.assert_accurate(a, b, *tensors[:count], dtype=dtype)
    common.assert_accurate(
        a, b, *tensors[:count], dtype=dtype, keep=(1, 2, 3, 4)
    )  # fp32 tables and vectors beside 16-bit activations


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_autocast(norm):
    *present, options = NORMS[norm]
    common.assert_autocast(
        *(bind(f, 33, **WHERE, **options) for f in (ours, oracle)), *inputs(2, 33, 100, True, True, *present), size=3300
    )


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("rms", [False, True])
def test_recompute_is_bitwise_the_first(rms, dtype):
    gamma, beta = leaf(33, dtype=FP32), None if rms else leaf(33, dtype=FP32)
    _, n, recompute = embed_finish(
        torch.randn(2, 17, 33).to(dtype),
        weight=gamma,
        norm_bias=beta,
        norm="rms" if rms else "layer",
        recompute=True,
        **WHERE,
    )
    assert n.dtype == dtype and torch.equal(norm_apply(recompute), n[0])
    asked = dict(recompute=True)
    assert embed_finish(P, weight=V, post_norm=True, **asked)[2] is embed_finish(P, **asked)[2] is None


@NORM
def test_non_contiguous(norm):
    *present, options = NORMS[norm]
    tensors = [
        t if t is None else t.detach().mT.contiguous().mT.requires_grad_() for t in inputs(2, 3, 4, True, True)[:3]
    ]
    vectors = inputs(2, 3, 4, True, True, *present)[3:]
    common.assert_same(
        *(bind(f, **WHERE, **options, ranks=2) for f in (ours, oracle)), *tensors, *vectors, non_contiguous=True
    )


@NORM
def test_compile(norm):
    *present, options = NORMS[norm]
    common.assert_compiles(bind(ours, **WHERE, **options, ranks=2), *inputs(2, 3, 4, True, True, *present, dtype=FP32))


@pytest.mark.parametrize(
    "options, match",
    [
        (dict(weight=V[:3]), r"weight must have shape \(7,\), got \(3,\)"),
        (dict(post_norm=True), "norm_bias and post_norm need weight"),
        (dict(norm_bias=V), "norm_bias and post_norm need weight"),
        (dict(position_weight=W), "position_weight and positions go together"),
        (dict(types=TYPES), "type_weight and types go together"),
        (dict(position_weight=W, positions=IDS[:2]), r"positions must be int64 \[3\], got torch.int64 \(2,\)"),
        (dict(position_weight=W, positions=IDS.bool()), r"positions must be int64 \[3\], got torch.bool \(3,\)"),
        (dict(type_weight=W, types=TYPES.int()), r"types must be int64 \[3\], got torch.int32 \(3,\)"),
        (dict(type_weight=W[:, :3], types=TYPES), r"type_weight must be \[_, 7\], got \(5, 3\)"),
        (dict(position_weight=W, positions=IDS - 5), r"embed_finish: positions must lie in 0 to 4, got \[-"),
        (dict(type_weight=W, types=TYPES + 5), r"embed_finish: types must lie in 0 to 4, got \["),
        (dict(p=1.0, rng=RNG), "p must lie"),
        (dict(p=0.5), "embed_finish: dropout needs rng"),
    ],
)
def test_errors(options, match):
    with pytest.raises(ValueError, match=match):
        embed_finish(P, **options)


@pytest.mark.parametrize("shape", [(3, 7), (0, 3, 7)], ids=["two dimensions", "of no rank"])
def test_parts_that_are_none(shape):
    rule = "embed_finish: parts must be [R, m, D] with R at least 1, got"
    with pytest.raises(ValueError, match=re.escape(f"{rule} {shape}")):
        embed_finish(torch.ones(shape))


# ---- the Triton side: launcher == reference under the interpreter, or compiled on a GPU ----

ALL = dict(position=True, type=True, norm=True, beta=True, dropout=True, rms=False)
LEFT_OUT = [
    {},
    dict(position=False),
    dict(type=False),
    dict(beta=False),
    dict(dropout=False),
    dict(rms=True, beta=False),
]
NO_NORM = dict(norm=False, beta=False)
DROPPED = Mask(make_rng(3, 2, 5, DEVICE), 0.3, site=7, first_row=11, batch=3)


def forward_arguments(R, m, D, post=False, dtype=torch.float32, **left_out):
    has = ALL | left_out
    parts = torch.randn(R, m, D, device=DEVICE).to(dtype)
    positions, types = (torch.arange(n, device=DEVICE).repeat(m)[:m].flip(0) for n in (max(m - 1, 1), 2))
    tables = torch.randn(max(m - 1, 1), D, device=DEVICE), positions, torch.randn(2, D, device=DEVICE).to(dtype), types
    tables = [t if has[k] else None for t, k in zip(tables, ("position", "position", "type", "type"), strict=True)]
    gamma, beta = (
        v if has[k] else None for v, k in zip(torch.randn(2, D, device=DEVICE), ("norm", "beta"), strict=True)
    )
    norm = NormVectors(gamma, beta, 1e-5, "rms" if has["rms"] else "layer")
    return parts, Add(None, *tables), norm, DROPPED if has["dropout"] else Mask(), DROP if post else PRE


def backward_arguments(arguments, dn=True, dh=True):
    parts, _, norm, mask, order = arguments
    x, _, mean, rstd = fwd.reference(*arguments)
    saved = (x, mean, rstd, norm.gamma) if norm.gamma is not None else (None,) * 4
    incoming = like(parts) if dn else None, like(x) if dh else None
    wanted = Wanted(None, norm.beta is not None, None, parts.dtype)
    return *incoming, Saved(*saved, norm.kind), mask, order, wanted


def assert_both(arguments):
    assert_same(fwd.launch(*arguments), fwd.reference(*arguments))
    both = backward_arguments(arguments)
    assert_same(bwd.launch(*both), bwd.reference(*both))


# several rows a program and the last program ragged; two tiles; no rows; one element's gradients are all rounding
@pytest.mark.parametrize("left_out", LEFT_OUT, ids=str)
@pytest.mark.parametrize("post", [False, True])
@pytest.mark.usefixtures("poisoned")
def test_launchers(post, left_out):
    arguments = forward_arguments(3, 35, 100, post, **left_out)
    assert_same(fwd.launch(*arguments), fwd.reference(*arguments))
    for dn, dh in ((True, True), (True, False), (False, True)):
        both = backward_arguments(arguments, dn, dh)
        assert_same(bwd.launch(*both), bwd.reference(*both))


# two-pass backward; chunked forward
WIDE = (2, 2, 9000), pytest.param((2, 1, 17000), marks=pytest.mark.slow)


@pytest.mark.parametrize("shape", [(2, 5, 768), (1, 0, 8), *WIDE], ids=str)
@pytest.mark.parametrize("post", [False, True])
@pytest.mark.usefixtures("poisoned")
def test_widths(shape, post):
    assert_both(forward_arguments(*shape, post))


@pytest.mark.usefixtures("poisoned")
def test_without_norm():
    for D, dn, dh in ((100, True, True), (100, False, True), (9000, True, False)):
        arguments = forward_arguments(2, 3, D, **NO_NORM)
        assert_same(fwd.launch(*arguments), fwd.reference(*arguments))
        both = backward_arguments(arguments, dn, dh)
        assert_same(bwd.launch(*both), bwd.reference(*both))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("post", [False, True])
@pytest.mark.usefixtures("poisoned")
def test_launchers_in_low_precision(post, dtype):
    arguments = forward_arguments(2, 5, 100, post, dtype)
    assert_accurate_launch(fwd, arguments)
    assert_accurate_launch(bwd, backward_arguments(arguments))


@pytest.mark.parametrize("post", [False, True])
@pytest.mark.usefixtures("poisoned")
def test_rows_in_two_pieces(post):
    """Those of two launches bitwise; and the reference's, called with the public function's record."""
    parts, add, norm, mask, order = forward_arguments(1, 8, 100, post, type=False)
    two = mask._replace(split=5, second_row=70)
    cut = [
        fwd.launch(parts[:, rows], add._replace(positions=add.positions[rows]), norm, piece, order)
        for rows, piece in ((slice(0, 5), mask), (slice(5, 8), mask._replace(first_row=70)))
    ]
    whole = fwd.launch(parts, add, norm, two, order)
    assert all(torch.equal(torch.cat(outputs), w) for outputs, w in zip(zip(*cut, strict=True), whole, strict=True))
    called, _, _ = embed_finish(
        parts, position_weight=add.position_weight, positions=add.positions, weight=norm.gamma, norm_bias=norm.beta,
        p=mask.p, rng=mask.rng, site=mask.site, first_row=RowPieces(mask.first_row, 5, 70), batch=mask.batch,
        post_norm=post,
    )  # fmt: skip
    torch.testing.assert_close(called, whole[1 if post else 0], rtol=2e-5, atol=2e-5)


@pytest.mark.usefixtures("poisoned")
def test_strided_tables():
    parts, add, *rest = forward_arguments(2, 4, 16)
    table, positions = add.position_weight, add.positions
    strided = torch.cat([table, table], 1)[:, :16], torch.stack([positions, positions], 1)[:, 0]
    strided = add._replace(position_weight=strided[0], positions=strided[1])
    for a, b in zip(fwd.launch(parts, strided, *rest), fwd.launch(parts, add, *rest), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.usefixtures("poisoned")
def test_declared_bytes(monkeypatch, wide):
    """Positions that all differ, as the declaration has it."""
    narrow(monkeypatch, wide)
    D = 256
    for post, dropout in itertools.product((False, True), (False, True)):
        parts, _, *rest = forward_arguments(2, 4, D, post, torch.bfloat16, dropout=dropout)
        tables = (
            torch.randn(6, D, device=DEVICE),
            torch.arange(4, device=DEVICE),
            torch.randn(2, D, device=DEVICE),
            torch.arange(4) % 2,
        )
        arguments = parts, Add(None, *(t.to(DEVICE) for t in tables)), *rest
        assert_declared(fwd, arguments)
        for dn, dh in ((True, True), (False, True)):
            assert_declared(bwd, backward_arguments(arguments, dn, dh))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("D", [768, 1024, 8192, 16384, 32768])
@pytest.mark.usefixtures("poisoned")
def test_on_a_gpu(D, dtype):
    for post in (False, True):
        arguments = forward_arguments(2, 67, D, post, dtype)
        on_a_gpu(fwd, arguments)
        on_a_gpu(bwd, backward_arguments(arguments))
