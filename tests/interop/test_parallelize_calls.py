"""What callers of transformers' models ask of a parallelized one: rows, hidden states, recompute, bases, hooks.

Spans: parallelize.py and parallelized.py of tpfuse/interop: the calls that test_parallelize.py does not make.
"""

import pickle

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from tests.common import assert_close, assert_equal, error, make_tp
from tests.models.common import batch
from tests.models.theirs import NAMES, make
from tests.models.tokenizers import byte_level
from tpfuse import parallelize
from tpfuse.models import GPT, Bert
from tpfuse.models.generation.options import DEFAULTS

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
F64 = torch.float64
DROPOUT = dict(attn_pdrop=0.2, resid_pdrop=0.2, embd_pdrop=0.2)


def model_of(name):
    """The model of a name; of "llama base" the LlamaModel inside."""
    model = make(name.removesuffix(" base"))
    return model.base_model if name.endswith(" base") else model


def asked(name, model):
    """Everything that a call with rows and hidden states gives, and the gradient of the rows."""
    call = batch(model.config, pad="right")
    ids, labels, seen = call.pop("input_ids"), call.pop("labels"), call["attention_mask"].bool()
    rows = model.get_input_embeddings()(ids).detach().requires_grad_()
    options = dict(labels=labels) if name in ("llama", "gpt2", "bert-mlm") else {}
    out = model(inputs_embeds=rows, output_hidden_states=True, use_cache=False, **call, **options)
    as_tuple = model(inputs_embeds=rows, output_hidden_states=True, use_cache=False, return_dict=False, **call)
    found = {f"hidden {i}": h[seen] for i, h in enumerate(out.hidden_states)}
    last = out.logits if "logits" in out else out.last_hidden_state
    found["last"] = last[seen]
    if getattr(out, "pooler_output", None) is not None:
        found["pooled"] = out.pooler_output
    weigh = lambda x: (x * torch.linspace(-1, 1, x.numel(), dtype=F64).view(x.shape)).sum()
    sum(map(weigh, found.values())).backward()
    shapes = [tuple(x.shape) if torch.is_tensor(x) else [tuple(y.shape) for y in x] for x in as_tuple]
    found = {key: x.detach() for key, x in found.items()} | {"rows": rows.detach(), "d rows": rows.grad}
    if "loss" in out:
        found["loss"] = out.loss.detach().double()
    return found, (type(out).__name__, list(out), shapes)


def asked_of_ours(world, name, sp):
    return asked(name, parallelize(model_of(name), make_tp(world, sp)))


CASES = [("llama", 1, False), ("llama", 4, True), ("gpt2", 2, False), ("bert-mlm", 2, True), ("bert", 4, True)]
CASES += [("gpt2 base", 2, True), ("llama base", 4, False), ("qwen3 base", 2, True)]


@pytest.mark.parametrize("name, R, sp", CASES)
def test_rows_in_and_hidden_states_out(ranks, name, R, sp):
    want, form = asked(name, model_of(name))
    loss = want.pop("loss", None)
    for got, got_form in ranks(R, asked_of_ours, name, sp):
        assert got_form == form
        if loss is not None:
            assert abs(got.pop("loss") - loss) < 1e-5  # theirs is fp32
        assert_close(got, want, F64)


def test_the_config_may_ask_for_hidden_states():
    theirs = make("gpt2")
    theirs.config.output_hidden_states = True
    call = batch(theirs.config)
    want = theirs(**call).hidden_states
    ours = parallelize(theirs)
    got = ours(**call).hidden_states
    assert len(got) == len(want) == 3 and all(error(a, b) < 1e-10 for a, b in zip(got, want))
    assert ours(**call, output_hidden_states=False).hidden_states is None


def test_the_options_of_the_loss():
    model = parallelize(make("llama"))
    call = batch(model.config)
    logits, labels = model(**call).logits[:, :-1].flatten(0, 1), call["labels"][:, 1:].flatten()
    smoothed = model(**call, label_smoothing=0.1).loss
    assert error(smoothed, F.cross_entropy(logits, labels, label_smoothing=0.1)) < 1e-10
    z = logits.logsumexp(-1)[labels != -100].square().mean()
    assert error(model(**call, z_loss=0.01).loss, F.cross_entropy(logits, labels) + 0.01 * z) < 1e-10
    each = model(**call, reduction="none").loss
    assert error(each[:, 1:].flatten(), F.cross_entropy(logits, labels, reduction="none")) < 1e-10


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(output_hidden_states=[1]), r"output_hidden_states=\[1\], a choice of layers, is not built; give True"),
        (dict(output_attentions=True), "output_attentions is not built"),
        (dict(never_heard_of=1), "never_heard_of is not built"),
    ],
)
def test_what_a_call_may_not_ask(options, words):
    model = parallelize(make("gpt2"))
    with pytest.raises(NotImplementedError, match=f"GPT2LMHeadModel, parallelized: {words}"):
        model(**batch(model.config), **options)
    base = parallelize(make("llama").base_model)
    with pytest.raises(NotImplementedError, match="LlamaModel, parallelized: label_smoothing is not built"):
        base(batch(base.config)["input_ids"], label_smoothing=0.1)


def test_what_a_config_may_not_ask():
    model = parallelize(make("gpt2"))
    model.config.tie_last_hidden_states = False
    with pytest.raises(NotImplementedError, match="tie_last_hidden_states=False is not built"):
        model(**batch(model.config), output_hidden_states=True)
    model.config._attn_implementation, model.config.output_attentions = "eager", True
    with pytest.raises(NotImplementedError, match="output_attentions is not built"):
        model(**batch(model.config))


def test_rows_and_tokens_at_once():
    model = parallelize(make("gpt2"))
    call = batch(model.config)
    for _ in range(2):
        with pytest.raises(ValueError, match="give input_ids or inputs_embeds, both came"):
            model(**call, inputs_embeds=torch.ones(3, 7, 48, dtype=F64))
        model.get_input_embeddings().register_forward_hook(lambda *_: None)


# ---- base classes ----


def saved(world, name, path):
    model = parallelize(model_of(name), make_tp(world))
    model.save_pretrained(path)
    return type(model).__name__


@pytest.mark.parametrize("name", ["llama base", "gpt2 base", "bert"])
def test_the_files_of_a_base(ranks, tmp_path, name):
    theirs = model_of(name)
    assert set(ranks(2, saved, name, str(tmp_path))) == {type(theirs).__name__}
    again = transformers.AutoModel.from_pretrained(tmp_path, dtype=F64)
    assert type(again) is type(theirs)
    assert_equal(dict(again.state_dict()), dict(theirs.state_dict()))
    cls, options = (Bert, {}) if name == "bert" else (GPT, dict(lm_head=False))
    native, call = cls.from_pretrained(tmp_path, dtype=F64, **options), batch(theirs.config)["input_ids"]
    assert error(native(call).last_hidden_state, theirs(call).last_hidden_state) < 1e-10


def test_a_base_has_no_head():
    base = parallelize(make("llama").base_model)
    assert base.get_output_embeddings() is None and not base.can_generate()
    with pytest.raises(NotImplementedError, match="LlamaModel is not a causal model with a head"):
        base.generate(torch.ones(1, 2, dtype=torch.int64), max_new_tokens=1)


# ---- recompute ----


def steps(model):
    call = batch(model.config)
    loss = model(**call, step=0, first_sample=0).loss
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return grads | {"loss": loss.detach()}


def checkpointed(world):
    """Gradients without, with, without again, and of a model that brought it; what the model says of each."""
    tp = make_tp(world)
    model = parallelize(make("gpt2", **DROPOUT).train(), tp)
    found, says = [steps(model)], [model.is_activation_checkpointing]
    for action in (model.activation_checkpointing_enable, model.activation_checkpointing_disable):
        action()
        found.append(steps(model))
        says.append(model.is_activation_checkpointing)
    brought = make("gpt2", **DROPOUT).train()
    brought.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=True))
    brought = parallelize(brought, tp)
    found.append(steps(brought))
    says += [brought.is_activation_checkpointing, brought.parallel.recompute]
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    says.append(pickle.loads(pickle.dumps(model)).parallel.recompute)
    return found, says


@pytest.mark.parametrize("R", [1, 2])
def test_gradient_checkpointing_changes_no_bit(ranks, R):
    for (first, *others), says in ranks(R, checkpointed):
        for other in others:
            assert_equal(other, first)
        assert says == [False, True, False, True, "full", "full"]


def only_one(world):
    model = parallelize(make("gpt2"), make_tp(world))
    if world.rank:
        model.gradient_checkpointing_enable()
    model(**batch(model.config)).loss.backward()


def test_ranks_that_recompute_differently(ranks):
    with pytest.raises(ValueError, match="GPT: recompute .*must be the same on every tensor-parallel rank"):
        ranks(2, only_one)


def test_what_gradient_checkpointing_is_not():
    model = parallelize(make("gpt2"))
    for options in (dict(every_n_layers=2), dict(offload=True)):
        with pytest.raises(NotImplementedError, match=f"GPT2LMHeadModel: {next(iter(options))}.* is not built"):
            model.gradient_checkpointing_enable(**options)
        theirs = make("gpt2")
        theirs.gradient_checkpointing_enable(**options)
        with pytest.raises(NotImplementedError, match="of some layers only, or with offload, is not built; call"):
            parallelize(theirs)
    with pytest.raises(NotImplementedError, match="context_fn is not built"):
        model.gradient_checkpointing_enable(dict(context_fn=print))
    assert not model.is_activation_checkpointing
    theirs.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="gradient checkpointing is enabled, got recompute='selective' beside it"):
        parallelize(theirs, recompute="selective")


def test_the_trainer_checkpoints(tmp_path):
    pytest.importorskip("accelerate")
    ids = torch.randint(1, 97, (4, 7), generator=torch.Generator().manual_seed(0))
    rows = [dict(input_ids=row, labels=row) for row in ids]

    def trained(**options):
        model = parallelize(make("gpt2", torch.float32, **DROPOUT))
        more = dict(max_steps=2, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True)
        arguments = transformers.TrainingArguments(str(tmp_path), **more, **options)
        transformers.Trainer(model, arguments, train_dataset=rows).train()
        return dict(model.state_dict()), model.parallel.recompute

    (plain, none), (again, full) = trained(), trained(gradient_checkpointing=True)
    assert none is None and full == "full"
    assert_equal(again, plain)


@pytest.mark.slow
def test_the_trainer_of_a_split_model_checkpoints(ranks, tmp_path):
    pytest.importorskip("accelerate")
    from tests.interop.test_trainer import DROPOUT, trained

    options = {}, dict(gradient_checkpointing=True)
    plain, again = (ranks(2, trained, (1, 2), str(tmp_path), DROPOUT, asked) for asked in options)
    for a, b in zip(plain, again, strict=True):
        assert a["logged"] == b["logged"]
        assert_equal(b["weights"], a["weights"])


# ---- hooks ----


def hooked(world, name, one_by_one):
    """How often each hook of a module fired in a call and its backward, and the first output."""
    model = parallelize(make(name), make_tp(world))
    call = batch(model.config)
    if name == "bert":
        del call["labels"]
    names = [n for n, m in model.named_modules() if n and not isinstance(m, nn.ModuleList)]
    fired, outputs = {n: [0, 0, 0] for n in names}, []

    def note(n, i):
        def hook(*_):
            fired[n][i] += 1

        return hook

    for group in [[n] for n in names if n != "parallel"] if one_by_one else [names]:
        handles = []
        for n in group:
            part = model.get_submodule(n)
            handles += [part.register_forward_pre_hook(note(n, 0)), part.register_forward_hook(note(n, 1))]
            handles.append(part.register_full_backward_hook(note(n, 2)))
        out = model(**call)
        outputs.append(out[-1].detach())
        (out.loss if "loss" in out else out.last_hidden_state.square().mean() + out.pooler_output.mean()).backward()
        for handle in handles:
            handle.remove()
    if one_by_one:
        del fired["parallel"]
    return fired, outputs


@pytest.mark.parametrize("name, R", [("llama", 2), ("gpt2", 1), ("bert", 2), ("bert-mlm", 1)])
def test_a_hook_on_every_part_fires_once(ranks, name, R):
    for fired, _ in ranks(R, hooked, name, False):
        assert set(map(tuple, fired.values())) == {(1, 1, 1)}, fired


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_hook_on_one_part_fires_once(ranks, name):
    for fired, outputs in ranks(2, hooked, name, True):
        assert set(map(tuple, fired.values())) == {(1, 1, 1)}, fired
        assert all(error(x, outputs[0]) < 1e-10 for x in outputs)


# ---- generate ----


class Heard:
    def __init__(self):
        self.columns = []

    def put(self, value):
        self.columns.append(value.tolist())

    def end(self):
        self.columns.append("end")


def generated(model):
    """By transformers' arguments: a streamer, a criterion, a processor and stop strings."""
    tokenizer, streamer, ids = byte_level(), Heard(), batch(model.config)["input_ids"]
    free = model.generate(ids, max_new_tokens=6, do_sample=False)
    criterion = lambda ids, scores, **_: ids[:, -1] == free[0, -3]
    bans = lambda ids, scores: scores.index_fill(1, free[1, -1:], -torch.inf)
    options = dict(max_new_tokens=6, do_sample=False, logits_processor=LogitsProcessorList([bans]))
    text = tokenizer.decode(free[0, -2:])
    out = model.generate(ids, streamer=streamer, stopping_criteria=StoppingCriteriaList([criterion]), **options)
    stopped = model.generate(ids[:1], stop_strings=[text], tokenizer=tokenizer, max_new_tokens=9, do_sample=False)
    beams = model.generate(ids, max_new_tokens=5, do_sample=False, num_beams=3, num_return_sequences=2)
    return out, streamer.columns, stopped, beams


def generated_by_ours(world):
    return generated(parallelize(make("llama", torch.float32), make_tp(world)))


@pytest.mark.parametrize("R", [1, 2])
def test_generate_takes_what_transformers_takes(ranks, R):
    want = generated(make("llama", torch.float32))
    assert want[2].shape[1] < 7 + 9
    for got in ranks(R, generated_by_ours):
        assert torch.equal(got[0], want[0]) and got[1] == want[1] and torch.equal(got[2], want[2])
        assert torch.equal(got[3], want[3])


def test_what_generate_does_not_do_is_named():
    model = parallelize(make("llama", torch.float32))
    ids = batch(model.config)["input_ids"]
    for option in (dict(token_healing=True), dict(guidance_scale=2.0), dict(penalty_alpha=0.5)):
        (name,) = option
        with pytest.raises(NotImplementedError, match=f"{name} is not built"):
            model.generate(ids, max_new_tokens=2, **option)


def refused_on_one_rank(world):
    model = parallelize(make("llama", torch.float32), make_tp(world))
    options = dict(generation_config=50) if world.rank else {}
    with pytest.raises(ValueError, match="generate: generation_config must be"):
        model.generate(torch.ones(1, 2, dtype=torch.int64), max_new_tokens=1, **options)
    torch.distributed.barrier()


def test_what_generate_refuses_on_one_rank_is_an_error_of_all(ranks):
    ranks(2, refused_on_one_rank)


CONFIGS = {  # generation_config.json of public models
    "gemma-2": dict(bos_token_id=2, cache_implementation="hybrid", eos_token_id=[1, 17], pad_token_id=0),
    "gemma-3": dict(cache_implementation="hybrid", do_sample=True, eos_token_id=[1, 6], top_k=64, top_p=0.95),
    "llama-3": dict(bos_token_id=3, do_sample=True, eos_token_id=[8, 9], temperature=0.6, top_p=0.9),
    "qwen": dict(do_sample=True, pad_token_id=5, eos_token_id=[5, 6], repetition_penalty=1.05, top_k=20, top_p=0.8),
    "neutral": {key: value for key, value in DEFAULTS.items() if value is not None},
    "off": dict(guidance_scale=1, use_mtp=False, remove_invalid_values=False, temperature=0.0, num_assistant_tokens=5),
    "somebody's own": dict(chat_format="chatml", max_window_size=24000, max_length=19),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_generation_configs_are_read_as_transformers_reads_them(name):
    theirs = make("llama", torch.float32)
    ids = batch(theirs.config)["input_ids"]
    theirs.generation_config = GenerationConfig.from_dict(dict(eos_token_id=96) | CONFIGS[name])
    options = {} if "max_length" in CONFIGS[name] else dict(max_new_tokens=8)
    want = theirs.generate(ids, do_sample=False, **options)
    assert torch.equal(parallelize(theirs).generate(ids, do_sample=False, **options), want)


def test_none_in_a_call_switches_off_what_the_config_says():
    theirs = make("llama", torch.float32)
    ids = batch(theirs.config)["input_ids"]
    call = dict(max_new_tokens=8, do_sample=False)
    theirs.generation_config.repetition_penalty = 1.5
    with_penalty = theirs.generate(ids, **call)
    want = theirs.generate(ids, repetition_penalty=None, **call)
    assert not torch.equal(want, with_penalty)
    assert torch.equal(parallelize(theirs).generate(ids, repetition_penalty=None, **call), want)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert-mlm", "llama base"])
def test_one_graph_serves_calls_of_any_size(name):
    torch._dynamo.reset()
    module, counter = parallelize(model_of(name)).eval(), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    for size in (2, 8), (3, 9), (2, 12):
        ids = batch(module.config, *size)["input_ids"]
        graph, eager = (call(input_ids=ids, use_cache=False) for call in (compiled, module))
        assert type(graph) is type(eager) and torch.equal(graph[0], eager[0])
    assert counter.frame_count == 2
