"""The messages of experts on several ranks: how many, of which rows, a row once a rank, and none on one."""

import pytest
import torch

from tests.common import Recorder
from tpfuse import TensorParallel
from tpfuse.kernels import Routing
from tpfuse.sequence_parallel import routed_experts

M, D, FFN, E, K = 6, 10, 4, 4, 2


def passes(tp: TensorParallel, keep: bool, favourite: int | None, alike: bool = True):
    """(op, shape) of every message of forward and backward; each row's experts.  ``alike``: the gradients of a row's
    parts are one, as of their sum."""
    torch.manual_seed(tp.rank)
    x, router = torch.rand(M, D, requires_grad=True), torch.randn(E, D)
    if favourite is not None:
        router[favourite : favourite + K] = 9.0  # for rows of no negative number
    fc1, fc2 = torch.randn(E // tp.size, FFN, 2, D), torch.randn(E // tp.size, D, FFN)
    weights = [w.requires_grad_() for w in (fc1, fc2, router)]
    with Recorder() as recorder:
        parts, *_ = routed_experts(x, *weights, routing=Routing(K), activation="silu", tp=tp, keep=keep)
        gradient = torch.randn(M, D).expand(K, M, D)
        parts.backward(gradient if alike else gradient.clone())
    assert all(t.grad.isfinite().all() for t in (x, *weights))
    chosen = (x @ router.t()).topk(K).indices
    ours = [call for call in recorder.calls if call.ours and call.name in ("all_gather", "exchange_rows", "all_to_all")]
    return [(call.name, tuple(call.inputs[0].shape)) for call in ours], chosen


def on_ranks(world, *args):
    return passes(TensorParallel(world.group, sequence_parallel=True), *args)


@pytest.mark.parametrize("favourite", [None, 2])
@pytest.mark.parametrize("keep, alike", [(True, True), (False, True), (True, False)])
def test_messages(ranks, keep, alike, favourite):
    """Counts, weights with their places, and rows there, of which the last are [rows, D]; results back, one for each
    expert of a row.  ``keep`` spares one way, and gradients that differ are sent one by one."""
    every = ranks(2, on_ranks, keep, favourite, alike)
    ranks_of = torch.stack([chosen for _, chosen in every]) // (E // 2)  # [source, row, slot]
    for rank, (messages, _) in enumerate(every):
        here = (ranks_of == rank).sum().item()
        rows = sum((ranks_of[rank] == other).any(1).sum().item() for other in range(2))
        assert M <= rows <= M * K
        there, back = ("exchange_rows", (rows, D)), ("exchange_rows", (here, D))
        forward = [("all_gather", (E + 2,)), ("exchange_rows", (M * K, 2)), there, back]
        backward = [there if alike else ("exchange_rows", (M * K, D)), back]
        backward += [] if keep else [there]
        assert messages == [*forward, *backward, ("exchange_rows", (here,))]
        if favourite is not None:
            assert here == (2 * M * K if rank == 1 else 0) and rows == M


def test_no_message_on_one_rank():
    assert passes(TensorParallel(), True, None)[0] == []


def test_what_is_refused():
    weights = torch.zeros(E, FFN, 2, D), torch.zeros(E, D, FFN), torch.zeros(E, D)
    call = dict(routing=Routing(K), activation="silu", tp=TensorParallel())
    with pytest.raises(ValueError, match="routed_experts: valid must be 0 to 6, the rows of this rank, got 7"):
        routed_experts(torch.zeros(M, D), *weights, valid=7, **call)
    with pytest.raises(ValueError, match=r"routed_experts: x must be \[m, D\] or \[3, m, D\], got \(2, 6, 10\)"):
        routed_experts(torch.zeros(2, M, D), *weights, **call)
