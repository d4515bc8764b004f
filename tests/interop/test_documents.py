"""Meaning that a call's arguments carry in passing, against the module of transformers that was parallelized: documents
that position_ids begin, rows whose logits are kept, labels that are shifted already."""

import pytest
import torch
import transformers

from tests.common import assert_close, error, make_tp
from tests.interop.launched import launched
from tests.interop.test_trainer import arguments
from tests.models.common import batch
from tests.models.theirs import NAMES, loss_of, make
from tpfuse import TrainerMixin, parallelize

F64 = torch.float64
CAUSAL = [name for name in NAMES if not name.startswith("bert")]
LENGTHS = (4, 1, 6), (7, 4)  # of the documents of two rows


def packed(model, rows=2):
    """Rows of documents, whose first labels count: transformers leaves those out that a collator has marked."""
    ids = batch(model.config, size=rows, seq=11)["input_ids"]
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in LENGTHS[:rows]])
    labels = ids.clone()
    labels[:, 2] = -100
    return dict(input_ids=ids, position_ids=positions, labels=labels)


def outcome(model, call, **options):
    """Logits, hidden states, the loss in fp64, and the gradient of the rows."""
    call = dict(call)
    rows = model.get_input_embeddings()(call.pop("input_ids")).detach().requires_grad_()
    out = model(inputs_embeds=rows, output_hidden_states=True, use_cache=False, **call, **options)
    loss = loss_of(out.logits, call["labels"], shift=True)
    if out.loss.dtype == F64:  # theirs is fp32
        assert error(out.loss, loss) < 1e-10
    loss.backward()
    states = {f"hidden {i}": h.detach() for i, h in enumerate(out.hidden_states)}
    return states | dict(logits=out.logits.detach(), loss=loss.detach(), rows=rows.grad)


def of_ours(world, name, call):
    return outcome(parallelize(make(name), make_tp(world)), call)


CASES = [("llama", 2), ("gpt2", 1), ("mistral", 1)]
SLOW = [(name, 1) for name in CAUSAL if (name, 1) not in CASES] + [("gpt2", 2), ("qwen2", 2)]


@pytest.mark.parametrize("name, R", CASES + [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW])
def test_position_ids_that_begin_again_are_documents(ranks, name, R):
    model = make(name)
    call = packed(model)
    want = outcome(model, call)
    alone = outcome(model, call | dict(attention_mask=torch.ones_like(call["input_ids"])))
    assert error(want["logits"], alone["logits"]) > 1e-3  # with a mask transformers does not read them so
    for got in ranks(R, of_ours, name, call):
        assert_close(got, want, F64)


def test_the_conditions_are_those_of_transformers():
    """A mask, or a cache that the config asks for, and each row is one document; [1, S] is for all rows."""
    theirs = make("llama")
    ours, call = parallelize(make("llama")), packed(theirs)
    del call["labels"]
    ids, again = call["input_ids"], call["position_ids"][:1]
    masks = dict(attention_mask=torch.ones_like(ids))
    for options in (masks, {}, dict(use_cache=False), dict(use_cache=False, position_ids=again)):
        options = call | options
        assert error(ours(**options).logits, theirs(**options).logits.detach()) < 1e-10
    for model in (ours, theirs):
        model.train().gradient_checkpointing_enable()
    assert error(ours(**call).logits, theirs(**call).logits.detach()) < 1e-10
    with pytest.raises(NotImplementedError, match="use_cache is not built; generate keeps a cache; leave it out"):
        ours(**call, use_cache=True)
    with pytest.raises(NotImplementedError, match="past_key_values is not built; generate keeps a cache; give all"):
        ours(**call, past_key_values=transformers.DynamicCache(), use_cache=False)
    with pytest.raises(ValueError, match=r"attention_mask must be bool or integer \(2, 11\) .* \(2, 1, 11, 11\)"):
        ours(ids, attention_mask=torch.zeros(2, 1, 11, 11, dtype=F64))


def test_a_classifier_per_sequence_reads_one_document_a_row():
    torch.manual_seed(0)
    config = dict(vocab_size=97, n_positions=32, n_embd=48, n_layer=1, n_head=4, num_labels=3, pad_token_id=0)
    make_config = lambda: transformers.GPT2Config(**config, use_cache=False)
    model = parallelize(transformers.GPT2ForSequenceClassification(make_config()))
    call = packed(model)
    with pytest.raises(ValueError, match="GPT2ForSequenceClassification: position_ids begin again, which packs"):
        model(call["input_ids"], position_ids=call["position_ids"])
    theirs = transformers.GPT2ForTokenClassification(make_config()).double().eval()
    want = theirs(call["input_ids"], position_ids=call["position_ids"], labels=call["labels"] % 3)
    got = parallelize(theirs)(call["input_ids"], position_ids=call["position_ids"], labels=call["labels"] % 3)
    assert error(got.logits, want.logits.detach()) < 1e-10 and error(got.loss, want.loss.detach()) < 1e-6


# ---- rows whose logits are kept, and labels that are shifted already ----


KEPT = {
    "all": 0,
    "last": 3,
    "more": 40,
    "positions": torch.tensor([1, 5, 5, 10]),
    "of each row": torch.tensor([[1, 2], [9, 4]]),
    "mask": torch.rand(2, 11, generator=torch.Generator().manual_seed(0)) < 0.4,
}


def kept(world, call, tied):
    """Logits and the gradient of the rows, of one row a document and of several."""
    return kept_of(parallelize(make("llama", tie_word_embeddings=tied), make_tp(world)), call)


def kept_of(model, call):
    found = {}
    for name, keep in KEPT.items():
        for positions in ({}, dict(position_ids=call["position_ids"])):
            rows = model.get_input_embeddings()(call["input_ids"]).detach().requires_grad_()
            out = model(inputs_embeds=rows, logits_to_keep=keep, use_cache=False, **positions).logits
            (out * torch.linspace(-1, 1, out.numel(), dtype=F64).view(out.shape)).sum().backward()
            found |= {f"{name} {len(positions)}": out.detach(), f"d {name} {len(positions)}": rows.grad}
    return found


@pytest.mark.parametrize("R, tied", [(1, True), (2, False)])
def test_logits_of_the_rows_that_are_kept(ranks, R, tied):
    model = make("llama", tie_word_embeddings=tied)
    call = packed(model)
    want = kept_of(model, call)
    for got in ranks(R, kept, call, tied):
        assert_close(got, want, F64)


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(logits_to_keep=-1), "logits_to_keep must be"),
        (dict(logits_to_keep=torch.tensor([11])), r"logits_to_keep must lie in 0 to 10, got \[11\]"),
        (dict(logits_to_keep=torch.ones(3, 2, dtype=torch.int64)), r"int64 positions \[K\] or \[2, K\], or bool"),
        (dict(logits_to_keep=2, labels=torch.ones(2, 11, dtype=torch.int64)), "give labels or logits_to_keep"),
        (dict(shift_labels=torch.ones(2, 10, dtype=torch.int64)), r"shift_labels must be int64 \(2, 11\)"),
    ],
)
def test_what_may_not_be_kept(options, words):
    model = parallelize(make("llama"))
    with pytest.raises(ValueError, match=words):
        model(packed(model)["input_ids"], **options)
    with pytest.raises(NotImplementedError, match=f"{next(iter(options))} is not built"):
        parallelize(make("bert-mlm"))(packed(model)["input_ids"], **options)


def shifted(model, call, shift_labels):
    """With labels beside them, which transformers then ignores; of documents too, and summed for each label."""
    ids, positions = call["input_ids"], dict(position_ids=call["position_ids"], use_cache=False)
    plain = [model(ids, labels=ids, shift_labels=shift_labels, **options).loss.detach() for options in ({}, positions)]
    return torch.stack(plain).double()


def shifted_of_ours(world, call, shift_labels):
    model = parallelize(make("llama"), make_tp(world))
    ids, positions = call["input_ids"], dict(position_ids=call["position_ids"], use_cache=False)
    each = [model(ids, shift_labels=shift_labels, reduction="none", **o).loss for o in ({}, positions)]
    aligned = [model(ids, labels=call["labels"], reduction="none", **o).loss for o in ({}, positions)]
    assert all(not x[:, 0].any() and x[:, 1].all() and not x[:, 2].any() for x in aligned)
    count = (shift_labels != -100).sum()
    return shifted(model, call, shift_labels), torch.stack([x.sum() / count for x in each]).detach()


@pytest.mark.parametrize("R", [1, 2])
def test_labels_that_are_shifted_already(ranks, R):
    model = make("llama")
    call = packed(model)
    labels = call["input_ids"].flip(1)
    labels[0, :3] = -100
    want = shifted(model, call, labels)
    for got, mean in ranks(R, shifted_of_ours, call, labels):
        assert error(got, want) < 1e-6 and error(mean, got) < 1e-6


# ---- the collator ----


class Trainer(TrainerMixin, transformers.Trainer):
    pass


def flattened(world, folder, plain):
    with launched(world):
        model = make("llama", torch.float32)
        model = model if plain else parallelize(model, make_tp(world))
        data = [dict(input_ids=list(range(5, 5 + n))) for n in (9, 5, 12, 7, 8, 3)]
        options = dict(per_device_train_batch_size=3, gradient_accumulation_steps=1, max_steps=2)
        trainer = (transformers.Trainer if plain else Trainer)(
            model, arguments(folder, 1, **options), train_dataset=data,
            data_collator=transformers.DataCollatorWithFlattening(),
        )  # fmt: skip
        trainer.train()
        return [e["loss"] for e in trainer.state.log_history if "loss" in e]


@pytest.mark.parametrize("R", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_collator_with_flattening(ranks, tmp_path, R):
    (want,) = ranks(1, flattened, str(tmp_path), True)
    for got in ranks(R, flattened, str(tmp_path), False):
        assert got == pytest.approx(want, rel=1e-5)
