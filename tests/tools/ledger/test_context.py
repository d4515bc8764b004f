"""What a rank sends over context-parallel ranks, and saves: closed forms, real ranks and dry ones, to the byte."""

import json
from dataclasses import replace

import pytest
import torch

from tests.planted import Mistaken
from tests.tools.ledger.test_dryrun import EXPERTS, MIXED, SIZES, SMALL, plan
from tpfuse import TensorParallel
from tpfuse.__main__ import main
from tpfuse.kernels.attn.options import Options
from tpfuse.models import GPT, GPTConfig
from tpfuse.sequence_parallel.context import HeadSplit, attend_pieces
from tpfuse.tools.ledger import Ledger, dry_run, load_config, saved_bytes
from tpfuse.tools.ledger.context import PieceBlock, PieceExchange
from tpfuse.tools.ledger.dryrun import (
    against_formulas,
    as_json,
    axis_of,
    expected_cp_wire,
    fake_world,
    layer_bytes,
    measured_layer,
    piece_block,
    ranks_of,
    report,
)
from tpfuse.tools.ledger.layer import compare as compare_layer

GROUPED = GPTConfig(
    **SIZES, family="llama", norm="rms", gated=True, activation="silu", ffn_size=40, num_kv_heads=2,
    tie_embeddings=False, qkv_bias=False, out_bias=False, mlp_bias=False, rope=dict(rope_theta=1e4),
)  # fmt: skip
NORMED = replace(GROUPED, qk_norm=True, num_kv_heads=4)
BATCH, WIDTH = 2, 8


def over_cp(ledger: Ledger, tp: TensorParallel, phase: str) -> tuple[int, int]:
    """Bytes and messages that this rank sent to the other context-parallel ranks."""
    row = ledger.total(group=tp.cp.group_name, phase=phase)
    return row.wire, row.calls * (tp.cp.size - 1)


# ---- attention ----


def attention(world, split: HeadSplit, kind: str, seq: int, dtype: torch.dtype, overlap: str = "off"):
    """(forward, backward) of one attention on a piece of each sequence."""
    tp = TensorParallel(cp=world.pieces(1, split.ranks, 1)["cp"], cp_kind=kind, overlap=overlap)
    rows = tp.piece(seq) * BATCH
    qkv = torch.ones(rows, split.groups, split.heads + 2, WIDTH, dtype=dtype, requires_grad=True)
    with Ledger() as ledger:
        attend_pieces(qkv, Options(batch=BATCH, seq=seq), tp).sum().backward()
    return rows, [over_cp(ledger, tp, phase) for phase in ("forward", "backward")]


SPLITS = [HeadSplit(4, 2, 2), HeadSplit(1, 4, 2), HeadSplit(2, 2, 4)]  # kv heads: as they are, and twice two copies


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("kind, seq, dtype", [
    ("heads", 13, torch.float32), ("heads", 16, torch.bfloat16), ("keys", 13, torch.bfloat16),
    ("keys", 16, torch.float64),
])  # fmt: skip
def test_attention(ranks, split, kind, seq, dtype):
    for rows, counted in ranks(split.ranks, attention, split, kind, seq, dtype):
        form = PieceExchange(split, WIDTH, rows, kind, dtype.itemsize)
        assert counted == [*zip(form.wire, form.messages)] and all(wire for wire, _ in counted)


def test_gathered_keys(ranks):
    """All that a rank gets of the others' pieces, and its own."""
    for rows, sizes in ranks(2, gathered):
        form = PieceExchange(HeadSplit(2, 2, 2), WIDTH, rows, "keys", 4)
        assert sizes == [form.gathered] * 2 and form._replace(kind="heads").gathered == 0


def gathered(world):
    """The bytes that each gather of one attention leaves, forward and backward."""
    tp = TensorParallel(cp=world.pieces(1, 2, 1)["cp"], cp_kind="keys")
    rows = tp.piece(13) * BATCH
    qkv = torch.ones(rows, 2, 4, WIDTH, requires_grad=True)
    with Ledger() as ledger:
        attend_pieces(qkv, Options(batch=BATCH, seq=13), tp).sum().backward()
    return rows, [size for e in ledger.entries if e.op == "all_gather" for _, size in e.outputs]


def test_messages_under_attention(ranks):
    """As many bytes, counted by the ops that they travel in; the calls of these are no messages."""
    split = HeadSplit(4, 2, 2)
    for rows, counted in ranks(2, attention, split, "heads", 13, torch.bfloat16, "pairwise"):
        assert tuple(wire for wire, _ in counted) == PieceExchange(split, WIDTH, rows, "heads", 2).wire


# ---- blocks ----


def model_of(world, config: GPTConfig, on):
    """-> by number of layers the sums over cp, all calls that send or compute, and saved bytes of a model."""
    mesh = world.pieces(1, on.cp, on.tp)
    tp = TensorParallel(mesh["tp"], sequence_parallel=on.sequence_parallel, cp=mesh["cp"], cp_kind=on.cp_kind)
    found = []
    for layers in (1, 2):
        model = GPT(replace(config, num_layers=layers), tp=tp, saving=on.saving, recompute="full" if on.full else None)
        ids = torch.zeros(on.micro_batch, on.seq, dtype=torch.int64)
        model(ids, labels=ids, step=0, first_sample=0)  # compares the ranks' calls, once
        with Ledger() as ledger:
            with saved_bytes(model) as saved:
                loss = model(ids, labels=ids, step=0, first_sample=0).loss
            loss.backward()
        sums = {key: row for key, row in ledger.sums("op", "phase", "kind").items() if row.wire or row.flops}
        sent = [over_cp(ledger, tp, phase) for phase in ("forward", "backward")]
        found.append(([sum(column) for column in zip(*sent)], sums, saved()))
    return found


def compare(ranks, config, on, function=model_of):
    """One layer more adds what the form says, and the first rank of a dry world does what a real one does."""
    dry = [dry_run(replace(config, num_layers=layers), on) for layers in (1, 2)]
    done = dry[1].plan
    block = PieceBlock.of(
        config, rows=done.piece * BATCH, ranks=on.cp, kind=done.cp_kind, element=on.dtype.itemsize, tp=on.tp
    )
    real = ranks(on.tp * on.cp, function, config, on)
    form = [block.wire(recomputed=on.full), block.messages(recomputed=on.full)]
    for (one, *_), (two, *_) in real:
        assert [b - a for a, b in zip(one, two)] == form
    for (sent, sums, saved), run in zip(real[0], dry):
        rows = {key: row for key, row in run.ledger.sums("op", "phase", "kind").items() if row.wire or row.flops}
        assert (sums, saved, sent[0]) == (rows, run.work.saved, run.work.cp_wire)
    return [run.work.saved for run in dry], done


CASES = {
    "heads": (SMALL, dict(tp=2, cp=2, cp_kind="heads")),
    "keys": (SMALL, dict(tp=2, cp=2, cp_kind="keys", full=True)),
    "copies": (GROUPED, dict(cp=4, cp_kind="heads", saving="smallest")),
    "auto": (NORMED, dict(tp=2, cp=2, sequence_parallel=False)),
    "few keys": (GROUPED, dict(cp=2, cp_kind="keys")),
    "copies over tp too": (replace(GROUPED, num_kv_heads=1), dict(tp=2, cp=2, cp_kind="heads")),
}


@pytest.mark.parametrize("case", CASES)
def test_a_block_of_an_odd_length(ranks, case):
    """Attention and the sums of gradients, forward and backward."""
    config, sizes = CASES[case]
    compare(ranks, config, plan(seq=63, **sizes))


@pytest.mark.parametrize("case", ["heads", "copies", "few keys"])
def test_a_piece_saves_what_as_many_positions_save(ranks, case):
    """To the byte, but for copies of vectors, as over tensor-parallel ranks; of "heads" o and kv heads' copies too."""
    config, sizes = CASES[case]
    (one, two), done = compare(ranks, config, plan(seq=64, **sizes))
    alone = done._replace(tp=2, cp=1)  # whose vectors are copied too, for the sum of their gradients
    vectors = measured_layer(config, alone) - layer_bytes(config, alone)
    assert two - one - layer_bytes(config, done) == vectors <= 10 * config.hidden_size * 4


def not_summed(right, x, tp):
    """Weights as they are, so that nobody sends their gradients."""
    return x


def test_a_gradient_that_is_not_summed_is_seen(ranks):
    config, sizes = CASES["heads"]
    with pytest.raises(AssertionError):
        compare(ranks, config, plan(seq=64, **sizes), Mistaken(model_of, "tpfuse.layers.linear.on_pieces", not_summed))


# ---- dry ranks ----


@pytest.mark.parametrize("kind", ["heads", "keys"])
@pytest.mark.parametrize("config", [EXPERTS, replace(MIXED, mlp_layers=()), replace(NORMED, qk_norm_all=True)])
def test_blocks_of_other_kinds(config, kind):
    """Experts, whose rows stay among tensor-parallel ranks, and norms of all heads together."""
    on = plan(tp=2, cp=2, cp_kind=kind, seq=63)
    one, two = (dry_run(replace(config, num_layers=n), on) for n in (1, 2))
    said = expected_cp_wire(two.config, on) - expected_cp_wire(one.config, on)
    assert two.work.cp_wire - one.work.cp_wire == said > 0


def test_a_long_sequence_of_a_large_model():
    """Weights so large that their sums are two messages; one kv head a rank, so that "auto" gathers keys."""
    config = replace(load_config("llama3.1-8b"), num_layers=2)
    on = plan(tp=8, cp=8, seq=131072, micro_batch=1, dtype=torch.bfloat16, full=True)
    done = dry_run(config, on)
    assert done.plan.cp_kind == "keys" and done.plan.ranks == 64
    counted, formula = {name: row for name, *row, _ in against_formulas(done)}[
        "sent over cp (formula: of blocks, embedding, head)"
    ]
    assert counted == pytest.approx(formula, rel=1e-4)
    whole = dry_run(config, on._replace(cp=1, dp=8)).held
    assert done.held.state == whole.state._replace(buckets=0) and done.held.sharded == whole.sharded
    assert piece_block(config, on).attention.gathered == 2 * 128 * 131072 * 2
    assert "of these keys and values, gathered" in report(done)


@pytest.mark.parametrize("case", CASES)
def test_a_layer_of_the_ledger(case):
    """What ``ledger`` counts of one layer is what the form says."""
    config, sizes = CASES[case]
    on = plan(seq=63, **sizes)._replace(sequence_parallel=True, full=False)
    with fake_world(on.tp, cp=on.cp) as mesh:
        tp = ranks_of(on, mesh)
        layer = compare_layer(config, batch=BATCH, seq=63, tp=tp, dtype=on.dtype)
        sent = {
            column.title: sum(e.wire for _, e in column.entries if axis_of(e.group, tp) == "cp")
            for column in layer.columns
        }
    assert sent == dict.fromkeys(["tpfuse fastest", "tpfuse smallest"], piece_block(config, on).wire())


SIZED = "--seq", "64", "--tp", "2", "--cp", "2", "--cp-kind", "keys", "--json"


def test_commands(capsys):
    """``memory`` measures what its closed form says, and ``ledger`` counts more than without cp."""
    assert main(["memory", "--model", "gpt-3m", *SIZED]) == 0
    values = json.loads(capsys.readouterr().out)
    rows = {name: row for name, row in values["activations"].items() if "CP 2 (keys)" in name}
    assert len(rows) == 6 and values["plan"]["cp"] == 2
    assert all(0 <= row["measured_a_layer"] - row["a_layer"] <= 11 * 256 * 4 for row in rows.values())  # vectors
    assert main(["ledger", "gpt-3m", *SIZED]) == 0
    sent = json.loads(capsys.readouterr().out)["tpfuse fastest"]["total"]["wire"]
    assert main(["ledger", "gpt-3m", *SIZED[:4], "--json"]) == 0
    assert sent > json.loads(capsys.readouterr().out)["tpfuse fastest"]["total"]["wire"]


def test_report_and_json_name_cp():
    done = dry_run(SMALL, plan(tp=2, cp=2, dp=2))
    assert "tp 2 x cp 2 (heads) x dp 2 = 8 ranks" in report(done)
    values = as_json(done.plan, done.held, done.work)
    assert (values["plan"]["cp"], values["plan"]["cp_kind"], values["plan"]["ranks"]) == (2, "heads", 8)
    sent = {over: sum(m["bytes"] for m in values["work"]["messages"] if m["over"] == over) for over in ("tp", "cp")}
    assert sent == dict(tp=done.work.wire, cp=done.work.cp_wire) and sent["cp"] > 0
    assert "cp" not in report(dry_run(SMALL, plan(tp=2)))


def test_sizes_that_cannot_be():
    with pytest.raises(ValueError, match="are not divisible by context-parallel size 3; use size .*cp_kind='keys'"):
        dry_run(SMALL, plan(cp=3, cp_kind="heads"))
    with pytest.raises(ValueError, match="cp must be at least 1, got 0"):
        dry_run(SMALL, plan(cp=0))
    with pytest.raises(ValueError, match="cp_kind must be one of auto, heads, keys, got 'rows'"):
        dry_run(SMALL, plan(cp=2, cp_kind="rows"))
    with pytest.raises(ValueError, match="experts over replicas are not built for cp="):
        dry_run(EXPERTS, plan(tp=2, dp=2, cp=2, over_replicas=True))
