"""What explain says is what a call does."""

from dataclasses import replace

import pytest
import torch

import tpfuse
from tests.common import fake_tp
from tests.routing import evenly, routed
from tests.sequence_parallel.test_overlap import restoring
from tpfuse import TensorParallel, parallel
from tpfuse.layers import ColumnParallelLinear, CrossAttention
from tpfuse.models import GPT, GPTConfig
from tpfuse.sequence_parallel import choice, flight
from tpfuse.tools.ledger import Ledger
from tpfuse.tools.ledger.aten import COMMUNICATION
from tpfuse.tools.ledger.dryrun import fake_world

CONFIG = GPTConfig(vocab_size=97, max_positions=64, hidden_size=64, num_layers=1, num_heads=4)
FAST = 1e12, 1e9, 1e-4


def _explained(world, overlap, sp, rows):
    model = GPT(CONFIG, tp=TensorParallel(world.group, sequence_parallel=sp, overlap=overlap))
    return [(p.layer, p.op, p.path, p.bytes, p.messages, p.reason) for p in tpfuse.explain(model, rows)], repr(
        tpfuse.explain(model)
    )


@pytest.mark.parametrize("overlap", ["pairwise", "off"])
def test_every_layer_is_listed(ranks, overlap):
    """Bytes of one layer under sequence parallelism: five messages of m D elements, forward and backward; three where
    nothing leaves."""
    (paths, table), other = ranks(2, _explained, overlap, True, 64)
    assert (paths, table) == other
    one = 32 * 64 * 4
    assert [p[:4] for p in paths] == [
        ("embedding", "embedding", "plain", 2 * one),
        ("blocks.0.attention", "gather_attention_exchange", "pairwise" if overlap == "pairwise" else "plain", 5 * one),
        ("blocks.0.mlp", "gather_mlp_exchange", "pairwise" if overlap == "pairwise" else "plain", 5 * one),
        ("head", "gather_linear", "pairwise" if overlap == "pairwise" else "plain", 3 * one),
    ]
    assert all(name in table for name, *_ in paths) and f"overlap='{overlap}'" in table


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_projections_of_heads_with_norms(kv_heads):
    """Listed apart, also where ranks have a copy of one kv head."""
    rope = dict(rope_type="default", rope_theta=1e4)
    config = replace(CONFIG, num_kv_heads=kv_heads, norm="rms", qk_norm=True, rope=rope)
    with fake_world(2) as mesh, torch.device("meta"):
        model = GPT(config, tp=TensorParallel(mesh["tp"], sequence_parallel=True))
        paths = [(p.layer, p.op, p.bytes) for p in tpfuse.explain(model, 64)]
    one = 32 * 64 * 4
    assert paths[1:3] == [
        ("blocks.0.attention.qkv", "gather_linear", 3 * one),
        ("blocks.0.attention.out", "linear_exchange", 2 * one),
    ]


def test_rows_that_cross_attention_reads():
    with fake_world(2) as mesh, torch.device("meta"):
        attention = CrossAttention(64, 4, tp=TensorParallel(mesh["tp"]))
        rows = {p.layer: (p.op, p.rows) for p in tpfuse.explain(attention, 64)}
    assert rows == {"q": ("gather_linear", 64), "kv": ("gather_linear", None), "out": ("linear_exchange", 64)}


@restoring
def _between(world):
    """Loss and backward where the rule's threshold lies between the columns of the two ranks' heads, 49 and 48."""
    choice.measured = lambda device, dtype, ranks: (0.98 * 24576 * 48.5 / 3e-4, 1e6, 1e-4)
    parallel.host = lambda: world.rank
    tp = TensorParallel(world.group, sequence_parallel=True)
    options = dict(dtype=torch.float32, device=torch.device("cpu"), tp=tp)
    wins = [choice.sizes("gather_linear", 64, (n, 64), **options).wins for n in (49, 48)]
    model = GPT(CONFIG, tp=tp)
    assert model.head.last - model.head.first == 49 - world.rank
    ids = torch.arange(64).view(1, 64)
    model(ids, labels=ids, step=0).loss.backward()
    return wins, tpfuse.explain(model, 64)[-1].path


def test_ranks_with_different_columns_decide_alike(ranks):
    assert ranks(2, _between) == [([True, False], "pairwise")] * 2


def test_without_sequence_parallelism(ranks):
    (paths, _), _ = ranks(2, _explained, "pairwise", False, 64)
    assert {p[1]: p[2] for p in paths} == dict(
        embedding="plain", gather_linear="pairwise", linear_exchange="plain", gather_mlp_exchange="pairwise"
    )


def test_auto_says_why(monkeypatch):
    layer = ColumnParallelLinear(1024, 1024)
    layer.tp = fake_tp(2, 0, True)
    monkeypatch.setattr(choice, "measured", lambda device, dtype, ranks: FAST)
    assert flight.LEAST_ROWS == 256
    little, much = (tpfuse.explain(layer, rows)[0] for rows in (16, 4096))
    assert (little.path, much.path) == ("plain", "pairwise")
    assert "<= its cost" in little.reason and "> its cost" in much.reason
    (unknown,) = tpfuse.explain(layer)
    least = int(unknown.reason.split()[3])
    assert 16 < least <= 4096
    assert [tpfuse.explain(layer, rows)[0].path for rows in (least // 2, least)] == ["plain", "pairwise"]
    monkeypatch.setattr(choice, "measured", lambda device, dtype, ranks: None)
    assert "nobody measured" in tpfuse.explain(layer, 4096)[0].reason
    object.__setattr__(layer.tp, "one_machine", True)
    assert tpfuse.explain(layer, 4096)[0][2::5] == (
        "plain",
        "one machine: messages are copies by the cores that multiply",
    )


def test_one_rank():
    assert tpfuse.explain(torch.nn.Sequential(ColumnParallelLinear(4, 4)), 8)[0].reason == "one rank: no messages"
    with pytest.raises(ValueError, match="explain: rows must be positive, got 0"):
        tpfuse.explain(ColumnParallelLinear(4, 4), 0)


EXPERTS = GPTConfig(
    vocab_size=97, max_positions=64, hidden_size=64, num_layers=1, num_heads=4, ffn_size=40, gated=True,
    activation="silu", mlp_bias=False, num_experts=4, experts_per_token=3,
)  # fmt: skip


def _experts(world, sp, shared):
    """What explain says of the experts, and the bytes and messages that the layer sends, to one other rank each."""
    model = GPT(replace(EXPERTS, **shared), tp=TensorParallel(world.group, sequence_parallel=sp))
    (said,) = (p for p in tpfuse.explain(model, 48) if p.op == "routed_experts")
    layer = model.blocks[0].mlp
    x = torch.randn(48 // layer.tp.row_shards, 64, requires_grad=True)
    layer(x).sum().backward()  # compares the ranks' calls, once
    with routed(evenly), Ledger() as ledger:
        layer(x).sum().backward()
    sent = ledger.total(kind=COMMUNICATION)
    return said, (sent.wire, sent.calls), repr(tpfuse.explain(model))


@pytest.mark.parametrize("sp, shared, words", [
    (True, {}, ""), (False, {}, ""), (True, dict(shared_size=24, shared_gate=True), " and a shared one of width 24"),
])  # fmt: skip
def test_experts(ranks, sp, shared, words):
    for said, sent, table in ranks(2, _experts, sp, shared):
        assert (said.bytes, said.messages) == sent
        assert said[:5] == ("blocks.0.mlp", "routed_experts", "plain", (2, 80, 64), 48)
        assert said.reason == f"3 of 4 experts a row{words}: exchanges of uneven parts, nothing overlaps"
        assert said.reason in table


def test_experts_of_one_rank():
    said = next(p for p in tpfuse.explain(GPT(EXPERTS), 48) if p.op == "routed_experts")
    assert said[2:] == ("plain", (4, 80, 64), 48, 0, 0, "one rank: no messages")


def _stages(world, name):
    mesh = world.stages(2, 1, 1)["pp"]
    config = GPTConfig(vocab_size=97, max_positions=64, hidden_size=64, num_layers=4, num_heads=4)
    model = GPT(config, stage=(mesh.get_local_rank(), 2, name))
    sent = [(p.layer, p.bytes, p.messages, p.reason) for p in tpfuse.explain(model, 24) if p.op == "send"]
    assert "stage" in repr(tpfuse.explain(model)) and not [p for p in tpfuse.explain(GPT(config)) if p.op == "send"]
    return sent


def test_what_a_pipelines_stages_send(ranks):
    """h [24, 64] in fp32 to the next rank, its gradient to the one before."""
    size, first, last = 24 * 64 * 4, "h to rank 1", "its input's gradient to rank 0"
    assert ranks(2, _stages, "1f1b") == [[("stage 0", size, 1, first)], [("stage 1", size, 1, last)]]
    zbv = ranks(2, _stages, "zbv")  # stages 1 and 2 are on one rank
    assert zbv[1] == [("stage 1", size, 1, last), ("stage 2", size, 1, "h to rank 0")]
    names = [layer for layer, *_ in ranks(2, _stages, "chimera")[0]]
    assert names == ["stage 0 of chain 0", "stage 1 of chain 1"]


def _pieces(world, kv_heads, cp_kind, overlap="off"):
    tp = TensorParallel(cp=world.group, cp_kind=cp_kind, overlap=overlap)
    config = GPTConfig(
        vocab_size=64, max_positions=64, hidden_size=32, num_layers=1, num_heads=4, num_kv_heads=kv_heads
    )
    model = GPT(config, tp=tp).eval()
    found = {path.op: path for path in tpfuse.explain(model, 16)}
    with Ledger() as ledger:
        model(torch.zeros(1, 32, dtype=torch.int64), labels=torch.zeros(1, 32, dtype=torch.int64)).loss.backward()
    sums = ledger.sums("op", "kind")
    counted = sum(row.wire for (op, kind), row in sums.items() if kind == COMMUNICATION and op == "all_to_all")
    return found, counted


@pytest.mark.parametrize(
    "kv_heads, cp_kind, words",
    [
        (4, "auto", "heads: 1 query heads a kv head and 1 copies of it against 2 x 2 ranks, of which heads sends less"),
        (1, "auto", "keys: 4 query heads a kv head and 2 copies of it against 2 x 2 ranks, of which keys sends less"),
        (1, "heads", "heads: 4 query heads a kv head and 2 copies of it against 2 x 2 ranks, of which keys sends less"),
    ],
)
def test_pieces_of_sequences(ranks, kv_heads, cp_kind, words):
    for found, counted in ranks(2, _pieces, kv_heads, cp_kind):
        path = found["attend_pieces"]
        why = "; overlap='off'" if words.startswith("heads") else ""
        assert path.reason == words + why and (path.path, path.rows) == ("plain", 16)
        assert {"gather_linear", "linear_exchange", "gather_mlp_exchange"} <= {*found}
        gathered = 0 if words.startswith("heads") else 2 * 2 * kv_heads * 8 * 16 * 4  # of keys, forward and backward
        assert path.bytes == counted + gathered
        assert path.messages == (4 if words.startswith("heads") else 3)


@pytest.mark.parametrize(
    "kv_heads, overlap, path, messages, why",
    [
        (4, "pairwise", "pairwise", 8, "2 rounds travel under attention"),
        (2, "pairwise", "plain", 4, "a rank has one kv head"),
        (4, "auto", "plain", 4, "one machine: messages are copies by the cores that multiply"),
    ],
)
def test_rounds_of_heads(ranks, kv_heads, overlap, path, messages, why):
    for found, _ in ranks(2, _pieces, kv_heads, "heads", overlap):
        row = found["attend_pieces"]
        assert (row.path, row.messages, row.reason.split("; ")[1]) == (path, messages, why)
