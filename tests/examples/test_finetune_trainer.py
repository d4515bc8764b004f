"""The Trainer's example under torchrun: the same losses at every split, a directory that transformers loads."""

import re

import pytest
import torch
from transformers import GPT2LMHeadModel

from tests.examples.launch import EXAMPLES, ok

pytest.importorskip("accelerate")
SCRIPT = "finetune_trainer.py"


def losses(said):
    return [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", said)]


@pytest.mark.slow
def test_the_same_at_one_and_at_two(tmp_path):
    text = ("--text", EXAMPLES / "generate.py")
    one = ok(SCRIPT, "--steps", 10, "--out", tmp_path / "one", *text)
    two = ok(SCRIPT, "--steps", 10, "--out", tmp_path / "two", "--tp", 2, *text, procs=2)
    assert len(losses(one)) == 2 and losses(two) == pytest.approx(losses(one), abs=2e-3)
    models = [GPT2LMHeadModel.from_pretrained(tmp_path / name / "final") for name in ("one", "two")]
    for first, second in zip(*(model.parameters() for model in models), strict=True):
        assert (first - second).abs().max() < 1e-3
    assert torch.isfinite(first).all()
    ok(SCRIPT, "--steps", 15, "--out", tmp_path / "two", "--tp", 2, "--resume", *text, procs=2)


@pytest.mark.slow
def test_help():
    assert "--tp N" in ok(SCRIPT, "--help")
