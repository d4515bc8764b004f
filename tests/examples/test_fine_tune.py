"""Fine-tuning a pretrained model: the same losses at TP = 1 and 2, adapters that PEFT loads."""

import re

import pytest
import torch

from tests.examples.launch import ok, run

SMALL = "--steps", "3", "--seq", "16", "--batch", "2", "--rank", "2", "--lr", "0.01"


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("given")
    torch.manual_seed(0)
    sizes = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=64, **sizes)).save_pretrained(folder / "model")
    (folder / "text.txt").write_text("one two three four\n" * 60)
    return folder


def losses(said: str) -> list[float]:
    found = [float(x) for x in re.findall(r"loss ([0-9.]+)", said)]
    assert len(found) == 4 and found[-1] < found[0]  # held out before, two steps, held out after
    return found


@pytest.mark.slow
def test_the_losses_do_not_depend_on_the_split(given):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    flags = "--model", given / "model", "--data", given / "text.txt", *SMALL
    alone = losses(ok("fine_tune.py", *flags, "--out", given / "alone", procs=0))
    assert losses(ok("fine_tune.py", *flags, "--out", given / "two", procs=2)) == pytest.approx(alone, abs=2e-4)
    loaded = [
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(given / "model"), given / out)
        for out in ("alone", "two")
    ]
    ids = torch.arange(16)[None]
    outputs = [model(ids, labels=ids).loss.item() for model in loaded]
    assert outputs[0] == pytest.approx(outputs[1], abs=1e-5)


def test_what_is_missing_is_one_line(given):
    flags = "--model", given / "model"
    for more, message in {
        ("--data", given / "none"): "is not there",
        ("--data", given / "text.txt", "--seq", "65"): "--seq 65 must be at most the model's 64 positions",
    }.items():
        done = run("fine_tune.py", *flags, *more, procs=0)
        assert done.returncode == 2 and message in done.stderr
