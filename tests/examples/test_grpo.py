"""Policy gradients: ratios of a first pass are 1, weights are the same at every pair of splits, rewards rise."""

import re

import pytest

from tests.examples.launch import ok, run

SMALL = "--questions", "4", "--group", "4", "--micro-batches", "2"


def off(said: str) -> list[int]:
    """How many ratios of each step's first pass are not 1."""
    counts = re.findall(r"reward [0-9.]+, (\d+) of (\d+) ratios are not 1", said)
    assert counts and {count for _, count in counts} == {"48"}  # 4 questions, 4 answers, 3 digits
    return [int(n) for n, _ in counts]


def digest(said: str) -> str:
    return re.search(r"weights sha256 ([0-9a-f]{64})", said)[1]


SPLITS = [  # processes, tensor-parallel size of sampling, of training
    (2, 2, 1),
    pytest.param(2, 1, 2, marks=pytest.mark.slow),
    pytest.param(4, 4, 2, marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize("procs, sample_tp, tp", SPLITS)
def test_all_ratios_are_one_at_every_split(procs, sample_tp, tp):
    said = ok("grpo.py", *SMALL, "--steps", 2, "--sample-tp", sample_tp, "--tp", tp, procs=procs)
    assert off(said) == [0, 0]
    assert digest(said) == digest(ok("grpo.py", *SMALL, "--steps", 2, procs=0))


@pytest.mark.slow
def test_without_batch_invariance_they_are_not():
    assert min(off(ok("grpo.py", *SMALL, "--steps", 2, "--no-batch-invariant", "--bf16", procs=2))) > 0


@pytest.mark.slow
def test_a_ratio_that_is_not_one_is_an_exit_code(tmp_path):
    """The cure taken away: weights that the sampler does not get."""
    script = tmp_path / "stale.py"
    script.write_text("import sys, grpo\ngrpo.give_weights = lambda *models: None\nsys.exit(grpo.main())\n")
    done = run(script, *SMALL, "--steps", 2, procs=0)
    first, second = off(done.stdout)
    assert (first, second > 0, done.returncode) == (0, True, 1)
    assert f"{second} ratios of first passes are not 1" in done.stdout


@pytest.mark.slow
def test_rewards_rise():
    said = ok("grpo.py", "--steps", 25, "--questions", 4, "--group", 16, "--micro-batches", 2, procs=0)
    rewards = [float(x) for x in re.findall(r"reward ([0-9.]+),", said)]
    assert len(rewards) == 25 and sum(rewards[-5:]) > sum(rewards[:5]) + 5 * 0.25


WRONG = [
    (["--tp", "3"], "--tp 3 does not divide the 2 processes"),
    (["--micro-batches", "1"], "--micro-batches 1 do not divide over 2 replicas"),
    (["--questions", "7"], "--questions 7 are not divisible by 4 micro-batches"),
    (["--bitwise", "3"], "bitwise must be a power of two"),
]


@pytest.mark.slow
@pytest.mark.parametrize("flags, message", WRONG)
def test_what_is_wrong_is_one_line(flags, message):
    done = run("grpo.py", *flags, procs=2)
    assert done.returncode != 0 and message in done.stderr
