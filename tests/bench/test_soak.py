"""The soak sees what is not clean, and a short one is."""

import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bench import _memory, soak
from tests.examples.launch import children

ROOT = Path(__file__).parents[2]


def made(out: Path) -> Path:
    """What a run of two steps leaves, as far as the judge looks."""
    checkpoint = out / "checkpoints" / "step-00000002"
    for folder in checkpoint, out / "hf":
        folder.mkdir(parents=True)
        save_file({"weight": torch.arange(6.0).view(2, 3), "rest": torch.zeros(2)}, folder / "shard.safetensors")
    (checkpoint / "meta.json").write_text(json.dumps(dict(name="step-00000002", step=2, param_groups=[dict(lr=0.1)])))
    (out / "checkpoints" / "latest").write_text("step-00000002\n")
    log(out, [dict(step=1, loss=2.0, tokens_per_s=5), dict(step=2, loss=1.0), dict(step=2, held_out_bits=3.0)])
    return out


def log(out: Path, records: list[dict]) -> None:
    (out / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def flip(out: Path, folder: str) -> None:
    """Flips the lowest bit of one weight."""
    path = out / folder / "shard.safetensors"
    tensors = load_file(path)
    tensors["weight"].view(torch.int32)[1, 2] ^= 1
    save_file(tensors, path)


def rewrite(out: Path, change) -> None:
    records = soak.read_log(out)
    change(records)
    log(out, records)


def learning_rate(out: Path) -> None:
    path = out / "checkpoints/step-00000002/meta.json"
    path.write_text(path.read_text().replace("0.1", "0.2"))


SPOILT = {
    "a weight": (lambda out: flip(out, "checkpoints/step-00000002"), "step-00000002/shard.safetensors: weight differs"),
    "an exported weight": (lambda out: flip(out, "hf"), "hf/shard.safetensors: weight differs"),
    "the optimizer": (learning_rate, "param_groups of meta.json differs"),
    "a lost step": (lambda out: rewrite(out, lambda records: records.pop(0)), "the log's loss of step 1: []"),
    "a step twice": (lambda out: rewrite(out, lambda r: r.insert(1, r[0])), "the log's loss of step 1: "),
    "a loss": (lambda out: rewrite(out, lambda r: r[0].update(loss=2.5)), "the log's loss of step 1: [(1, 2.5"),
    "the order": (lambda out: rewrite(out, lambda r: r.insert(0, r.pop(1))), "the log's lines are in another order"),
    "a file": (lambda out: (out / "checkpoints/latest.new").touch(), "checkpoints/latest.new is left over"),
    "no file": (lambda out: (out / "hf/shard.safetensors").unlink(), "hf/shard.safetensors is missing"),
    "no checkpoint": (lambda out: (out / "checkpoints/latest").unlink(), "there is no checkpoint"),
}


def test_a_job_answers_for_its_own_steps_alone(tmp_path):
    """One that is stopped while it starts has lost none of those that its predecessor had logged."""
    log(tmp_path, [dict(step=20)])
    before = soak.inode(tmp_path)
    assert before and soak.reached_since(tmp_path, before) == 0
    new = tmp_path / "new.jsonl"
    new.write_text(json.dumps(dict(step=12)) + "\n")
    new.replace(tmp_path / "log.jsonl")
    assert soak.reached_since(tmp_path, before) == 12


@pytest.mark.parametrize("what", SPOILT)
def test_a_difference_is_seen(tmp_path, what):
    spoil, said = SPOILT[what]
    reference, out = made(tmp_path / "reference"), made(tmp_path / "out")
    rewrite(out, lambda records: records[0].update(tokens_per_s=7))
    assert soak.differences(out, reference) == []
    spoil(out)
    assert any(fault.startswith(said) for fault in soak.differences(out, reference))


@pytest.mark.parametrize(
    "background, promised, reached, fault",
    [
        (False, False, 25, None),
        (False, False, 26, "6 steps are lost, at most 5 may be"),
        (True, False, 30, None),
        (True, False, 31, "11 steps are lost, at most 10 may be"),
        (True, True, 20, None),
        (False, True, 21, "1 steps are lost though a checkpoint was said to be written, at most 0 may be"),
    ],
)
def test_lost_steps_are_counted(background, promised, reached, fault):
    known = dict(harm=None, seconds=1.0, lost=None, faults=["before"])
    done = soak.Outcome(background=background, promised=promised, reached=reached, **known)
    counted = soak.with_lost(done, 20)
    assert counted.lost == reached - 20 and counted.faults == ["before"] + [fault] * (fault is not None)


def test_harms_follow_from_the_seed():
    draw = lambda seed: [harm for harm, _ in zip(soak.harms(random.Random(seed), 4), range(2 * len(soak.HARMS)))]
    drawn = draw("0/1")
    assert drawn == draw("0/1") != draw("0/2")
    assert sorted((harm.action, harm.whom) for harm in drawn) == sorted(2 * soak.HARMS)


def test_a_slope_and_its_error():
    steps = np.arange(100.0)
    noise = np.random.default_rng(0).normal(size=100)
    best, error = _memory.slope(steps, 7 + 3 * steps + noise)
    assert abs(best - 3) < 4 * error and error == pytest.approx(
        1 / np.sqrt(((steps - steps.mean()) ** 2).sum()), rel=0.2
    )


def test_memory_that_grows_is_seen():
    kept, before = [], _memory.sample()
    kept += [bytes(1 << 12) for _ in range(1000)]
    after = _memory.sample()
    assert after.blocks - before.blocks >= 1000 and after.used - before.used >= 1000 << 12


def command(*flags) -> list[str]:
    return [sys.executable, "-m", "bench.soak", *map(str, flags)]


@pytest.mark.slow
@pytest.mark.parametrize("harms, seed", [(3, 123), pytest.param(6, 34, marks=pytest.mark.rare)])
def test_a_short_soak(tmp_path, harms, seed):
    """The sequences of both seeds have a flipped bit."""
    flags = "--harms", harms, "--seed", seed, "--out", tmp_path, "--json"
    done = subprocess.run(command(*flags), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    kinds = {(d["harm"][0], d["harm"][1]) for d in result["done"]}
    assert result["faults"] == [] and len(kinds) >= harms and ("flip", "a rank") in kinds


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.rare)])
def test_an_interrupted_soak_leaves_nothing(tmp_path, number):
    process = subprocess.Popen(command("--out", tmp_path), cwd=ROOT, stderr=subprocess.DEVNULL)
    log = tmp_path / "undisturbed/run/log.jsonl"
    assert soak.wait(log.exists, 120)
    launcher = next(child for server in children(process.pid) for child in children(server))
    assert len(soak.session(launcher)) == 5
    process.send_signal(number)
    assert process.wait(60) != 0
    assert soak.wait(lambda: soak.session(launcher) == [], 5)
