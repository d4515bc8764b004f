"""Modules of transformers that classify, parallelized: forward, files, adapters, the Trainer.

Spans: tpfuse/interop: every file of it, on models with a classification head.
"""

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.common import assert_equal, make_tp
from tests.interop.launched import LENGTH, VOCAB, launched, weights
from tests.interop.test_trainer import Trainer, arguments
from tests.models.families import encoders
from tests.models.test_classify import F64, batch, close, make, want
from tests.models.test_classify import step as of_module
from tpfuse import TensorParallel, load_adapter, load_checkpoint, parallelize, save_adapter, save_checkpoint

LABELS = 4


class Named:
    """A parallelized module as ``step`` takes a model: its call, and the names of what is inside."""

    def __init__(self, module):
        self.module, self.parallel = module, module.parallel
        self.kind = None

    def __call__(self, **call):
        out = self.module(**call)
        self.kind = type(out).__name__
        return out

    def __getattr__(self, name):
        return getattr(self.parallel, name)


def split(world, name, per, sp, saved):
    module = Named(parallelize(make(name, per), None if world is None else make_tp(world, sp)))
    found = of_module(module, batch(per, "right"))
    module.module.save_pretrained(saved)
    return found, module.kind, type(module.module).__name__


@pytest.mark.parametrize("name, per", [("gpt2", "sequence"), ("llama", "token"), ("bert", "sequence")])
def test_forward_gradients_and_files(ranks, tmp_path, name, per):
    model, call = make(name, per), batch(per, "right")
    exact, kind = want(model, call), type(model(**call)).__name__
    for sp in True, False:
        for got, its, cls in ranks(2, split, name, per, sp, tmp_path):
            if per == "token":  # theirs is fp32
                assert abs(got["loss"] - exact["loss"]) < 1e-5
            close(got, exact)
            assert its == kind and cls == type(model).__name__
    again = type(model).from_pretrained(tmp_path, dtype=F64)
    assert_equal(again.state_dict(), model.state_dict())


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_the_config_is_followed_from_call_to_call(tmp_path, name):
    """As transformers reads it: the problem of the labels, the token that is padding; and a save keeps it."""
    theirs, call = make(name, "sequence"), batch("sequence", "right")
    model = parallelize(make(name, "sequence"))
    for module in theirs, model:
        module.config.problem_type, module.config.pad_token_id = "multi_label_classification", 5
        module.config.id2label = {i: f"kind {i}" for i in range(module.config.num_labels)}
    call["labels"] = torch.nn.functional.one_hot(call["labels"], model.config.num_labels).double()
    if name == "gpt2":
        call["input_ids"] = call["input_ids"].masked_fill(call.pop("attention_mask") == 0, 5)
    model.save_pretrained(tmp_path)  # before any call
    assert torch.allclose(model(**call).loss, theirs(**call).loss)
    again = type(theirs).from_pretrained(tmp_path, dtype=F64)
    assert again.config.id2label == theirs.config.id2label and again.config.pad_token_id == 5
    assert torch.allclose(again(**call).loss, theirs(**call).loss)


def test_a_class_that_is_not_built():
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=9)
    with pytest.raises(
        ValueError, match=r"module must be transformers' own .*GPT2ForSequenceClassification.*, got .*QuestionA"
    ):
        parallelize(transformers.GPT2ForQuestionAnswering(config))


def test_it_generates_nothing():
    with pytest.raises(NotImplementedError, match="generate: GPT2ForSequenceClassification is not a causal model with"):
        parallelize(small()).generate(ids()[0], max_new_tokens=1)


def test_a_module_on_the_meta_device():
    with torch.device("meta"):
        model = make("bert", "sequence")
    assert parallelize(model).parallel.classifier.weight.is_meta


# ---- adapters and checkpoints ----


def small(seed=0, **options):
    torch.manual_seed(seed)
    sizes = dict(vocab_size=VOCAB, n_positions=16, n_embd=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None)
    config = transformers.GPT2Config(**sizes | dict(num_labels=LABELS, pad_token_id=0) | options)
    return transformers.GPT2ForSequenceClassification(config)


NO_DROPOUT = dict(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)


def ids():
    g = torch.Generator().manual_seed(0)
    return torch.randint(1, VOCAB, (6, LENGTH), generator=g), torch.randint(LABELS, (6,), generator=g)


def steps(model, count=2):
    x, labels = ids()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for _ in range(count):
        model(x, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model(x).logits.detach()


def adapted(world, folder):
    peft = pytest.importorskip("peft")
    model = parallelize(small(**NO_DROPOUT), make_tp(world)).train()
    model.add_adapter(peft.LoraConfig(task_type="SEQ_CLS", r=4, lora_alpha=8, target_modules=["c_attn"]))
    trained = [name for name, p in model.named_parameters() if p.requires_grad and ".lora." not in name]
    logits = steps(model)
    save_adapter(model, folder)
    again = load_adapter(parallelize(small(**NO_DROPOUT), make_tp(world)), folder)
    assert not any(p.requires_grad for p in again.parameters())
    return trained, logits, again(ids()[0]).logits.detach()


def test_the_head_is_trained_beside_adapters_and_kept_with_them(ranks, tmp_path):
    """In PEFT's files, which PEFT loads."""
    peft = pytest.importorskip("peft")
    trained, logits, again = ranks(2, adapted, tmp_path)[0]
    assert trained == ["parallel.classifier.weight"] and torch.equal(again, logits)
    theirs = peft.PeftModel.from_pretrained(small(**NO_DROPOUT).eval(), tmp_path)
    assert type(theirs).__name__ == "PeftModelForSequenceClassification"
    assert torch.allclose(theirs(ids()[0]).logits, logits, atol=1e-5)
    assert not torch.allclose(small(**NO_DROPOUT).eval()(ids()[0]).logits, logits, atol=1e-2)
    theirs.save_pretrained(tmp_path / "theirs")
    model = load_adapter(parallelize(small(**NO_DROPOUT)), tmp_path / "theirs")
    assert torch.allclose(model(ids()[0]).logits, logits, atol=1e-5)
    file = tmp_path / "theirs" / "adapter_model.safetensors"
    save_file({name: t for name, t in load_file(file).items() if "score" not in name}, file)
    with pytest.raises(ValueError, match=r"base_model.model.score.weight in .* must be \(4, 32\), got none"):
        load_adapter(parallelize(small(**NO_DROPOUT)), tmp_path / "theirs")


def adapted_encoder(world, name, folder):
    peft = pytest.importorskip("peft")
    model = parallelize(encoders.make(name, "sequence"), make_tp(world)).train(False)
    model.add_adapter(peft.LoraConfig(task_type="SEQ_CLS", r=4, lora_alpha=8, target_modules="all-linear"))
    trained = [key for key, p in model.named_parameters() if p.requires_grad and ".lora." not in key]
    call, optimizer = encoders.batch("sequence"), torch.optim.SGD(model.parameters(), lr=0.5)
    model(**call).loss.backward()
    optimizer.step()
    save_adapter(model, folder)
    again = load_adapter(parallelize(encoders.make(name, "sequence"), make_tp(world)), folder)
    assert torch.equal(again(**call).logits, model(**call).logits)
    return trained, model(**call).logits.detach()


@pytest.mark.parametrize("name", ["roberta", "distilbert"])
def test_a_head_of_two_layers_is_trained_whole_beside_adapters(ranks, tmp_path, name):
    """And PEFT loads it, whose modules_to_save are the same."""
    peft = pytest.importorskip("peft")
    trained, logits = ranks(2, adapted_encoder, name, tmp_path)[0]
    layers = {"parallel.pooler", "parallel.classifier"}
    assert set(trained) == {f"{layer}.{leaf}" for layer in layers for leaf in ("weight", "bias")}
    model = peft.PeftModel.from_pretrained(encoders.make(name, "sequence"), tmp_path)
    call = encoders.batch("sequence")
    assert torch.allclose(model(**call).logits, logits, atol=1e-5)
    with model.disable_adapter():
        assert not torch.allclose(model(**call).logits, logits, atol=1e-2)
    model.save_pretrained(tmp_path / "theirs")
    again = load_adapter(parallelize(encoders.make(name, "sequence")), tmp_path / "theirs")
    assert torch.allclose(again(**call).logits, logits, atol=1e-5)


def checkpointed(world, folder, first):
    model = parallelize(small(seed=0 if first else 5, **NO_DROPOUT), make_tp(world))
    if first:
        logits = steps(model)
        save_checkpoint(folder, model, torch.optim.SGD(model.parameters(), lr=0.5), step=2)
        return logits
    load_checkpoint(folder, model)
    return model(ids()[0]).logits.detach()


def test_a_checkpoint_holds_the_head(ranks, tmp_path):
    logits = ranks(2, checkpointed, tmp_path, True)[0]
    assert torch.allclose(ranks(1, checkpointed, tmp_path, False)[0], logits, atol=1e-5)


# ---- the Trainer ----


def rows(count, seed):
    """Rows that are padded on the right to unequal lengths."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(1, VOCAB, (count, LENGTH), generator=g)
    mask = torch.arange(LENGTH) < LENGTH - torch.arange(count)[:, None] % 4
    labels = torch.randint(LABELS, (count,), generator=g)
    rows = zip(x.masked_fill(~mask, 0), mask.long(), labels, strict=True)
    return [dict(input_ids=i, attention_mask=m, labels=y) for i, m, y in rows]


def accuracy(prediction):
    return dict(
        count=len(prediction.label_ids), hits=int((prediction.predictions.argmax(-1) == prediction.label_ids).sum())
    )


def trained(world, layout, folder):
    with launched(world):
        mesh = world.mesh(*layout)
        model = parallelize(small(), TensorParallel(mesh["tp"]), dp=mesh["dp"], seed=3)
        data = dict(train_dataset=rows(24, 0), eval_dataset=rows(7, 1), compute_metrics=accuracy)
        trainer = Trainer(model, arguments(folder, layout[0]), **data)
        trainer.train()
        logged = [(e["loss"], e["grad_norm"]) for e in trainer.state.log_history if "grad_norm" in e]
        metrics = trainer.evaluate()
        return logged, [metrics[f"eval_{key}"] for key in ("count", "hits")], weights(trainer.model)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(1, 2), (2, 2)])
def test_the_trainer_trains_it_as_one_process_does(ranks, tmp_path, layout):
    pytest.importorskip("accelerate")
    ((logged, counted, exact),) = ranks(1, trained, (1, 1), str(tmp_path))
    assert counted[0] == 7
    assert all(0.5 < loss < 2 for loss, _ in logged)  # means over micro-batches and replicas: about log 4
    for its, metrics, got in ranks(layout[0] * layout[1], trained, layout, str(tmp_path)):
        for pair, its_own in zip(its, logged, strict=True):
            assert pair == pytest.approx(its_own, rel=1e-5)
        assert metrics == counted
        assert max((got[name] - weight).abs().max() for name, weight in exact.items()) < 1e-6
