"""What Gemma 2, Gemma 3 and OLMo 2 have of their own: defaults of their config.json, two kinds of rotary positions,
what is refused; and a model of all of it under everything that a model runs under."""

import json
from dataclasses import replace

import pytest
import torch
import transformers
from transformers import Gemma2Config, Gemma3TextConfig, Olmo2Config

from tests.common import make_tp
from tests.models.families.test_llama_like import LOCAL, SIZES, config_of, their_config
from tests.models.generation.test_direct import GEMMA
from tpfuse.models import GPT, Classifier, GPTConfig

THEIRS = {"gemma2": Gemma2Config, "gemma3_text": Gemma3TextConfig, "olmo2": Olmo2Config}


def embedded(world, path, ids, sp):
    model = GPT.from_pretrained(path, tp=make_tp(world, sp), dtype=torch.bfloat16)
    with torch.no_grad():
        return model.input_embeddings(ids), model(ids, output_hidden_states=True).hidden_states[0]


def test_the_scale_of_an_embedding_is_rounded_as_its_rows_are(ranks, tmp_path):
    """In bf16 the root of 40 is 6.3125."""
    config = their_config("gemma2", 2, hidden_size=40, head_dim=8)
    model, ids = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), torch.arange(8).view(2, 4)
    model.save_pretrained(tmp_path)
    want = model.get_input_embeddings()(ids)
    assert not torch.equal(want, (model.get_input_embeddings().weight[ids] * 40**0.5))
    for R, sp in (1, False), (2, True):
        assert all(torch.equal(got, want) for both in ranks(R, embedded, str(tmp_path), ids, sp) for got in both)


def test_null_is_no_soft_cap_and_no_key_is_the_usual_one():
    keys = their_config("gemma2", 2).to_dict()
    caps = "attn_logit_softcapping", "final_logit_softcapping"
    null = GPTConfig.from_hf(keys | dict.fromkeys(caps))
    assert (null.attention_softcap, null.logit_softcap) == (None, None)
    assert GPTConfig.from_hf(null.to_hf()) == null
    usual = GPTConfig.from_hf({key: value for key, value in keys.items() if key not in caps})
    assert (usual.attention_softcap, usual.logit_softcap) == (50.0, 30.0)


def test_no_window_is_written_as_one_that_no_layer_has():
    config = replace(GPTConfig.from_hf(their_config("gemma3", 2).to_dict()), window=None, layer_types=None)
    again = GPTConfig.from_hf(Gemma3TextConfig(**config.to_hf()).to_dict())
    assert again.windows == config.windows == (None, None)
    assert replace(again, window=None, layer_types=None) == config


def test_the_older_keys_of_both_rotations():
    new = GPTConfig.from_hf(their_config("gemma3", 2).to_dict())
    assert [new.rope, new.local_rope] == [LOCAL["full_attention"], LOCAL["sliding_attention"]]
    assert new.windows == (3, None)
    keys = {k: v for k, v in their_config("gemma3", 2).to_dict().items() if k not in ("rope_parameters", "layer_types")}
    scaling = dict(rope_type="linear", factor=2.0)
    old = keys | dict(rope_theta=1e4, rope_scaling=scaling, rope_local_base_freq=100.0, sliding_window_pattern=2)
    assert GPTConfig.from_hf(old) == new == GPTConfig.from_hf(Gemma3TextConfig(**old).to_dict())
    assert GPTConfig.from_hf(json.loads(json.dumps(new.to_hf()))) == new


@pytest.mark.parametrize("name", ["gemma3_text", "olmo2"])
def test_a_classifier_that_transformers_has_not_is_named(tmp_path, name):
    given = THEIRS[name](**SIZES | dict(rope_parameters=None)).to_dict() | dict(rope_theta=1e4)
    config = GPTConfig.from_hf({key: value for key, value in given.items() if key != "rope_parameters"})
    with pytest.raises(ValueError, match=f"a {name} model of transformers has no class that classifies per token"):
        GPT(config, classifier=Classifier(3, per="token"))


@pytest.mark.parametrize(
    "name, change, said",
    [
        ("gemma2", dict(use_bidirectional_attention=True), "use_bidirectional_attention=True is not built; only False"),
        ("gemma3", dict(use_bidirectional_attention=True), "use_bidirectional_attention=True is not built; only False"),
        ("gemma3", dict(attn_logit_softcapping=50.0), "attn_logit_softcapping=50.0 is not built; only None"),
        ("gemma3", dict(rope_parameters=LOCAL["full_attention"]), "must have full_attention and sliding_attention"),
        (
            "gemma3",
            dict(rope_parameters=dict(full_attention=[1])),
            r"rope_parameters\.full_attention must be an object",
        ),
        ("gemma3", dict(layer_types=["full_attention", "chunked"]), "layer_types must be 2 of"),
        ("gemma2", dict(sliding_window=None), "layer_types has sliding_attention, and window is None"),
        (
            "gemma2",
            dict(final_logit_softcapping=0.0),
            r"must lie in \(0, 1e\+06\] or None, got 0.0 as final_logit_softcapping",
        ),
        ("gemma2", dict(query_pre_attn_scalar="256"), "must be a number in .* got '256' as query_pre_attn_scalar"),
    ],
)
def test_what_is_not_built_or_wrong_is_named(name, change, said):
    with pytest.raises(ValueError, match=f"GPTConfig: .*{said}"):
        GPTConfig.from_hf(their_config(name, 2).to_dict() | change)


@pytest.mark.parametrize(
    "change",
    [
        dict(branch_norm=True),
        dict(pre_norm=False, branch_norm=True),
        dict(qk_norm_kind="gemma_rms"),
        dict(qk_norm_all=True),
        dict(attention_scalar=3),
        dict(attention_softcap=3.0),
        dict(logit_softcap=3.0),
        dict(scaled_embedding=True),
        dict(local_rope=dict(rope_theta=10.0)),
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_family_that_has_no_such_thing_is_not_written(change):
    with pytest.raises(ValueError, match=f"GPTConfig: a llama model of transformers has .*{next(iter(change))[:4]}"):
        replace(config_of("llama", 2, gated=True), attention_dropout=0.0, **change).to_hf()


@pytest.mark.parametrize(
    "change, said",
    [
        (dict(pre_norm=False, branch_norm=False), "pre_norm=False needs branch_norm=True"),
        (dict(qk_norm_kind="layer"), "qk_norm_kind must be one of rms, gemma_rms, got 'layer'"),
        (dict(local_rope=dict(rope_type="dynamic", rope_theta=10.0, factor=2.0)), "dynamic ones are not built"),
        (dict(rope=None, local_rope=dict(rope_theta=10.0)), "local_rope needs rope.*got rope=None"),
        (dict(attention_softcap=-1.0), r"attention_softcap must lie in \(0, 1e\+06\] or None, got -1.0"),
    ],
)
def test_fields_that_contradict_are_named(change, said):
    with pytest.raises(ValueError, match=f"GPTConfig: .*{said}"):
        replace(GEMMA, **change)
