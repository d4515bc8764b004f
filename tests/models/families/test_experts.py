"""Mixtral, Qwen2-MoE, Qwen3-MoE and OLMoE against transformers in fp64: logits, loss and gradients at 1, 2 and 4 ranks,
files of both layouts, tokens."""

import functools
import re
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from tests.common import assert_close, error, make_tp
from tests.models.common import batch, change_of_loss, of_files, of_transformers, run
from tests.models.families.experts import FAMILIES, an_expert_a_tensor, tensors, their_config, theirs
from tpfuse.layers.shapes import MLPShape, MoEShape
from tpfuse.models import GPT, GPTConfig
from tpfuse.models.stages import costs
from tpfuse.pipeline import schedule
from tpfuse.tools.ledger import activation_bytes, model_flops

transformers.utils.logging.disable_progress_bar()
F64 = torch.float64
NORMED = "olmoe-normed"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """name -> a model of transformers, and the directory that it saved."""

    @functools.cache
    def make(name):
        model, path = theirs(name), tmp_path_factory.mktemp(name)
        model.save_pretrained(path)
        return model, path

    return make


CASES = [(1, False, None), (2, True, "left"), (4, True, "right"), (4, False, None)]
MARKED = [
    pytest.param(name, *case, marks=[pytest.mark.slow] * (name == NORMED))
    for name in FAMILIES
    for case in (CASES[1:3] if name == NORMED else CASES)
]


@pytest.mark.parametrize("name, R, sp, pad", MARKED)
def test_values_and_gradients_are_those_of_transformers(ranks, saved, name, R, sp, pad):
    model, path = saved(name)
    call = batch(model.config, pad=pad)
    exact = an_expert_a_tensor(of_transformers(model, call), name)
    for ours in ranks(R, of_files, str(path), GPT, call, sp):
        seen = call["attention_mask"].bool() if pad else ...
        assert_close(*(dict(found, logits=found["logits"][seen]) for found in (ours, exact)), F64)


@pytest.mark.parametrize("name, change", [
    ("qwen3_moe", dict(renormalize=False)),
    ("qwen3_moe", dict(window=None)),
    ("qwen3_moe-mixed", dict(renormalize=True)),
    ("qwen2_moe", dict(renormalize=True)),
    ("qwen2_moe", dict(layer_types=("sliding_attention",) * 3)),
    ("olmoe", dict(renormalize=True)),
    ("olmoe", dict(experts_per_token=3)),
])  # fmt: skip
def test_what_is_not_trivial_shows(saved, name, change):
    model, path = saved(name)
    assert change_of_loss(path, batch(model.config), **change) > 1e-4


def open_gate(right, x, w, bias, routing):
    weights, *others = right(x, w, bias, routing)
    return torch.ones_like(weights), *others


def test_a_gate_that_is_left_open_shows(saved, planted):
    model, path = saved("qwen2_moe")
    call = batch(model.config)
    ours = GPT.from_pretrained(path, dtype=F64)
    right = ours(**call).loss
    planted("tpfuse.sequence_parallel.shared_expert.router_fwd", open_gate)
    assert abs(ours(**call).loss - right) > 1e-4


def test_a_layers_mlp_is_data_of_the_config():
    config = GPTConfig.from_hf(their_config("qwen3_moe-mixed").to_dict())
    shapes = [config.mlp_shape(layer) for layer in range(4)]
    assert config.mlp_layers == (0, 2, 3) and [type(s) for s in shapes] == [MLPShape, MoEShape, MLPShape, MLPShape]
    assert [shape.ffn_size for shape in shapes] == [28, 12, 28, 28] and not shapes[1].routing.renormalize


def test_stages_weigh_layers_by_their_own_mlps():
    """Multiply-adds of a row: of the router and three experts of 12 columns, of an MLP of 28."""
    config = GPTConfig.from_hf(their_config("qwen3_moe-mixed").to_dict())
    attention = 10 * (2 * 8 + 2 * 2)
    dense, sparse = (48 * (attention + mlp) for mlp in (3 * 28, 8 + 3 * 3 * 12))
    assert costs(config, head=True).blocks == (dense, sparse, dense, dense)


def test_the_ledger_counts_layers_of_both_kinds():
    """Experts of a width of their own; of layers that are not alike it is said which."""
    alike, mixed = (GPTConfig.from_hf(their_config(name).to_dict()) for name in ("qwen3_moe", "qwen3_moe-mixed"))
    wider = replace(alike, expert_size=24)
    more = model_flops(wider, 8, 1) - model_flops(alike, 8, 1)
    assert more == 3 * 2 * 8 * 2 * (2 * 3 * 48 * 12)  # passes, layers, rows, experts of a row, multiply-adds
    layers = [replace(mixed, num_layers=1, mlp_layers=which) for which in ((), (0,))]
    experts, mlp = (model_flops(layer, 8, 1) for layer in layers)
    ends = 3 * 2 * 8 * 48 * mixed.vocab_size
    assert model_flops(mixed, 8, 1) == experts + 3 * mlp - 3 * ends
    with pytest.raises(ValueError, match="some layers have an MLP and some experts: say which is meant by layer="):
        activation_bytes(mixed, recompute="fastest", batch=1, seq=8)
    with pytest.raises(ValueError, match="layer must be 0 to 3, got 4"):
        activation_bytes(mixed, recompute="fastest", batch=1, seq=8, layer=4)


# ---- files ----


def saved_again(world, path, out):
    GPT.from_pretrained(path, tp=make_tp(world), dtype=F64).save_pretrained(out)


@pytest.mark.parametrize("name", [n for n in FAMILIES if n != NORMED])
def test_files_both_ways(ranks, saved, tmp_path, name):
    """What two ranks write are the tensors that transformers wrote, which it opens to the same model."""
    model, path = saved(name)
    ranks(2, saved_again, str(path), tmp_path)
    before, after = tensors(path), tensors(tmp_path)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    module, _, (down,) = FAMILIES[name].names
    assert f"model.layers.1.{module}.experts.3.{down}.weight" in after
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=F64)
    assert type(again) is type(model)
    assert all(map(torch.equal, again.state_dict().values(), model.state_dict().values()))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_config_is_written_and_read_again(name):
    theirs = their_config(name)
    config = GPTConfig.from_hf(theirs.to_dict())
    their = FAMILIES[name].config(**config.to_hf())  # transformers takes every key for what it is
    assert GPTConfig.from_hf(their.to_dict()) == GPTConfig.from_hf(config.to_hf())
    assert replace(GPTConfig.from_hf(config.to_hf()), head_width=config.head_width) == config
    for key in ("num_experts", "num_experts_per_tok", "norm_topk_prob", "intermediate_size", "sliding_window"):
        assert getattr(their, key, None) == getattr(theirs, key, None)
    for key in ("moe_intermediate_size", "shared_expert_intermediate_size", "layer_types", "qkv_bias"):
        assert getattr(their, key, None) == getattr(theirs, key, None)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe-mixed", "olmoe"])
def test_merged_tensors_are_read_too(ranks, tmp_path, name):
    """All experts in one tensor, as transformers has them in memory."""
    model = theirs(name)
    tied = model.config.tie_word_embeddings
    state = {key: t.clone() for key, t in model.state_dict().items() if not (tied and key == "lm_head.weight")}
    assert state["model.layers.1.mlp.experts.gate_up_proj"].dim() == 3
    model.config.save_pretrained(tmp_path)
    save_file(state, tmp_path / "model.safetensors")
    call = batch(model.config)
    exact = of_transformers(model, call)
    for found in ranks(2, of_files, str(tmp_path), GPT, call):
        assert error(found["logits"], exact["logits"]) < 1e-12 and error(found["loss"], exact["loss"]) < 1e-12


def spoiled(path, folder, change):
    """A copy of a directory, its tensors changed."""
    (folder / "config.json").write_text((path / "config.json").read_text())
    stored = tensors(path)
    change(stored)
    save_file({name: t.contiguous() for name, t in stored.items()}, folder / "model.safetensors")
    return folder


EXPERT = "model.layers.{}.mlp.experts.{}.{}.weight"
MODULE = "model.layers.1.mlp.experts"


def merge(stored, count=4):
    """The experts of layer 1, each in a tensor of its own -> all in one."""
    leaf = lambda name: [stored.pop(EXPERT.format(1, expert, name)) for expert in range(count)]
    stored[f"{MODULE}.gate_up_proj"] = torch.cat([torch.stack(leaf("gate_proj")), torch.stack(leaf("up_proj"))], 1)
    stored[f"{MODULE}.down_proj"] = torch.stack(leaf("down_proj"))


def merge_fewer(stored):
    merge(stored)
    stored[f"{MODULE}.down_proj"] = stored[f"{MODULE}.down_proj"][:3]


def keep_both(stored):
    apart = dict(stored)
    merge(stored)
    stored |= apart


SPOILED = {
    "missing": (lambda t: t.pop(EXPERT.format(1, 2, "up_proj")), "lacks layers.1.mlp.experts.2.up_proj.weight"),
    "extra": (
        lambda t: t.update({EXPERT.format(0, 4, "down_proj"): torch.zeros(48, 12)}),
        "holds model.layers.0.mlp.experts.4.down_proj.weight, which GPT has no place for",
    ),
    "mis-shaped": (
        lambda t: t.update({EXPERT.format(0, 3, "down_proj"): torch.zeros(48, 28)}),
        "model.layers.0.mlp.experts.3.down_proj.weight in {} must be (48, 12) for blocks.0.mlp.fc2",
    ),
    "fewer merged": (merge_fewer, "model.layers.1.mlp.experts.down_proj in {} must be (4, 48, 12)"),
    "both layouts": (keep_both, f"holds {MODULE}.down_proj, {MODULE}.gate_up_proj, which"),
    "dense": (
        lambda t: t.update({"model.layers.0.mlp.up_proj.weight": torch.zeros(28, 48)}),
        "holds model.layers.0.mlp.up_proj.weight, which GPT has no place for",
    ),
}  # fmt: skip


@pytest.mark.parametrize("change, message", SPOILED.values(), ids=SPOILED)
def test_experts_of_a_file_are_named(saved, tmp_path, change, message):
    folder = spoiled(saved("qwen3_moe")[1], tmp_path, change)
    with pytest.raises(ValueError, match=re.escape(message.format(folder))):
        GPT.from_pretrained(folder)


def test_both_layouts_in_one_file(saved, tmp_path):
    """A layer's experts merged, another's apart."""
    model, path = saved("qwen3_moe")
    call = batch(model.config)
    found, exact = (GPT.from_pretrained(p, dtype=F64)(**call).loss for p in (spoiled(path, tmp_path, merge), path))
    assert torch.equal(found, exact)


def over_stages(world, paths, call):
    """Of each directory: what this stage reads, beside the whole model; the loss of a step."""
    mesh, found = world.stages(2, 1, 1)["pp"], []
    whole = dict(GPT.from_pretrained(paths[0], dtype=F64).named_parameters())
    for path in paths:
        model = GPT.from_pretrained(path, dtype=F64, stage=(mesh.get_local_rank(), 2, "1f1b"))
        same = all(torch.equal(p, whole[name]) for name, p in model.named_parameters())
        loss = schedule(model, mesh, "1f1b", 3).step(call["input_ids"], labels=call["labels"], step=0)
        found.append((same and len(list(model.parameters())) < len(whole), loss))
    return found


@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe-mixed"])
def test_stages_of_a_pipeline(ranks, saved, tmp_path, name):
    """A stage reads its own layers of either layout, and takes no notice of the others' experts and MLPs."""
    model, path = saved(name)
    merged = spoiled(path, tmp_path, lambda stored: merge(stored, model.config.num_experts))
    call = batch(model.config)
    exact = of_transformers(model, call)["loss"]
    for found in ranks(2, over_stages, (path, merged), call):
        for same, loss in found:
            assert same and abs(loss.item() - exact.item()) < 1e-12


COMPOSED = {"recompute": dict(recompute="full"), "smallest": dict(saving="smallest")}


@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe-mixed"])
@pytest.mark.parametrize("options", COMPOSED.values(), ids=COMPOSED)
def test_layers_of_both_kinds_composed(ranks, name, options):
    """MLPs around experts on two ranks, with dropout: as on one rank without."""
    config = replace(GPTConfig.from_hf(their_config(name).to_dict()), attention_dropout=0.1)
    call = dict(batch(config), step=3, first_sample=0)
    one = run(None, GPT, config, call)
    for found in ranks(2, run, GPT, config, call, True, F64, options):
        assert_close(found, one, F64)


# ---- generate ----


def generated(world, path, ids):
    return GPT.from_pretrained(path, tp=make_tp(world, False), dtype=F64).generate(ids, max_new_tokens=6)


@pytest.mark.parametrize("name, R", [(n, R) for n in FAMILIES if n != NORMED for R in (1, 2, 4)])
def test_tokens_are_those_of_transformers(ranks, saved, name, R):
    model, path = saved(name)
    ids = batch(model.config)["input_ids"]
    expected = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    for tokens in ranks(R, generated, str(path), ids):
        assert torch.equal(tokens[:, -6:], expected[:, -6:])


# ---- what is refused ----


@pytest.mark.parametrize("name, change, message", [
    ("mixtral", dict(router_jitter_noise=0.1), "router_jitter_noise"),
    ("olmoe", dict(clip_qkv=8.0), "clip_qkv=8.0 is not built; only None is"),
    ("olmoe", dict(head_dim=10), "head_dim=10 is not built; only 6 is"),
    ("qwen2_moe", dict(shared_expert_intermediate_size=0), "shared_size must be a positive integer"),
    ("qwen3_moe", dict(norm_topk_prob="yes"), "renormalize must be true or false, got 'yes' as norm_topk_prob"),
    ("qwen3_moe", dict(moe_intermediate_size=0), "expert_size must be a positive integer"),
    ("qwen3_moe", dict(decoder_sparse_step=0), "decoder_sparse_step must be a positive integer, got 0"),
    ("qwen3_moe", dict(mlp_only_layers=["1"]), "mlp_only_layers must be a list of integers or None, got ['1']"),
    ("qwen3_moe", dict(num_experts_per_tok=5), "k must be 1 to num_experts=4, got 5"),
    ("qwen3_moe", dict(num_experts_per_tok=None), "num_experts_per_tok=null"),
])  # fmt: skip
def test_configs_that_are_refused(name, change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        GPTConfig.from_hf(their_config(name).to_dict() | change)


DENSE = dict(vocab_size=9, max_positions=8, hidden_size=8, num_layers=2, num_heads=2)
SPARSE = DENSE | dict(num_experts=4, experts_per_token=2, gated=True, mlp_bias=False)


@pytest.mark.parametrize("change, message", [
    (DENSE | dict(num_experts=4), "num_experts and experts_per_token go together, got 4 and None"),
    (SPARSE | dict(gated=False), "experts must be gated, got gated=False with num_experts=4"),
    (SPARSE | dict(mlp_bias=True), "experts have no bias, got mlp_bias=True"),
    (DENSE | dict(expert_size=4), "expert_size is of models with experts, got 4 without"),
    (DENSE | dict(renormalize=False), "renormalize is of models with experts, got False without"),
    (DENSE | dict(shared_size=4), "shared_size=4 needs num_experts, got None"),
    (SPARSE | dict(shared_gate=True), "shared_gate=True needs shared_size, got None"),
    (SPARSE | dict(shared_size=1 << 30, hidden_size=1 << 20), "a weight of shared_size=1073741824 x 2 x 1048576 is"),
    (DENSE | dict(mlp_layers=(1,)), "mlp_layers is of models with experts, got (1,) without"),
    (SPARSE | dict(num_experts=1 << 18), "2 layers of num_experts=262144 are more than 262144 experts"),
    (SPARSE | dict(expert_size=1 << 30, hidden_size=1 << 20), "a weight of 4 experts of 2251799813685248 elements"),
    (SPARSE | dict(mlp_layers=(0, 2)), "mlp_layers must be some of 0 to 1, got (0, 2)"),
    (SPARSE | dict(mlp_layers="0"), "mlp_layers must be a list of integers, got '0'"),
])  # fmt: skip
def test_fields_that_are_refused(change, message):
    with pytest.raises(ValueError, match=re.escape(f"GPTConfig: {message}")):
        GPTConfig(**change)


@pytest.mark.parametrize("name, change, message", [
    ("olmoe", dict(mlp_layers=(1,)), "a olmoe model of transformers has mlp_layers=(), got (1,)"),
    ("olmoe", dict(expert_size=8), "a olmoe model of transformers has expert_size=None, got 8"),
    ("olmoe", dict(head_width=10), "a olmoe model of transformers has head_size=6, got 10"),
    ("olmoe", dict(shared_size=8), "a olmoe model of transformers has shared_size=None, got 8"),
    ("qwen2_moe", dict(shared_gate=False), "a qwen2_moe model of transformers has shared_gate=True, got False"),
    ("qwen3_moe", dict(layer_types=("full_attention", "sliding_attention")), "has one window for all layers"),
    ("mixtral", dict(family="llama"), "a llama model of transformers has num_experts=None, got"),
])  # fmt: skip
def test_what_a_family_cannot_write(name, change, message, tmp_path):
    config = replace(GPTConfig.from_hf(their_config(name).to_dict()), **change)
    with pytest.raises(ValueError, match=re.escape(message)):
        config.to_hf()
    if "family" in change:
        with pytest.raises(ValueError, match=re.escape(message)):
            GPT(config).save_pretrained(tmp_path / "model")
        assert not (tmp_path / "model").exists()
