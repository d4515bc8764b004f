"""Mixtral against transformers in fp64: logits, loss and gradients at 1, 2 and 4 ranks, files both ways, tokens."""

import re
from dataclasses import replace
from unittest import mock

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, MixtralConfig

import tpfuse
from tests.common import assert_close, error, make_tp
from tests.models import common
from tests.models.common import batch, of_files, of_transformers, run, whole_logits
from tests.models.families.experts import an_expert_a_tensor, tensors, theirs
from tests.models.families.test_llama_like import ROPE, SIZES
from tests.routing import routed, to_the_first
from tpfuse import TensorParallel, data_parallel
from tpfuse.models import GPT, GPTConfig
from tpfuse.models.files.write import whole_tensors
from tpfuse.training.checkpoint import load_checkpoint, save_checkpoint

transformers.utils.logging.disable_progress_bar()
F64 = torch.float64
OPTIONS = dict(num_local_experts=4, num_experts_per_tok=2, num_key_value_heads=2, rope_parameters=ROPE)
OPTIONS |= dict(sliding_window=4, router_jitter_noise=0.0, attn_implementation="sdpa", experts_implementation="eager")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model of transformers, and its directory."""
    model, path = theirs("mixtral"), tmp_path_factory.mktemp("mixtral")
    model.save_pretrained(path)
    return model, path


@pytest.mark.parametrize("R, sp, pad", [(1, False, None), (2, True, "left"), (4, True, "right"), (4, False, None)])
def test_values_and_gradients_are_those_of_transformers(ranks, saved, R, sp, pad):
    model, path = saved
    call = batch(model.config, pad=pad)
    exact = an_expert_a_tensor(of_transformers(model, call), "mixtral")
    for ours in ranks(R, of_files, str(path), GPT, call, sp):
        seen = call["attention_mask"].bool() if pad else ...
        both = [dict(found, logits=found["logits"][seen]) for found in (ours, exact)]
        assert_close(*both, F64)


def saved_again(world, path, out):
    GPT.from_pretrained(path, tp=make_tp(world), dtype=F64).save_pretrained(out)


def test_files_both_ways(ranks, saved, tmp_path):
    """What two ranks write are the tensors that transformers wrote, which it opens to the same model."""
    model, path = saved
    ranks(2, saved_again, str(path), tmp_path)
    before, after = tensors(path), tensors(tmp_path)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight" in after
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=F64)
    assert all(map(torch.equal, again.state_dict().values(), model.state_dict().values()))
    for key in ("num_local_experts", "num_experts_per_tok", "sliding_window", "intermediate_size"):
        assert getattr(again.config, key) == getattr(model.config, key)


def generated(world, path, ids):
    return GPT.from_pretrained(path, tp=make_tp(world, False), dtype=F64).generate(ids, max_new_tokens=6)


@pytest.mark.parametrize("R", [1, 2, 4])
def test_tokens_are_those_of_transformers(ranks, saved, R):
    model, path = saved
    ids = batch(model.config)["input_ids"]
    expected = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    for tokens in ranks(R, generated, str(path), ids):
        assert torch.equal(tokens[:, -6:], expected[:, -6:])


# ---- what is refused ----


@pytest.mark.parametrize("change, message", [
    (dict(router_jitter_noise=0.1), "router_jitter_noise"),
    (dict(num_experts_per_tok=5), "k must be 1 to num_experts=4, got 5"),
])  # fmt: skip
def test_configs_that_are_refused(change, message):
    config = MixtralConfig(**SIZES, **OPTIONS).to_dict() | change
    with pytest.raises(ValueError, match=re.escape(message)):
        GPTConfig.from_hf(config)


@pytest.mark.parametrize("change, message", [
    (dict(num_experts=4), "num_experts and experts_per_token go together, got 4 and None"),
    (dict(num_experts=4, experts_per_token=2), "experts must be gated, got gated=False with num_experts=4"),
    (dict(num_experts=4, experts_per_token=2, gated=True), "experts have no bias, got mlp_bias=True"),
])  # fmt: skip
def test_fields_that_are_refused(change, message):
    with pytest.raises(ValueError, match=re.escape(f"GPTConfig: {message}")):
        GPTConfig(vocab_size=9, max_positions=8, hidden_size=8, num_layers=1, num_heads=2, **change)


def test_missing_and_extra_experts_are_named(saved, tmp_path):
    from safetensors.torch import save_file

    _, path = saved
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    stored, expert = tensors(path), "model.layers.0.block_sparse_moe.experts.{}.w1.weight".format
    save_file({name: t for name, t in stored.items() if name != expert(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=re.escape("lacks layers.0.block_sparse_moe.experts.2.w1.weight")):
        GPT.from_pretrained(tmp_path)
    save_file(stored | {expert(4): torch.zeros(28, 48)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=re.escape(expert(4))):
        GPT.from_pretrained(tmp_path)


COMPOSED = {
    "recompute": dict(recompute="full"),
    "smallest": dict(saving="smallest"),
}


@pytest.mark.parametrize("options", COMPOSED.values(), ids=COMPOSED)
def test_composed_on_two_ranks(ranks, options):
    """As on one rank without: values and gradients of a model with dropout."""
    config = GPTConfig.from_hf(MixtralConfig(**SIZES, **OPTIONS, attention_dropout=0.1).to_dict())
    call = dict(batch(config), step=3, first_sample=0)
    one = run(None, GPT, config, call)
    for found in ranks(2, run, GPT, config, call, True, F64, options):
        assert_close(found, one, F64)


def test_autocast(ranks):
    """A rounding may send a token to another expert: the loss is near."""
    config = GPTConfig.from_hf(MixtralConfig(**SIZES, **OPTIONS).to_dict())
    one = run(None, GPT, config, batch(config), dtype=torch.float32)
    for found in ranks(2, run, GPT, config, batch(config), True, torch.float32, dict(autocast=True)):
        assert error(found["loss"], one["loss"]) < 2e-2
        assert {found[name].dtype for name in found if name.startswith("d ")} == {torch.float32}


def trained(world, dp, kind, micro):
    """(loss, gradient's norm) of two steps over replicas."""
    config = replace(GPTConfig.from_hf(MixtralConfig(**SIZES, **OPTIONS).to_dict()), num_layers=1)
    with mock.patch.object(common, "STEP_CONFIG", config):
        return common.Training(world, dp, kind=kind).steps(0, 2, micro)


@pytest.mark.parametrize("R, dp, kind, micro", [(4, 2, "ddp", 1), (2, 1, "ddp", 3), (4, 2, "fsdp", 1)])
def test_training_over_replicas(ranks, R, dp, kind, micro):
    (one,) = ranks(1, trained, 1, "ddp", 1)
    for found in ranks(R, trained, dp, kind, micro):
        torch.testing.assert_close(torch.tensor(found, dtype=F64), torch.tensor(one, dtype=F64), rtol=1e-9, atol=0)


def flooded(world, dp, kind):
    """``trained``, where every row has the experts of one tensor-parallel rank, and the other has none."""
    with routed(to_the_first):
        return trained(world, dp, kind, 1)


@pytest.mark.parametrize(
    "R, dp, kind", [(2, 1, "ddp"), (4, 2, "ddp"), pytest.param(4, 2, "fsdp", marks=pytest.mark.slow)]
)
def test_training_with_a_flooded_rank_and_a_starved_one(ranks, R, dp, kind):
    (one,) = ranks(1, flooded, 1, "ddp")
    (usual,) = ranks(1, trained, 1, "ddp", 1)
    assert one != usual
    for found in ranks(R, flooded, dp, kind):
        torch.testing.assert_close(torch.tensor(found, dtype=F64), torch.tensor(one, dtype=F64), rtol=1e-9, atol=0)


def watched(world, path):
    """What is said of steps of two replicas of two ranks: right, with data_parallel; then with one expert's last bit
    flipped on one rank, and with one router's."""
    mesh = world.mesh(2, 2)
    model = GPT.from_pretrained(path, tp=TensorParallel(mesh["tp"], sequence_parallel=True), dtype=F64)
    replica, optimizer = data_parallel(model, mesh["dp"]), torch.optim.SGD(model.parameters(), lr=0.1)
    tpfuse.watch_replicas(model, optimizer, every=1)
    call = batch(model.config, size=2)

    def step():
        optimizer.zero_grad()
        replica(**call, step=0, first_sample=0).loss.backward()
        optimizer.step()

    found = []
    with tpfuse.checking():
        for name in (None, "fc1", "router"):
            if world.rank == 3 and name is not None:
                with torch.no_grad():
                    getattr(model.blocks[1].mlp, name).flatten()[0] += 1
            try:
                step()
                found.append("")
            except ValueError as error:
                found.append(str(error))
    return found


def test_replicas_that_differ_are_named(ranks, saved):
    for right, expert, router in ranks(4, watched, str(saved[1])):
        assert right == "" and "blocks.1.mlp.fc1" in expert and "blocks.1.mlp.router" in router


def packed(world, path, call):
    model = GPT.from_pretrained(path, tp=make_tp(world), dtype=F64)
    out = model(**call, return_logits=True)
    return whole_logits(out.logits, 97, model.tp)


def test_packed_documents(ranks, saved):
    """Two documents of 5 and 2 tokens in one row, each as alone."""
    model, path = saved
    ids = batch(model.config, size=1)["input_ids"]
    call = dict(input_ids=ids, cu_seqlens=torch.tensor([0, 5, 7], dtype=torch.int32), max_seqlen=5)
    with torch.no_grad():
        alone = torch.cat([model(ids[:, :5]).logits, model(ids[:, 5:]).logits], 1)
    for logits in ranks(2, packed, str(path), call):
        assert error(logits, alone) < 1e-12


def resharded(world, path, folder, fresh):
    """A checkpoint read, or made of a first step; then a step, whose loss and weights depend on the optimizer's state;
    saved before it."""
    model = GPT.from_pretrained(path, tp=make_tp(world), dtype=F64)
    optimizer, call = torch.optim.AdamW(model.parameters(), lr=1e-2), batch(model.config)

    def step():
        optimizer.zero_grad()
        loss = model(**call).loss
        loss.backward()
        optimizer.step()
        return loss.item()

    if fresh:
        step()
    else:
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        load_checkpoint(folder, model, optimizer)
    save_checkpoint(folder, model, optimizer, step=1 if fresh else 2 + world.size)
    weights = {name: t.clone() for name, t in whole_tensors(model.files)}
    return weights, step(), dict(whole_tensors(model.files))


@pytest.mark.slow
def test_checkpoints_at_other_sizes(ranks, saved, tmp_path):
    """1 -> 2 -> 4 -> 1: the weights' bits, and the next step's values."""
    _, path = saved
    ((weights, loss, after),) = ranks(1, resharded, str(path), tmp_path, True)
    for R in (2, 4, 1):
        for found, again, later in ranks(R, resharded, str(path), tmp_path, False):
            assert all(torch.equal(found[name], weights[name]) for name in weights)
            assert abs(again - loss) < 1e-12 and max(error(later[name], after[name]) for name in after) < 1e-9
