"""Adapters in PEFT's format: random ones written as PEFT would, against transformers' own modules with W + s B A in
place of W."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.common import assert_close, assert_equal, error, make_tp
from tests.models.common import GPT_CONFIG, batch, body_loss
from tests.models.theirs import loss_of, make
from tpfuse import add_lora, load_adapter, merge_lora, parallelize, save_adapter
from tpfuse.interop import adapter
from tpfuse.layers.lora_targets import base_of
from tpfuse.models import GPT, Bert
from tpfuse.models.files.source import written

F64 = torch.float64
R_A, ALPHA = 3, 6
TARGETS = {  # by PEFT's own rule, endings of names; a fused weight with some of its projections only
    "gpt2": ["attn.c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"],
    "bert": ["query", "value", "attention.output.dense"],
    "bert-mlm": ["query", "key", "value", "intermediate.dense"],
    "llama": ["q_proj", "v_proj"],
    "mistral": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "qwen3": ["k_proj", "up_proj"],
    "phi3": ["qkv_proj", "gate_up_proj", "down_proj"],
    "gpt_neox": ["query_key_value", "dense_h_to_4h"],
}
CLASSES = {"bert": Bert, "bert-mlm": Bert}


def adapted_modules(model, targets):
    return [(n, m) for n, m in model.named_modules() if any(f".{n}".endswith(f".{t}") for t in targets)]


def their_adapter(name, path, rank=R_A, **config):
    """The directory that PEFT's save_pretrained leaves (its documented names and shapes): A [r, in], B [out, r],
    also of a Conv1D."""
    model, tensors = make(name), {}
    g = torch.Generator().manual_seed(3)
    for module, m in adapted_modules(model, TARGETS[name]):
        outs, ins = m.weight.shape if isinstance(m, torch.nn.Linear) else m.weight.shape[::-1]
        for letter, shape in (("A", (rank, ins)), ("B", (outs, rank))):
            tensors[f"base_model.model.{module}.lora_{letter}.weight"] = 0.1 * torch.randn(
                shape, generator=g, dtype=F64
            )
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    values = dict(
        peft_type="LORA",
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=ALPHA,
        lora_dropout=0.0,
        bias="none",
        use_rslora=False,
    )
    values |= dict(
        target_modules=TARGETS[name],
        fan_in_fan_out=name == "gpt2",
        modules_to_save=None,
        rank_pattern={},
        inference_mode=True,
    )
    (path / "adapter_config.json").write_text(json.dumps(values | config))
    return tensors


def loss_and_output(name, model, call):
    if name == "bert":
        out = model(**{k: v for k, v in call.items() if k != "labels"})
        return body_loss(out.last_hidden_state, out.pooler_output), out.last_hidden_state.detach()
    out = model(**call)
    return loss_of(out.logits, call["labels"], "bert" not in name), out.logits.detach()


def exact(name, tensors, scale=ALPHA / R_A):
    """Loss, output, and the gradients of A and B by PEFT's names."""
    model, leaves = make(name), {key: t.clone().requires_grad_() for key, t in tensors.items()}
    weights = dict(model.named_parameters())
    for module, m in adapted_modules(model, TARGETS[name]):
        a, b = (leaves[f"base_model.model.{module}.lora_{letter}.weight"] for letter in "AB")
        delta = scale * b @ a
        weights[f"{module}.weight"] = m.weight.detach() + (delta if isinstance(m, torch.nn.Linear) else delta.T)
    call = batch(model.config)
    functional = lambda **call: torch.func.functional_call(model, weights, kwargs=call, tie_weights=True)
    loss, out = loss_and_output(name, functional, call)
    loss.backward()
    return dict(loss=loss.detach(), out=out) | {key: t.grad for key, t in leaves.items()}


def ours(world, name, path, out, sp, saving):
    """As ``exact``, by a parallelized module; and whether what is saved again is, bit for bit, what was loaded."""
    model = load_adapter(parallelize(make(name), make_tp(world, sp), saving=saving), path, trainable=True)
    assert all(p.requires_grad == (".lora." in key) for key, p in model.named_parameters())
    loss, output = loss_and_output(name, model, batch(model.config))
    loss.backward()
    save_adapter(model, out)
    base, found = base_of(model), dict(loss=loss.detach(), out=output)
    grads = ((source, adapter.full_tensor(p.grad, spec, tp).clone()) for p, spec, tp, source in adapter._entries(base))
    return found | dict(written(grads))


LAYOUTS = {  # ranks, sequence parallel, saving; Llama's 2 kv heads over 4 ranks are parameters of their own
    "gpt2": [(1, False, "fastest"), (4, True, "smallest"), (2, False, "fastest")],
    "bert": [(4, True, "fastest")],
    "bert-mlm": [(2, False, "smallest")],
    "llama": [(4, False, "fastest"), (2, True, "smallest")],
    "mistral": [(2, True, "fastest"), (1, False, "fastest"), (4, True, "smallest")],
    "qwen3": [(4, True, "fastest")],
    "phi3": [(4, True, "fastest"), (2, False, "smallest")],
    "gpt_neox": [(2, True, "smallest")],
}


@pytest.mark.parametrize(
    "name, R, sp, saving",
    [
        pytest.param(name, *layout, marks=[pytest.mark.slow] * (i > 0))
        for name, layouts in LAYOUTS.items()
        for i, layout in enumerate(layouts)
    ],
)
def test_values_gradients_and_files_are_those_of_peft(ranks, tmp_path, name, R, sp, saving):
    tensors = their_adapter(name, tmp_path / "theirs")
    want = exact(name, tensors)
    for got in ranks(R, ours, name, str(tmp_path / "theirs"), str(tmp_path / "ours"), sp, saving):
        assert_close(got, want, F64)
    assert_equal(load_file(tmp_path / "ours" / "adapter_model.safetensors"), tensors)
    config, theirs = (json.loads((tmp_path / who / "adapter_config.json").read_text()) for who in ("ours", "theirs"))
    for key in ("peft_type", "r", "lora_alpha", "bias", "fan_in_fan_out", "lora_dropout"):
        assert config[key] == theirs[key], key
    assert config["task_type"] == (None if "bert" in name else "CAUSAL_LM")
    model = make(name)
    assert (
        adapted_modules(model, config["target_modules"]) != [] and len(config["target_modules"]) <= 7
    )  # short, and no other is named
    assert [n for n, _ in adapted_modules(model, config["target_modules"])] == [
        n for n, _ in adapted_modules(model, TARGETS[name])
    ]


def test_a_module_that_is_not_adapted_shows(tmp_path):
    """The adapters matter at these sizes, each of them."""
    tensors = their_adapter("llama", tmp_path)
    want = exact("llama", tensors)["out"]
    for key in list(tensors):
        if key.endswith("lora_B.weight"):
            assert error(exact("llama", tensors | {key: 0 * tensors[key]})["out"], want) > 1e-4, key


def test_peft_loads_it(tmp_path):
    peft = pytest.importorskip("peft")
    tensors = their_adapter("llama", tmp_path / "theirs")
    save_adapter(load_adapter(parallelize(make("llama")), tmp_path / "theirs"), tmp_path / "ours")
    model = peft.PeftModel.from_pretrained(make("llama"), tmp_path / "ours").double()
    assert error(model(**batch(model.config)).logits, exact("llama", tensors)["out"]) < 1e-10


def test_peft_loads_one_of_a_model_without_its_head(tmp_path):
    peft = pytest.importorskip("peft")
    ours = add_lora(parallelize(make("llama").model), rank=2, alpha=4, targets=["q_proj"])
    save_adapter(ours, tmp_path)
    theirs = peft.PeftModel.from_pretrained(make("llama").model, tmp_path)
    assert {name for name, _ in theirs.named_parameters() if "lora_" in name} and theirs.active_peft_config.r == 2


def test_rslora_and_frozen_unless_asked(tmp_path):
    tensors = their_adapter("llama", tmp_path, use_rslora=True, lora_dropout=0.1)
    model = load_adapter(parallelize(make("llama")), tmp_path)
    assert not any(p.requires_grad for p in model.parameters())
    want = exact("llama", tensors, scale=ALPHA / R_A**0.5)
    assert error(model(**batch(model.config)).logits, want["out"]) < 1e-10


def test_adapters_of_a_model_that_no_file_describes_come_back(tmp_path):
    """A llama with learned positions: the names of its layers are known, and others are not asked for."""
    config = replace(GPT_CONFIG, family="llama", norm="rms", gated=True, activation="silu", mlp_bias=False)
    model, other = (add_lora(GPT(config, seed=0), rank=2, alpha=4, seed=seed) for seed in (1, 2))
    save_adapter(model, tmp_path / "adapter")
    found = load_adapter(GPT(config, seed=0), tmp_path / "adapter")
    ids = torch.arange(12).view(2, 6)
    assert torch.equal(model(ids).logits, found(ids).logits)
    weights = dict(other.named_parameters())
    assert any(not torch.equal(p, weights[name]) for name, p in found.named_parameters())


def test_a_failed_save_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("planted")

    model = add_lora(GPT(GPT_CONFIG), rank=2, alpha=4)
    monkeypatch.setattr(adapter, "full_tensor", fail)
    with pytest.raises(RuntimeError, match="planted"):
        save_adapter(model, tmp_path / "adapter")
    assert not any(tmp_path.iterdir())


def saved(world, path, adapters):
    model = parallelize(make("mistral"), make_tp(world))
    load_adapter(model, adapters)
    with pytest.raises(
        ValueError, match="the model has adapters; use save_adapter for them, or merge_lora to have them in the weights"
    ):
        model.save_pretrained(path)
    merge_lora(model).save_pretrained(path)
    return model(**batch(model.config)).logits


@pytest.mark.parametrize("R", [1, 4])
def test_a_merged_model_is_saved_for_transformers(ranks, tmp_path, R):
    transformers = pytest.importorskip("transformers")
    want = exact("mistral", their_adapter("mistral", tmp_path / "adapters"))["out"]
    for logits in ranks(R, saved, str(tmp_path / "out"), str(tmp_path / "adapters")):
        assert error(logits, want) < 1e-10
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=F64)
    assert error(again(**batch(again.config)).logits, want) < 1e-6  # its norms are fp32


def config(**changes):
    def edit(path):
        file = path / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return edit


def tensors(change):
    def edit(path):
        found = load_file(path / "adapter_model.safetensors")
        change(found)
        save_file(found, path / "adapter_model.safetensors")

    return edit


def every(*spoils):
    return lambda path: [spoil(path) for spoil in spoils]


BASE = "base_model.model"
Q = BASE + ".model.layers.0.self_attn.q_proj.lora_{}.weight"
ERRORS = {
    "no config": (
        lambda path: (path / "adapter_config.json").unlink(),
        "must hold adapter_config.json and adapter_model",
    ),
    "no tensors": (
        lambda path: (path / "adapter_model.safetensors").unlink(),
        "must hold adapter_config.json and adapter_model",
    ),
    "another method": (config(peft_type="IA3"), "peft_type='IA3' is not built; only 'LORA' is"),
    "dora": (config(use_dora=True), "use_dora=True is not built"),
    "biases": (config(bias="all"), "bias='all' is not built"),
    "more modules": (config(modules_to_save=["lm_head"]), r"modules_to_save=\['lm_head'\] is not built"),
    "nested modules": (config(modules_to_save=[["lm_head"]]), r"modules_to_save=\[\[.lm_head.\]\] is not built"),
    "ranks that differ": (config(rank_pattern={"q_proj": 4}), "rank_pattern={'q_proj': 4} is not built"),
    "dropout": (config(lora_dropout=0.1), "lora_dropout=0.1 in .* is not built, to train with"),
    "the rank": (config(r=4), r"q_proj.lora_A.weight in .* must be \(4, 48\), got \(3, 48\)"),
    "a tensor missing": (
        tensors(lambda t: t.pop(Q.format("B"))),
        r"q_proj.lora_B.weight in .* must be \(48, 3\), got none",
    ),
    "a layer missing": (
        tensors(lambda t: [t.pop(Q.format(letter)) for letter in "AB"]),
        r"q_proj.lora_A.weight in .* must be \(3, 48\), got none",
    ),
    "a layer missing of an expression": (
        every(tensors(lambda t: [t.pop(Q.format(letter)) for letter in "AB"]), config(target_modules=".*q_proj")),
        r"q_proj.lora_A.weight in .* must be \(3, 48\), got none",
    ),
    "a layer missing of numbers": (
        every(tensors(lambda t: [t.pop(Q.format(letter)) for letter in "AB"]), config(layers_to_transform=[0])),
        r"q_proj.lora_A.weight in .* must be \(3, 48\), got none",
    ),
    "no expression": (config(target_modules="(q_proj"), r"must hold regular expressions, got '?\(q_proj"),
    "a shape": (
        tensors(lambda t: t.update({Q.format("B"): torch.ones(3, 3)})),
        r"lora_B.weight in .* must be \(48, 3\), got \(3, 3\)",
    ),
    "another kind": (
        tensors(lambda t: t.update({f"{BASE}.x.lora_magnitude_vector": torch.ones(3)})),
        "not an adapter of a linear layer",
    ),
    "another module": (
        tensors(lambda t: t.update({f"{BASE}.lm_head.lora_A.weight": torch.ones(3, 48)})),
        "no layer is called lm_head",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_are_named_and_nothing_happens(tmp_path, case):
    spoil, match = ERRORS[case]
    their_adapter("llama", tmp_path)
    spoil(tmp_path)
    model = parallelize(make("llama"))
    before = dict(model.state_dict())
    with pytest.raises(ValueError, match=match):
        load_adapter(model, tmp_path, trainable=True)
    assert_equal(dict(model.state_dict()), before)
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    "options", [dict(exclude_modules=["layers.0.self_attn.q_proj"]), dict(layers_to_transform=[1])], ids=str
)
def test_layers_that_its_config_left_out_have_no_tensors(tmp_path, options):
    their_adapter("llama", tmp_path)
    tensors(lambda t: [t.pop(Q.format(letter)) for letter in "AB"])(tmp_path)
    config(**options)(tmp_path)
    names = dict(load_adapter(parallelize(make("llama")), tmp_path).named_parameters())
    assert any(".lora." in name for name in names)


def unequal(world, path):
    """A directory that one rank cannot read."""
    load_adapter(parallelize(make("llama"), make_tp(world)), path if world.rank else path + "/none")


def test_an_error_on_one_rank_is_an_error_on_every_rank(ranks, tmp_path):
    their_adapter("llama", tmp_path)
    with pytest.raises(ValueError, match="none must hold adapter_config.json"):
        ranks(2, unequal, str(tmp_path))


def test_what_cannot_be_saved(tmp_path):
    with pytest.raises(ValueError, match="save_adapter: the model has no adapters"):
        save_adapter(parallelize(make("llama")), tmp_path)
    block = add_lora(torch.nn.Sequential(parallelize(make("gpt2")).parallel.blocks[0]), rank=2, alpha=4)
    with pytest.raises(ValueError, match="save_adapter: Sequential has no names of Hugging Face"):
        save_adapter(block, tmp_path)


def test_generation_with_adapters(tmp_path):
    """The same path as in training: as the merged model does."""
    their_adapter("llama", tmp_path)
    model = load_adapter(parallelize(make("llama")), tmp_path)
    ids = batch(model.config)["input_ids"]
    tokens = model.generate(ids, max_new_tokens=6)
    plain = parallelize(make("llama")).generate(ids, max_new_tokens=6)
    assert torch.equal(merge_lora(model).generate(ids, max_new_tokens=6), tokens) and not torch.equal(tokens, plain)
    assert isinstance(model.parallel, GPT)
