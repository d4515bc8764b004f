"""A mixture of experts in closed form against real ranks and meta tensors, to the byte: even, and flooded."""

from typing import NamedTuple

import pytest
import torch

from tests.planted import Mistaken
from tests.routing import evenly, routed, to_the_first
from tpfuse import TensorParallel
from tpfuse.kernels import Routing
from tpfuse.layers import Call, MoEShape, ParallelMoE
from tpfuse.layers.expert_sizes import ExpertSizes
from tpfuse.sequence_parallel.assumed import assumed_imbalance
from tpfuse.tools.ledger import Ledger, fake_world, saved_bytes
from tpfuse.tools.ledger.aten import COMMUNICATION, GEMM

SHAPE = MoEShape(20, 12, 8, Routing(2))
SHARED = SHAPE._replace(shared_size=24, shared_gate=True)
ROWS = 4 * 336  # of all ranks: 28 choices of two experts, and a CPU fills the rows of logits up to a multiple of 48
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


class Counted(NamedTuple):
    flops: int
    saved: int
    wire: int
    collectives: int


def counted(
    tp: TensorParallel, dtype: torch.dtype, keep: bool, device: str = "cpu", shape=SHAPE, experts=None
) -> Counted:
    """Forward and backward of a layer on this rank."""
    layer = ParallelMoE(**shape._asdict(), tp=tp, dtype=dtype, device=device, experts=experts)
    x = torch.ones(ROWS // tp.row_shards, SHAPE.hidden_size, dtype=dtype, device=device, requires_grad=True)
    call = Call(keep=keep)
    layer(x, call=call).sum().backward()  # compares the ranks' calls, once
    with Ledger() as ledger:
        with saved_bytes(layer) as saved:
            y = layer(x, call=call)
        y.backward(torch.empty_like(y))
    sent = ledger.total(kind=COMMUNICATION)
    return Counted(ledger.total(kind=GEMM).flops, saved(), sent.wire, sent.calls)


def on_ranks(world, sp: bool, dtype: torch.dtype, keep: bool, where, shape=SHAPE) -> Counted:
    with routed(where):
        return counted(TensorParallel(world.group, sequence_parallel=sp), dtype, keep, shape=shape)


def formula(
    R: int, sp: bool, dtype: torch.dtype, keep: bool, imbalance: float = 1.0, shape=SHAPE
) -> tuple[float, float, float]:
    """Flops, saved bytes and sent bytes; n apart in the formula, and the rows that are collected without sp."""
    sizes = ExpertSizes(shape, ROWS / R, R, dtype.itemsize, imbalance=imbalance)
    n = ROWS // R * SHAPE.hidden_size * dtype.itemsize
    collected = 0 if sp else 2 * (R - 1) * n
    return 3 * sizes.flops(), sizes.saved(kept=keep) + n, sizes.wire(kept=keep) + collected


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP64])
@pytest.mark.parametrize("R, sp", [(1, True), (2, True), (4, True), (2, False)])
def test_every_byte_of_even_ranks(ranks, R, sp, dtype, keep):
    """Real ranks, meta tensors and the closed form agree."""
    with fake_world(R) as mesh:
        tp = TensorParallel(mesh["tp"], sequence_parallel=sp)
        dry = counted(tp, dtype, keep, device="meta")
    assert dry[:3] == formula(R, sp, dtype, keep)
    assert ranks(R, on_ranks, sp, dtype, keep, evenly) == [dry] * R


@pytest.mark.parametrize("shape", [SHARED, SHARED._replace(shared_gate=False)], ids=["gate", "no gate"])
@pytest.mark.parametrize("R, sp, dtype", [(1, True, FP32), (4, True, BF16), (2, False, FP64)])
def test_every_byte_of_a_shared_expert(ranks, R, sp, dtype, shape):
    with fake_world(R) as mesh:
        tp = TensorParallel(mesh["tp"], sequence_parallel=sp)
        dry = counted(tp, dtype, True, device="meta", shape=shape)
    assert dry[:3] == formula(R, sp, dtype, True, shape=shape)
    assert ranks(R, on_ranks, sp, dtype, True, evenly, shape) == [dry] * R


def over_replicas(world, where, keep: bool, sp: bool) -> Counted:
    """A rank of two replicas, each with as many rows as all ranks have elsewhere here."""
    mesh = world.stages(1, 2, 2)
    tp = TensorParallel(mesh["tp"], sequence_parallel=sp)
    with routed(where):
        return counted(tp, FP32, keep, shape=SHARED, experts=mesh["dp", "tp"])


@pytest.mark.parametrize("keep, sp", [(True, True), (False, True), (True, False)])
def test_every_byte_over_replicas(ranks, keep, sp):
    """The rows of two replicas over four ranks: the router and the shared expert are of the two ranks of one."""
    for where, imbalance in ((evenly, 1), (to_the_first, 4)):
        sizes = ExpertSizes(SHARED, ROWS / 2, 4, 4, imbalance=imbalance, replicas=2)
        n = ROWS // 2 * SHAPE.hidden_size * 4
        form = 3 * sizes.flops(), sizes.saved(kept=keep) + n, sizes.wire(kept=keep) + (0 if sp else 2 * n)
        first, *others = ranks(4, over_replicas, where, keep, sp)
        assert first[:3] == form
        assert (others == [first] * 3) == (imbalance == 1)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("R", [2, 4])
def test_a_flooded_rank(ranks, R, keep):
    """One rank has every row, R times the mean, and the others none: all compute what even ones compute."""
    first, *others = ranks(R, on_ranks, True, FP32, keep, to_the_first)
    with fake_world(R) as mesh, assumed_imbalance(R):
        tp = TensorParallel(mesh["tp"], sequence_parallel=True)
        assert counted(tp, FP32, keep, device="meta") == first
    assert first[:3] == formula(R, True, FP32, keep, R)
    assert set(others) == {others[0]} and others[0].collectives == first.collectives
    assert first.flops + sum(rank.flops for rank in others) == R * formula(R, True, FP32, keep)[0]


def test_half_as_many_again():
    """1008 of the 1344 places that a rank of two fills are its own experts', of 648 rows; 312 rows go to the other."""
    with fake_world(2) as mesh, assumed_imbalance(1.5):
        dry = counted(TensorParallel(mesh["tp"], sequence_parallel=True), FP32, True, device="meta")
    assert dry[:3] == formula(2, True, FP32, True, 1.5)


def unsent(right, self, x):
    """Results stay where they are."""
    return x


def test_a_message_too_few_is_seen(ranks):
    spoilt = Mistaken(on_ranks, "tpfuse.sequence_parallel.experts.Routes._returned", unsent)
    for found in ranks(2, spoilt, True, FP32, True, evenly):
        assert found.wire < formula(2, True, FP32, True)[2]
