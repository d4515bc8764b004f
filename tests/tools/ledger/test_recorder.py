"""The recorder: what an op costs, what is one storage, what is alive, forward or backward."""

import pytest
import torch
from torch import nn

from tpfuse import TensorParallel
from tpfuse.kernels.attn.op import attention
from tpfuse.kernels.gemm.op import linear
from tpfuse.kernels.runtime.op import OPS, moved
from tpfuse.layers import TransformerBlock
from tpfuse.tools.ledger import Ledger, mue
from tpfuse.tools.ledger.aten import ATTENTION, ELEMENTWISE, GEMM, KINDS, NORM

M, K, N = 64, 32, 48


def record(fn) -> Ledger:
    with Ledger() as ledger:
        fn()
    return ledger


def only(fn):
    (entry,) = record(fn).entries
    return entry


def tensor(*shape, **options):
    return torch.empty(*shape, device="meta", **options)


SAME = tensor(M, K)
ATEN = {  # what, bytes read, bytes written, flops, kind
    "mm": (lambda: tensor(M, K) @ tensor(K, N), 4 * (M * K + K * N), 4 * M * N, 2 * M * K * N, GEMM),
    "addmm": (
        lambda: torch.addmm(tensor(N), tensor(M, K), tensor(K, N)),
        4 * (N + M * K + K * N),
        4 * M * N,
        2 * M * K * N,
        GEMM,
    ),
    "bmm": (lambda: tensor(3, M, K) @ tensor(3, K, N), 12 * (M * K + K * N), 12 * M * N, 6 * M * K * N, GEMM),
    "add": (lambda: tensor(M, K) + tensor(M, K), 8 * M * K, 4 * M * K, 0, ELEMENTWISE),
    "add one": (lambda: tensor(M, K) + 1, 4 * M * K, 4 * M * K, 0, ELEMENTWISE),
    "add in place": (lambda: tensor(M, K).add_(tensor(M, K)), 8 * M * K, 4 * M * K, 0, ELEMENTWISE),
    "twice the same": (lambda: SAME * SAME, 4 * M * K, 4 * M * K, 0, ELEMENTWISE),
    "broadcast": (lambda: tensor(M, K) + tensor(1, K).expand(M, K), 4 * (M * K + K), 4 * M * K, 0, ELEMENTWISE),
    "fill": (lambda: tensor(M, K).fill_(0), 0, 4 * M * K, 0, ELEMENTWISE),
    "copy": (lambda: tensor(M, K).copy_(tensor(M, K, dtype=torch.float16)), 2 * M * K, 4 * M * K, 0, ELEMENTWISE),
    "lookup": (
        lambda: nn.functional.embedding(tensor(8, dtype=torch.int64), tensor(1000, K)),
        8 * 8 + 4 * 8 * K,
        4 * 8 * K,
        0,
        ELEMENTWISE,
    ),
    "softmax": (lambda: torch.softmax(tensor(M, K), -1), 4 * M * K, 4 * M * K, 0, NORM),
    "cat": (lambda: torch.cat([tensor(M, K), tensor(M, K)]), 8 * M * K, 8 * M * K, 0, ELEMENTWISE),
    "foreach": (lambda: torch._foreach_add_([tensor(M), tensor(N)], 1.0), 4 * (M + N), 4 * (M + N), 0, ELEMENTWISE),
}


@pytest.mark.parametrize("name", ATEN)
def test_an_aten_op(name):
    fn, read, written, flops, kind = ATEN[name]
    entry = only(fn)
    assert (entry.read, entry.written, entry.flops, entry.kind) == (read, written, flops, kind)
    assert entry.least == entry.moved


def test_views_and_allocations_move_nothing():
    def run():
        x = tensor(M, K)
        x.t().unflatten(0, (4, -1)).transpose(0, 1).unbind(0)[0].detach()
        x.expand(3, M, K).split(1)
        torch.empty_like(x), x.new_empty(3)

    assert record(run).entries == []


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_our_ops_say_what_they_cost(device):
    x, w = torch.ones(M, K, device=device, requires_grad=True), torch.ones(N, K, device=device, requires_grad=True)
    ledger = record(lambda: linear(x, w).sum().backward())
    ours = {e.op: e for e in ledger.entries if e.op in OPS}
    assert list(ours) == ["linear_fwd", "linear_wgrad", "linear_dgrad"]
    assert [e.phase for e in ours.values()] == ["forward", "backward", "backward"]
    assert all(e.flops == 2 * M * K * N and e.kind == GEMM for e in ours.values())
    assert ours["linear_fwd"].read == moved(x, w) and ours["linear_fwd"].written == 4 * M * N


def test_tiles_of_a_products_result():
    x, w = (torch.ones(n, 64, device="meta", requires_grad=True) for n in (300, 130))
    ledger = record(lambda: linear(x, w).sum().backward())
    assert {e.op: e.tiles for e in ledger.entries if e.op in OPS} == {
        "linear_fwd": 3 * 2,
        "linear_wgrad": 2 * 1,
        "linear_dgrad": 3 * 1,
    }
    assert only(lambda: tensor(3, 130, 64) @ tensor(3, 64, 129)).tiles == 3 * 2 * 2
    assert only(lambda: tensor(M, K) + tensor(M, K)).tiles == 0


def test_meta_and_real_tensors_are_counted_alike():
    def run(device):
        layer = nn.Sequential(nn.Linear(K, N), nn.LayerNorm(N), nn.GELU()).to(device)
        return lambda: layer(torch.ones(M, K, device=device)).sum().backward()

    summed = [record(run(device)).sums("op", "phase") for device in ("meta", "cpu")]
    assert summed[0] == summed[1]


def test_attention_is_attention():
    qkv = tensor(4 * 2, 2, 3, 8)
    entry = only(lambda: attention(qkv, batch=2, causal=False))
    assert (entry.kind, entry.flops) == (ATTENTION, 2 * 2 * 2 * 2 * 4 * 4 * 8)


def test_what_is_alive():
    x = tensor(1000)
    with Ledger() as ledger:
        a = x + 1
        b = a.view(10, 100) * 2
        assert ledger.live == 8000 and ledger.peak == 8000
        del a
        assert ledger.live == 4000
        b = b + 1
        del b
    assert (ledger.live, ledger.peak) == (0, 8000)


def test_a_storage_keeps_its_number_through_views():
    x = tensor(M, K)
    ledger = record(lambda: (x + 1).view(-1).mul(2))
    add, mul = ledger.entries
    assert add.outputs[0][0] == mul.inputs[0][0] != add.inputs[0][0]


def test_totals_and_table():
    x = tensor(M, K, requires_grad=True)
    ledger = record(lambda: torch.softmax(x @ tensor(K, N), -1).sum().backward())
    assert ledger.total().moved == sum(ledger.total(kind=kind).moved for kind in KINDS)
    assert ledger.total().calls == ledger.total(phase="forward").calls + ledger.total(phase="backward").calls
    text = str(ledger).splitlines()
    assert text[0].split() == ["kind", "calls", "read", "written", "at", "least", "sent", "computed"] and text[
        -1
    ].startswith("total")


def test_seconds_are_measured_where_asked():
    x = torch.ones(300, 300)
    with Ledger(timed=True) as ledger:
        x @ x
    assert 0 < ledger.entries[0].seconds < 10
    assert record(lambda: x @ x).entries[0].seconds == 0


def test_mue_is_the_papers():
    """Half of what moves must; it moves at half the peak."""
    assert mue(50.0, 100.0, 2.0, 100.0) == pytest.approx(25.0)


def _both_forms(world, sp, kind):
    """(flops, bytes sent) of a block's forward and backward, by the plain forms and by the overlapped ones."""
    found = []
    for overlap in ("off", "pairwise"):
        tp = TensorParallel(world.group, sequence_parallel=sp, overlap=overlap)
        torch.manual_seed(0)
        block = TransformerBlock(
            16, 4, 24, tp=tp, activation="silu" if kind == "gated" else "relu", gated=kind == "gated"
        )
        x = torch.randn(24 // tp.row_shards, 16, requires_grad=True)
        with Ledger() as ledger:
            block(x, batch=2).sum().backward()
        found.append((ledger.total().flops, ledger.total().wire))
    return found


@pytest.mark.parametrize("kind", ["plain", "gated"])
@pytest.mark.parametrize("sp", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["sp", "no sp"])
def test_overlapped_ops_declare_what_the_plain_ones_do(ranks, sp, kind):
    for off, on in ranks(2, _both_forms, sp, kind):
        assert on[0] == off[0] > 0
        assert (
            sp is False or on[1] == off[1] > 0
        )  # without sequence parallelism small sums travel by another collective
