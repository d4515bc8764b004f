"""Rotary positions of long calls and of a part of each head, against transformers' own classes: which factors a length
has, generation past the trained length, and how the files of both generations tell it."""

import copy
import json

import pytest
import torch
from transformers import GPTNeoXConfig, LlamaConfig, Phi3Config

from tests.common import error, make_tp
from tests.models.common import batch
from tests.models.families.test_llama_like import LLAMA3, LONG, ROPE, SIZES, YARN, oracle, their_config
from tpfuse.interop.vocabulary import whole_logits
from tpfuse.models import GPT, GPTConfig

F64, TRAINED = torch.float64, 5


@pytest.fixture(scope="module")
def phi3(tmp_path_factory):
    model, path = oracle(their_config("phi3", 2)), tmp_path_factory.mktemp("phi3")
    model.save_pretrained(path)
    return model, path


def padded(lengths):
    """Ids and a mask, padded on the left."""
    ids = torch.randint(1, 97, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(2))
    return ids, (torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]).long()


def positions_of(mask):
    return (mask.cumsum(1) - 1).clamp(min=0)


# ---- which factors a call has ----


@pytest.mark.parametrize("length", [TRAINED, TRAINED + 1])
@pytest.mark.parametrize("given", ["length", "positions", "padding", "documents"])
def test_a_calls_longest_position_chooses_the_factors(phi3, given, length):
    model, path = phi3
    ours = GPT.from_pretrained(path, dtype=F64)
    ids, mask = padded((length, 2, 4))
    if given == "length":
        got, want = ours(ids).logits, model(ids).logits
    elif given == "positions":  # the call is shorter than the trained length
        ids, where = ids[:, :3], torch.arange(length - 3, length).expand(3, -1)
        got, want = ours(ids, position_ids=where).logits, model(ids, position_ids=where, use_cache=False).logits
    elif given == "padding":
        call = dict(attention_mask=mask, position_ids=positions_of(mask))
        got, want = (m(ids, **call).logits[mask.bool()] for m in (ours, model))
    else:
        parts = [row[m.bool()] for row, m in zip(ids, mask, strict=True)]
        bounds = torch.tensor([0, length, length + 2, length + 6], dtype=torch.int32)
        got = ours(torch.cat(parts)[None], cu_seqlens=bounds).logits
        where = torch.cat([torch.arange(len(part)) for part in parts])[None]
        want = model(torch.cat(parts)[None], position_ids=where, use_cache=False).logits
    assert error(got, want.detach()) < 1e-10


def test_short_and_long_factors_differ(phi3):
    _, path = phi3
    ours, (ids, _) = GPT.from_pretrained(path, dtype=F64), padded((TRAINED,))
    assert ours.config.switches_at == TRAINED
    far = torch.arange(TRAINED)[None] + 1  # the same distances, past the trained length
    assert error(ours(ids, position_ids=far).logits, ours(ids).logits) > 1e-4


@pytest.mark.slow
def test_under_torch_compile(phi3):
    torch._dynamo.reset()  # which makes numbers that differed between models of this process symbols
    ours, (ids, mask) = GPT.from_pretrained(phi3[1], dtype=F64), padded((TRAINED + 1, 3))
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    for call in dict(), dict(position_ids=positions_of(mask)), dict(position_ids=positions_of(mask).clamp(max=3)):
        assert torch.equal(compiled(ids, **call).logits, ours(ids, **call).logits)


# ---- generation ----


def continued(world, path, ids, mask, layers):
    model = GPT.from_pretrained(path, tp=make_tp(world), dtype=F64)
    if layers:  # a hook leaves generation to the model's own pass
        model.blocks[0].mlp.register_forward_hook(lambda *args: None)
    return model.generate(ids, attention_mask=mask, max_new_tokens=8)


# Past the trained length at the first token, later, and before; in a batch by its longest prompt.
PROMPTS = [(TRAINED, 2), (3,), (TRAINED + 2, 3)]


@pytest.mark.parametrize("lengths", PROMPTS)
@pytest.mark.parametrize("R, layers", [(1, False), (1, True), pytest.param(2, False, marks=pytest.mark.slow)])
def test_generation_past_the_trained_length(ranks, phi3, reached, lengths, R, layers):
    """transformers throws its cache away when the batch passes that length, and computes it anew."""
    model, path = phi3
    ids, mask = padded(lengths)
    want = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert len(want[:, -8:].unique()) > 2
    for got in ranks(R, continued, str(path), ids, mask, layers):
        assert torch.equal(got[:, -8:], want[:, -8:])
    reached(GPTConfig.from_hf(model.config.to_dict()), R, {"generated tokens": 0.0})


# ---- Llama 3 ----


@pytest.mark.parametrize("generation", ["new", "old"])
def test_llama3_past_the_original_length(tmp_path, generation):
    """24 positions where 16 were trained; rope_parameters, and rope_theta with rope_scaling."""
    model = oracle(their_config("llama", 2))
    model.save_pretrained(tmp_path)
    if generation == "old":
        config = json.loads((tmp_path / "config.json").read_text())
        del config["rope_parameters"]
        config |= dict(
            rope_theta=LLAMA3["rope_theta"], rope_scaling={k: v for k, v in LLAMA3.items() if "theta" not in k}
        )
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert LlamaConfig.from_dict(config).rope_parameters == model.config.rope_parameters
    ids = batch(model.config, size=2, seq=24)["input_ids"]
    ours = GPT.from_pretrained(tmp_path, dtype=F64)
    assert error(ours(ids).logits, model(ids).logits.detach()) < 1e-10
    plain = oracle(their_config("llama", 2, rope_parameters=dict(ROPE)))
    plain.load_state_dict(model.state_dict())
    assert error(ours(ids).logits, plain(ids).logits.detach()) > 1e-4  # the scaling shows


# ---- past max_position_embeddings ----

MOST = SIZES["max_position_embeddings"]
PAST = {  # what model cards add to a config.json whose max_position_embeddings they leave as it is
    "default": dict(ROPE),
    "yarn": dict(YARN, original_max_position_embeddings=MOST),
    "dynamic": dict(ROPE, rope_type="dynamic", factor=2.0),
    "llama3": dict(LLAMA3),
    "linear": dict(ROPE, rope_type="linear", factor=2.0),
}


def past_the_most(world, path, calls, prompts):
    """Logits, by length, by positions and of documents, and what is generated across that length."""
    model = GPT.from_pretrained(path, tp=make_tp(world), dtype=F64)
    with torch.no_grad():
        logits = [whole_logits(model(ids, **call).logits, 97, model.tp) for ids, call in calls]
    return logits, model.generate(prompts, max_new_tokens=6)


@pytest.mark.parametrize("kind", PAST)
@pytest.mark.parametrize("R", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_rotary_positions_go_past_max_position_embeddings(ranks, tmp_path, kind, R):
    """As in transformers, where the config's number is no limit."""
    model = oracle(their_config("llama", 2, rope_parameters=PAST[kind]))
    model.generation_config.eos_token_id = None
    model.save_pretrained(tmp_path)
    ids = batch(model.config, size=2, seq=3 * MOST)["input_ids"]
    far = torch.arange(2 * MOST, 2 * MOST + 8).expand(2, -1)
    apart = torch.cat([torch.arange(2 * MOST), torch.arange(MOST)])[None]
    bounds = torch.tensor([0, 2 * MOST, 3 * MOST], dtype=torch.int32)
    calls = (ids, {}), (ids[:, :8], dict(position_ids=far)), (ids[:1], dict(cu_seqlens=bounds))
    theirs = (ids, {}), (ids[:, :8], dict(position_ids=far)), (ids[:1], dict(position_ids=apart))
    fresh = lambda: copy.deepcopy(model)  # a dynamic one remembers longer calls
    exact = [fresh()(x, use_cache=False, **call).logits.detach() for x, call in theirs]
    prompts = ids[:, : MOST - 3]
    want = fresh().generate(prompts, max_new_tokens=6, do_sample=False, pad_token_id=0)
    for logits, tokens in ranks(R, past_the_most, str(tmp_path), calls, prompts):
        tolerance = 1e-5 if kind == "dynamic" else 1e-10  # transformers takes its power in fp32, of an integer tensor
        assert all(error(got, x) < tolerance for got, x in zip(logits, exact, strict=True))
        assert torch.equal(tokens, want)


# ---- files ----


def rope_of(cls, **values):
    return GPTConfig.from_hf(
        cls(**SIZES).to_dict() | dict(rope_parameters=None, model_type=cls.model_type) | values
    ).rope


PARTIAL = dict(LONG, partial_rotary_factor=0.7)
FACTORS = {k: v for k, v in LONG.items() if k.endswith("factor")}


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])  # which older files call the same
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_longrope_of_older_files(key, name):
    old = dict(rope_scaling={key: name} | FACTORS, rope_theta=10000.0, original_max_position_embeddings=TRAINED)
    assert rope_of(Phi3Config, partial_rotary_factor=0.7, **old) == their_config("phi3", 2).rope_parameters


def test_the_trained_length_beside_rope_parameters_goes_first():
    """As in transformers, whose class has 4096 where a file has none."""
    inner = dict(PARTIAL, original_max_position_embeddings=7)
    for outer, trained in (({}, 4096), (dict(original_max_position_embeddings=9), 9)):
        theirs = Phi3Config(rope_parameters=dict(inner), **SIZES, **outer).rope_parameters
        keys = dict(model_type="phi3", rope_parameters=dict(inner)) | SIZES | outer
        assert theirs["original_max_position_embeddings"] == trained
        assert GPTConfig.from_hf(keys).rope["original_max_position_embeddings"] == trained


@pytest.mark.parametrize("share", [None, 0.75])
def test_a_part_of_each_head_in_older_files(share):
    keys = {} if share is None else dict(partial_rotary_factor=share, rotary_pct=share)
    phi = rope_of(Phi3Config, rope_theta=500.0, **keys)
    assert phi["partial_rotary_factor"] == (share or 1.0) and phi["rope_theta"] == 500.0
    neox = rope_of(GPTNeoXConfig, rotary_emb_base=500, **keys)
    assert neox["partial_rotary_factor"] == (share or 0.25) and neox["rope_theta"] == 500
    assert rope_of(GPTNeoXConfig)["rope_theta"] == 10000.0


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(long_factor=[1.0]), "long_factor must have 2 numbers, one a pair, got 1"),
        (dict(short_factor=None), "rope type 'longrope' needs short_factor"),
        (dict(rope_type="linear", factor=2.0), "rope_type='linear' is not built; one of default, longrope is"),
        (dict(partial_rotary_factor=0.0), "partial_rotary_factor must lie in"),
    ],
)
def test_errors(change, message):
    rope = PARTIAL | change
    config = their_config("phi3", 2).to_dict() | dict(rope_parameters=rope)
    with pytest.raises(ValueError, match=message):
        GPTConfig.from_hf(config)


# ---- the head's other name ----


@pytest.mark.parametrize("name", ["embed_out.weight", "lm_head.weight"])
def test_gpt_neox_heads_go_by_both_names(tmp_path, name):
    from safetensors.torch import load_file, save_file

    model = oracle(their_config("gpt_neox", 8))
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[name] = tensors.pop("embed_out.weight")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    ids = batch(model.config)["input_ids"]
    ours = GPT.from_pretrained(tmp_path, dtype=F64)
    assert ours.head is not None and error(ours(ids).logits, model(ids).logits.detach()) < 1e-10
    ours.save_pretrained(tmp_path / "again")
    assert "embed_out.weight" in load_file(tmp_path / "again" / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("lengths", PROMPTS)
@pytest.mark.parametrize("layers", [False, True])
def test_beams_past_the_trained_length(phi3, lengths, layers):
    """A cache that is made anew holds the beams of that time."""
    model, path = phi3
    ids, mask = padded(lengths)
    options = dict(num_beams=3, num_return_sequences=3, max_new_tokens=8)
    want = model.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, eos_token_id=None, **options)
    ours = GPT.from_pretrained(path, dtype=F64)
    if layers:
        ours.blocks[0].mlp.register_forward_hook(lambda *args: None)
    assert torch.equal(ours.generate(ids, attention_mask=mask, **options)[:, -8:], want[:, -8:])
