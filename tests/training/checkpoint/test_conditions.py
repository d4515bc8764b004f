"""What makes a resumed run another run is an error; what decides its last bits is said."""

import dataclasses
import json
import re
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.common import assert_equal
from tests.models.common import STEP_CONFIG, Training
from tests.training.checkpoint.common import made, state
from tpfuse import add_lora, load_checkpoint, merge_lora, param_groups, save_checkpoint
from tpfuse.models import GPT
from tpfuse.training.checkpoint.conditions import check_config, config_of
from tpfuse.training.checkpoint.meta import sealed


def edit(path, **changes):
    """Changes conditions in meta.json, as if another run had written it."""
    meta = json.loads((path / "meta.json").read_text())
    meta.pop("sha256")
    meta["conditions"] |= changes
    (path / "meta.json").write_bytes(sealed(meta))


def said_at(load):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load()
    return [str(w.message) for w in caught if "load_checkpoint" in str(w.message)]


def test_nothing_is_said_where_nothing_differs(tmp_path):
    model, optimizer = made(steps=1)
    save_checkpoint(tmp_path, model, optimizer, step=1)
    assert said_at(lambda: load_checkpoint(tmp_path, model, optimizer)) == []


DIFFERENCES = {"torch": "2.0.0", "tpfuse": "0.0.1", "threads": 999, "tensor-parallel size": 4, "overlap": "pairwise"}
DIFFERENCES |= {"context-parallel size": 2, "context-parallel kind": "keys"}
DIFFERENCES |= {"pipeline-parallel size": 2, "pipeline schedule": "zbv", "bitwise_micro_batches": 8}
DIFFERENCES |= {"data-parallel size": 16, "sequence_parallel": True, "one_machine": True, "dtype": "bfloat16"}
DIFFERENCES |= {"processor": "8086", "instructions": "8087", "libraries": "MKL 1", "MKL_CBWR": "COMPATIBLE"}
DIFFERENCES |= {"float32_matmul_precision": "medium"}


@pytest.mark.parametrize("key", DIFFERENCES)
def test_each_difference_is_said_in_a_line(tmp_path, key):
    model, optimizer = made(steps=1)
    path = save_checkpoint(tmp_path, model, optimizer, step=1)
    now = json.loads((path / "meta.json").read_text())["conditions"][key]
    edit(path, **{key: DIFFERENCES[key]})
    (said,) = said_at(lambda: load_checkpoint(tmp_path, model, optimizer))
    assert said.endswith(f"{path} was written with {key} {DIFFERENCES[key]}, now {now}") and "\n" not in said


def warned(world, directory, sequence_parallel):
    training = Training(world, sp=sequence_parallel)
    found = said_at(lambda: load_checkpoint(directory, training.model, training.optimizer))
    save_checkpoint(directory, training.model, training.optimizer, step=1)
    return found


def test_the_split_is_recorded_and_rank_0_says_it(ranks, tmp_path):
    assert ranks(4, warned, str(tmp_path), True) == [[], [], [], []]
    (said,), others = ranks(2, warned, str(tmp_path), False)  # one for all: the size says the rest
    assert said.endswith("was written with tensor-parallel size 4, now 2") and others == []
    (said,), others = ranks(2, warned, str(tmp_path), True)
    assert said.endswith("was written with sequence_parallel False, now True") and others == []


def test_all_differences_are_one_warning(tmp_path):
    model, optimizer = made(steps=1)
    edit(save_checkpoint(tmp_path, model, optimizer, step=1), torch="2.0.0", threads=999)
    (said,) = said_at(lambda: load_checkpoint(tmp_path, model, optimizer))
    assert "threads 999, now " in said and "; torch 2.0.0, now " in said


CHANGES = [dict(activation="relu"), dict(eps=1e-6), dict(window=4)]
ROPE = replace(STEP_CONFIG, rope={"rope_theta": 10000.0})
CASES = [(STEP_CONFIG, replace(STEP_CONFIG, **c), next(iter(c))) for c in CHANGES]
CASES += [(ROPE, replace(ROPE, rope={"rope_theta": 20000.0}), "rope")]
CASES += [(ROPE, replace(ROPE, parallel_residual=True), "parallel_residual")]
CASES += [(replace(ROPE, norm="rms"), replace(ROPE, norm="gemma_rms"), "norm")]


@pytest.mark.parametrize("saved, ours, field", CASES, ids=[field for _, _, field in CASES])
def test_another_function_of_the_same_shapes(tmp_path, saved, ours, field):
    save_checkpoint(tmp_path, *made(saved, 1), step=1)
    model, optimizer = made(ours, 1, seed=1)
    before = state(model, optimizer)
    with pytest.raises(ValueError, match=f"load_checkpoint: the model's config has {field}=.* was written with "):
        load_checkpoint(tmp_path, model, optimizer)
    assert_equal(state(model, optimizer), before)


def test_what_does_not_enter_the_function_may_differ(tmp_path):
    save_checkpoint(tmp_path, *made(steps=1), step=1)
    rates = dict.fromkeys(("dropout", "attention_dropout", "embedding_dropout"), 0.25)
    model, optimizer = made(replace(STEP_CONFIG, init_std=0.5, **rates))
    assert load_checkpoint(tmp_path, model, optimizer) == (1, None)


def test_a_field_that_an_older_checkpoint_does_not_know_had_its_default():
    model, _ = made(replace(STEP_CONFIG, parallel_residual=True))
    then = {key: value for key, value in config_of(model).items() if key != "parallel_residual"}
    with pytest.raises(ValueError, match="parallel_residual=True, x was written with 'False'"):
        check_config(Path("x"), then, model)
    check_config(Path("x"), then, made(STEP_CONFIG)[0])


def test_any_config_that_is_a_dataclass():
    @dataclasses.dataclass
    class Config:
        sizes: tuple = (1, 2)
        kind: object = torch.float32

    model = torch.nn.Linear(1, 1)
    assert config_of(model) is None
    model.config = Config()
    assert config_of(model) == {"sizes": [1, 2], "kind": "torch.float32"}


def adapted(alpha=4):
    model = add_lora(GPT(STEP_CONFIG), rank=2, alpha=alpha)
    return model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def test_adapters_of_another_alpha_and_merged_ones(tmp_path):
    """Neither is a tensor, and both decide the function."""
    model, optimizer = adapted()
    path = save_checkpoint(tmp_path / "apart", model, optimizer, step=1)
    load_checkpoint(tmp_path / "apart", *adapted())
    with pytest.raises(ValueError, match=rf"qkv has scale=4.0, {re.escape(str(path))} was written with '2.0'"):
        load_checkpoint(tmp_path / "apart", *adapted(alpha=8))
    merge_lora(model)
    save_checkpoint(tmp_path / "merged", model, optimizer, step=1)
    load_checkpoint(tmp_path / "merged", model, optimizer)
    with pytest.raises(ValueError, match="has merged=True, .* was written with 'False'"):
        load_checkpoint(tmp_path / "apart", model, optimizer)
    with pytest.raises(ValueError, match="has merged=False, .* was written with 'True'"):
        load_checkpoint(tmp_path / "merged", *adapted())


def test_another_optimizer(tmp_path):
    model, optimizer = made(steps=1)
    save_checkpoint(tmp_path, model, optimizer, step=1)
    other = GPT(STEP_CONFIG, seed=1)
    optimizer = torch.optim.SGD(param_groups(other, 0.1), lr=0.1, momentum=0.9)
    before = state(other, optimizer)
    with pytest.raises(ValueError, match="load_checkpoint: the optimizer is SGD, .* was written with AdamW"):
        load_checkpoint(tmp_path, other, optimizer)
    assert_equal(state(other, optimizer), before)
