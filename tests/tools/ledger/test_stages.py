"""A pipeline's ranks on meta tensors: what they say of whole models; tests/pipeline/test_counted.py holds them to real
ranks."""

import json

import pytest
import torch

from tpfuse.__main__ import main
from tpfuse.models import GPT, GPTConfig
from tpfuse.pipeline import SCHEDULES
from tpfuse.tools.ledger import Pipe, Plan, dry_pipeline, dry_run, state_bytes
from tpfuse.tools.ledger.stages import as_json, report

SMALL = GPTConfig(vocab_size=96, max_positions=64, hidden_size=32, num_layers=4, num_heads=4, tie_embeddings=False)
PLAN = Plan(seq=32, micro_batch=2, dtype=torch.float32)
COMMAND = "--model", "gpt-3m", "--seq", "64", "--pp", "2", "--schedule", "zbv", "--micro-batches", "4"


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_ranks_of_a_pipeline_are_one_whole_model(name):
    """Parameters, flops and what a micro-batch saves, where no border adds anything of its own."""
    ranks, whole = dry_pipeline(SMALL, PLAN, Pipe(2, name, 4)), dry_run(SMALL, PLAN)
    copies = SCHEDULES[name].chains
    assert sum(r.parameters for r in ranks) == copies * whole.held.parameters
    assert sum(r.flops for r in ranks) == 4 * whole.work.flops
    for r in ranks:
        assert r.peak == r.state.total + max(*r.alive, r.copied[1]) and r.alive[-1] == 0
        assert (r.copied[1] == r.state.gradients) == (copies == 2)


def test_two_versions_of_the_weights():
    flushed, ranks = (dry_pipeline(SMALL, PLAN._replace(dp=2), Pipe(2, name, 4)) for name in ("1f1b", "2bw"))
    for r, once in zip(ranks, flushed, strict=True):
        assert (r.parameters, r.flops, r.messages) == (once.parameters, once.flops, once.messages)
        assert r.state == once.state._replace(parameters=2 * once.state.parameters, gradients=2 * once.state.gradients)
    saved = [next(iter(r.stages.values())).saved for r in ranks]
    assert [max(r.alive) for r in ranks] == [3 * saved[0], saved[1]]
    assert [r.alive[-1] for r in ranks] == [2 * saved[0], 0]  # of the two micro-batches in flight between steps


def test_a_tied_embedding_is_on_both_ends():
    config = GPTConfig(vocab_size=96, max_positions=64, hidden_size=32, num_layers=4, num_heads=4)
    first, last = dry_pipeline(config, PLAN, Pipe(2, "1f1b", 4))
    assert first.copied == last.copied == (1, 96 * 32 * 4)
    (only,) = dry_pipeline(config, PLAN, Pipe(2, "zbv", 4))[:1]
    assert only.copied == (0, 0)


def test_state_of_a_model_with_stages():
    model = GPT(SMALL, stage=(0, 2))
    assert state_bytes(model).parameters == 4 * sum(p.numel() for p in model.parameters())
    assert state_bytes(model, dp=2, sharded=True).gathered > 0


def test_report_and_commands(capsys):
    ranks = dry_pipeline(SMALL, PLAN._replace(dp=2, tp=2), Pipe(2, "1f1b", 4))
    text = report(ranks)
    assert all(word in text for word in ("1f1b over 2 ranks of tp 2 x dp 2", "send", "all_reduce (gradients)", "(B)"))
    assert json.loads(json.dumps(as_json(ranks)))[0]["messages"][0]["op"] == "send"
    for command in ("dryrun", "memory"):
        assert main([command, *COMMAND, "--json"]) == 0
        values = json.loads(capsys.readouterr().out)
        assert [r["rank"] for r in values["ranks"]] == [0, 1] and values["ranks"][0]["peak"] > 0
        assert main([command, *COMMAND]) == 0
        assert "saved a micro-batch" in capsys.readouterr().out


@pytest.mark.parametrize(
    "more, words",
    [
        (["--schedule", "dualpipev"], "needs as many micro-batches as stages, 4, got micro_batches=2"),
        (["--pp", "40"], "cuts the model into 40 stages"),
        (["--sweep"], "--sweep is of tp and dp alone; leave out --pp"),
    ],
)
def test_what_is_refused(capsys, more, words):
    argv = "dryrun", "--model", "gpt-3m", "--seq", "64", "--pp", "2", "--micro-batches", "2", *more
    assert main([*argv]) == 2 and words in capsys.readouterr().err
