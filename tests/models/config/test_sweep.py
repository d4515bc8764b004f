"""Every key of every family's config.json, missing, null, at its default, at another value and under both names, means
what it means to transformers, or is refused; and the tables of defaults are those of the installed release."""

import json

import pytest
from transformers import PreTrainedConfig

from bench import configurations, defaults, documents
from tests.models.config import sweep
from tpfuse.models.families import FAMILIES, NO_WINDOW

sweep.quiet()
# Keys that no model reads: generation's, the heads that classify, and what starts a model of transformers.
UNREAD = {"use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "cls_token_id", "sep_token_id"}
UNREAD |= {f"summary_{of}" for of in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")}
UNREAD |= {"classifier_dropout", "seq_classif_dropout", "qa_dropout", "sparse_pred_ignore_index"}
UNREAD |= {"pretraining_tp", "initializer_cutoff_factor", "sinusoidal_pos_embds", "deterministic_flash_attn"}
UNREAD |= {"is_decoder"}  # of GPT-NeoX, which is one
LAYERS = {"layer_types", "local_attention", "use_sliding_window", "max_window_layers", "sliding_window"}
LAYERS |= {"mlp_only_layers", "decoder_sparse_step"}
ROTARY = {"rope_parameters", "original_max_position_embeddings"}
# Keys of all families: outputs, labels, names, dtypes; ``tie_word_embeddings`` is each family's own.
SHARED = {"transformers_version", "architectures", "output_hidden_states", "return_dict", "dtype", "_name_or_path"}
SHARED |= {"chunk_size_feed_forward", "is_encoder_decoder", "id2label", "label2id", "problem_type", "model_type"}
SHARED |= {"output_attentions"}
EVERYDAY = "gpt2", "llama", "gemma3_text", "qwen2", "modernbert"


@pytest.mark.parametrize("name", FAMILIES)
def test_defaults_are_those_of_the_installed_release(name):
    """A release that adds a key, or lets one be null, fails here: ``python -m bench.defaults`` writes the table."""
    family = FAMILIES[name]
    assert defaults.of_class(name) == {"defaults": family.defaults, "nullable": family.nullable}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_key_is_read_refused_or_known_to_mean_nothing(name):
    family = FAMILIES[name]
    read = {key for keys in family.hf_keys.values() for key in keys} | family.not_built.keys()
    read |= (ROTARY if family.rotary else set()) | (LAYERS if family.windows != NO_WINDOW else set())
    assert family.defaults.keys() - read <= UNREAD


def test_keys_of_all_families_are_known():
    assert PreTrainedConfig().to_dict().keys() - {"tie_word_embeddings"} <= SHARED


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in EVERYDAY)) for n in FAMILIES])
def test_every_state_of_every_key(name):
    found = {sweep.verdict(case, values=False)[0] for case in sweep.cases(name)}
    assert {sweep.RIGHT, sweep.BOTH} <= found <= set(sweep.VERDICTS)


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.parametrize("name", FAMILIES)
def test_values_too_and_the_table_of_the_documents(name):
    assert documents.line(sweep.row(name)) in configurations.PAGE.read_text().splitlines()


@pytest.mark.parametrize("key, value", [("rms_norm_eps", 1e-5), ("hidden_act", "gelu"), ("initializer_range", 0.5)])
def test_a_default_that_differs_is_found(monkeypatch, key, value):
    other = FAMILIES["llama"]._replace(defaults=FAMILIES["llama"].defaults | {key: value})
    monkeypatch.setitem(FAMILIES, "llama", other)
    whole = json.loads(sweep.base("llama"))
    del whole[key]
    with pytest.raises(AssertionError, match="is not"):
        sweep.verdict(sweep.Case("llama", key, "missing", whole), values=False)
