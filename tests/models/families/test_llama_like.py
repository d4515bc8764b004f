"""The Llama family against transformers' own classes: values, gradients and files, with kv heads more and fewer than
ranks."""

import functools
import json
from dataclasses import replace

import pytest
import torch
import transformers
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Starcoder2Config,
)

from tests.common import assert_close, assert_equal, make_tp
from tests.models.common import batch, change_of_loss, default_dtype, of_files, of_transformers, run, whole
from tests.models.exact import EXACT, make_exact
from tpfuse import TensorParallel
from tpfuse.models import GPT, GPTConfig

transformers.utils.logging.disable_progress_bar()
F64 = torch.float64
# 28 columns split over 1, 2 and 4 ranks, 97 words over none; the head width is not hidden_size / num_heads where a
# family allows that
SIZES = dict(
    vocab_size=97,
    hidden_size=48,
    num_hidden_layers=2,
    intermediate_size=28,
    num_attention_heads=8,
    max_position_embeddings=32,
)
SIZES |= dict(initializer_range=0.2, bos_token_id=None, eos_token_id=None, pad_token_id=None)
ROPE = dict(rope_type="default", rope_theta=10000.0)
LLAMA3 = dict(rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 |= dict(original_max_position_embeddings=16)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=8)
LONG = dict(rope_type="longrope", rope_theta=10000.0, short_factor=[1.0, 1.5], long_factor=[3.0, 5.0])
LOCAL = dict(full_attention=dict(ROPE, rope_type="linear", factor=2.0), sliding_attention=dict(ROPE, rope_theta=100.0))
FAMILIES = {
    "llama": (LlamaConfig, dict(rope_parameters=LLAMA3)),
    "llama-biased": (
        LlamaConfig,
        dict(rope_parameters=YARN, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, head_dim=10),
    ),
    "mistral": (MistralConfig, dict(rope_parameters=ROPE, sliding_window=4, head_dim=10)),
    "gpt_neox": (GPTNeoXConfig, dict(rope_parameters=dict(ROPE, partial_rotary_factor=0.25))),
    "gpt_neox-serial": (
        GPTNeoXConfig,
        dict(rope_parameters=dict(ROPE, partial_rotary_factor=0.7), use_parallel_residual=False)
        | dict(attention_bias=False, tie_word_embeddings=True),
    ),
    "phi3": (
        Phi3Config,
        dict(rope_parameters=dict(LONG, partial_rotary_factor=0.7), original_max_position_embeddings=5),
    ),
    "phi3-windowed": (Phi3Config, dict(rope_parameters=dict(ROPE), sliding_window=4, tie_word_embeddings=True)),
    "starcoder2": (Starcoder2Config, dict(rope_parameters=ROPE, sliding_window=4)),
    "starcoder2-unbiased": (
        Starcoder2Config,
        dict(rope_parameters=LLAMA3, use_bias=False, tie_word_embeddings=False, head_dim=10),
    ),
    "qwen2": (Qwen2Config, dict(rope_parameters=ROPE, use_sliding_window=True, sliding_window=3, max_window_layers=1)),
    "qwen3": (
        Qwen3Config,
        dict(rope_parameters=dict(ROPE, rope_type="linear", factor=2.0), head_dim=10, tie_word_embeddings=True)
        | dict(use_sliding_window=True, sliding_window=3, max_window_layers=1),
    ),
    "gemma2": (
        Gemma2Config,
        dict(rope_parameters=ROPE, head_dim=10, sliding_window=3, query_pre_attn_scalar=7, attn_implementation=EXACT)
        | dict(attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    ),
    "olmo2": (Olmo2Config, dict(rope_parameters=LLAMA3)),
    "gemma3": (
        Gemma3TextConfig,
        dict(head_dim=10, sliding_window=3, query_pre_attn_scalar=7, sliding_window_pattern=2, rope_parameters=LOCAL)
        | dict(tie_word_embeddings=False),
    ),
}


def their_config(name, kv_heads, **options):
    cls, own = FAMILIES[name]
    grouped = {} if cls is GPTNeoXConfig else dict(num_key_value_heads=kv_heads)
    return cls(**grouped, **SIZES | dict(attn_implementation="sdpa") | own | options)


def oracle(config):
    """A model of transformers in fp64, its RMSNorm too (which would be fp32), in which no norm, bias or row is
    trivial."""
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)
    make_exact(model)
    return model


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """(name, kv heads) -> a model of transformers, and the directory that it saved."""

    @functools.cache
    def make(name, kv_heads=2):
        model, path = oracle(their_config(name, kv_heads)), tmp_path_factory.mktemp(name)
        model.save_pretrained(path)
        return model, path

    return make


def comparable(found, call):
    """Without what a row of padding attends to, and a key's bias, which no family but qwen3 (by its norm) notices."""
    found = dict(found)
    if "attention_mask" in call:
        found["logits"] = found["logits"][call["attention_mask"].bool()]
    return found


CASES = [  # kv heads, ranks, sequence parallel, padding: kv heads more than, as many as and fewer than ranks
    (8, 2, True, None),
    (2, 1, False, "left"),
    (2, 2, True, "right"),
    (2, 4, True, "left"),
    (1, 4, False, None),
]


# One configuration of each of these runs every day, at R = 2.  GPT-NeoX has as many kv heads as heads, and a variant
# ("phi3-windowed") the projections of its family, so that these take fewer cases.
LATER = "gpt_neox", "phi3", "starcoder2", "gemma2", "gemma3", "olmo2"
MARKED = [
    pytest.param(
        name,
        *case,
        marks=[pytest.mark.slow] * (name.startswith(LATER) and (name not in LATER or case != CASES[2])),
    )
    for name in FAMILIES
    for case in (CASES[1:4] if name.startswith(LATER) and (name not in LATER or name == "gpt_neox") else CASES)
]


@pytest.mark.parametrize("name, kv_heads, R, sp, pad", MARKED)
def test_values_and_gradients_are_those_of_transformers(ranks, theirs, reached, name, kv_heads, R, sp, pad):
    model, path = theirs(name, kv_heads)
    call = batch(model.config, pad=pad)
    exact = comparable(of_transformers(model, call), call)
    for got in ranks(R, of_files, str(path), GPT, call, sp):
        errors = assert_close(comparable(got, call), exact, F64)
        reached(GPTConfig.from_hf(model.config.to_dict()), R, errors, sp=sp)


def test_what_is_not_trivial_shows(theirs):
    """The window, the scaling of the rotation and the norms of the heads all matter at these sizes, and so does what
    Gemma has of its own."""
    for name, change in (
        ("mistral", dict(window=None)),
        ("llama", dict(rope=ROPE)),
        ("qwen2", dict(layer_types=("full_attention", "full_attention"))),
        ("qwen3", dict(rope=ROPE)),
        ("gpt_neox", dict(parallel_residual=False)),
        ("gpt_neox", dict(rope=dict(ROPE, partial_rotary_factor=0.5))),
        ("phi3", dict(rope=dict(ROPE, partial_rotary_factor=0.7))),
        ("phi3", dict(rope=dict(LONG, partial_rotary_factor=0.7, original_max_position_embeddings=7))),
        ("starcoder2", dict(window=None)),
        ("gemma2", dict(attention_scalar=None)),
        ("gemma2", dict(attention_softcap=None)),
        ("gemma2", dict(logit_softcap=None)),
        ("gemma2", dict(scaled_embedding=False)),
        ("gemma2", dict(layer_types=None, window=None)),
        ("gemma3", dict(local_rope=None)),
        ("gemma3", dict(qk_norm_kind="rms")),
    ):
        model, path = theirs(name)
        assert change_of_loss(path, batch(model.config), **change) > 1e-4, name


def saved_again(world, path, out, sp):
    GPT.from_pretrained(path, tp=make_tp(world, sp), dtype=F64).save_pretrained(out)


SAVED = "gpt_neox", "starcoder2", "phi3-windowed", "gemma2", "gemma3", "olmo2"


@pytest.mark.parametrize(
    "name, R",
    [("llama-biased", 4), ("mistral", 2), ("qwen2", 1), ("qwen3", 4)]
    + [("phi3", 4), *(pytest.param(n, 2, marks=pytest.mark.slow) for n in SAVED)],
)
def test_a_saved_directory_is_transformers_own(ranks, theirs, reached, tmp_path, name, R):
    model, path = theirs(name)
    ranks(R, saved_again, str(path), str(tmp_path), True)
    first, again = (transformers.AutoModelForCausalLM.from_pretrained(p, dtype=F64) for p in (path, tmp_path))
    assert_equal(dict(again.state_dict()), dict(model.state_dict()))
    reached(GPTConfig.from_hf(model.config.to_dict()), R, {"saved and loaded": 0.0})
    assert type(again) is type(model)
    call = batch(model.config)
    assert torch.equal(again(call["input_ids"]).logits, first(call["input_ids"]).logits)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [type(model).__name__]


OLD = dict(rope_theta=500.0, rope_scaling=dict(type="linear", factor=2.0))


# (gemma3 has two rotations: test_gemma.py; gpt_neox and phi3 have partial ones: test_rotary.py)
@pytest.mark.parametrize("name", [n for n in FAMILIES if not n.startswith(("gpt_neox", "phi3", "gemma3"))])
def test_both_generations_of_rope_keys(name):
    config = their_config(name, 2, rope_parameters=dict(rope_type="linear", rope_theta=500.0, factor=2.0)).to_dict()
    new = GPTConfig.from_hf(config)
    for rope in (OLD, OLD | dict(rope_scaling=dict(rope_type="linear", factor=2.0))):
        old = {k: v for k, v in config.items() if not k.startswith("rope")} | rope
        assert GPTConfig.from_hf(old) == new
    assert new.rope == dict(rope_type="linear", rope_theta=500.0, factor=2.0)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_config_is_written_and_read_again(name):
    config = GPTConfig.from_hf(their_config(name, 2).to_dict())
    if "head_width" in config.hf.hf_keys:
        config = replace(config, head_width=config.head_size)  # written out
    assert GPTConfig.from_hf(config.to_hf()) == config
    their = FAMILIES[name][0](**config.to_hf())  # transformers takes every key for what it is
    assert GPTConfig.from_hf(their.to_dict()) == config


def config_of(name, kv_heads, **options):
    return replace(GPTConfig.from_hf(their_config(name, kv_heads).to_dict()), attention_dropout=0.1, **options)


@pytest.mark.parametrize("name", ["llama", "qwen3", "olmo2"])
def test_the_split_does_not_show(ranks, name):
    """Initial weights, dropout masks and gradients: bitwise or 1e-10, kv heads copied or not."""
    config = config_of(name, 2)
    call = batch(config, size=2, seq=5) | dict(step=3, first_sample=0)
    exact = run(None, GPT, config, call, dtype=F64)
    for R in (2, 4):
        for got in ranks(R, split_run, config, call):
            assert_close(got, exact, F64)


def fused(found):
    """q and kv, where they are apart, as the qkv that they are elsewhere."""
    for key in [key for key in found if key.endswith("qkv.kv")]:
        kv, q = found.pop(key), found.pop(key.replace("qkv.kv", "qkv.q"))
        found[key.replace("qkv.kv", "qkv.weight")] = torch.cat([q.unflatten(0, (len(kv), -1)), kv], 1)
    return found


def split_run(world, config, call):
    return fused(run(world, GPT, config, call, dtype=F64))


def initial(world, config):
    with default_dtype(torch.float32):
        model = GPT(config, tp=make_tp(world, True), seed=5)
    return fused(whole(model))


def test_initial_weights_do_not_know_the_split(ranks):
    config = config_of("llama", 2)
    exact = fused(whole(GPT(config, seed=5)))
    for R in (2, 4):
        for got in ranks(R, initial, config):
            assert_equal(got, exact)


def test_heads_that_do_not_fit_are_named(ranks):
    with pytest.raises(ValueError, match="num_heads=8 is not divisible by num_kv_heads=3"):
        config_of("llama", 3)
    with pytest.raises(ValueError, match="num_heads=8 is not divisible by tensor-parallel size 3; use 1, 2, 4 or 8"):
        ranks(3, built, config_of("llama", 2))
    config = replace(config_of("llama", 2), num_heads=12, num_kv_heads=3, hidden_size=48, head_width=4)
    with pytest.raises(
        ValueError, match="num_kv_heads=3 and tensor-parallel size 2: one must divide the other; use size 1, 3, 6$"
    ):
        ranks(2, built, config)


def built(world, config):
    GPT(config, tp=make_tp(world, True))


@pytest.mark.parametrize(
    "rope, message",
    [
        (
            dict(ROPE, rope_type="longrope"),
            "rope_type='longrope' is not built; one of default, linear, dynamic, llama3, yarn is",
        ),
        (dict(ROPE, partial_rotary_factor=0.5), "partial_rotary_factor=0.5 is not built; only 1 is"),
    ],
)
def test_rotations_that_are_not_built_are_named(rope, message):
    with pytest.raises(ValueError, match=message):
        replace(config_of("llama", 2), rope=rope)


def test_a_model_alone_is_the_same_path():
    assert TensorParallel().size == 1
    model = GPT(config_of("qwen3", 2))
    assert model.positions is None and model.blocks[0].mlp_norm.kind == "rms"
