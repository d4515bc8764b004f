import functools
import importlib
import itertools

import pytest
import torch
import torch.nn.functional as F

from tests.kernels import common
from tests.kernels.common import gradcheck, leaf, run
from tests.kernels.losses.test_op import OPTION, bind, double, labels_for
from tests.kernels.losses.test_op import oracle as dense
from tpfuse.kernels import cross_entropy, linear_cross_entropy
from tpfuse.kernels.losses import linear_triton as K
from tpfuse.kernels.losses.linear import (
    linear_cross_entropy_bwd,
    linear_cross_entropy_bwd_add,
    linear_cross_entropy_stats,
)
from tpfuse.kernels.losses.options import Linear, Loss, Rows
from tpfuse.kernels.runtime.op import acc_dtype

module = importlib.import_module("tpfuse.kernels.losses.linear")
X, W, B, Y, ROW = torch.randn(4, 6), torch.randn(7, 6), torch.randn(7), torch.tensor([0, 6, -100, 12]), torch.rand(4)
LAYER, LOW, ROWS = Linear(X, W, B), Linear(X.bfloat16(), W.bfloat16(), None), Rows(Y, ROW, ROW)
SAMPLES = [
    (linear_cross_entropy_stats, (LAYER, Y, Loss(14, label_smoothing=0.1))),
    (linear_cross_entropy_stats, (LOW, Y, Loss(14, first_token=7))),
    (linear_cross_entropy_bwd, (LAYER, ROWS, Loss(14, label_smoothing=0.1, z_loss=1e-3))),
    (linear_cross_entropy_bwd, (LOW, ROWS, Loss(14, first_token=7))),
    (linear_cross_entropy_bwd_add, (LAYER, ROWS, Loss(14, label_smoothing=0.1), torch.randn(LAYER.w.shape))),
    (linear_cross_entropy_bwd_add, (LOW, ROWS, Loss(14, first_token=7), torch.randn(LOW.w.shape))),
]
test_opcheck = common.opcheck(SAMPLES)

EVERYTHING = dict(label_smoothing=0.1, z_loss=1e-2)


def oracle(x, w, b=None, *, labels, **options):
    z = F.linear(x, w, b)
    return dense(z.to(acc_dtype(z)), labels, **options)


def ours(x, w, b=None, *, labels, **options):
    return linear_cross_entropy(x, w, labels, b, **options)


def inputs(rows, vocab, width, bias=True, dtype=torch.float64):
    return [leaf(*shape, dtype=dtype) for shape in ((rows, width), (vocab, width), *([(vocab,)] if bias else []))]


# no rows; one of everything; one chunk; three chunks, the last one ragged
@pytest.mark.parametrize("shape", [(0, 5, 3), (1, 1, 1), (7, 13, 4), (6, 300, 5)], ids=str)
@OPTION
def test_against_torch(shape, options, small_chunks):
    for normalizer, bias in ((None, True), (3.5, False), (torch.tensor(11), True)):
        some = dict(labels=labels_for(*shape[:2]), normalizer=normalizer, **options)
        common.assert_same(
            functools.partial(ours, **some), functools.partial(oracle, **some), *inputs(*shape, bias=bias)
        )


def test_ignore_index():
    """One that is a token too; where every row is ignored, the loss is 0 and so are the gradients."""
    some = dict(labels=labels_for(7, 5, ignore_index=3), ignore_index=3, **EVERYTHING)
    common.assert_same(functools.partial(ours, **some), functools.partial(oracle, **some), *inputs(7, 5, 3))
    (loss,), grads = run(bind(ours, torch.full((4,), -100), **EVERYTHING), inputs(4, 5, 3))
    assert loss == 0 and not any(g.any() for g in grads)


@OPTION
def test_gradcheck(options):
    gradcheck(bind(ours, labels_for(4, 6), **options), *inputs(4, 6, 3))


def split(x, w, b, labels, bounds, **options):
    """Every rank's loss and gradients, ranks played one after the other: the gather brings all ranks' statistics."""
    loss = Loss(bounds[-1], label_smoothing=options.get("label_smoothing", 0.0))
    slices = [[t.detach()[i:j].contiguous().requires_grad_() for t in (w, b)] for i, j in itertools.pairwise(bounds)]
    stats = torch.stack(
        [
            linear_cross_entropy_stats(Linear(x.detach(), *own), labels, loss._replace(first_token=i))
            for own, i in zip(slices, bounds)
        ]
    )
    options = dict(vocab_size=bounds[-1], gather=lambda _: stats) | options
    losses = [
        linear_cross_entropy(x, own[0], labels, own[1], first_token=i, **options) for own, i in zip(slices, bounds)
    ]
    dx, dw, db = zip(*(torch.autograd.grad(loss, (x, *own)) for loss, own in zip(losses, slices)))
    return losses, (torch.stack(dx).sum(0), torch.cat(dw), torch.cat(db))


@pytest.mark.parametrize("bounds", [(0, 13), (0, 7, 13), (0, 4, 8, 12, 13)], ids=["R=1", "R=2", "R=4"])
def test_split_vocabulary(bounds):
    """Smoothing, z-loss and ignored rows together; dx is a part of a sum over the ranks."""
    (x, w, b), labels = inputs(7, 13, 4), labels_for(7, 13)
    exact = oracle(x, w, b, labels=labels, **EVERYTHING)
    losses, grads = split(x, w, b, labels, bounds, **EVERYTHING)
    for loss in losses:
        torch.testing.assert_close(loss, exact, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads, torch.autograd.grad(exact, (x, w, b)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@OPTION
def test_low_precision(dtype, options, small_chunks):
    some = dict(labels=labels_for(20, 300), **options)
    common.assert_accurate(
        functools.partial(ours, **some), functools.partial(oracle, **some), *inputs(20, 300, 16), dtype=dtype
    )


def many_rows():
    """dW is a sum over 4096 rows of one sign, where a bf16 running sum stops growing."""
    labels = torch.randint(4, (4096,))
    return leaf(4096, 16).detach().abs().requires_grad_(), leaf(5, 16).detach().mul_(0.1).requires_grad_(), labels


def test_dw_is_summed_in_fp32():
    x, w, labels = many_rows()
    some = dict(labels=labels)
    common.assert_accurate(
        functools.partial(ours, **some), functools.partial(oracle, **some), x, w, dtype=torch.bfloat16
    )


def test_another_sum_of_dw_would_be_seen():
    x, w, labels = (t.detach().bfloat16() if t.is_floating_point() else t for t in many_rows())
    every = Rows(labels, torch.logsumexp(x.float() @ w.float().t(), -1), torch.full((4096,), 1 / 4096))
    args = Linear(x, w, None), every, Loss(5)
    exact = linear_cross_entropy_bwd.reference(*double(args))[1]
    good, bad = linear_cross_entropy_bwd(*args)[1], torch.zeros_like(w)
    for i in range(0, 4096, 16):
        rows = slice(i, i + 16)
        bad += linear_cross_entropy_bwd(Linear(x[rows], w, None), Rows(*(t[rows] for t in every)), Loss(5))[1]
    good, bad = ((dw.double() - exact).abs().max() for dw in (good, bad))
    assert bad > 10 * good


def test_memory_is_bounded(monkeypatch):
    """Above the gradients: a few chunks' temporaries and dx in fp32.  Chunks and x are 1/32 of the logits here, which
    are not bounded."""
    monkeypatch.setattr(module, "ELEMENTS", 64 * 256)
    monkeypatch.setattr(K, "LEAST_COLUMNS", 128)
    (x, w, b), labels = (t.detach() for t in inputs(64, 8192, 256, dtype=torch.float32)), labels_for(64, 8192)
    chunk, logits = 4 * 64 * 256, 4 * 64 * 8192
    rows, loss = Rows(labels, torch.rand(64), torch.rand(64)), Loss(8192, label_smoothing=0.1, z_loss=1e-2)
    peaks = []
    for fwd_fn, bwd_fn in (
        (linear_cross_entropy_stats.cpu, linear_cross_entropy_bwd.cpu),
        (linear_cross_entropy_stats.reference, linear_cross_entropy_bwd.reference),
    ):
        _, forward = common.peak(lambda fn=fwd_fn: fn(Linear(x, w, b), labels, loss))
        grads, backward = common.peak(lambda fn=bwd_fn: fn(Linear(x, w, b), rows, loss))
        peaks.append((forward, backward - sum(g.nbytes for g in grads)))
    assert max(peaks[0]) <= 6 * chunk < logits <= min(peaks[1])


def test_autocast():
    """fp32 parameters: bf16 ones are saved, the gradients are fp32."""
    some, saved = dict(labels=labels_for(20, 30), **EVERYTHING), []
    xs = [t.detach().bfloat16().float().requires_grad_() for t in inputs(20, 30, 16)]
    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        loss = ours(*xs, **some)
    assert loss.dtype == torch.float32 and {t.dtype for t in saved if t.dim() == 2} == {torch.bfloat16}
    assert {g.dtype for g in torch.autograd.grad(loss, xs)} == {torch.float32}

    def under_autocast(*xs):
        with torch.autocast("cpu", torch.bfloat16):
            return ours(*(x.float() for x in xs), **some)

    common.assert_accurate(under_autocast, functools.partial(oracle, **some), *xs, dtype=torch.bfloat16)


def test_what_is_saved():
    """x, W, b, labels, lse and the normalizer: nothing of the logits' size."""
    saved, (x, w, b) = [], inputs(20, 300, 16)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ours(x, w, b, labels=labels_for(20, 300))
    assert sorted(t.numel() for t in saved) == sorted([x.numel(), w.numel(), b.numel(), 20, 20, 1])


def test_shapes_and_strides():
    """Batches of sequences; x a slice of something wider; labels shifted."""
    x, labels = leaf(2, 5, 9)[:, :4, 1:6].detach().requires_grad_(), labels_for(10, 7).view(2, 5)[:, 1:]
    w = leaf(5, 7).detach().t().requires_grad_()
    assert not any(t.is_contiguous() for t in (x, w, labels))
    common.assert_same(*(bind(f, labels, **EVERYTHING) for f in (ours, oracle)), x, w)


def test_equals_cross_entropy_of_linear():
    """One definition: the composition of the two ops gives the same bits where one chunk holds all."""
    (x, w, b), labels = inputs(6, 9, 4, dtype=torch.float32), labels_for(6, 9)
    composed = lambda x, w, b: cross_entropy(F.linear(x, w, b), labels, **EVERYTHING)
    torch.testing.assert_close(
        run(bind(ours, labels, **EVERYTHING), (x, w, b)), run(composed, (x, w, b)), rtol=1e-6, atol=1e-6
    )


def test_micro_batches():
    """With the step's normaliser, two halves add up to the whole."""
    (x, w, b), labels = inputs(8, 5, 3), labels_for(8, 5)
    n = int((labels >= 0).sum())
    halves = [linear_cross_entropy(x[i : i + 4], w, labels[i : i + 4], b, normalizer=n) for i in (0, 4)]
    torch.testing.assert_close(halves[0] + halves[1], linear_cross_entropy(x, w, labels, b))


@pytest.mark.parametrize("bias", [True, False])
def test_compile(bias):
    common.assert_compiles(bind(ours, labels_for(5, 6), **EVERYTHING), *inputs(5, 6, 4, bias=bias, dtype=torch.float32))


def test_once_differentiable():
    common.assert_once_differentiable(bind(ours, labels_for(5, 6)), *inputs(5, 6, 4))


@pytest.mark.parametrize(
    "w, labels, options, match",
    [
        (torch.randn(5, 4), torch.zeros(2, dtype=torch.int64), {}, r"weight must be \[N, 3\], got \(5, 4\)"),
        (
            torch.randn(5, 3).half(),
            torch.zeros(2, dtype=torch.int64),
            {},
            "x and weight must have one dtype outside autocast",
        ),
        (
            torch.randn(5, 3),
            torch.zeros(2, dtype=torch.int64),
            dict(bias=torch.randn(4)),
            r"bias must be \[5\], got torch.Size\(\[4\]\)",
        ),
        (
            torch.randn(5, 3),
            torch.zeros(3, dtype=torch.int64),
            {},
            r"labels must be int64 \(2,\), got torch.int64 \(3,\)",
        ),
        (torch.randn(5, 3), torch.tensor([0, 5]), {}, r"labels must lie in 0 to 4, got \[5\]"),
        (
            torch.randn(5, 3),
            torch.tensor([0, 1]),
            dict(label_smoothing=1.0),
            r"label_smoothing must lie in \[0, 1\), got 1.0",
        ),
    ],
)
def test_errors(w, labels, options, match):
    with pytest.raises(ValueError, match="linear_cross_entropy: " + match):
        linear_cross_entropy(torch.randn(2, 3), w, labels, **options)
