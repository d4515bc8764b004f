"""parallelize against the very module of transformers that it was given, before."""

import copy
import gc
import inspect
import json
import pickle
import weakref

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from tests.common import assert_close, assert_equal, error, make_tp
from tests.models.common import batch, body_loss, whole
from tests.models.families import experts
from tests.models.families.test_llama_like import LATER
from tests.models.theirs import NAMES, loss_of, make
from tests.planted import planted
from tpfuse import add_lora, load_checkpoint, parallelize, save_checkpoint
from tpfuse.collectives import gather
from tpfuse.models import GPT
from tpfuse.models.files.source import written

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
F64 = torch.float64


def call_of(name, model):
    call = batch(model.config, pad="right")
    if name == "bert":
        del call["labels"]
    return call


def outputs(name, model, call, shift):
    """What the module returns, by name, and a loss made of it: its own (where that is fp64), and twice one that the
    caller makes."""
    out = model(**call)
    found = {key: value for key, value in out.items() if key != "past_key_values"}
    if name == "bert":
        return found, body_loss(out.last_hidden_state, out.pooler_output, call["attention_mask"]), type(out).__name__
    own = loss_of(out.logits, call["labels"], shift)
    found["logits"] = out.logits[call["attention_mask"].bool()]
    if out.loss.dtype == F64:
        return found, out.loss + 2 * own, type(out).__name__
    assert abs(out.loss - own) < 1e-5  # theirs is fp32
    return found | dict(loss=own), 3 * own, type(out).__name__


def exact(name):
    model = make(name)
    found, loss, kind = outputs(name, model, call_of(name, model), "bert" not in name)
    loss.backward()
    grads = {f"d {key}": p.grad for key, p in model.named_parameters() if p.grad is not None}
    grads = experts.an_expert_a_tensor(grads, name) if name in experts.FAMILIES else grads
    return {key: x.detach() for key, x in found.items()} | grads, kind


def ours(world, name, sp):
    model = make(name)
    call = call_of(name, model)
    module = parallelize(model, make_tp(world, sp))
    assert module is model
    found, loss, kind = outputs(name, model, call, "bert" not in name)
    loss.backward()
    sources = model.parallel.files.sources()
    grads = ((sources[key], g) for key, g in whole(model.parallel, grad=True).items())
    found |= {f"d {model.parallel.files.hf_name(n)}": t for n, t in written(grads)}
    return {key: x.detach() for key, x in found.items()}, kind


LAYOUTS = [
    (1, False),
    (2, True),
    (4, True),
    (2, False),
]  # llama takes all; another family one, by turns: what is split is the block's
CASES = [(name, *LAYOUTS[i % 4]) for i, name in enumerate(NAMES, 1)]
CASES += [("mixtral", 2, True), ("qwen3_moe-mixed", 4, True), ("olmoe", 2, False), ("qwen3_moe", 1, False)]
CASES += [("qwen2_moe", 2, True), ("qwen2_moe", 4, False)]
CASES += [("llama", *layout) for layout in LAYOUTS if ("llama", *layout) not in CASES]
CASES = [pytest.param(*c, marks=[pytest.mark.slow] * (c[0].startswith(LATER) and c[0] != "phi3")) for c in CASES]


@pytest.mark.parametrize("name, R, sp", CASES)
def test_outputs_and_gradients_stay(ranks, name, R, sp):
    """The module's own loss and one that every rank makes of the whole logits."""
    want, kind = exact(name)
    keys = [
        key for key in want if key.endswith("query.bias") or key.endswith("key.bias")
    ]  # a key's bias has no gradient but rounding
    for got, got_kind in ranks(R, ours, name, sp):
        assert got_kind == kind
        for key in keys:
            assert error(got.pop(key) + 1, want[key] + 1) < 1e-10
        assert_close(got, {key: x for key, x in want.items() if key not in keys}, F64)


def with_gather(world, name, sp):
    def gathered(collect, x, tp, dim, *, size):
        rows = torch.nn.functional.pad(x, (0, tp.slice_size(size) - x.shape[-1]))
        return gather(rows, tp, dim)[..., :size]

    with planted("tpfuse.interop.vocabulary.collect", gathered):
        return ours(world, name, sp)


def test_gather_in_place_of_collect_would_be_wrong(ranks):
    """The part of the gradient that comes through the logits is then counted once a rank: 1 + 2 * 2 for 1 + 2."""
    want, _ = exact("llama")
    for got, _ in ranks(2, with_gather, "llama", True):
        assert error(got["logits"], want["logits"]) < 1e-10
        key = "d model.layers.0.mlp.down_proj.weight"
        assert error(got[key], want[key] * 5 / 3) < 1e-10


# ---- a training script changes by one line ----


def trained(name, line, steps=3):
    """A plain loop over transformers' signature, as its Trainer makes the calls; micro-batches share one count of
    labels."""
    model = make(name, torch.float32)
    line(model)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        micros = [batch(model.config, size=2, pad="right", seed=2 * step + i) for i in range(2)]
        items = sum((m["labels"][:, 1:] != -100).sum() for m in micros)
        for call in micros:
            loss = model(**call, num_items_in_batch=items, use_cache=False).loss
            loss.backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe-mixed"])
def test_a_training_loop_at_one_rank_changes_by_one_line(name):
    before, after = trained(name, lambda model: None), trained(name, parallelize)
    assert before == pytest.approx(after, rel=1e-4) and before[0] != pytest.approx(before[-2], rel=1e-2)


def test_every_loss_divides_by_the_trainers_count():
    """Who gives it adds the micro-batches' losses up, and multiplies them by the replicas."""
    model = parallelize(make("bert-mlm"))
    call = batch(model.config, pad="right")
    count = (call["labels"] != -100).sum()
    mean, of_more = (model(**call, num_items_in_batch=items).loss for items in (count, 2 * count))
    assert mean == model(**call).loss and error(2 * of_more, mean) < 1e-12


@pytest.mark.parametrize("name", ["gpt2", "bert-mlm"])
def test_one_row_of_positions_is_for_all_rows(name):
    theirs, call = make(name), batch(make(name).config, size=2)
    call |= dict(position_ids=torch.arange(call["input_ids"].shape[1], 0, -1)[None])
    assert error(parallelize(make(name))(**call).logits, theirs(**call).logits) < 1e-10


@pytest.mark.parametrize("items", [0, 0.0, torch.tensor(0), torch.tensor(0.0)], ids=str)
@pytest.mark.parametrize("name", ["llama", "bert-mlm"])
def test_a_step_without_labels_has_the_loss_zero(name, items):
    model = parallelize(make(name))
    call = batch(model.config)
    loss = model(**call | dict(labels=torch.full_like(call["labels"], -100)), num_items_in_batch=items).loss
    loss.backward()
    assert loss == 0 and not any(p.grad.any() for p in model.parameters() if p.grad is not None)
    with pytest.raises(ValueError, match="loss_normalizer must be positive and finite"):
        model.parallel(**call, loss_normalizer=items)


def test_the_trainer_of_transformers(tmp_path):
    pytest.importorskip("accelerate")
    ids = torch.randint(1, 97, (8, 7), generator=torch.Generator().manual_seed(0))
    rows = [dict(input_ids=row, labels=row) for row in ids]

    def losses(line):
        model = make("llama", torch.float32)
        line(model)
        options = dict(
            max_steps=3, per_device_train_batch_size=2, logging_steps=1, report_to=[], use_cpu=True, save_strategy="no"
        )
        trainer = transformers.Trainer(
            model, transformers.TrainingArguments(str(tmp_path), **options), train_dataset=rows
        )
        trainer.train()
        trainer.save_model(str(tmp_path / "out"))
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    assert losses(lambda model: None) == pytest.approx(losses(parallelize), rel=1e-3)


DROPOUT = dict(attn_pdrop=0.2, resid_pdrop=0.2, embd_pdrop=0.2)


def dropped(world, seed, dtype=F64):
    model = parallelize(make("gpt2", dtype, **DROPOUT).train(), None if world is None else make_tp(world), seed=seed)
    call = batch(model.config)
    return torch.stack(
        [model(**call).loss.detach(), model(**call).loss.detach(), model(**call, step=1, first_sample=0).loss.detach()]
    )


def test_dropout_is_by_seed_and_position(ranks):
    want = dropped(None, 3)
    assert want[0] != want[1] and torch.equal(want[1], want[2])  # the counter goes on, and may be said
    assert not torch.equal(want, dropped(None, 4))
    for got in ranks(2, dropped, 3):
        assert error(got, want) < 1e-10


# ---- still the module it was ----


def test_it_is_still_that_module():
    model = make("llama", torch.float32).train()
    cls, signature, call = type(model), inspect.signature(type(model).forward), batch(model.config)
    with torch.no_grad():
        want = model(**call)
    old = [weakref.ref(p) for p in model.parameters()]
    numel = sum(p.numel() for p in model.parameters())
    parallelize(model)
    gc.collect()
    assert not any(ref() is not None for ref in old)  # no second copy is kept
    assert sum(p.numel() for p in model.parameters()) == numel and model.num_parameters() == numel
    assert (
        isinstance(model, cls)
        and type(model).__name__ == cls.__name__
        and inspect.signature(type(model).forward) == signature
    )
    assert model.training and model.parallel.training and not model.eval().parallel.training
    assert model.dtype == torch.float32 and model.device.type == "cpu"
    out = model(
        call["input_ids"], call["attention_mask"] if "attention_mask" in call else None, labels=call["labels"]
    )  # by position
    assert error(out.logits, want.logits) < 1e-5 and out.past_key_values is None and out["loss"] is out.loss
    as_tuple = model(**call, return_dict=False)
    assert isinstance(as_tuple, tuple) and torch.equal(as_tuple[1], out.logits)
    for other in copy.deepcopy(model), pickle.loads(pickle.dumps(model)):
        assert type(other) is type(model) and torch.equal(other(**call).logits, out.logits)
    fresh = parallelize(make("llama", torch.float32, seed=2))
    assert not torch.equal(fresh(**call).logits, out.logits)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(**call).logits, out.logits)


def split(world, path, sp):
    model = parallelize(make("llama"), make_tp(world, sp))
    model.save_pretrained(path)
    tokens = model.generate(batch(model.config)["input_ids"], max_new_tokens=6, do_sample=False)
    return tokens, sum(p.numel() for p in model.parameters())


def test_what_it_saves_and_generates_is_transformers_own(ranks, tmp_path):
    theirs = make("llama")
    theirs.save_pretrained(tmp_path / "theirs")
    tokens = theirs.generate(batch(theirs.config)["input_ids"], max_new_tokens=6, do_sample=False)
    for R in (1, 4):
        got = ranks(R, split, str(tmp_path / f"ours{R}"), True)
        assert all(torch.equal(t, tokens) for t, _ in got)
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / f"ours{R}", dtype=F64)
        assert type(again) is type(theirs) and (tmp_path / f"ours{R}" / "generation_config.json").is_file()
        assert_equal(dict(again.state_dict()), dict(theirs.state_dict()))
        if R == 4:
            assert all(n < 0.6 * theirs.num_parameters() for _, n in got)  # shards; 2 kv heads are held twice


def saved_with_a_bad_config(world, folder):
    model = parallelize(make("llama"), make_tp(world))
    if world.rank == 1:
        model.config.mine = {1, 2}
    model.save_pretrained(folder)


def test_config_json_is_the_modules_present_config(ranks, tmp_path):
    model = parallelize(make("gpt2"))
    model.config.pad_token_id, model.config.eos_token_id, model.config.mine = 5, 7, dict(key="x")
    model.config.n_positions = 3  # which the weights decide
    model.save_pretrained(tmp_path / "0")
    config = json.loads((tmp_path / "0/config.json").read_text())
    want = dict(pad_token_id=5, eos_token_id=7, mine=dict(key="x"), n_positions=make("gpt2").config.n_positions)
    assert {key: config[key] for key in want} == want
    with pytest.raises(ValueError, match="save_pretrained: the config of LlamaForCausalLM is no JSON"):
        ranks(2, saved_with_a_bad_config, tmp_path / "1")
    assert not (tmp_path / "1").exists()


def test_a_module_made_in_memory_comes_from_no_directory(tmp_path, monkeypatch):
    """Least of all from the one that the process is in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokenizer.json").write_text("another model's")
    parallelize(make("gpt2")).save_pretrained("saved")
    assert not (tmp_path / "saved/tokenizer.json").exists()


def test_the_generation_config_is_followed():
    model = make("llama")
    ids = batch(model.config, size=2)["input_ids"]
    model.generation_config.eos_token_id = int(model.generate(ids, max_new_tokens=2, do_sample=False)[0, -1])
    want = model.generate(ids, max_length=12, do_sample=False)
    parallelize(model)
    assert torch.equal(model.generate(ids, max_length=12), want)
    sampled = model.generate(ids, max_new_tokens=4, do_sample=True, top_k=0, temperature=1.5, seed=1)
    assert torch.equal(
        sampled, model.parallel.generate(ids, max_new_tokens=4, do_sample=True, temperature=1.5, seed=1, **ends(model))
    )


@pytest.mark.parametrize("also_ends", [False, True])
def test_pad_tokens_are_padding_where_no_mask_is_given(also_ends):
    """Unless the pad token is an end token too."""
    model = make("llama")
    ids = batch(model.config, size=3)["input_ids"]
    ids[1, :3], ids[2, :5], ids[0, 2] = 7, 7, 7
    call = dict(max_new_tokens=6, do_sample=False, pad_token_id=7, eos_token_id=[7, 96] if also_ends else 96)
    want = model.generate(ids, **call)
    seen = model.generate(ids, attention_mask=torch.ones_like(ids), **call)
    assert torch.equal(want, seen) == also_ends
    model = parallelize(model)
    assert torch.equal(model.generate(ids, **call)[:, 7:], want[:, 7:])
    for kind in torch.tensor, np.array, tuple if also_ends else int:
        others = dict(eos_token_id=kind(call["eos_token_id"]), pad_token_id=torch.tensor(7))
        assert torch.equal(model.generate(ids, **call | others)[:, 7:], want[:, 7:])
    tensor, generate = torch.tensor(call["eos_token_id"]), model.parallel.generate
    assert torch.equal(generate(ids, **call | dict(eos_token_id=tensor)), generate(ids, **call))


def test_without_a_length_it_ends_where_transformers_does():
    """Behind 20 tokens, or at max_position_embeddings, be positions rotary or not."""
    for name in "llama", "gpt2":
        theirs, model = make(name, max_position_embeddings=16), parallelize(make(name, max_position_embeddings=16))
        ids = batch(theirs.config, size=2)["input_ids"][:, :5]
        want = theirs.generate(ids, do_sample=False)
        assert want.shape[1] == 16 and torch.equal(model.generate(ids, do_sample=False), want)
        for generate in theirs.generate, model.generate:
            with pytest.raises(ValueError, match="max_length|max_new_tokens"):
                generate(want, do_sample=False)


def test_the_modules_generation_config_says_what_a_given_one_does_not():
    model = make("llama")
    ids = batch(model.config, size=2)["input_ids"]
    model.generation_config.eos_token_id = int(model.generate(ids, max_new_tokens=2, do_sample=False)[0, -1])
    model.generation_config.pad_token_id, model.generation_config.repetition_penalty = 0, 1.5
    given = transformers.GenerationConfig(max_new_tokens=9, repetition_penalty=1.0, do_sample=False)
    want = model.generate(ids, generation_config=given)
    assert torch.equal(parallelize(model).generate(ids, generation_config=given), want)
    assert (want[0, -1] == 0) or want.shape[1] < ids.shape[1] + 9  # it has ended


def ends(model):
    return dict(eos_token_id=model.generation_config.eos_token_id)


def test_on_the_meta_device(tmp_path):
    full = parallelize(make("llama", torch.float32))
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(make("llama").config)
    parallelize(model)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu").load_state_dict(full.state_dict())
    call = batch(model.config)
    assert torch.equal(model.eval()(**call).logits, full(**call).logits)


def test_an_optimizer_made_before_is_an_error_at_its_step():
    """It would train parameters that no module has any more."""
    module = make("llama")
    early, other = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (module, nn.Linear(2, 2)))
    parallelize(module)
    module(**batch(module.config)).loss.backward()
    with pytest.raises(ValueError, match="AdamW.step: .* of its parameters were dropped by parallelize, .* after it"):
        early.step()
    torch.optim.AdamW(module.parameters(), lr=0.1).step()
    other.step()


def test_frozen_parameters_stay_frozen():
    model = make("llama")
    for key, p in model.named_parameters():
        p.requires_grad_("mlp" in key)
    parallelize(model)
    assert {key.split(".")[3] for key, p in model.named_parameters() if p.requires_grad} == {"mlp"}
    model(**batch(model.config)).loss.backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
    model = make("llama")
    model.model.layers[1].self_attn.q_proj.weight.requires_grad_(False)
    with pytest.raises(
        ValueError,
        match=r"q_proj.weight, .*k_proj.weight, .*v_proj.weight are one parameter here; freeze all of them or",
    ):
        parallelize(model)


def test_checkpoints_and_adapters_take_it(tmp_path):
    model = parallelize(make("gpt2", torch.float32, **DROPOUT).train(), seed=5)
    add_lora(model, rank=2, alpha=4, targets=["c_attn"])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    call = batch(model.config)
    model(**call).loss.backward()
    optimizer.step()
    save_checkpoint(tmp_path, model, optimizer, step=1)
    again = add_lora(
        parallelize(make("gpt2", torch.float32, seed=9, **DROPOUT).train()), rank=2, alpha=4, targets=["c_attn"]
    )
    assert load_checkpoint(tmp_path, again)[0] == 1 and again.seed == 5 and again.step == 1
    assert torch.equal(again(**call).loss, model(**call).loss)  # the same masks too


# ---- experts, which transformers holds in tensors of all of them ----


def experts_of(world, name, path):
    """Whole tensors of transformers in, twice: at parallelize, and into a module of other values; files out, tokens."""
    model, tp = parallelize(make(name), make_tp(world)), make_tp(world)
    other = parallelize(make(name, seed=2), tp)
    assert not torch.equal(*(m.parallel.blocks[1].mlp.fc1 for m in (model, other)))
    other.load_state_dict(make(name).state_dict())
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    other = parallelize(make(name, seed=2), tp)
    other.load_state_dict(model.state_dict())  # a rank's own shards
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    model.save_pretrained(path)
    tokens = model.generate(batch(model.config)["input_ids"], max_new_tokens=6, do_sample=False)
    return tokens, model.num_parameters()


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe-mixed", "olmoe"])
def test_state_files_and_tokens_of_experts(ranks, tmp_path, name):
    theirs = make(name)
    theirs.save_pretrained(tmp_path / "theirs")
    tokens = theirs.generate(batch(theirs.config)["input_ids"], max_new_tokens=6, do_sample=False)
    for found, count in ranks(2, experts_of, name, str(tmp_path / "ours")):
        assert torch.equal(found, tokens) and count == theirs.num_parameters()
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=F64)
    assert type(again) is type(theirs)
    assert_equal(dict(again.state_dict()), dict(theirs.state_dict()))
    first, second = (experts.tensors(tmp_path / folder) for folder in ("theirs", "ours"))
    assert_equal(second, first)


def test_experts_that_lack_in_a_state_are_named():
    model = parallelize(make("olmoe"))
    state = make("olmoe").state_dict()
    fewer = state | {"model.layers.1.mlp.experts.down_proj": state["model.layers.1.mlp.experts.down_proj"][:-1]}
    with pytest.raises(ValueError, match=r"layers.1.mlp.experts.down_proj in state_dict must be \(8, 48, 28\)"):
        model.load_state_dict(fewer)
    with pytest.raises(ValueError, match="state_dict lacks layers.0.mlp.experts.0.gate_proj.weight"):
        model.load_state_dict({k: t for k, t in state.items() if k != "model.layers.0.mlp.experts.gate_up_proj"})


def test_frozen_experts_stay_frozen():
    model = make("mixtral")
    for key, p in model.named_parameters():
        p.requires_grad_("experts.down_proj" in key or "mlp.gate" in key)
    parallelize(model)
    assert {key.rpartition(".")[2] for key, p in model.named_parameters() if p.requires_grad} == {"fc2", "router"}


def test_a_call_may_not_ask_for_logits_of_routers():
    model = parallelize(make("mixtral"))
    with pytest.raises(
        NotImplementedError, match="MixtralForCausalLM, parallelized: output_router_logits is not built"
    ):
        model(**batch(model.config), output_router_logits=True)


def balanced(world):
    """The loss and the router's gradient of a module whose config asks for the loss of balance."""
    model = parallelize(make("olmoe", output_router_logits=True, router_aux_loss_coef=0.5), make_tp(world))
    out = model(**batch(model.config))
    out.loss.backward()
    return out.loss.detach(), out.aux_loss.detach(), model.parallel.blocks[0].mlp.router.grad


def test_the_loss_of_balance_of_a_config(ranks):
    """Theirs has sums in fp32 in an fp64 model too."""
    model = make("olmoe", output_router_logits=True, router_aux_loss_coef=0.5)
    out = model(**batch(model.config))
    out.loss.backward()
    for loss, balance, router in ranks(2, balanced):
        assert abs(loss - out.loss) < 1e-6 and abs(balance - out.aux_loss) < 1e-6 and balance > 1
        assert error(router, model.model.layers[0].mlp.gate.weight.grad) < 1e-5


@pytest.mark.parametrize("base", [True, False])
def test_bodies_and_classifiers_with_experts(base):
    config = experts.their_config("qwen3_moe", num_labels=3, pad_token_id=0)
    auto = transformers.AutoModel if base else transformers.AutoModelForSequenceClassification
    torch.manual_seed(2)
    model = experts.widen(auto.from_config(config).double().eval())
    ids = batch(config)["input_ids"]
    want = model(ids)
    got = parallelize(model)(ids)
    assert type(got) is type(want)
    key = "last_hidden_state" if base else "logits"
    assert error(got[key], want[key]) < 1e-5  # their norms are fp32


def test_adapters_beside_experts():
    peft = pytest.importorskip("peft")
    ids = batch(make("mixtral").config)["input_ids"]
    model = peft.get_peft_model(make("mixtral"), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    for key, p in model.named_parameters():
        if "lora_" in key:
            torch.nn.init.normal_(p, std=0.1)
    want = model(ids).logits
    assert error(parallelize(model)(ids).logits, want) < 1e-12


# ---- errors ----


def test_what_is_not_supported_is_named():
    with pytest.raises(
        ValueError,
        match=r"must be transformers' own .*GPT2LMHeadModel.*BertModel.*, got torch.nn.modules.linear.Linear",
    ):
        parallelize(nn.Linear(2, 2))
    own = type("LlamaForCausalLM", (type(make("llama")),), {})  # somebody's subclass may do anything
    model = make("llama")
    model.__class__ = own
    with pytest.raises(ValueError, match="module must be transformers' own"):
        parallelize(model)
    model = parallelize(make("llama"))
    with pytest.raises(ValueError, match="LlamaForCausalLM is parallelized already"):
        parallelize(model)
    mixed = make("llama")
    mixed.model.norm.half()
    with pytest.raises(ValueError, match="one dtype and one device, got .*float64.*float16"):
        parallelize(mixed)
    untied = make("gpt2")
    untied.lm_head.weight = nn.Parameter(untied.lm_head.weight.detach().clone())
    with pytest.raises(ValueError, match="tie_word_embeddings=True, and the module's embeddings are not tied"):
        parallelize(untied)
    more = make("llama")
    more.model.layers[0].register_parameter("extra", nn.Parameter(torch.ones(2, dtype=F64)))
    with pytest.raises(
        ValueError, match="parallelize: LlamaForCausalLM holds model.layers.0.extra, which GPT has no place for"
    ):
        parallelize(more)
    assert more(**batch(more.config)).loss > 0  # nothing has happened to it
    with pytest.raises(ValueError, match="scale_attn_by_inverse_layer_idx=True is not built"):
        parallelize(make("gpt2", scale_attn_by_inverse_layer_idx=True))


ASKED = (
    dict(use_cache=True),
    dict(output_attentions=True),
    dict(past_key_values=1),
    dict(never_heard_of=torch.ones(1)),
)


@pytest.mark.parametrize("asked", ASKED)
def test_what_a_call_asks_for_is_named(asked):
    model = parallelize(make("llama"))
    with pytest.raises(NotImplementedError, match=f"LlamaForCausalLM, parallelized: {next(iter(asked))} is not built"):
        model(**batch(model.config), **asked)


def test_what_else_is_named():
    model, bert = parallelize(make("llama")), parallelize(make("bert"))
    ids = batch(model.config)["input_ids"]
    with pytest.raises(NotImplementedError, match="penalty_alpha is not built"):
        model.generate(ids, max_new_tokens=2, penalty_alpha=0.5)
    with pytest.raises(NotImplementedError, match="BertModel is not a causal model"):
        bert.generate(ids)
    with pytest.raises(NotImplementedError, match="saving='smallest'"):
        model.gradient_checkpointing_enable(offload=True)


def seeded(world, seeds):
    parallelize(make("llama", seed=seeds[world.rank]), make_tp(world))


def reordered(world):
    module = make("llama")
    weight = module.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data.roll(world.rank, 0)
    parallelize(module, make_tp(world))


def test_what_the_ranks_do_not_agree_on(ranks):
    weights = r"a checksum of the weights \(call torch.manual_seed .* must be the same on every"
    with pytest.raises(ValueError, match=weights):
        ranks(2, seeded, [0, 1])
    with pytest.raises(ValueError, match=weights):  # rows in another order
        ranks(2, reordered)
    with pytest.raises(ValueError, match="num_heads=8 is not divisible by tensor-parallel size 3"):
        ranks(3, seeded, [0, 0, 0])


def test_a_model_of_ours_is_inside():
    assert isinstance(parallelize(make("mistral")).parallel, GPT)


def test_the_arguments_of_save_pretrained(tmp_path):
    model = parallelize(make("llama", torch.float32))
    options = dict(max_shard_size="20KB", push_to_hub=False, safe_serialization=True, variant=None, save_function=print)
    model.save_pretrained(tmp_path, **options)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_equal(dict(again.state_dict()), dict(make("llama", torch.float32).state_dict()))
    for name, value in dict(push_to_hub=True, variant="fp16", safe_serialization=False).items():
        with pytest.raises(NotImplementedError, match=f"save_pretrained of LlamaForCausalLM: {name}.* is not built"):
            model.save_pretrained(tmp_path, **{name: value})
    with pytest.raises(ValueError, match="max_shard_size must be bytes or as '5GB', got 'big'"):
        model.save_pretrained(tmp_path, max_shard_size="big")


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_the_dtype_of_a_directory(tmp_path, name):
    make("llama", torch.bfloat16).save_pretrained(tmp_path)
    for asked, want in (("auto", torch.bfloat16), ("float16", torch.float16), (torch.float64, torch.float64)):
        assert GPT.from_pretrained(tmp_path, **{name: asked}).head.weight.dtype == want
    with pytest.raises(ValueError, match="dtype must be 'auto' or one of float64, .*, got torch.int8"):
        GPT.from_pretrained(tmp_path, **{name: "int8"})
    with pytest.raises(ValueError, match="dtype=torch.float32 and torch_dtype=torch.float16 differ"):
        GPT.from_pretrained(tmp_path, dtype=torch.float32, torch_dtype=torch.float16)
    both = GPT.from_pretrained(tmp_path, dtype="auto", torch_dtype="bfloat16")  # the same by another word
    assert both.embedding.weight.dtype == torch.bfloat16


# ---- what a foreign trainer reads off the module ----

DEEPSPEED = "bias", "layer_norm.weight", "layernorm.weight", "norm.weight", "ln_f.weight"  # of DeepSpeed's examples


def undecayed(model, rule):
    """Elements that a rule leaves without weight decay."""
    if rule == "Trainer":
        decays = set(transformers.Trainer.get_decay_parameter_names(None, model))
    else:
        decays = {name for name, _ in model.named_parameters() if not any(words in name for words in DEEPSPEED)}
    return sum(p.numel() for name, p in model.named_parameters() if name not in decays)


@pytest.mark.parametrize("name", NAMES)
def test_norms_and_biases_stay_without_weight_decay(name):
    """By transformers' names and classes no vector decays, before and after; by another list of names after too."""
    model = make(name, torch.float32)
    before = undecayed(model, "Trainer")
    assert before == sum(p.numel() for p in model.parameters() if p.dim() == 1)
    parallelize(model)
    assert undecayed(model, "Trainer") == undecayed(model, "DeepSpeed") == before
