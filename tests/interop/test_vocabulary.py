"""The embedding and the head of a parallelized model, and another number of rows of both, against transformers."""

import copy

import pytest
import torch
import transformers
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.common import assert_equal, error, make_tp
from tests.interop.launched import launched
from tests.models.common import batch
from tests.models.theirs import make
from tpfuse import MainGrad, TensorParallel, as_dtensor, parallelize
from tpfuse.models.files.write import whole_tensors
from tpfuse.training.data_parallel import under_ddp

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
F64 = torch.float64
TIED, UNTIED = dict(tie_word_embeddings=True), dict(tie_word_embeddings=False)


# ---- the layers ----


def ends(world, name, options, sp):
    """Rows of a batch of ids, the logits of hidden states, and the gradients that come back through both."""
    model = parallelize(make(name, **options), make_tp(world, sp))
    return through(model), model.get_input_embeddings().weight.shape, model.get_output_embeddings().weight.shape


def through(model):
    ids = batch(model.config)["input_ids"]
    rows = model.get_input_embeddings()(ids)
    hidden = rows.detach().requires_grad_()
    logits = model.get_output_embeddings()(hidden)
    weigh = lambda x: (x * torch.linspace(-1, 1, x.numel(), dtype=F64).view(x.shape)).sum()
    (weigh(rows) + weigh(logits)).backward()
    return dict(rows=rows.detach(), logits=logits.detach(), hidden=hidden.grad) | gradient(model)


def gradient(model):
    """The whole gradient of the embedding, and of a head of its own."""
    found = {}
    for name, layer in dict(embedding=model.get_input_embeddings(), head=model.get_output_embeddings()).items():
        if not hasattr(model, "parallel"):
            found[f"d {name}"] = layer.weight.grad
            continue
        g, tp = (
            (layer if layer.shard("weight") is not None else model.parallel.embedding).shard("weight").grad,
            layer.tp,
        )
        if tp.size > 1:
            every = [None] * tp.size
            torch.distributed.all_gather_object(every, g, group=tp.group)
            g = torch.cat(every)
        found[f"d {name}"] = g
    return found


@pytest.mark.parametrize("R, sp, options", [(1, False, TIED), (2, True, UNTIED), (4, True, TIED), (2, False, TIED)])
def test_the_ends_take_whole_tensors(ranks, R, sp, options):
    want = through(make("llama", **options))
    for got, *both in ranks(R, ends, "llama", options, sp):
        assert all(error(got[key], x) < 1e-10 for key, x in want.items())
        assert both == [(97, 48), (97, 48)]


def watched(world):
    """What hooks on both ends see in a call, and what a hook that adds to the rows changes."""
    model = parallelize(make("gpt2"), make_tp(world))
    call, seen = batch(model.config), []
    plain = model(**call).logits
    first, last = model.get_input_embeddings(), model.get_output_embeddings()
    handles = [first.register_forward_hook(lambda m, args, out: seen.append((args[0].shape, out.shape)))]
    handles.append(last.register_forward_hook(lambda m, args, out: seen.append("head")))
    during = model(**call).logits
    model.enable_input_require_grads()
    model.requires_grad_(False)
    assert model(**call).logits.requires_grad
    model.disable_input_require_grads()
    for handle in handles:
        handle.remove()
    first.register_forward_hook(lambda m, args, out: out + 1)
    return plain, during, seen, model(**call).logits


def test_hooks_on_the_ends(ranks):
    theirs = make("gpt2")
    theirs.get_input_embeddings().register_forward_hook(lambda m, args, out: out + 1)
    want = theirs(**batch(theirs.config)).logits
    for plain, during, seen, changed in ranks(2, watched):
        assert error(during, plain) < 1e-10 and error(changed, want) < 1e-10
        assert seen == [((3, 7), (3, 7, 48)), "head"] * 2


def unlike(world):
    model = parallelize(make("gpt2"), make_tp(world))
    model.get_input_embeddings()(torch.full((1 + world.rank, 3), 5))


def test_ids_that_the_ranks_do_not_share(ranks):
    with pytest.raises(ValueError, match=r"get_input_embeddings\(\): input_ids must be the same on every"):
        ranks(2, unlike)


def test_an_id_beyond_the_vocabulary():
    model = parallelize(make("gpt2"))
    for word in (97, -1):
        with pytest.raises(ValueError, match=r"get_input_embeddings\(\): input_ids must"):
            model.get_input_embeddings()(torch.tensor([[word]]))
    with pytest.raises(
        ValueError, match=r"get_output_embeddings\(\): hidden states must be \[B, S, D\], got \(2, 48\)"
    ):
        model.get_output_embeddings()(torch.ones(2, 48, dtype=F64))


def test_another_module_in_their_place():
    model = parallelize(make("gpt2"))
    model.set_input_embeddings(model.get_input_embeddings())
    model.set_output_embeddings(model.get_output_embeddings())
    model.tie_weights()
    for method in ("set_input_embeddings", "set_output_embeddings"):
        with pytest.raises(
            NotImplementedError, match=f"{method} of a parallelized GPT2LMHeadModel: the table is split"
        ):
            getattr(model, method)(torch.nn.Embedding(97, 48))
    model.config.tie_word_embeddings = False
    with pytest.raises(ValueError, match="config.tie_word_embeddings=False, and it was parallelized with True; set it"):
        model.tie_weights()
    copied = copy.deepcopy(model)
    assert copied.get_output_embeddings().weight is copied.get_input_embeddings().weight
    assert copied.get_output_embeddings().weight is not model.get_output_embeddings().weight


# ---- resizing ----


def resized(model, arguments):
    torch.manual_seed(5)
    layer = model.resize_token_embeddings(**arguments)
    assert layer is model.get_input_embeddings() and layer.num_embeddings == model.config.vocab_size
    call = batch(model.config, seed=3)
    if model.get_output_embeddings() is None:
        del call["labels"]
    return call


def resized_ours(world, name, options, arguments, path):
    model = parallelize(make(name, **options), make_tp(world))
    before = list(model.parameters())
    out = model(**resized(model, arguments))
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    (out.loss if "loss" in out else out.last_hidden_state.sum()).backward()
    torch.optim.AdamW(model.parameters()).step()
    fresh = parallelize(make(name, **options), make_tp(world))
    resized(fresh, arguments)
    if path:
        fresh.save_pretrained(path)
    tensors = {key: x.clone() for key, x in whole_tensors(fresh.parallel.files)}
    return out[0 if "loss" not in out else 1].detach(), tensors, model.parallel.config.vocab_size


GROWN, SHRUNK = dict(new_num_tokens=103), dict(new_num_tokens=90)
CASES = [
    ("llama", UNTIED, 2, GROWN),
    ("gpt2", {}, 4, SHRUNK),
    ("bert-mlm", TIED, 2, GROWN),
]
MORE = [
    ("llama", TIED, 1, GROWN),
    ("llama", UNTIED, 4, dict(new_num_tokens=101, mean_resizing=False)),
    ("gpt2", {}, 2, dict(pad_to_multiple_of=64)),
    ("bert-mlm", UNTIED, 4, GROWN),
    ("bert", {}, 2, GROWN),
]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in MORE]


@pytest.mark.parametrize("name, options, R, arguments", CASES)
def test_the_rows_are_those_of_transformers(ranks, tmp_path, name, options, R, arguments):
    """Bitwise, whatever the split; and the whole model goes on with them."""
    theirs = make(name, **options)
    out = theirs(**resized(theirs, arguments))
    want = dict(theirs.state_dict())
    for logits, tensors, vocab in ranks(R, resized_ours, name, options, arguments, str(tmp_path)):
        assert vocab == theirs.config.vocab_size
        assert error(logits, out.logits if "logits" in out else out.last_hidden_state) < 1e-10
        assert_equal(tensors, {key: want[key] for key in tensors})
    again = type(theirs).from_pretrained(tmp_path, dtype=F64)
    assert again.config.vocab_size == vocab and again.get_input_embeddings().num_embeddings == vocab
    assert_equal(dict(again.state_dict()), want)


def test_nothing_to_do_and_what_stays():
    model = parallelize(make("llama"))
    model.get_input_embeddings().weight.requires_grad_(False)
    layer = model.get_input_embeddings()
    assert model.resize_token_embeddings() is layer and model.resize_token_embeddings(97) is layer
    model.train()
    model(**batch(model.config)).loss.backward()
    model.resize_token_embeddings(100)
    assert not layer.weight.requires_grad and model.get_output_embeddings().weight.requires_grad
    assert model.get_output_embeddings().weight.grad is None and model.training
    tokens = model.generate(batch(model.config)["input_ids"], max_new_tokens=3, do_sample=False)
    assert tokens.shape == (3, 10)
    assert copy.deepcopy(model)(tokens).logits.shape[-1] == 100


def test_an_adapter_holds_no_rows(tmp_path):
    peft = pytest.importorskip("peft")
    model = parallelize(make("llama"))
    model.resize_token_embeddings(100)
    model.add_adapter(peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"]))
    with pytest.warns(UserWarning, match="files hold no rows of the vocabulary, which was resized; to keep these"):
        model.save_pretrained(tmp_path)


def test_an_optimizer_that_has_stepped_is_stale_and_says_so():
    model = parallelize(make("gpt2"))
    optimizer = torch.optim.AdamW(model.parameters())
    step = lambda: model(**batch(model.config)).loss.backward() or optimizer.step()
    step()
    model.resize_token_embeddings(100)
    with pytest.raises(RuntimeError, match="size"):
        step()


def unequal(world, how):
    model = parallelize(make("llama"), make_tp(world))
    torch.manual_seed(world.rank)
    before = {key: x.clone() for key, x in model.named_parameters()}
    try:
        model.resize_token_embeddings(dict(seed=100, number=100 + world.rank, few=1)[how])
    except ValueError as error:
        assert model.config.vocab_size == 97 and all(torch.equal(before[k], x) for k, x in model.named_parameters())
        return str(error)


@pytest.mark.parametrize(
    "how, R, words",
    [
        ("seed", 2, "embedding.weight (call torch.manual_seed with one seed on every rank before)"),
        ("number", 2, "new_num_tokens must be the same on every"),
        ("few", 2, "new_num_tokens=1 leaves a rank of tensor-parallel size 2 with nothing"),
    ],
)
def test_what_the_ranks_refuse_together(ranks, how, R, words):
    assert all(words in message for message in ranks(R, unequal, how))


def test_a_wrapper_that_was_never_made_holds_no_model():
    left = DistributedDataParallel.__new__(DistributedDataParallel)  # as a constructor leaves it that raises at once
    assert not under_ddp(torch.nn.Linear(2, 2)) and left is not None


def test_what_cannot_be_resized():
    model = parallelize(make("llama"))
    for asked in (dict(new_num_tokens=0), dict(new_num_tokens=1.5), dict(pad_to_multiple_of=0)):
        with pytest.raises(ValueError, match=f"resize_token_embeddings: {next(iter(asked))} must be"):
            model.resize_token_embeddings(**asked)
    main = MainGrad(model)
    with pytest.raises(ValueError, match="embedding.weight has a main_grad; resize before tpfuse.MainGrad is made"):
        model.resize_token_embeddings(100)
    del main
    with torch.device("meta"):
        meta = transformers.LlamaForCausalLM(make("llama").config)
    with pytest.raises(ValueError, match="embedding.weight is on the meta device; give it its values before"):
        parallelize(meta).resize_token_embeddings(100)


def refusal(action):
    try:
        action()
    except ValueError as error:
        return str(error)


def wrapped(world):
    """Under DDP, as DTensors, and under fully_shard, where hooks see what the model's own call does."""
    with launched(world):
        mesh = world.mesh(world.size, 1)
        model = parallelize(make("gpt2"), TensorParallel(mesh["tp"]), dp=mesh["dp"])
        ddp = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
        messages = [refusal(lambda: model.resize_token_embeddings(100))]
        del ddp
        as_dtensor(model.parallel, mesh["tp"])
        messages.append(refusal(lambda: model.resize_token_embeddings(100)))
        call, seen = batch(model.config), []
        plain, rows = model(**call).logits, torch.ones(1, 2, 48, dtype=F64)
        fully_shard(model.parallel, mesh=mesh["dp"])
        handle = model.get_input_embeddings().register_forward_hook(lambda m, args, out: seen.append(out.shape))
        assert error(model(**call).logits, plain) < 1e-10
        handle.remove()
        model.parallel.reshard()
        messages.append(refusal(lambda: model.get_input_embeddings()(call["input_ids"])))
        messages.append(refusal(lambda: model.get_output_embeddings()(rows)))
        return messages, seen


def test_wrapped_models(ranks):
    for (ddp, dtensor, *ends), seen in ranks(2, wrapped):
        assert "it is under DistributedDataParallel; resize it before" in ddp
        assert "embedding.weight is held by fully_shard or as_dtensor; resize before" in dtensor
        assert all("put_embeddings(): fully_shard holds a part of this rank's rows" in message for message in ends)
        assert seen == [(21, 48)]
