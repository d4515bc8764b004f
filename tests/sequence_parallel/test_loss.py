"""The loss without logits: the value and gradients of gather_linear and cross_entropy, and what is saved."""

import pytest
import torch
from torch import Tensor

from tests.common import assert_close, make_tp
from tpfuse import TensorParallel
from tpfuse.kernels.losses.op import cross_entropy
from tpfuse.kernels.norm import norm_in
from tpfuse.sequence_parallel import gather_linear, gather_linear_cross_entropy
from tpfuse.sequence_parallel.loss import gather_stats

F64 = torch.float64
M, D, V = 24, 6, 23  # 23 words are shared unevenly by 2 and 4 ranks


def inputs() -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    h, w, b, gamma = (torch.randn(*s, generator=g, dtype=F64) for s in ((M, D), (V, D), (V,), (D,)))
    labels = torch.randint(V, (M,), generator=g)
    labels[3] = -100
    return h, w, b, gamma, labels


def loss_and_gradients(world, sp, fused, recompute, normalizer=None):
    tp = make_tp(world, sp)
    h, w, b, gamma, labels = inputs()
    first, last = tp.chunk(V)
    rows = slice(tp.row_rank * M // tp.row_shards, (tp.row_rank + 1) * M // tp.row_shards)
    h, w, b = (t.clone().requires_grad_() for t in (h[rows], w[first:last], b[first:last]))
    _, n, how = norm_in(h, gamma, None, eps=1e-5, ranks=tp.row_shards, recompute=recompute)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        if fused:
            options = dict(tp=tp, first_token=first, vocab_size=V, normalizer=normalizer, recompute=how)
            loss = gather_linear_cross_entropy(n, w, labels, b, **options)
        else:
            logits = gather_linear(n, w, b, tp=tp, recompute=how)
            options = dict(first_token=first, vocab_size=V, gather=lambda stats: gather_stats(stats, tp))
            loss = cross_entropy(logits, labels, normalizer=normalizer, **options)
    loss.backward()
    return (
        dict(loss=loss.detach(), h=h.grad, w=w.grad, b=b.grad),
        max(sizes),
        M * (last - first),
        max(w.numel(), h.numel()),
    )


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("R, sp", [(1, False), (2, True), (2, False), (4, True)])
def test_it_is_gather_linear_and_cross_entropy(ranks, R, sp, recompute):
    apart = ranks(R, loss_and_gradients, sp, False, recompute)
    for (got, largest, _, allowed), (want, with_logits, logits, _) in zip(
        ranks(R, loss_and_gradients, sp, True, recompute), apart, strict=True
    ):
        assert_close(got, want, F64)
        assert with_logits >= logits  # they are kept where they are made
        assert largest <= allowed < logits  # neither logits nor gathered rows: a weight or a shard is the largest


def test_the_normalizer_divides(ranks):
    (one, *_), (ten, *_) = (
        ranks(2, loss_and_gradients, True, True, False, 1.0)[0],
        ranks(2, loss_and_gradients, True, True, False, 10.0)[0],
    )
    assert_close({k: v / 10 for k, v in one.items()}, ten, F64)


@pytest.mark.parametrize(
    "labels, message",
    [
        (torch.zeros(M - 1, dtype=torch.int64), r"gather_linear_cross_entropy: labels must be int64 \(24,\)"),
        (torch.full((M,), V), "labels must lie in 0 to 22, got"),
    ],
)
def test_errors(labels, message):
    h, w, *_ = inputs()
    with pytest.raises(ValueError, match=message):
        gather_linear_cross_entropy(h, w, labels, tp=TensorParallel(), vocab_size=V, first_token=0)
