import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.kernels import common
from tests.kernels.common import gradcheck, leaf, run
from tests.kernels.interpreter_bytes import assert_declared
from tpfuse.kernels import cross_entropy, linear_cross_entropy
from tpfuse.kernels.losses import op as losses
from tpfuse.kernels.losses.op import cross_entropy_bwd, cross_entropy_stats
from tpfuse.kernels.losses.options import Loss, Rows
from tpfuse.kernels.runtime.op import acc_dtype

X, Y, ROW = torch.randn(4, 7), torch.tensor([0, 6, -100, 12]), torch.rand(4)
SAMPLES = [
    (cross_entropy_stats, (X, Y, Loss(14, label_smoothing=0.1))),
    (cross_entropy_stats, (X.bfloat16(), Y, Loss(14, first_token=7))),
    (cross_entropy_bwd, (X, Rows(Y, ROW, ROW), Loss(14, label_smoothing=0.1, z_loss=1e-3))),
    (cross_entropy_bwd, (X.bfloat16(), Rows(Y, ROW, ROW), Loss(14, first_token=7))),
]
test_opcheck = common.opcheck(SAMPLES)

OPTIONS = [dict(label_smoothing=e, z_loss=z) for e, z in ((0.0, 0.0), (0.1, 0.0), (0.0, 1e-2), (0.1, 1e-2))]
OPTION = pytest.mark.parametrize("options", OPTIONS, ids=str)


def oracle(logits, labels, *, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, normalizer=None):
    """torch's cross-entropy, and the z-loss by its formula."""
    logits, labels = logits.flatten(0, -2), labels.flatten()
    valid = labels != ignore_index
    total = F.cross_entropy(logits, labels, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="sum")
    z = torch.where(valid, torch.logsumexp(logits, -1) ** 2, 0).sum() * z_loss
    return (total + z) / (valid.sum().clamp(min=1) if normalizer is None else normalizer)


def labels_for(rows, vocab, ignore_index=-100):
    """Every third row ignored, the first and the last token among the others."""
    labels = torch.randint(vocab, (rows,))
    labels[:1], labels[1:2] = 0, vocab - 1
    labels[2::3] = ignore_index
    return labels


def bind(fn, labels, **options):
    return functools.partial(fn, labels=labels, **options)


# no rows, one row of one token, ragged
@pytest.mark.parametrize("rows, vocab", [(0, 5), (1, 1), (1, 9), (7, 13)])
@OPTION
def test_against_torch(rows, vocab, options):
    for normalizer in (None, 3.5, torch.tensor(11)):
        labels = labels_for(rows, vocab)
        common.assert_same(
            *(bind(f, labels, normalizer=normalizer, **options) for f in (cross_entropy, oracle)), leaf(rows, vocab)
        )


@OPTION
def test_gradcheck(options):
    gradcheck(bind(cross_entropy, labels_for(5, 6), **options), leaf(5, 6))


@OPTION
def test_ignore_index(options):
    """One that is a token too; and where every row is ignored the loss is 0, as is the gradient."""
    labels = labels_for(7, 5, ignore_index=3)
    common.assert_same(*(bind(f, labels, ignore_index=3, **options) for f in (cross_entropy, oracle)), leaf(7, 5))
    (loss,), (dx,) = run(bind(cross_entropy, torch.full((4,), -100), **options), (leaf(4, 5),))
    assert loss == 0 and not dx.any()


def split_cross_entropy(logits, labels, bounds, **options):
    """Every rank's loss and gradient, ranks played one after the other: the gather brings all ranks' statistics."""
    chunks = [logits[:, a:e].detach().contiguous().requires_grad_() for a, e in itertools.pairwise(bounds)]
    vocab = options.pop("vocab", bounds[-1])
    loss = Loss(vocab, label_smoothing=options.get("label_smoothing", 0.0))
    stats = torch.stack(
        [cross_entropy_stats(c.detach(), labels, loss._replace(first_token=a)) for c, a in zip(chunks, bounds)]
    )
    losses = [
        cross_entropy(c, labels, first_token=a, vocab_size=vocab, gather=lambda _: stats, **options)
        for c, a in zip(chunks, bounds)
    ]
    return losses, torch.cat([torch.autograd.grad(loss, c)[0] for loss, c in zip(losses, chunks)], 1)


@pytest.mark.parametrize("bounds", [(0, 13), (0, 7, 13), (0, 4, 8, 12, 13)], ids=["R=1", "R=2", "R=4"])
@OPTION
def test_split_vocabulary(bounds, options):
    logits, labels = leaf(7, 13), labels_for(7, 13)
    exact = oracle(logits, labels, **options)
    losses, dlogits = split_cross_entropy(logits, labels, bounds, **options)
    for loss in losses:
        torch.testing.assert_close(loss, exact, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(dlogits, torch.autograd.grad(exact, logits)[0], rtol=1e-12, atol=1e-12)


def test_a_slice_of_padding():
    """Columns of -inf, up to a whole rank's: no probability, no gradient, no NaN."""
    logits, labels = torch.randn(7, 9).double(), labels_for(7, 9)
    padded = torch.cat([logits, torch.full((7, 3), -torch.inf)], 1)
    losses, dlogits = split_cross_entropy(padded, labels, (0, 6, 10, 12), z_loss=1e-2, vocab=9)
    exact = oracle(logits.requires_grad_(), labels, z_loss=1e-2)
    for loss in losses:
        torch.testing.assert_close(loss, exact)
    torch.testing.assert_close(dlogits[:, :9], torch.autograd.grad(exact, logits)[0])
    assert not dlogits[:, 9:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@OPTION
def test_low_precision(dtype, options):
    """The loss is fp32 whatever the logits are; theirs is too, given fp32 copies of them."""
    labels = labels_for(20, 300)
    ours = bind(cross_entropy, labels, **options)
    common.assert_accurate(ours, lambda x: oracle(x.to(acc_dtype(x)), labels, **options), leaf(20, 300), dtype=dtype)
    assert ours(leaf(20, 300, dtype=dtype)).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows, vocab", [(1, 4099), (5, 4099), (64, 300)], ids=str)
def test_blocks_of_rows_are_the_whole(monkeypatch, rows, vocab, dtype):
    """On a CPU, to the bit."""
    monkeypatch.setattr(losses, "BLOCK", 2 * 300)
    logits, labels, loss = torch.randn(rows, vocab).to(dtype), labels_for(rows, vocab), Loss(vocab, label_smoothing=0.1)
    stats = cross_entropy_stats.reference(logits, labels, loss)
    of = Rows(labels, stats[:, 1].log() + stats[:, 0], torch.rand(rows))
    assert torch.equal(cross_entropy_stats(logits, labels, loss), stats)
    assert torch.equal(cross_entropy_bwd(logits, of, loss), cross_entropy_bwd.reference(logits, of, loss))
    assert cross_entropy_bwd(logits.mT.contiguous().mT, of, loss).is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_copy_of_the_logits_in_memory(dtype):
    """On a CPU forward holds a few blocks of rows at a time, and backward those and the gradient."""
    rows, vocab = 1024, 8192
    logits, labels, loss = torch.randn(rows, vocab).to(dtype), labels_for(rows, vocab), Loss(vocab)
    block = losses.BLOCK * torch.get_num_threads() * 4
    stats, ahead = common.peak(lambda: cross_entropy_stats(logits, labels, loss))
    of = Rows(labels, stats[:, 1].log() + stats[:, 0], torch.rand(rows))
    dlogits, back = common.peak(lambda: cross_entropy_bwd(logits, of, loss))
    size = dlogits.numel() * dlogits.element_size()
    assert ahead < 4 * block and back < size + 4 * block and 8 * block < 4 * logits.numel()


def test_large_logits():
    """exp overflows in fp32 beyond 88; a logsumexp of 300 is known to 3e-5."""
    x, labels = torch.tensor([[1e4, 0.0, -1e4], [300.0, 299.0, 298.0]], requires_grad=True), torch.tensor([1, 0])
    common.assert_same(*(bind(f, labels) for f in (cross_entropy, oracle)), x, rtol=3e-5)


def test_autocast():
    """Nothing is lowered, and bf16 logits are saved as they are."""
    logits, labels, saved = leaf(20, 30, dtype=torch.bfloat16), labels_for(20, 30), []
    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        loss = cross_entropy(logits, labels, label_smoothing=0.1)
    assert torch.equal(loss, cross_entropy(logits, labels, label_smoothing=0.1)) and loss.dtype == torch.float32
    assert [t.dtype for t in saved if t.numel() >= 600] == [torch.bfloat16]


def test_shapes_and_strides():
    """Batches of sequences; logits that are a slice of a wider matrix, labels that are a shifted one."""
    logits, labels = leaf(2, 4, 9)[..., 1:6].detach().requires_grad_(), labels_for(10, 5).view(2, 5)[:, 1:]
    assert not logits.is_contiguous() and not labels.is_contiguous()
    common.assert_same(*(bind(f, labels, label_smoothing=0.1) for f in (cross_entropy, oracle)), logits)


def test_micro_batches():
    """With the step's normaliser, losses and gradients of two halves add up to the whole's."""
    logits, labels = leaf(8, 5), labels_for(8, 5)
    n = int((labels >= 0).sum())
    halves = [cross_entropy(logits[i : i + 4], labels[i : i + 4], normalizer=n) for i in (0, 4)]
    torch.testing.assert_close(halves[0] + halves[1], cross_entropy(logits, labels))


@OPTION
def test_compile(options):
    common.assert_compiles(bind(cross_entropy, labels_for(5, 6), **options), leaf(5, 6, dtype=torch.float32))


def test_fake_tensors():
    """Their labels and normalizer have no values, which are not read."""
    with FakeTensorMode():
        x, w, labels = leaf(3, 8), leaf(9, 8), torch.zeros(3, dtype=torch.int64)
        loss = linear_cross_entropy(x, w, labels) + cross_entropy(x, labels, normalizer=torch.tensor(2.0))
        loss.backward()
    assert loss.shape == () and (x.grad.shape, w.grad.shape) == (x.shape, w.shape)


def test_once_differentiable():
    common.assert_once_differentiable(bind(cross_entropy, labels_for(5, 6)), leaf(5, 6))


@pytest.mark.parametrize(
    "labels, options, match",
    [
        (torch.zeros(3, dtype=torch.int64), {}, r"labels must be int64 \(2,\), got torch.int64 \(3,\)"),
        (torch.zeros(2), {}, r"labels must be int64 \(2,\), got torch.float32 \(2,\)"),
        (torch.tensor([0, 5]), {}, r"labels must lie in 0 to 4, got \[5\]"),
        (torch.tensor([-1, -100]), {}, r"labels must lie in 0 to 4, got \[-1\]"),
        (torch.tensor([0, 1]), dict(label_smoothing=1.0), r"label_smoothing must lie in \[0, 1\), got 1.0"),
    ],
)
def test_errors(labels, options, match):
    with pytest.raises(ValueError, match="cross_entropy: " + match):
        cross_entropy(torch.randn(2, 5), labels, **options)


# ---- the launchers, under Triton's interpreter or on a GPU ----

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# a chunk with room to spare; two chunks, rows that begin anywhere; a last chunk that is full; three chunks; one column
SHAPES = [(5, 7), (3, 261), (2, 512), (3, 9001), (4, 1)]


def launch_arguments(rows, columns, dtype=torch.float32, slices=3):
    """The middle of three slices: labels on its first and last column, outside it on either side, ignored.  -> stats',
    bwd's"""
    pytest.importorskip("triton")
    first, vocab = columns, slices * columns
    labels = torch.randint(vocab, (rows,))
    for i, label in enumerate((first, 2 * columns - 1, -100, first - 1, 2 * columns)[:rows]):
        labels[i] = label
    logits, labels = torch.randn(rows, columns).to(dtype).to(DEVICE), labels.to(DEVICE)
    lse, dloss = torch.logsumexp(logits.float(), -1) + 1, torch.rand(1, device=DEVICE).expand(rows)
    loss = Loss(vocab, first, label_smoothing=0.1, z_loss=1e-2)
    return (logits, labels, loss), (logits, Rows(labels, lse, dloss), loss)


def double(args):
    """The same arguments with floating tensors, those in records too, in fp64."""
    if isinstance(args, torch.Tensor):
        return args.double() if args.is_floating_point() else args
    if hasattr(args, "_make"):
        return args._make(map(double, args))
    return tuple(map(double, args)) if isinstance(args, tuple) else args


def both_launchers(shape, **options):
    return zip((cross_entropy_stats, cross_entropy_bwd), launch_arguments(*shape, **options), strict=True)


@pytest.mark.parametrize("shape", [*SHAPES, (0, 7)], ids=str)
def test_launchers(shape, poisoned):
    for op, args in both_launchers(shape):
        got, want = op.launch(*args), op.reference(*args)
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5, check_stride=True)
        assert torch.equal(got, op.launch(*args))


def test_launchers_without_smoothing(poisoned):
    _, (logits, rows, loss) = launch_arguments(3, 261)
    loss = loss._replace(label_smoothing=0.0, z_loss=0.0)
    stats = cross_entropy_stats.launch(logits, rows.labels, loss)
    torch.testing.assert_close(stats, cross_entropy_stats.reference(logits, rows.labels, loss))
    assert not stats[:, 3].any()
    plain = logits, rows, loss
    torch.testing.assert_close(cross_entropy_bwd.launch(*plain), cross_entropy_bwd.reference(*plain))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_launchers_in_low_precision(dtype, poisoned):
    for op, args in both_launchers((5, 700), dtype=dtype):
        exact = op.reference(*double(args))
        error, allowed = ((y.double() - exact).abs().max() for y in (op.launch(*args), op.reference(*args)))
        assert error <= 2 * allowed + 1e-6, (error, allowed)


def test_launchers_where_columns_are_minus_infinity(poisoned):
    """The end of a row, all of another: no NaN."""
    logits, labels, loss = launch_arguments(4, 700)[0]
    logits[0, 300:], logits[1] = -torch.inf, -torch.inf
    plain = loss._replace(label_smoothing=0.0)
    stats = cross_entropy_stats.launch(logits, labels, plain)
    torch.testing.assert_close(stats, cross_entropy_stats.reference(logits, labels, plain))
    bwd = logits, Rows(labels, torch.full((4,), 3.0, device=DEVICE), torch.rand(4, device=DEVICE)), loss
    torch.testing.assert_close(cross_entropy_bwd.launch(*bwd), cross_entropy_bwd.reference(*bwd))


def test_launchers_take_any_strides(poisoned):
    """Logits that are columns of a wider matrix, labels and row gradients with gaps."""
    (logits, labels, loss), (_, rows, _) = launch_arguments(3, 261)
    wide, gaps = torch.randn(3, 300, device=DEVICE), torch.stack([labels, labels * 0], 1)
    wide[:, 20:281] = logits
    args = wide[:, 20:281], gaps[:, 0], loss
    torch.testing.assert_close(cross_entropy_stats.launch(*args), cross_entropy_stats.launch(logits, labels, loss))
    rows = Rows(gaps[:, 0], rows.lse.mul(1)[:, None].expand(3, 2)[:, 0], torch.rand(3, 2, device=DEVICE)[:, 1])
    strided = wide[:, 20:281], rows, loss
    torch.testing.assert_close(cross_entropy_bwd.launch(*strided), cross_entropy_bwd.reference(*strided))


def test_launchers_beyond_2_to_the_31_elements(poisoned):
    logits, labels, loss = launch_arguments(3, 261, dtype=torch.float16)[0]
    far = torch.empty((1 << 31) + 300, dtype=torch.float16, device=DEVICE).as_strided((3, 261), ((1 << 30) + 11, 1))
    far.copy_(logits)
    stats = (cross_entropy_stats.launch(x, labels, loss) for x in (far, logits))
    torch.testing.assert_close(*stats)


@pytest.mark.skipif(DEVICE == "cuda", reason="counts what the interpreter moves")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_declared_bytes(dtype):
    pytest.importorskip("triton")
    for op, args in both_launchers((4, 640), dtype=dtype):
        assert_declared(op, args)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 100, 50257, 131072])
def test_on_a_gpu(columns, dtype):
    rounding = dict(rtol=2e-2, atol=1e-3) if dtype == torch.bfloat16 else dict(rtol=1e-4, atol=1e-4)
    for op, args in both_launchers((64, columns), dtype=dtype):
        torch.testing.assert_close(op.launch(*args), op.reference(*args), **rounding)
