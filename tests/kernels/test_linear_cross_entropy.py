import functools
import importlib
import itertools
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tpfuse.kernels._linear_cross_entropy as K
from tests.kernels import common
from tests.kernels.common import gradcheck, leaf, run
from tests.kernels.test_cross_entropy import OPTION, bind, labels_for
from tests.kernels.test_cross_entropy import oracle as dense
from tpfuse.kernels import cross_entropy, linear_cross_entropy
from tpfuse.kernels._op import acc_dtype
from tpfuse.kernels.linear_cross_entropy import linear_cross_entropy_bwd, linear_cross_entropy_stats

module = importlib.import_module("tpfuse.kernels.linear_cross_entropy")  # in the package that name is the function
X, W, B, Y, ROW = torch.randn(4, 6), torch.randn(7, 6), torch.randn(7), torch.tensor([0, 6, -100, 12]), torch.rand(4)
LOW = X.bfloat16(), W.bfloat16()
SAMPLES = [
    (linear_cross_entropy_stats, (X, W, B, Y, 0, True)),
    (linear_cross_entropy_stats, (*LOW, None, Y, 7, False)),
    (linear_cross_entropy_bwd, (X, W, B, Y, ROW, ROW, 0, 14, -100, 0.1, 1e-3)),
    (linear_cross_entropy_bwd, (*LOW, None, Y, ROW, ROW, 7, 14, -100, 0.0, 0.0)),
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


@pytest.fixture
def small_chunks(monkeypatch):
    """Of 128 columns, however few the rows."""
    for where, name, value in ((module, "ELEMENTS", 1), (K, "ELEMENTS", 1), (K, "LEAST_COLUMNS", 128)):
        monkeypatch.setattr(where, name, value)


# no rows; one of everything; one chunk; three chunks, the last one ragged
@pytest.mark.parametrize("shape", [(0, 5, 3), (1, 1, 1), (7, 13, 4), (6, 300, 5)], ids=str)
@OPTION
def test_against_torch(shape, options, small_chunks):
    for normalizer, bias in ((None, True), (3.5, False), (torch.tensor(11), True)):
        some = dict(labels=labels_for(*shape[:2]), normalizer=normalizer, **options)
        common.assert_same(functools.partial(ours, **some), functools.partial(oracle, **some), *inputs(*shape, bias=bias))


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
    smoothing = options.get("label_smoothing", 0) > 0
    slices = [[t.detach()[i:j].contiguous().requires_grad_() for t in (w, b)] for i, j in itertools.pairwise(bounds)]
    stats = torch.stack([linear_cross_entropy_stats(x.detach(), *own, labels, i, smoothing) for own, i in zip(slices, bounds)])
    options = dict(vocab_size=bounds[-1], gather=lambda _: stats) | options
    losses = [linear_cross_entropy(x, own[0], labels, own[1], first_token=i, **options) for own, i in zip(slices, bounds)]
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


def test_smoothing_counts_the_global_vocabulary():
    """It can fail: with another width the loss is another one."""
    (x, w, b), labels = inputs(7, 12, 4), labels_for(7, 12)
    exact = oracle(x, w, b, labels=labels, **EVERYTHING)
    right, _ = split(x, w, b, labels, (0, 6, 12), **EVERYTHING)
    wrong, _ = split(x, w, b, labels, (0, 6, 12), vocab_size=24, **EVERYTHING)
    assert (right[0] - exact).abs() < 1e-12 < 1e-3 < (wrong[0] - exact).abs()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@OPTION
def test_low_precision(dtype, options, small_chunks):
    some = dict(labels=labels_for(20, 300), **options)
    common.assert_accurate(functools.partial(ours, **some), functools.partial(oracle, **some), *inputs(20, 300, 16), dtype=dtype)


def many_rows():
    """dW is a sum over 4096 rows of one sign, where a bf16 running sum stops growing."""
    labels = torch.randint(4, (4096,))
    return leaf(4096, 16).detach().abs().requires_grad_(), leaf(5, 16).detach().mul_(0.1).requires_grad_(), labels


def test_dw_is_summed_in_fp32():
    x, w, labels = many_rows()
    some = dict(labels=labels)
    common.assert_accurate(functools.partial(ours, **some), functools.partial(oracle, **some), x, w, dtype=torch.bfloat16)


def test_another_sum_of_dw_would_be_seen():
    x, w, labels = (t.detach().bfloat16() if t.is_floating_point() else t for t in many_rows())
    args = labels, torch.logsumexp(x.float() @ w.float().t(), -1), torch.full((4096,), 1 / 4096), 0, 5, -100, 0.0, 0.0
    exact = linear_cross_entropy_bwd.reference(x.double(), w.double(), None, args[0], args[1].double(), args[2].double(), *args[3:])[1]
    good, bad = linear_cross_entropy_bwd(x, w, None, *args)[1], torch.zeros_like(w)
    for i in range(0, 4096, 16):
        rows = slice(i, i + 16)
        bad += linear_cross_entropy_bwd(x[rows], w, None, labels[rows], args[1][rows], args[2][rows], *args[3:])[1]
    good, bad = ((dw.double() - exact).abs().max() for dw in (good, bad))
    assert bad > 10 * good


class Live(TorchDispatchMode):
    """The most bytes that were alive at a time, of what aten's ops made."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.known = set()

    def _gone(self, key, size):
        self.now -= size
        self.known.discard(key)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and (key := t.untyped_storage()._cdata) not in before | self.known:
                size = t.untyped_storage().nbytes()
                self.known.add(key)
                self.now += size
                weakref.finalize(t.untyped_storage(), self._gone, key, size)
        self.peak = max(self.peak, self.now)
        return out


def test_memory_is_bounded(monkeypatch):
    """Above the gradients: a few chunks' temporaries and dx in fp32.  Chunks and x are 1/32 of the logits here, which are not bounded."""
    monkeypatch.setattr(module, "ELEMENTS", 64 * 256)
    monkeypatch.setattr(K, "LEAST_COLUMNS", 128)
    (x, w, b), labels = (t.detach() for t in inputs(64, 8192, 256, dtype=torch.float32)), labels_for(64, 8192)
    chunk, logits = 4 * 64 * 256, 4 * 64 * 8192
    bwd = labels, torch.rand(64), torch.rand(64), 0, 8192, -100, 0.1, 1e-2
    peaks = []
    for fwd_fn, bwd_fn in (
        (linear_cross_entropy_stats.cpu, linear_cross_entropy_bwd.cpu),
        (linear_cross_entropy_stats.reference, linear_cross_entropy_bwd.reference),
    ):
        with Live() as forward:
            fwd_fn(x, w, b, labels, 0, True)
        with Live() as backward:
            grads = bwd_fn(x, w, b, *bwd)
        peaks.append((forward.peak, backward.peak - sum(g.nbytes for g in grads)))
    assert max(peaks[0]) <= 6 * chunk < logits <= min(peaks[1])


def test_autocast():
    """fp32 parameters: bf16 ones are saved, the gradients are fp32."""
    some, saved = dict(labels=labels_for(20, 30), **EVERYTHING), []
    xs = [t.detach().bfloat16().float().requires_grad_() for t in inputs(20, 30, 16)]
    with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
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
    composed = lambda x, w, b: cross_entropy(F.linear(x, w, b), labels, **EVERYTHING)  # noqa: E731
    torch.testing.assert_close(run(bind(ours, labels, **EVERYTHING), (x, w, b)), run(composed, (x, w, b)), rtol=1e-6, atol=1e-6)


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
        (torch.randn(5, 3).half(), torch.zeros(2, dtype=torch.int64), {}, "x and weight must have one dtype outside autocast"),
        (torch.randn(5, 3), torch.zeros(2, dtype=torch.int64), dict(bias=torch.randn(4)), r"bias must be \[5\], got torch.Size\(\[4\]\)"),
        (torch.randn(5, 3), torch.zeros(3, dtype=torch.int64), {}, r"labels must be int64 \(2,\), got torch.int64 \(3,\)"),
        (torch.randn(5, 3), torch.tensor([0, 5]), {}, r"labels must lie in 0 to 4, got \[5\]"),
        (torch.randn(5, 3), torch.tensor([0, 1]), dict(label_smoothing=1.0), r"label_smoothing must lie in \[0, 1\), got 1.0"),
    ],
)
def test_errors(w, labels, options, match):
    with pytest.raises(ValueError, match="linear_cross_entropy: " + match):
        linear_cross_entropy(torch.randn(2, 3), w, labels, **options)


# ---- the launchers, under Triton's interpreter or on a GPU ----

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# one ragged tile whose rows are not 16 bytes apart; ragged tiles in every dimension; chunks of 128 columns, a ragged last; one column
SHAPES = [(3, 5, 7), (70, 100, 40), (5, 300, 24), (4, 1, 8)]


def launch_arguments(rows, vocab, width, dtype=torch.float32, bias=True, smoothing=0.1):
    """The middle of three slices: labels on its first and last column, outside it on either side, ignored.  -> stats', bwd's"""
    pytest.importorskip("triton")
    labels = torch.randint(3 * vocab, (rows,))
    for i, label in enumerate((vocab, 2 * vocab - 1, -100, vocab - 1, 2 * vocab)[:rows]):
        labels[i] = label
    x, w, b = (torch.randn(*shape).to(dtype).to(DEVICE) for shape in ((rows, width), (vocab, width), (vocab,)))
    x, own = x * width**-0.5, (labels.to(DEVICE),)
    b = b if bias else None
    lse = torch.logsumexp(F.linear(x.float(), w.float(), None if b is None else b.float()), -1) + 1
    dloss = torch.rand(1, device=DEVICE).expand(rows)
    return (x, w, b, *own, vocab, smoothing > 0), (x, w, b, *own, lse, dloss, vocab, 3 * vocab, -100, smoothing, 1e-2)


def both_launchers(shape, **options):
    return zip((linear_cross_entropy_stats, linear_cross_entropy_bwd), launch_arguments(*shape, **options), strict=True)


def outputs(y):
    return (y,) if isinstance(y, torch.Tensor) else y


@pytest.mark.parametrize("bias, smoothing", [(True, 0.1), (False, 0.0)])
@pytest.mark.parametrize("shape", [*SHAPES, (0, 7, 8)], ids=str)
def test_launchers(shape, bias, smoothing, small_chunks, poisoned):
    for op, args in both_launchers(shape, bias=bias, smoothing=smoothing):
        got, want = outputs(op.launch(*args)), outputs(op.reference(*args))
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5, check_stride=True)


def test_two_runs_give_the_same_bits(small_chunks):
    for op, args in both_launchers((5, 300, 24)):
        assert all(map(torch.equal, outputs(op.launch(*args)), outputs(op.launch(*args))))


def assert_accurate(op, args, theirs):
    exact = op.reference(*(a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args))
    for y, z, truth in zip(outputs(op.launch(*args)), outputs(theirs), outputs(exact), strict=True):
        error, allowed = (torch.linalg.vector_norm(t.double() - truth, torch.inf) if len(truth) else 0 for t in (y, z))
        assert error <= 2 * allowed + 1e-6, (op.name, truth.shape, error, allowed)


# tiles are 128 x 128 here
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(20, 300, 72), (130, 60, 9)], ids=str)
def test_launchers_in_low_precision(shape, dtype, small_chunks, poisoned):
    """Against torch's own GEMMs in that dtype, which is what a CPU runs."""
    for op, args in both_launchers(shape, dtype=dtype):
        assert_accurate(op, args, op.cpu(*args))


def test_launched_dw_is_summed_in_fp32():
    x, w, labels = (t.detach().bfloat16().to(DEVICE) if t.is_floating_point() else t.to(DEVICE) for t in many_rows())
    pytest.importorskip("triton")
    lse, dloss = torch.logsumexp(x.float() @ w.float().t(), -1), torch.full((1,), 1 / 4096, device=DEVICE).expand(4096)
    args = x, w, None, labels, lse, dloss, 0, 5, -100, 0.0, 0.0
    assert_accurate(linear_cross_entropy_bwd, args, linear_cross_entropy_bwd.cpu(*args))


def test_launchers_where_columns_are_minus_infinity(poisoned):
    """A bias of -inf is how padding is kept out: no probability, no gradient, no NaN; a whole tile and a whole slice of it too."""
    (x, w, b, labels, first, _), bwd = launch_arguments(5, 200, 8)
    for columns in (slice(150, None), slice(0, 70), slice(None)):
        b = b.clone()
        b[columns] = -torch.inf
        labels = torch.full_like(labels, first + 100)
        stats = linear_cross_entropy_stats.launch(x, w, b, labels, first, False)
        torch.testing.assert_close(stats[:, :2], linear_cross_entropy_stats.reference(x, w, b, labels, first, False)[:, :2])
        args = x, w, b, labels, *bwd[4:9], 0.0, 1e-2
        torch.testing.assert_close(linear_cross_entropy_bwd.launch(*args), linear_cross_entropy_bwd.reference(*args))


def test_launchers_take_any_strides():
    """Transposed, expanded and misaligned operands; labels with gaps; offsets beyond 2^31 elements."""
    (x, w, b, labels, first, smoothing), bwd = launch_arguments(5, 20, 16, dtype=torch.float16)
    far = torch.empty((1 << 31) + 200, dtype=torch.float16, device=DEVICE).as_strided((5, 16), ((1 << 29) + 8, 1))
    misaligned = torch.empty(20 * 16 + 1, dtype=torch.float16, device=DEVICE)[1:].view(20, 16)
    gaps = torch.stack([labels, labels], 1)[:, 0]
    args = far.copy_(x), misaligned.copy_(w), b, gaps
    assert torch.equal(
        linear_cross_entropy_stats.launch(*args, first, smoothing), linear_cross_entropy_stats.launch(*bwd[:4], first, smoothing)
    )
    args = x.t().contiguous().t(), w.t().contiguous().t(), torch.stack([b, b], 1)[:, 0], gaps
    assert all(map(torch.equal, linear_cross_entropy_bwd.launch(*args, *bwd[4:]), linear_cross_entropy_bwd.launch(*bwd)))


@pytest.mark.skipif(DEVICE == "cuda", reason="counts what the interpreter moves")
@pytest.mark.parametrize("bias, smoothing", [(True, 0.1), (False, 0.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_declared_bytes(dtype, bias, smoothing, small_chunks):
    pytest.importorskip("triton")
    from tests.kernels.interpreter_bytes import assert_declared

    for op, args in both_launchers((64, 384, 16), dtype=dtype, bias=bias, smoothing=smoothing):
        assert_declared(op, args)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(300, 1000, 100), (4096, 50257, 768)], ids=str)
def test_on_a_gpu(shape, dtype):
    """Compiled: the second takes several chunks."""
    rounding = dict(rtol=2e-2, atol=2e-2) if dtype == torch.bfloat16 else dict(rtol=1e-3, atol=1e-3)
    for op, args in both_launchers(shape, dtype=dtype):
        torch.testing.assert_close(outputs(op.launch(*args)), outputs(op.reference(*args)), **rounding)


@pytest.mark.parametrize("rows, vocab", [(0, 1), (1, 7), (4096, 131072), (4096, 50257), (1 << 20, 50257)])
def test_chunks_cover_the_vocabulary(rows, vocab):
    chunks = list(K.vocabulary_chunks(rows, vocab, K.ELEMENTS))
    assert chunks[0][0] == 0 and chunks[-1][1] == vocab and all(a[1] == b[0] for a, b in itertools.pairwise(chunks))
    assert all(i % 128 == 0 for i, _ in chunks)  # so that a chunk of W begins where a descriptor may
    assert max(j - i for i, j in chunks) * rows <= max(K.ELEMENTS, rows * K.LEAST_COLUMNS) + 128 * rows
