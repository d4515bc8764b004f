"""The public losses over a split vocabulary: torch's dense cross-entropy, and what is refused."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.common import assert_close, error, make_tp
from tests.layers.sharded import Case, sharded_is_whole
from tpfuse import TensorParallel, checking
from tpfuse.layers import VocabParallelHead, collect, cross_entropy, linear_cross_entropy, log_probs

F64 = torch.float64
M, D, V = 24, 6, 23  # 23 words are shared unevenly by 2 and 4 ranks
EVERYTHING = dict(ignore_index=3, label_smoothing=0.1, z_loss=1e-2)

test_head_sharded_is_whole = sharded_is_whole(
    {
        "head": Case(VocabParallelHead, (10, 24), (8, 10), (8, 24), y_is="columns"),
        "bias": Case(VocabParallelHead, (10, 24, True), (8, 10), (8, 24), y_is="columns"),
    }
)


def data() -> tuple[Tensor, ...]:
    """-> x, weight, bias, labels of which some are ignored, and a weight for each row."""
    g = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(*s, generator=g, dtype=F64) for s in ((M, D), (V, D), (V,)))
    labels = torch.randint(V, (M,), generator=g)
    labels[::5] = 3
    return x, w, b, labels, torch.rand(M, generator=g, dtype=F64)


def dense(logits, labels, *, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, reduction="mean", normalizer=None):
    """torch's, and the z-loss by its formula."""
    options = dict(ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none")
    valid = labels != ignore_index
    rows = F.cross_entropy(logits, labels, **options) + torch.where(valid, logits.logsumexp(-1) ** 2, 0) * z_loss
    total = valid.sum() if normalizer is None else normalizer
    return {"none": rows, "sum": rows.sum(), "mean": rows.sum() / total}[reduction]


def scalar_of(loss: Tensor, per_row: Tensor) -> Tensor:
    """Rows count differently, so that each one's gradient is seen."""
    return (loss * per_row).sum() if loss.dim() else loss


def step(x, w, b, labels, per_row, lossy) -> dict[str, Tensor]:
    x, w, b = (t.clone().requires_grad_() for t in (x, w, b))
    loss = lossy(x, w, b, labels)
    scalar_of(loss, per_row).backward()
    return dict(loss=loss.detach(), x=x.grad, w=w.grad, b=b.grad)


def from_logits(x, w, b, labels, *, tp, fn, **options):
    head = VocabParallelHead(D, V, bias=True, tp=tp, dtype=F64)
    logits = torch.func.functional_call(head, dict(weight=w, bias=b), (x,))
    return fn(logits, labels, vocab_size=V, tp=tp, **options)


def without_logits(x, w, b, labels, *, tp, **options):
    return linear_cross_entropy(x, w, labels, b, vocab_size=V, tp=tp, **options)


def split_loss(world, sp, name, options):
    """-> gradients of the whole, from this rank's, and the loss."""
    tp = make_tp(world, sp)
    x, w, b, labels, per_row = data()
    first, last = tp.chunk(V)
    rows = slice(tp.row_rank * M // tp.row_shards, (tp.row_rank + 1) * M // tp.row_shards)
    fn = {
        "logits": functools.partial(from_logits, fn=cross_entropy),
        "linear": without_logits,
        "log_probs": functools.partial(from_logits, fn=log_probs),
    }[name]
    got = step(x[rows], w[first:last], b[first:last], labels, per_row, functools.partial(fn, tp=tp, **options))
    return got, rows, slice(first, last)


OPTIONS = [
    dict(EVERYTHING, normalizer=7.0),
    dict(EVERYTHING, reduction="sum"),
    dict(EVERYTHING, reduction="none"),
]


def check_loss(ranks, R, sp, name, options, exact):
    x, w, b, labels, per_row = data()
    want = step(x, w, b, labels, per_row, lambda x, w, b, labels: exact(F.linear(x, w, b), labels))
    for got, rows, columns in ranks(R, split_loss, sp, name, options):
        assert_close(got, dict(loss=want["loss"], x=want["x"][rows], w=want["w"][columns], b=want["b"][columns]), F64)


@pytest.mark.parametrize("options", OPTIONS, ids=["mean", "sum", "none"])
@pytest.mark.parametrize("name", ["logits", "linear"])
@pytest.mark.parametrize("R, sp", [(1, False), (2, True), (2, False), (4, True)])
def test_it_is_torchs_dense_loss(ranks, R, sp, name, options):
    check_loss(ranks, R, sp, name, options, functools.partial(dense, **options))


@pytest.mark.parametrize("R", [1, 2, 4])
def test_log_probs(ranks, R):
    exact = lambda z, labels: -dense(z, labels, ignore_index=3, reduction="none")
    check_loss(ranks, R, True, "log_probs", dict(ignore_index=3), exact)


def tied(world):
    tp = make_tp(world)
    x, w, _, labels, _ = data()
    first, last = tp.chunk(V)
    weight = w[first:last].clone().requires_grad_()
    rows = x.chunk(tp.size)[tp.rank]
    head = VocabParallelHead(D, V, tied=True, tp=tp)
    assert not list(head.parameters())
    loss = head.loss(rows, labels, weight, ignore_index=3)
    return loss.detach(), cross_entropy(head(rows, weight), labels, vocab_size=V, tp=tp, ignore_index=3).detach()


def test_a_tied_head_has_no_weight(ranks):
    x, w, _, labels, _ = data()
    for found in ranks(2, tied)[0]:
        assert error(found, dense(x @ w.t(), labels, ignore_index=3)) <= 1e-12


def compiled(world):
    tp = make_tp(world)
    x, w, _, labels, _ = data()
    w = w[slice(*tp.chunk(V))]

    def losses(logits, x, w, labels):
        options = dict(vocab_size=V, tp=tp, ignore_index=3)
        return cross_entropy(logits, labels, **options), linear_cross_entropy(x, w, labels, **options)

    args = x @ w.t(), x.chunk(tp.size)[tp.rank], w, labels
    return torch.compile(losses, fullgraph=True, backend="eager")(*args), losses(*args)


def test_they_are_part_of_one_compiled_graph(ranks):
    for graph, eager in ranks(2, compiled):
        assert graph == eager


# ---- what is refused ----


def refused(world, what):
    tp = make_tp(world)
    x, w, b, labels, _ = data()
    first, last = tp.chunk(V)
    mine = x @ w[first:last].t()
    with pytest.raises(ValueError) as error:
        if what == "gathered":
            cross_entropy(x @ w.t(), labels, vocab_size=V, tp=tp)
        elif what == "collected":
            cross_entropy(collect((x @ w.t())[:, :22].chunk(2, -1)[tp.rank], tp, dim=-1), labels, vocab_size=22, tp=tp)
        elif what == "whole weight":
            linear_cross_entropy(x[:12], w, labels, vocab_size=V, tp=tp)
        elif what == "other labels":
            with checking():  # else a kind's first call is compared, which another test has made
                cross_entropy(mine, labels.roll(world.rank), vocab_size=V, tp=tp)
        elif what == "batch":
            linear_cross_entropy(x.view(4, 6, D), w[first:last], labels, vocab_size=V, tp=tp)
        elif what == "normalizer":
            cross_entropy(mine, labels, vocab_size=V, tp=tp, normalizer=3.0, reduction="sum")
        else:
            cross_entropy(mine, labels, vocab_size=V, tp=tp, reduction="all")
    return str(error.value)


@pytest.mark.parametrize(
    "what, words",
    {
        "gathered": "cross_entropy: logits must be this rank's 12 of the 23 tokens, got 23 (they are gathered",
        "collected": "cross_entropy: logits must be this rank's 11 of the 22 tokens, got 22 (they are gathered",
        "whole weight": "linear_cross_entropy: weight must be this rank's 12 of the 23 tokens, got 23",
        "other labels": "cross_entropy: labels must be the same on every tensor-parallel rank",
        "batch": "linear_cross_entropy: x must be rows [m, D], got (4, 6, 6)",
        "normalizer": "cross_entropy: normalizer goes with reduction='mean', got reduction='sum'",
        "all": "cross_entropy: reduction must be one of mean, sum, none, got 'all'",
    }.items(),
)
def test_what_is_refused(ranks, what, words):
    assert words in ranks(2, refused, what)[0]


def test_a_head_says_its_rule():
    head = VocabParallelHead(6, 23, tp=TensorParallel())
    with pytest.raises(ValueError, match=r"VocabParallelHead: x must be rows \[m, 6\], got \(4, 3, 6\)"):
        head(torch.zeros(4, 3, 6))
    with pytest.raises(ValueError, match="a tied head is given the embedding's weight"):
        VocabParallelHead(6, 23, tied=True)(torch.zeros(4, 6))
