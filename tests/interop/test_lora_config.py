"""What PEFT's users write, on a parallelized module: transformers' add_adapter, PEFT's files, named errors."""

import contextlib

import pytest
import torch

from tests.common import make_tp
from tests.interop.launched import VOCAB, small
from tests.models.theirs import make
from tpfuse import merge_lora, parallelize

peft = pytest.importorskip("peft")
NO_DROPOUT = dict(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)


def config(**options):
    return peft.LoraConfig(**dict(r=4, lora_alpha=8, target_modules=["c_attn", "mlp.c_proj"]) | options)


def ids():
    return torch.randint(VOCAB, (2, 7), generator=torch.Generator().manual_seed(0))


def adapted(world, folder):
    model = parallelize(small(**NO_DROPOUT), make_tp(world)).train()
    model.add_adapter(config())
    count = model.num_parameters(only_trainable=True)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for _ in range(2):
        model(ids(), labels=ids()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(f"{folder}/adapter")
    loss = model(ids(), labels=ids()).loss.item()
    merge_lora(model)
    model.save_pretrained(f"{folder}/merged")
    again = parallelize(small(**NO_DROPOUT), make_tp(world))
    again.load_adapter(f"{folder}/adapter")
    return count, loss, again(ids(), labels=ids()).loss.item()


@pytest.mark.slow
def test_its_files_are_pefts(ranks, tmp_path):
    """PEFT loads what a split module writes on the unsplit model; both, and the merged weights, have one loss."""
    for R in (1, 2):
        folder = tmp_path / str(R)
        for count, loss, again in ranks(R, adapted, str(folder)):
            theirs = peft.PeftModel.from_pretrained(small(**NO_DROPOUT), folder / "adapter", is_trainable=True)
            merged = type(small()).from_pretrained(folder / "merged")
            for value in (again, theirs(ids(), labels=ids()).loss.item(), merged(ids(), labels=ids()).loss.item()):
                assert value == pytest.approx(loss, abs=2e-6)
            if R == 1:
                assert count == theirs.get_nb_trainable_parameters()[0]
            assert loss < small(**NO_DROPOUT)(ids(), labels=ids()).loss - 1e-3


@pytest.mark.parametrize("asked", [None, "all-linear", r".*\.c_fc", ["attn.c_proj"]])
def test_targets_mean_what_they_mean_to_peft(asked):
    theirs = peft.get_peft_model(small(), config(target_modules=asked, fan_in_fan_out=True, task_type="CAUSAL_LM"))
    model = parallelize(small())
    model.add_adapter(config(target_modules=asked))
    assert model.num_parameters(only_trainable=True) == theirs.get_nb_trainable_parameters()[0]


@pytest.mark.parametrize("asked", ["all-linear", r".*\.dense", ["dense"], ["attention.output.dense"]])
def test_layers_that_peft_alone_would_adapt_are_named(asked):
    theirs = peft.get_peft_model(make("bert-mlm"), config(target_modules=asked))
    model = parallelize(make("bert-mlm"))
    if asked == ["attention.output.dense"]:
        model.add_adapter(config(target_modules=asked))
        assert model.num_parameters(only_trainable=True) == theirs.get_nb_trainable_parameters()[0]
        return
    name = "cls.predictions.transform.dense"
    assert hasattr(theirs.get_base_model().get_submodule(name), "lora_A")
    with pytest.raises(ValueError, match=f"add_adapter: target_modules=.* names {name}, whose adapters are not built"):
        model.add_adapter(config(target_modules=asked))
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("asked", [r".*(decoder|query)", ["decoder", "query"]])
@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_peft_would_adapt_is_named(asked, tied):
    """Where its weight is the embedding's too, which has no name of its own among ours."""
    theirs = peft.get_peft_model(make("bert-mlm", tie_word_embeddings=tied), config(target_modules=asked))
    name = "cls.predictions.decoder"
    assert hasattr(theirs.get_base_model().get_submodule(name), "lora_A")
    model = parallelize(make("bert-mlm", tie_word_embeddings=tied))
    with pytest.raises(ValueError, match=f"add_adapter: target_modules=.* names {name}, whose adapters are not built"):
        model.add_adapter(config(target_modules=asked))
    small_model = parallelize(small())
    with pytest.raises(ValueError, match="names lm_head, whose adapters are not built"):
        small_model.add_adapter(config(target_modules=r".*(c_fc|lm_head)"))
    model.add_adapter(config(target_modules=[r"query"]))


def test_patterns_of_experts_are_refused_where_there_are_none():
    """PEFT gives Phi-3's gate_up_proj the other rank."""
    patterns = dict(rank_pattern={r".*\.gate_up_proj": 8}, alpha_pattern={r".*\.gate_up_proj": 16})
    for of in {}, patterns:
        model = parallelize(make("phi3"))
        with pytest.raises(ValueError, match="rank_pattern=.* is not built") if of else contextlib.nullcontext():
            model.add_adapter(config(target_modules=["gate_up_proj"], **of))


OPTIONS = dict(use_dora=True), dict(rank_pattern={"c_attn": 2}), dict(init_lora_weights="pissa"), dict(bias="all")


@pytest.mark.parametrize("options", OPTIONS)
def test_what_is_not_built_is_named(options):
    with pytest.raises(ValueError, match=f"add_adapter: LoraConfig: {next(iter(options))}=.* is not built"):
        parallelize(small()).add_adapter(config(**options))
    with pytest.raises(ValueError, match="dropout on an adapter's input is not built"):
        parallelize(small()).add_adapter(config(lora_dropout=0.1))


def test_pefts_own_wrapper_is_refused_with_the_line_to_write(tmp_path):
    peft.get_peft_model(small(), config()).save_pretrained(tmp_path)
    model = parallelize(small())
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=r"in place of get_peft_model.* write model.add_adapter\(config\)"):
        peft.get_peft_model(model, config())
    with pytest.raises(ValueError, match=r"PeftModel.from_pretrained\(model, path\), model.load_adapter\(path\)"):
        peft.PeftModel.from_pretrained(model, tmp_path)
    assert all(torch.equal(p, before[name]) and p.requires_grad for name, p in model.named_parameters())
