"""Configurations: checked when made, and read from both generations of config.json."""

from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
import torch
from transformers import BertConfig as TheirBert
from transformers import GPT2Config

from tests.models.common import BERT_CONFIG, GPT_CONFIG
from tpfuse.kernels.rotary.table import rope_table
from tpfuse.models import BertConfig, GPTConfig, families
from tpfuse.models.config.reader import HF_ACTIVATIONS


@pytest.mark.parametrize("ours, theirs", [(GPTConfig, GPT2Config), (BertConfig, TheirBert)])
def test_defaults_are_those_of_transformers(ours, theirs):
    read = ours.from_hf(theirs().to_dict())
    sizes = {k: getattr(read, k) for k in ("vocab_size", "max_positions", "hidden_size", "num_layers", "num_heads")}
    assert read == ours(**sizes)
    assert read.vocab_size == (50257 if ours is GPTConfig else 30522) and read.ffn_size == 3072


@pytest.mark.parametrize(
    "config", [GPT_CONFIG, BERT_CONFIG, replace(GPT_CONFIG, tie_embeddings=False, activation="relu", dropout=0.3)]
)
def test_written_and_read_again_it_is_the_same(config):
    written = config.to_hf()
    assert type(config).from_hf(written) == config
    theirs = GPT2Config if isinstance(config, GPTConfig) else TheirBert
    assert type(config).from_hf(theirs(**written).to_dict()) == config  # transformers takes every key for what it is


@pytest.mark.parametrize("name, ours", HF_ACTIVATIONS.items())
def test_activations_go_by_the_names_of_transformers(name, ours):
    assert GPTConfig.from_hf(GPT_CONFIG.to_hf() | dict(activation_function=name)).activation == ours


def test_older_and_newer_keys():
    old = GPT_CONFIG.to_hf()
    newer = dict(
        n_positions="max_position_embeddings",
        n_embd="hidden_size",
        n_layer="num_hidden_layers",
        n_head="num_attention_heads",
    )
    assert GPTConfig.from_hf({newer.get(k, k): v for k, v in old.items()}) == GPT_CONFIG
    assert GPTConfig.from_hf(old | dict(n_inner=None)).ffn_size == 4 * 48


WRONG = [
    (dict(num_layers=0), "num_layers must be a positive integer, got 0"),
    (dict(vocab_size=97.0), "vocab_size must be a positive integer, got 97.0"),
    (dict(num_heads=5), "hidden_size=48 is not divisible by num_heads=5"),
    (dict(dropout=1.0), r"dropout must lie in \[0, 0.99999.\), got 1.0"),
    (dict(dropout=0.999999), r"dropout must lie in \[0, 0.99999.\), got 0.999999"),
    (dict(attention_dropout=-0.1), r"attention_dropout must lie in \[0, 0.99999.\), got -0.1"),
    (dict(activation="mish"), "activation must be one of .*, got 'mish'"),
]


@pytest.mark.parametrize("change, said", WRONG)
@pytest.mark.parametrize("config", [GPT_CONFIG, BERT_CONFIG], ids=["gpt", "bert"])
def test_errors(config, change, said):
    with pytest.raises(ValueError, match=f"{type(config).__name__}: {said}"):
        replace(config, **change)


def test_a_gated_mlp_has_an_activation_that_gates():
    with pytest.raises(
        ValueError, match="GPTConfig: activation must be one of silu, .*, which gated MLPs have, got 'rel"
    ):
        replace(GPT_CONFIG, gated=True, activation="relu")


def test_what_transformers_cannot_hold_is_not_written():
    with pytest.raises(ValueError, match="one dropout for both"):
        replace(BERT_CONFIG, embedding_dropout=0.2).to_hf()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_family_whose_files_know_no_parallel_residual_does_not_write_it(family):
    rope = dict(rope_type="default", rope_theta=1e4) if family == "llama" else None
    config = replace(GPT_CONFIG, family=family, rope=rope, parallel_residual=True)
    if family == "llama":
        config = replace(config, norm="rms", gated=True, activation="silu", dropout=0.0, embedding_dropout=0.0)
    with pytest.raises(ValueError, match=f"a {family} model of transformers has parallel_residual=False, got True"):
        config.to_hf()


def test_it_is_a_value():
    assert replace(GPT_CONFIG) == GPT_CONFIG and hash(replace(GPT_CONFIG)) == hash(GPT_CONFIG)
    with pytest.raises(FrozenInstanceError):
        GPT_CONFIG.dropout = 0.0


@pytest.mark.parametrize("own, trained", [(None, 32), (64, 64), (8, 8)])
@pytest.mark.parametrize("kind", ["dynamic", "default"])
def test_only_dynamic_positions_past_the_trained_length_are_stretched(kind, own, trained):
    """A model's max_positions is the trained length unless ``rope`` says another."""
    rope = dict(rope_type=kind, rope_theta=10000.0, factor=2.0) | (
        {} if own is None else {"max_position_embeddings": own}
    )
    config = replace(GPT_CONFIG, family="llama", rope=rope)
    assert config.stretches_past == (trained if kind == "dynamic" else None) and config.most_positions is None
    assert [config.depends_on_length(n) for n in (trained, trained + 1)] == [False, kind == "dynamic"]
    options = dict(scaling=dict(config.rope), max_position_embeddings=config.max_positions)
    short, most, long = (rope_table(4, 2, **options, seq_len=n)[0] for n in (1, trained, trained + 1))
    assert torch.equal(short, most) and torch.equal(most, long) == (kind == "default")


BESIDE = {"__init__", "family", "names", "bert_like", "llama_like"}


@pytest.mark.parametrize("path", sorted(Path(families.__file__).parent.glob("*.py")), ids=lambda path: path.stem)
def test_a_family_is_a_short_file(path):
    assert path.stem in BESIDE or len(path.read_text().splitlines()) <= 60
