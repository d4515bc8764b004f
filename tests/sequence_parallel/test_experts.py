"""The messages of experts on several ranks: how many, of which rows, and none on one."""

import pytest
import torch

from tests.common import Recorder
from tpfuse import TensorParallel
from tpfuse.kernels import Routing
from tpfuse.sequence_parallel import routed_experts

M, D, FFN, E, K = 6, 10, 4, 4, 2


def passes(tp: TensorParallel, keep: bool, favourite: int | None):
    """(op, shape) of every message of forward and backward; the rows that each expert of all gets from this rank."""
    torch.manual_seed(tp.rank)
    x, router = torch.rand(M, D, requires_grad=True), torch.randn(E, D)
    if favourite is not None:
        router[favourite : favourite + K] = 9.0  # for rows of no negative number
    fc1, fc2 = torch.randn(E // tp.size, FFN, 2, D), torch.randn(E // tp.size, D, FFN)
    weights = [w.requires_grad_() for w in (fc1, fc2, router)]
    with Recorder() as recorder:
        parts, *_ = routed_experts(x, *weights, routing=Routing(K), activation="silu", tp=tp, keep=keep)
        parts.backward(torch.randn(M, D).expand(K, M, D))
    assert all(t.grad.isfinite().all() for t in (x, *weights))
    chosen = (x @ router.t()).topk(K).indices.flatten()
    ours = [call for call in recorder.calls if call.ours and call.name in ("all_gather", "exchange_rows", "all_to_all")]
    return [(call.name, tuple(call.inputs[0].shape)) for call in ours], chosen.bincount(minlength=E)


def on_ranks(world, keep, favourite):
    return passes(TensorParallel(world.group, sequence_parallel=True), keep, favourite)


@pytest.mark.parametrize("favourite", [None, 2])
@pytest.mark.parametrize("keep", [True, False])
def test_messages(ranks, keep, favourite):
    """Counts, and rows and weights there and back, the last two of which are [rows]; ``keep`` spares one way."""
    every = ranks(2, on_ranks, keep, favourite)
    counts = torch.stack([chosen for _, chosen in every])
    for rank, (messages, _) in enumerate(every):
        sent, here = M * K, counts[:, rank * E // 2 : (rank + 1) * E // 2].sum().item()
        forward = [("all_gather", (E,)), ("exchange_rows", (sent, D)), ("exchange_rows", (sent,))]
        forward += [("exchange_rows", (here, D))]
        backward = [("exchange_rows", (sent, D)), ("exchange_rows", (here, D))]
        backward += [] if keep else [("exchange_rows", (sent, D))]
        assert messages == [*forward, *backward, ("exchange_rows", (here,))]
        if favourite is not None:
            assert here == (2 * M * K if rank == 1 else 0)


def test_no_message_on_one_rank():
    assert passes(TensorParallel(), True, None)[0] == []


def test_what_is_refused():
    weights = torch.zeros(E, FFN, 2, D), torch.zeros(E, D, FFN), torch.zeros(E, D)
    call = dict(routing=Routing(K), activation="silu", tp=TensorParallel())
    with pytest.raises(ValueError, match="routed_experts: valid must be 0 to 6, the rows of this rank, got 7"):
        routed_experts(torch.zeros(M, D), *weights, valid=7, **call)
    with pytest.raises(ValueError, match=r"routed_experts: x must be \[m, D\] or \[3, m, D\], got \(2, 6, 10\)"):
        routed_experts(torch.zeros(2, M, D), *weights, **call)
