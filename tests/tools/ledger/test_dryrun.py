"""Any model at any scale in one process: against the formulas, against real ranks, and the errors of run time."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.common import make_tp
from tests.routing import evenly, routed, to_the_first
from tpfuse.layers import TransformerBlock
from tpfuse.models import GPT, GPTConfig
from tpfuse.parallel import TensorParallel
from tpfuse.tools.ledger import (
    Ledger,
    Pipe,
    Plan,
    dry_pipeline,
    dry_run,
    fake_world,
    load_config,
    saved_bytes,
    state_bytes,
)
from tpfuse.tools.ledger.dryrun import (
    against_formulas,
    as_json,
    expected_wire,
    layer_bytes,
    measured_layer,
    point,
    report,
    sweep,
    sweep_table,
)

SIZES = dict(vocab_size=96, max_positions=64, hidden_size=64, num_layers=2, num_heads=8)
SMALL = GPTConfig(**SIZES)
EXPERTS = GPTConfig(
    **SIZES, family="mixtral", norm="rms", gated=True, activation="silu", ffn_size=40, num_kv_heads=4,
    tie_embeddings=False, qkv_bias=False, out_bias=False, mlp_bias=False, rope=dict(rope_theta=1e4),
    num_experts=4, experts_per_token=2, shared_size=24, shared_gate=True,
)  # fmt: skip


MIXED = replace(EXPERTS, family="qwen2_moe", num_layers=4, expert_size=24, mlp_layers=(0, 3))


def plan(**values):
    return Plan(**dict(seq=64, micro_batch=2, dtype=torch.float32) | values)


BIG = """
import time
from bench._resident import resident
from tpfuse.tools.ledger import Plan, dry_run, load_config
from tpfuse.tools.ledger.dryrun import against_formulas
began = time.monotonic()
done = dry_run(load_config("gpt3-175b"), Plan(tp=8, dp=128, seq=2048, micro_batch=1))
counted = [(n, formula) for _, n, formula, _ in against_formulas(done)]
assert abs(counted[0][0] - counted[0][1]) < 1 and 21.8e9 < counted[0][0] < 21.9e9, counted
assert all(0.98 < n / formula < 1.02 for n, formula in counted), counted
seconds, gigabytes = time.monotonic() - began, resident("VmHWM") / 1e9
assert seconds < 60 and gigabytes < 2, (seconds, gigabytes)
"""


@pytest.mark.slow
def test_gpt3_on_1024_ranks_in_a_minute_and_two_gigabytes():
    done = subprocess.run([sys.executable, "-c", BIG], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def _real(world, sequence_parallel, saving, recompute=None, config=SMALL, seq=64):
    model = GPT(config, tp=make_tp(world, sequence_parallel), saving=saving, recompute=recompute)
    ids = torch.zeros(2, seq, dtype=torch.int64)
    model(ids, labels=ids, step=0, first_sample=0)  # compares the ranks' input_ids, once
    with Ledger() as ledger:
        model(ids, labels=ids, step=0, first_sample=0).loss.backward()
    return {key: row for key, row in ledger.sums("op", "phase", "kind").items() if row.wire or row.flops}


@pytest.mark.parametrize("sequence_parallel, saving", [(True, "fastest"), (True, "smallest"), (False, "fastest")])
def test_a_dry_rank_does_what_a_real_one_does(ranks, sequence_parallel, saving):
    """Every GEMM, attention and collective: calls, bytes, flops."""
    real = ranks(2, _real, sequence_parallel, saving)
    dry = dry_run(SMALL, plan(tp=2, sequence_parallel=sequence_parallel, saving=saving))
    rows = {key: row for key, row in dry.ledger.sums("op", "phase", "kind").items() if row.wire or row.flops}
    assert rows == real[0] == real[1]
    assert sum(row.wire for row in rows.values()) == dry.work.wire > 0


def _with_experts(world, where, sequence_parallel, saving, recompute):
    with routed(where):
        return _real(world, sequence_parallel, saving, recompute, EXPERTS, seq=48)


@pytest.mark.parametrize("sequence_parallel, saving, recompute", [
    (True, "fastest", None), (True, "smallest", None), (True, "fastest", "full"), (False, "fastest", None),
])  # fmt: skip
def test_a_dry_rank_with_experts_does_what_a_real_one_does(ranks, sequence_parallel, saving, recompute):
    """Where all ranks' experts have as many rows, eight for each choice of two of four, and on the one that has them
    all."""
    on = plan(tp=2, seq=48, sequence_parallel=sequence_parallel, saving=saving, full=recompute == "full")
    for where, imbalance in ((evenly, 1), (to_the_first, 2)):
        real = ranks(2, _with_experts, where, sequence_parallel, saving, recompute)
        dry = dry_run(EXPERTS, on._replace(imbalance=imbalance))
        rows = {key: row for key, row in dry.ledger.sums("op", "phase", "kind").items() if row.wire or row.flops}
        assert rows == real[0] and (rows == real[1]) == (imbalance == 1)
        assert ("exchange_rows", "backward", "communication") in rows


def _mixed(world, where, over_replicas):
    """A rank of two replicas of two: what it computes and sends, and what it holds and saves."""
    mesh = world.stages(1, 2, 2)
    tp = TensorParallel(mesh["tp"], sequence_parallel=True)
    model = GPT(MIXED, tp=tp, dp=mesh["dp"], experts=mesh["dp", "tp"] if over_replicas else None)
    ids = torch.zeros(2, 48, dtype=torch.int64)
    with routed(where):
        model(ids, labels=ids)  # compares the ranks' calls, once
        with Ledger() as ledger:
            with saved_bytes(model) as saved:
                loss = model(ids, labels=ids).loss
            loss.backward()
    sums = {key: row for key, row in ledger.sums("op", "phase", "kind").items() if row.wire or row.flops}
    return sums, saved(), state_bytes(model, dp=2), state_bytes(model, dp=2, sharded=True)


@pytest.mark.parametrize("over_replicas", [False, True])
def test_a_dry_rank_of_mlps_and_experts_does_what_a_real_one_does(ranks, over_replicas):
    """To the byte, with even experts and, where a rank has two, on the one that has all rows; experts of one replica
    and of both."""
    on = plan(tp=2, dp=2, seq=48, over_replicas=over_replicas)
    for where, imbalance in [(evenly, 1), (to_the_first, 2)][: 1 if over_replicas else 2]:
        real = ranks(4, _mixed, where, over_replicas)
        dry = dry_run(MIXED, on._replace(imbalance=imbalance))
        rows = {key: row for key, row in dry.ledger.sums("op", "phase", "kind").items() if row.wire or row.flops}
        states = dry.held.state, dry.held.sharded
        assert real[0][0] == rows and real[0][1:] == (dry.work.saved, *states)
        assert all((each[0] == rows) == (imbalance == 1 or i % imbalance == 0) for i, each in enumerate(real))


@pytest.mark.parametrize("over_replicas, imbalance", [(False, 1), (False, 1.5), (True, 1), (True, 3)])
def test_formulas_of_mlps_and_experts(over_replicas, imbalance):
    """Sums over the kinds of layers: parameters, and the bytes that each kind saves; flops of GEMMs; messages."""
    on = plan(tp=2, dp=2, over_replicas=over_replicas, imbalance=imbalance)
    done = dry_run(MIXED, on)
    rows = {what.partition(" (")[0]: (counted, formula) for what, counted, formula, _ in against_formulas(done)}
    assert done.held.parameters == rows["parameters"][1]
    assert rows["flops"][1] - done.work.gemm_flops == 12 * 2 * 4 * 64 * 64 * 64 / 2
    mlp, experts = (layer_bytes(MIXED, on, layer) for layer in (0, 1))
    assert rows["saved activations"][1] == 2 * mlp + 2 * experts and mlp != experts
    for layer, form in ((0, mlp), (1, experts)):
        assert 0 <= measured_layer(MIXED, on, layer) - form <= 2 * 64 * 4  # of two norms
    assert point(MIXED, on).work == done.work
    alike = [dry_run(replace(MIXED, num_layers=n, mlp_layers=()), on) for n in (1, 2)]
    sent, said = (b - a for a, b in ([d.work.wire for d in alike], [expected_wire(d.config, on) for d in alike]))
    assert sent - said == 2 * 64 * 4 * 1  # the gradients of two norms
    if over_replicas:
        alone = on._replace(over_replicas=False, imbalance=1)
        assert done.held.parameters < dry_run(MIXED, alone).held.parameters


def test_experts_over_replicas_that_cannot_be():
    on = plan(tp=2, dp=2, over_replicas=True)
    with pytest.raises(ValueError, match="over_replicas is of a model with experts, and this one has none"):
        dry_run(SMALL, on)
    with pytest.raises(ValueError, match="1 to 2 x tp=4, got 5"):
        dry_run(MIXED, on._replace(imbalance=5))


@pytest.mark.parametrize("imbalance", [1.0, 1.5, 4.0])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_experts_counted_are_what_the_formulas_say(sequence_parallel, imbalance):
    """Parameters and the flops of GEMMs to the last; a layer's messages but for the vectors that norms sum."""
    on = plan(tp=4, sequence_parallel=sequence_parallel, imbalance=imbalance)
    done = dry_run(EXPERTS, on)
    rows = {what.partition(" (")[0]: (counted, formula) for what, counted, formula, _ in against_formulas(done)}
    assert done.held.parameters == rows["parameters"][1]
    hidden = rows["flops"][1] - done.work.gemm_flops  # of all keys
    assert hidden == 12 * 2 * 2 * 64 * 64 * 64 / 4
    layers = [dry_run(replace(EXPERTS, num_layers=n), on) for n in (1, 2)]
    sent, said = (b - a for a, b in ([d.work.wire for d in layers], [expected_wire(d.config, on) for d in layers]))
    norms = 2 * 64 * 4 * 3  # the gradients of two norms, which each rank has of its rows
    assert sent - said == (norms if sequence_parallel else 0)


@pytest.mark.parametrize("config, imbalance, message", [
    (EXPERTS, 0.5, "imbalance is the busiest rank's rows over the mean, 1 to tp=2, got 0.5"),
    (EXPERTS, 2.5, "imbalance is the busiest rank's rows over the mean, 1 to tp=2, got 2.5"),
    (SMALL, 1.5, "imbalance is of a model with experts, and this one has none, got 1.5"),
])  # fmt: skip
def test_an_imbalance_that_cannot_be(config, imbalance, message):
    on = plan(tp=2, imbalance=imbalance)
    for call in (
        lambda: dry_run(config, on),
        lambda: dry_pipeline(config, on, Pipe(2)),
        lambda: layer_bytes(config, on),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_dry_rank_recomputes_what_a_real_one_does(ranks, sequence_parallel):
    real = ranks(2, _real, sequence_parallel, "fastest", "full")
    dry = dry_run(SMALL, plan(tp=2, sequence_parallel=sequence_parallel, full=True))
    rows = {key: row for key, row in dry.ledger.sums("op", "phase", "kind").items() if row.wire or row.flops}
    assert rows == real[0] == real[1]
    # small all-reduces are one message, a gather and an exchange are two; two pairs of GEMMs a layer
    of_forward = (2 if sequence_parallel else 1) * 2 * SMALL.num_layers
    calls = lambda run: sum(calls for calls, _ in run.work.messages.values())
    plain = dry_run(SMALL, plan(tp=2, sequence_parallel=sequence_parallel))
    assert calls(dry) - calls(plain) == of_forward


@pytest.mark.parametrize("sequence_parallel", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_what_a_recomputing_rank_saves_and_sends_is_what_the_formulas_say(sequence_parallel):
    on = Plan(tp=4, seq=512, micro_batch=8, sequence_parallel=sequence_parallel, full=True)
    rows = {
        what: (counted, formula) for what, counted, formula, _ in against_formulas(dry_run(load_config("gpt-22b"), on))
    }
    counted, formula = rows["sent over tp (formula: of row tiles)"]
    assert counted == pytest.approx(formula, rel=0.02)


@pytest.mark.parametrize("name", ["gpt-22b", "bert-large"])
@pytest.mark.parametrize("sequence_parallel, rows", [(True, 8), (False, 8), (False, 1)])
def test_counted_is_what_the_formulas_say(name, sequence_parallel, rows):
    """At these sizes what the formulas leave out (vectors, the loss, BERT's head) is small; BERT's sums of one sequence
    are one message each."""
    done = dry_run(load_config(name), Plan(tp=4, dp=2, seq=512, micro_batch=rows, sequence_parallel=sequence_parallel))
    close = 0.02 if name.startswith("gpt") else 0.10
    for what, counted, formula, _ in against_formulas(done):
        assert counted == pytest.approx(formula, rel=close), what


def test_many_layers_are_those_of_a_few():
    config, on = GPTConfig(vocab_size=96, max_positions=64, hidden_size=64, num_layers=7, num_heads=8), plan(tp=4, dp=2)
    whole, few = dry_run(config, on), point(config, on)
    assert (few.held, few.work) == (whole.held, whole.work)


def test_sizes_that_do_not_fit_have_the_words_of_run_time():
    with pytest.raises(
        ValueError, match="num_heads=8 is not divisible by tensor-parallel size 3; use 1, 2, 4 or 8"
    ) as dry:
        dry_run(SMALL, plan(tp=3))
    with fake_world(3) as mesh, torch.device("meta"), pytest.raises(ValueError) as real:
        TransformerBlock(64, 8, tp=TensorParallel(mesh["tp"]))
    assert str(dry.value) == str(real.value)
    assert not dist.is_initialized()


def test_too_many_positions():
    with pytest.raises(ValueError, match="128 positions are more than the model's max_positions=64"):
        dry_run(SMALL, plan(seq=128))


def test_no_dry_run_inside_a_process_group():
    with fake_world(2), pytest.raises(ValueError, match="in a process group already"):
        dry_run(SMALL, plan())
    with pytest.raises(ValueError, match="tp must be at least 1, got 0"):
        dry_run(SMALL, plan(tp=0))


def test_ddp_sends_its_buckets():
    done = dry_run(SMALL, plan(tp=2, dp=4))
    gradients = done.held.parameters * 4
    calls, sent = done.held.reduced
    assert calls == 1 and sent == int(2 * 3 / 4 * gradients) and done.held.sharded_wire == int(3 * 3 / 4 * gradients)
    assert done.held.state.buckets == gradients and done.held.sharded.buckets == 0
    assert done.held.viewed == done.held.state._replace(buckets=0)
    assert dry_run(SMALL, plan(tp=2)).held.reduced == (0, 0)


def test_peak_is_of_activations_alone():
    done = dry_run(SMALL, plan(tp=2))
    assert done.work.saved < done.work.peak < 2 * done.work.saved


@pytest.mark.slow
def test_sweep_from_one_rank_to_4096():
    points = sweep(load_config("gpt-530b"), Plan(seq=2048), [1, 8, 64], [1, 64, 4096])
    assert [(p.plan.tp, p.plan.ranks) for p in points] == [
        (1, 1),
        (1, 64),
        (1, 4096),
        (8, 64),
        (8, 4096),
        (64, 64),
        (64, 4096),
    ]
    by_tp = {p.plan.tp: p for p in points if p.plan.ranks == 4096}
    assert by_tp[1].work.wire == 0 < by_tp[8].work.wire < by_tp[64].work.wire
    assert by_tp[64].held.parameters * 64 == pytest.approx(by_tp[1].held.parameters, rel=0.02)
    assert by_tp[64].work.saved * 64 == pytest.approx(by_tp[1].work.saved, rel=0.05)


def test_a_sweep_goes_on_after_sizes_that_do_not_fit():
    points = sweep(SMALL, plan(), [8, 16], [16])
    assert points[0].error == "" and "num_heads=8 is not divisible by tensor-parallel size 16" in points[1].error
    assert sweep_table(points).splitlines()[-1] == f"tp 16: {points[1].error}"


def test_report_and_json():
    done = dry_run(SMALL, plan(tp=2, dp=2))
    text = report(done)
    words = (
        "tp 2 x dp 2 = 4 ranks",
        "FSDP",
        "all_to_all",
        "DDP buckets",
        "data_parallel",
        "formula",
        "a ratio is no error",
    )
    assert all(word in text for word in words)
    values = as_json(done.plan, done.held, done.work)
    assert (
        values["plan"]["ranks"] == 4
        and values["work"]["flops"] == done.work.flops
        and values["held"]["state"]["total"] > 0
    )
