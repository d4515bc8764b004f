"""Adapters of experts against PEFT on transformers' own models in fp64: values, gradients, files, targets, refusals."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.common import assert_close, assert_equal, error, make_tp
from tests.interop.test_adapter import adapter, written
from tests.models.common import batch
from tests.models.families.experts import theirs
from tests.models.theirs import loss_of
from tpfuse import TensorParallel, add_lora, load_adapter, merge_lora, parallelize, save_adapter
from tpfuse.layers.lora_targets import base_of
from tpfuse.models import GPT
from tpfuse.training.checkpoint import load_checkpoint, save_checkpoint

peft = pytest.importorskip("peft")
F64 = torch.float64
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
FORMS = {  # the model, and what its LoraConfig names
    "both": ("mixtral", dict(target_modules=[], target_parameters=BOTH)),
    "down and attention": (
        "qwen3_moe",
        dict(target_modules=["q_proj"], target_parameters=["experts.down_proj"], use_rslora=True),
    ),
    "up": ("olmoe", dict(target_parameters=["gate_up_proj"])),
    "beside a shared expert": ("qwen2_moe", dict(target_modules=["k_proj"], target_parameters=BOTH)),
    "one layer": ("mixtral", dict(target_parameters=["layers.1.mlp.experts.gate_up_proj"])),
    "by layers": ("mixtral", dict(target_modules=["w1", "w2", "w3", "v_proj"])),
    "beside MLPs": ("qwen3_moe-mixed", dict(target_modules=["mlp.gate_proj", "up_proj", "down_proj"])),
}
FILE, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def wrapped(form):
    """A PeftModel whose adapter does something."""
    name, options = FORMS[form]
    model = peft.get_peft_model(theirs(name), peft.LoraConfig(r=3, lora_alpha=6, **options)).double()
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "lora_" in key:
                p.copy_(0.1 * torch.randn(p.shape, generator=g, dtype=F64))
    return model


def results(model):
    """Loss and logits, after backward."""
    call = batch(model.config)
    logits = model(**call).logits
    loss = loss_of(logits, call["labels"], True)
    loss.backward()
    return dict(loss=loss.detach(), logits=logits.detach())


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    """form -> PEFT's results, gradients by their names in its file, and its directory; once for each form."""
    known = {}

    def of(form):
        if form not in known:
            model, path = wrapped(form), tmp_path_factory.mktemp("theirs")
            model.save_pretrained(path)
            found = results(model)
            grads = {key.replace(".default", ""): p.grad for key, p in model.named_parameters() if "lora_" in key}
            known[form] = found | grads, path
        return known[form]

    return of


def ours(world, name, path, out, sp, saving):
    """As PEFT's, by a parallelized module; and its directory."""
    model = load_adapter(parallelize(theirs(name), make_tp(world, sp), saving=saving), path, trainable=True)
    assert all(p.requires_grad == (".lora." in key) for key, p in model.named_parameters())
    found = results(model)
    save_adapter(model, out)
    grads = (
        (source, adapter.full_tensor(p.grad, spec, tp).clone())
        for p, spec, tp, source in adapter._entries(base_of(model))
    )
    return found | dict(written(grads))


@pytest.mark.parametrize("form, R, sp, saving", [
    ("both", 1, False, "fastest"),
    ("both", 2, True, "smallest"),
    pytest.param("both", 4, False, "fastest", marks=pytest.mark.slow),
    ("down and attention", 2, False, "fastest"),
    pytest.param("up", 4, True, "smallest", marks=pytest.mark.slow),
    ("one layer", 2, True, "fastest"),
    ("beside a shared expert", 2, True, "smallest"),
    ("by layers", 2, True, "fastest"),
    ("beside MLPs", 1, False, "fastest"),
])  # fmt: skip
def test_values_gradients_and_files_are_those_of_peft(ranks, exact, tmp_path, form, R, sp, saving):
    """What is saved again are the same tensors, which PEFT opens to the same model."""
    want, path = exact(form)
    for got in ranks(R, ours, FORMS[form][0], str(path), str(tmp_path), sp, saving):
        assert_close(got, want, F64)
    assert_equal(load_file(tmp_path / FILE), load_file(path / FILE))
    again = peft.PeftModel.from_pretrained(theirs(FORMS[form][0]), tmp_path).double()
    assert error(again(**batch(again.config)).logits, want["logits"]) < 1e-12


def test_an_expert_that_is_not_adapted_shows(exact, tmp_path):
    """Each of these tensors matters at these sizes."""
    want, path = exact("both")
    tensors = load_file(path / FILE)
    (tmp_path / CONFIG).write_text((path / CONFIG).read_text())
    for key in (k for k in tensors if k.endswith("lora_B.weight")):
        part = tensors[key].clone()
        part.view(len(part), 3, 4)[..., 1] = 0  # expert 1's
        save_file(tensors | {key: part}, tmp_path / FILE)
        model = load_adapter(parallelize(theirs("mixtral")), tmp_path)
        assert error(model(**batch(model.config)).logits, want["logits"]) > 1e-4, key


def split(world, form):
    model = parallelize(wrapped(form), make_tp(world))
    return model(**batch(model.config)).logits.detach()


@pytest.mark.parametrize("form", ["both", "by layers"])
def test_parallelize_takes_a_peft_model(ranks, exact, form):
    for logits in ranks(2, split, form):
        assert error(logits, exact(form)[0]["logits"]) < 1e-10


def generated(world, path):
    model = load_adapter(parallelize(theirs("mixtral"), make_tp(world, False)), path)
    ids = batch(model.config)["input_ids"]
    beside = model.generate(ids, max_new_tokens=6)
    return beside, merge_lora(model).generate(ids, max_new_tokens=6)


@pytest.mark.parametrize("R", [1, 2])
def test_tokens_are_those_of_the_merged_model(ranks, exact, R):
    merged, ids = wrapped("both").merge_and_unload(), batch(theirs("mixtral").config)["input_ids"]
    options = dict(max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    expected = merged.generate(ids, **options)
    assert not torch.equal(expected, theirs("mixtral").generate(ids, **options))
    for tokens in ranks(R, generated, str(exact("both")[1])):
        assert all(torch.equal(t[:, -6:], expected[:, -6:]) for t in tokens)


def resharded(world, path, folder, first):
    """A checkpoint, made of a first step or read; the adapter of it, and of the step behind it."""
    model = parallelize(theirs("mixtral"), make_tp(world)).parallel
    load_adapter(model, path, trainable=True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    def step():
        optimizer.zero_grad()
        model(**batch(model.config)).loss.backward()
        optimizer.step()

    if first:
        step()
    else:
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        load_checkpoint(folder / "checkpoint", model, optimizer)
    save_checkpoint(folder / "checkpoint", model, optimizer, step=1)
    save_adapter(model, folder / "adapter")
    step()
    save_adapter(model, folder / "behind")


def test_checkpoints_at_other_sizes(ranks, exact, tmp_path):
    """1 -> 2 -> 1: the adapter's bits, and the next step's values."""
    read = lambda: [load_file(tmp_path / name / FILE) for name in ("adapter", "behind")]
    ranks(1, resharded, str(exact("both")[1]), tmp_path, True)
    before, after = read()
    for R in (2, 1):
        ranks(R, resharded, str(exact("both")[1]), tmp_path, False)
        again, later = read()
        assert_equal(again, before)
        assert max(error(later[key], after[key]) for key in after) < 1e-8


def over_replicas(world, model_path, path, out):
    mesh = world.mesh(2, 1)
    tp = TensorParallel(mesh["tp"], sequence_parallel=True)
    model = GPT.from_pretrained(model_path, tp=tp, dp=mesh["dp"], experts=mesh["dp", "tp"], dtype=F64)
    load_adapter(model, path)
    save_adapter(model, out)
    return model(**batch(model.config), return_logits=True).logits


def test_experts_over_replicas(ranks, exact, tmp_path):
    want, path = exact("both")
    theirs("mixtral").save_pretrained(tmp_path / "model")
    for logits in ranks(2, over_replicas, str(tmp_path / "model"), str(path), str(tmp_path / "out")):
        assert error(logits, want["logits"]) < 1e-10
    assert_equal(load_file(tmp_path / "out" / FILE), load_file(path / FILE))


def of_each_expert(path):
    """The directory of an older release: an adapter for each expert's layers."""
    g, found = torch.Generator().manual_seed(3), {}
    for layer in range(2):
        for expert in range(4):
            for leaf, (outputs, inputs) in dict(w1=(28, 48), w2=(48, 28), w3=(28, 48)).items():
                name = f"base_model.model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{leaf}.lora_"
                found[f"{name}A.weight"] = torch.randn(3, inputs, generator=g, dtype=F64)
                found[f"{name}B.weight"] = 0.1 * torch.randn(outputs, 3, generator=g, dtype=F64)
    values = dict(peft_type="LORA", r=3, lora_alpha=6, target_modules=["w1", "w2", "w3"], bias="none")
    path.mkdir()
    (path / CONFIG).write_text(json.dumps(values))
    save_file(found, path / FILE)


def test_an_older_release_s_files_are_refused_and_read_as_peft_saves_them_again(tmp_path):
    of_each_expert(tmp_path / "old")
    with pytest.raises(ValueError, match="no layer is called model.layers.0.block_sparse_moe.experts.0.w1"):
        load_adapter(parallelize(theirs("mixtral")), tmp_path / "old")
    model = peft.PeftModel.from_pretrained(theirs("mixtral"), tmp_path / "old").double()
    model.save_pretrained(tmp_path / "new")
    again, call = load_adapter(parallelize(theirs("mixtral")), tmp_path / "new"), batch(model.config)
    assert error(again(**call).logits, model(**call).logits) < 1e-10
    assert error(again(**call).logits, theirs("mixtral")(**call).logits) > 1e-3


def test_an_mlp_beside_experts_has_no_form_in_peft(tmp_path):
    model = add_lora(parallelize(theirs("qwen3_moe-mixed")), rank=3, alpha=6, targets=["fc2"])
    with pytest.raises(ValueError, match="adapters of model.layers.0.mlp.down_proj, .* have no form in PEFT"):
        save_adapter(model, tmp_path)


# ---- what a LoraConfig names ----


@pytest.mark.parametrize("form", FORMS)
def test_targets_mean_what_they_mean_to_peft(form):
    name, options = FORMS[form]
    model = parallelize(theirs(name))
    model.add_adapter(peft.LoraConfig(r=3, lora_alpha=6, **options))
    assert model.num_parameters(only_trainable=True) == wrapped(form).get_nb_trainable_parameters()[0]


LAYERS = ["w1", "w2", "w3"]
REFUSED = {
    "gate alone": (dict(target_modules=["w1", "q_proj"]), "are adapted together, got model.layers.0.mlp.experts.w1"),
    "another model's": (dict(target_modules=["gate_proj"]), "no layer is called gate_proj; there are"),
    "a router": (dict(target_modules=["gate"]), "no layer is called gate; .*; adapters of routers are not built"),
    "all": (dict(target_modules="all-linear"), "target_modules='all-linear' names routers too, by PEFT's rule"),
    "a router's weight": (dict(target_parameters=["gate.weight"]), r"target_parameters=\['gate.weight'\] is not built"),
    "one that is not": (dict(target_parameters=[*BOTH, "up"]), r"\['up'\] .* here down_proj, gate_up_proj"),
    "dropout": (dict(target_parameters=BOTH, lora_dropout=0.1), "lora_dropout=0.1 is not built with target_parameters"),
    "transposed": (dict(target_parameters=BOTH, fan_in_fan_out=True), "fan_in_fan_out=True is not built with target_"),
    "dora": (dict(target_parameters=BOTH, use_dora=True), "use_dora=True is not built"),
    "rslora": (dict(target_modules=LAYERS, use_rslora=True), "use_rslora=True is not built with gate and up of"),
    "a pattern": (dict(target_parameters=BOTH, rank_pattern={"down_proj": 5}), "rank_pattern={'down_proj': 5} is not"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_built_is_named(case):
    options, message = REFUSED[case]
    model = parallelize(theirs("mixtral"))
    with pytest.raises(ValueError, match=f"add_.*{message}"):
        model.add_adapter(peft.LoraConfig(r=3, lora_alpha=6, **options))
    assert all(p.requires_grad and ".lora." not in name for name, p in model.named_parameters())


@pytest.mark.parametrize(
    "targets", [["gate_proj", "up_proj", "down_proj"], ["q_proj", "shared_expert.up_proj"], r".*up_proj"]
)
def test_a_shared_expert_is_named(targets):
    """PEFT adapts it too."""
    model = parallelize(theirs("qwen2_moe"))
    with pytest.raises(
        ValueError, match="names model.layers.0.mlp.shared_expert.*, whose adapters are not built; of the"
    ):
        model.add_adapter(peft.LoraConfig(r=3, target_modules=targets))
    with pytest.raises(ValueError, match="shared_expert"):
        parallelize(peft.get_peft_model(theirs("qwen2_moe"), peft.LoraConfig(r=3, target_modules=targets)))
    assert all(p.requires_grad and ".lora." not in name for name, p in model.named_parameters())


def config(**changes):
    def edit(path):
        (path / CONFIG).write_text(json.dumps(json.loads((path / CONFIG).read_text()) | changes))

    return edit


def tensors(change):
    def edit(path):
        found = load_file(path / FILE)
        change(found)
        save_file(found, path / FILE)

    return edit


EXPERTS = "base_model.model.model.layers.0.mlp.experts"
OLD = "base_model.model.model.layers.0.block_sparse_moe.experts.0.w1.lora_A.weight"
STORED = {
    "dropout": (config(lora_dropout=0.1), "lora_dropout=0.1 is not built with target_parameters"),
    "no list": (config(target_parameters="down"), "target_parameters must be names of parameters, got 'down'"),
    "a router": (config(target_parameters=[*BOTH, "gate.weight"]), r"target_parameters=\['gate.weight'\] is not built"),
    "a pattern": (config(rank_pattern={r".*\.gate_up_proj": 7}), "rank_pattern={.* 7} is not built"),
    "one of them": (config(target_parameters=BOTH[:1]), r"lora_A.weight in .* must be \(12, 48\), got \(12, 28\)"),
    "missing": (
        tensors(lambda t: t.pop(f"{EXPERTS}.base_layer.lora_B.weight")),
        r"experts.base_layer.lora_B.weight in .* must be \(56, 12\), got none",
    ),
    "an expert a tensor": (
        tensors(lambda t: t.update({OLD: torch.ones(3, 48)})),
        "no layer is called model.layers.0.block_sparse_moe.experts.0.w1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", STORED)
def test_directories_that_are_refused(exact, tmp_path, case):
    spoil, message = STORED[case]
    for file in (CONFIG, FILE):
        (tmp_path / file).write_bytes((exact("both")[1] / file).read_bytes())
    spoil(tmp_path)
    model = parallelize(theirs("mixtral"))
    with pytest.raises(ValueError, match=f"load_adapter: .*{message}"):
        load_adapter(model, tmp_path)
    assert all(p.requires_grad and ".lora." not in name for name, p in model.named_parameters())


def test_targets_of_add_lora():
    """Names here, and those of Hugging Face; a layer named beside an expert's reaches both."""
    count = lambda name, *targets: sum(
        p.numel() for p in add_lora(parallelize(theirs(name)), rank=3, alpha=6, targets=targets).parameters()
        if p.requires_grad
    )  # fmt: skip
    assert count("mixtral", "fc1", "fc2") == count("mixtral", *BOTH) > count("mixtral", "fc2")
    assert count("mixtral", "w1", "w3") == 2 * count("mixtral", "fc1")
    both = count("qwen3_moe-mixed", "down_proj")
    assert both > count("qwen3_moe-mixed", "experts.down_proj") > 0
    with pytest.raises(ValueError, match=re.escape("no layer is called fc3; there are")):
        count("mixtral", "fc3")
