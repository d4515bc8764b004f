"""``python -m tpfuse plan`` and best_plans: output, files, errors, and the training example that runs a plan.

Spans: tpfuse/tools/plan/planning.py and check.py, whose plans the command checks.
"""

import gc
import json
import sys

import pytest
import torch

from tests.examples.launch import example, ok
from tests.tools.plan import fake
from tpfuse.__main__ import main
from tpfuse.models import GPTConfig
from tpfuse.plan import Job, best_plans, preset
from tpfuse.tools import html
from tpfuse.tools.ledger import layer
from tpfuse.tools.ledger.presets import PRESETS
from tpfuse.tools.plan import check, explain, planning
from tpfuse.tools.plan.devices import DEVICES
from tpfuse.tools.plan.search import SearchResult, search
from tpfuse.tools.plan.split import Split

COMMAND = ["plan", "--model", "gpt-3m", "--device", "a100-80gb", "--devices", "2", "--seq", "64", "--global-batch", "4"]
FEW = ["--fix", "micro_batch=2,saving=fastest,full=no"]
ONE = ["--fix", "dp=2,micro_batch=1,saving=fastest,full=no,sharded=no"]


def test_plans(capsys, tmp_path):
    assert main([*COMMAND, *FEW, "--explain", "1", "--json", str(tmp_path / "plan.json")]) == 0
    assert gc.get_freeze_count() == 0  # nothing of the caller's is garbage for good
    text = capsys.readouterr().out
    assert all(word in text for word in ("dp 2 x tp 1 x pp 1", "a rank may hold 72.0 GB", "runner-up", "twice the"))
    values = json.loads((tmp_path / "plan.json").read_text())
    assert values["job"] == dict(batch=4, seq=64, dtype="bfloat16", optimizer="adamw", num_layers=4)
    best = values["plans"][0]
    assert best["dp"] * best["tp"] * best["pp"] == 2 and sum(best["layers"]) == 4
    assert all(p["micro_batch"] == 2 and p["saving"] == "fastest" and not p["full"] for p in values["plans"])


def test_a_plan_by_hand(capsys):
    by_hand = "dp=1,tp=1,pp=2,schedule=zbv,chunks=2,micro_batch=1,saving=smallest,full=yes,sharded=no,layers=1-1-1-1"
    assert main([*COMMAND, "--fix", by_hand]) == 0
    text = capsys.readouterr().out
    assert "1 splits costed" in text and "zbv x 2" in text and "smallest, full recompute" in text


@pytest.mark.parametrize(
    "options, message",
    [
        (["--model", "gpt-9"], "model 'gpt-9' is neither a local config.json nor one of"),
        (["--device", "tpu"], "plan: device must be one of v100, a100-80gb,"),
        (["--devices", "12"], "plan: devices must fill nodes of 8, got 12"),
        (["--cluster", "none.toml"], "--cluster says the devices; leave out --device(s)"),
        (["--check"], "--check runs plans on this machine: give --device here"),
        (["--explain", "11"], "--explain is one of the 10 fastest plans, got 11"),
        (["--fix", "tp"], "--fix is FIELD=VALUE,.., got 'tp'"),
        (["--fix", "tp=two"], "--fix tp must be a positive integer, got 'two'"),
        (["--fix", "layers=3--4"], "--fix layers must be blocks of each stage, such as 3-4-4-3, got '3--4'"),
        (["--fix", "tp=2,tp=1"], "--fix says tp twice, 'tp=2,tp=1'"),
        (["--device", "v100"], "error: plan: v100 has no peak for bfloat16, only for float16, float32"),
        (["--fix", "full=perhaps"], "full must be one of False, True, got perhaps"),
        (["--global-batch", "3", "--fix", "dp=2"], "a batch of 3 that dp x micro-batch divides"),
        (["--memory-share", "0.0001", *FEW], "no split of 2 devices holds the model: a rank needs"),
    ],
)
def test_errors_of_one_line(capsys, options, message):
    assert main([*COMMAND, *options]) == 2
    error = capsys.readouterr().err
    assert message in error and len([line for line in error.splitlines() if "error" in line]) == 1


@pytest.mark.slow
def test_no_plan_splits_experts_over_more_ranks_than_there_are():
    sizes = dict(vocab_size=96, max_positions=64, hidden_size=64, num_layers=2, num_heads=4, tie_embeddings=False)
    experts = dict(gated=True, activation="silu", mlp_bias=False, num_experts=2, experts_per_token=1)
    job = Job(GPTConfig(**sizes, **experts), batch=4, seq=32)
    few = dict(micro_batch=1, saving="fastest", full=False, schedule="1f1b")
    plans = best_plans(job, preset("a100-80gb", 4), fixed=few, keep=100)
    assert {step.split.tp for step in plans.steps} == {1, 2}
    assert all(step.split.dp * step.split.tp == 2 for step in plans.steps if step.split.over_replicas)  # none over four
    dense = job._replace(config=GPTConfig(**sizes))
    assert {s.split.tp for s in best_plans(dense, preset("a100-80gb", 4), fixed=few, keep=100).steps} == {1, 2, 4}


def test_the_choice_of_experts_ranks_is_in_the_plan(capsys, tmp_path):
    """Of the model's experts over tp or over dp x tp: in the table, in JSON and by hand."""
    sizes = dict(vocab_size=96, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    sizes |= dict(intermediate_size=128, moe_intermediate_size=96, num_experts=4, num_experts_per_tok=2)
    config = PRESETS["qwen3-30b-a3b"] | sizes | dict(mlp_only_layers=[0], head_dim=16)
    (tmp_path / "config.json").write_text(json.dumps(config))
    few = "micro_batch=1,saving=fastest,full=no,sharded=no,dp=2,tp=1,pp=1"
    argv = ["plan", "--model", str(tmp_path), *COMMAND[3:], "--json", str(tmp_path / "plan.json"), "--fix"]
    assert main([*argv, few, "--explain", "1"]) == 0
    assert "DDP, experts over dp x tp" in capsys.readouterr().out
    plans = json.loads((tmp_path / "plan.json").read_text())["plans"]
    assert {p["over_replicas"] for p in plans} == {False, True}
    by_choice = {p["over_replicas"]: p["memory"][0]["state"] for p in plans}
    assert by_choice[True] < by_choice[False]
    assert main([*argv, f"{few},over_replicas=yes"]) == 0
    assert main([*argv, "cp=2,over_replicas=yes"]) == 2
    assert "no split of 2 devices with cp=2, over_replicas=True has" in capsys.readouterr().err


def test_how_many_devices_would_do(capsys):
    assert main([*COMMAND, *FEW, "--memory-share", "0.0002"]) == 2
    assert "and may hold 16.0 MB; 4 would do" in capsys.readouterr().err


def test_a_machine_has_to_be_named(capsys):
    assert main(["plan", "--model", "gpt-3m", "--devices", "2"]) == 2
    assert "say what it runs on: --devices and --device, or --cluster" in capsys.readouterr().err


def test_checked_plans_are_spread(monkeypatch):
    plans = fake.plans()
    steps = check.chosen(plans)
    splits = {(s.split.dp, s.split.cp, s.split.tp, s.split.pp) for s in steps}
    assert len(splits) == 4 and steps[0].seconds == min(s.seconds for s in steps)
    monkeypatch.setattr(check, "measure", lambda job, splits: [1, 2, 3, 4])
    assert "rank correlation (Spearman): " in check.checked(plans)
    assert check.correlation([1, 2, 3], [3, 5, 9]) == 1 and check.correlation([1, 2, 3], [3, 2, 1]) == -1
    one = fake.plans(fixed=dict(tp=2, pp=2))
    monkeypatch.setattr(check, "measure", lambda job, splits: [1.0] * len(splits))
    (step,) = check.chosen(one)
    assert (step.split.tp, step.split.pp) == (2, 2) and "correlation" not in check.checked(one)


def test_plans_that_fit_with_fsdp_alone_are_not_checked():
    plans = fake.plans()
    plans = plans._replace(costs=plans.costs._replace(limit=0.0))
    with pytest.raises(ValueError, match="--check runs plans without FSDP, and no such split holds the model"):
        check.chosen(plans)


def test_a_check_that_is_not_possible_is_refused_before_the_search(monkeypatch):
    with pytest.raises(ValueError, match="leave out sharded=yes of --fix"):
        check.check_possible(dict(sharded=True), 4)
    with pytest.raises(ValueError, match="plan --check: there must be at most 256 processes"):
        check.check_possible({}, 1000)
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setattr(check.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="--check needs scipy: pip install tpfuse"):
        check.check_possible({}, 4)


def test_experts_over_replicas_run_in_a_pipeline(ranks):
    sizes = dict(vocab_size=96, max_positions=64, hidden_size=64, num_layers=2, num_heads=4, tie_embeddings=False)
    experts = dict(gated=True, activation="silu", mlp_bias=False, num_experts=2, experts_per_token=1)
    job = Job(GPTConfig(**sizes, **experts), batch=4, seq=8, dtype=torch.float32)
    split = Split(dp=2, tp=1, pp=2, over_replicas=True, layers=(1, 1))
    assert all(divided for divided in ranks(4, stepped, job, split))


def stepped(world, job, split):
    """Takes a step, and returns the numbers of experts that the replicas of the models made have divided."""
    models = []

    def build(*args, **options):
        models.append(layer.build(*args, **options))
        return models[-1]

    check.build, original = build, check.build
    try:
        check._train(job, split, 1)
    finally:
        check.build = original
    return [model.groups.experts.replicas for model in models] == [2]


def plan_of(tmp_path, **fields):
    split = dict(dp=1, tp=1, pp=2, schedule="interleaved", chunks=2, micro_batches=2, layers=[1, 1, 1, 1])
    split |= dict(saving="smallest", full=True, sharded=False, over_replicas=False, cp=1, cp_kind="auto") | fields
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(dict(job=dict(batch=4, seq=32, num_layers=4), plans=[split])))
    return path


SMALL = "--width 32 --layers 4 --heads 4 --seq 32 --batch 4 --max-mb 0.03 --prompt import --steps 2".split()


@pytest.mark.slow
def test_the_example_runs_a_plan(tmp_path):
    output = ok("train_gpt.py", *SMALL, "--plan", plan_of(tmp_path), "--out", tmp_path / "out", procs=2)
    assert "pp=2 (interleaved) x tp=1 x dp=1" in output
    pieces = plan_of(tmp_path, pp=1, cp=2, cp_kind="keys", schedule="1f1b", chunks=1, layers=[4])
    output = ok("train_gpt.py", *SMALL, "--plan", pieces, "--out", tmp_path / "pieces", procs=2)
    assert "tp=1 x cp=2 x dp=1" in output


@pytest.mark.parametrize(
    "fields, options, message",
    [
        (dict(sharded=True), [], "--plan: sharded is true, and this script has no FSDP"),
        (dict(over_replicas=True), [], "--plan: over_replicas is true, and this script has no experts"),
        ({}, ["--batch", "8"], "--plan: it is of --batch 4, and this run has 8"),
    ],
)
def test_plans_that_the_example_refuses(tmp_path, monkeypatch, capsys, fields, options, message):
    arguments = [*SMALL, *options, "--plan", str(plan_of(tmp_path, **fields)), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
        example("_options").parse()
    assert message in capsys.readouterr().err


def test_a_page_that_is_too_large_costs_no_explanation(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(html, "MOST", 10)
    assert main([*COMMAND, *ONE, "--explain", "1", "--html", str(tmp_path / "plans.html")]) == 2
    printed = capsys.readouterr()
    assert "plan 1: " in printed.out and "and at most 10 are allowed" in printed.err


def test_files_are_written_before_an_explanation_fails(capsys, tmp_path):
    assert main([*COMMAND, *ONE, "--explain", "9", "--json", str(tmp_path / "plan.json")]) == 2
    assert len(json.loads((tmp_path / "plan.json").read_text())["plans"]) == 1
    assert "--explain is one of the 1 plans, got 9" in capsys.readouterr().err


def no_search(*_, **__):
    raise AssertionError("a search was begun")


def test_a_file_that_cannot_be_written_is_refused_before_the_search(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(planning, "search", no_search)
    for option in ("--json", "--html", "--plot"):
        assert main([*COMMAND, option, str(tmp_path)]) == 2
        assert str(tmp_path) in capsys.readouterr().err


def test_ctrl_c_before_the_first_plan(monkeypatch, capsys):
    nothing = SearchResult([], 0, 0, 0, least=float("inf"), complete=False)
    monkeypatch.setattr(planning, "search", lambda *_, **__: nothing)
    assert main(COMMAND) == 130 and capsys.readouterr().err == "tpfuse plan: interrupted\n"


def test_ctrl_c_leaves_the_plans_so_far(monkeypatch, capsys):
    monkeypatch.setattr(planning, "search", lambda *args, **options: search(*args, **options)._replace(complete=False))
    monkeypatch.setattr(planning, "explain", no_search)
    assert main([*COMMAND, *ONE, "--explain", "1"]) == 130
    assert "interrupted: the best so far" in capsys.readouterr().out


def test_ctrl_c_ends_an_explanation(monkeypatch, capsys):
    """The best plan of a search that was interrupted is no answer to what would change the choice."""
    monkeypatch.setattr(explain, "search", lambda *args, **options: search(*args, **options)._replace(complete=False))
    assert main([*COMMAND, *ONE, "--explain", "1"]) == 130
    assert capsys.readouterr().err.endswith("tpfuse plan: interrupted\n")


def test_the_help_lists_all_devices(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert f"{', '.join(DEVICES)}, or here for these CPUs" in text


def test_fields_of_fix():
    assert planning.fixed_of("tp=2, full=yes,layers=2-2") == dict(tp=2, full=True, layers=(2, 2))
    assert planning.fixed_of("cp=2,cp_kind=heads") == dict(cp=2, cp_kind="heads")
    with pytest.raises(ValueError, match="cp_kind must be one of heads, keys, got auto"):
        planning.fixed_of("cp_kind=auto")
    assert planning.fixed_of(None) == {}
