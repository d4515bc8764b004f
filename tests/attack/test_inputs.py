"""Odd arguments, from a table: each is right, or an error that names the function and the argument, and a call that is
refused leaves the model as it was.

Spans: the public functions and models of tpfuse/, by one table of odd values.
"""

import math
import re

import numpy as np
import pytest
import torch

from tests.common import assert_equal, make_tp
from tests.models.common import BERT_CONFIG, GPT_CONFIG, batch, results
from tpfuse import add_lora, make_rng
from tpfuse import kernels as K
from tpfuse.layers import LayerNorm, ParallelAttention, ParallelMLP, RMSNorm, TransformerBlock
from tpfuse.models import GPT, Bert

NAN, INF = math.nan, math.inf
B, S, V = 3, 7, 97
IDS = batch(GPT_CONFIG)["input_ids"]
T = torch.tensor

# ---- what is odd: by kind, values that are refused, and those that are right ----

FLOATS = {"nan": NAN, "inf": INF, "-inf": -INF, "negative": -1.0, "text": "0.5", "list": [0.5], "bool": True}
INTEGERS = {
    "1.5": 1.5,
    "1.0": 1.0,
    "nan": NAN,
    "text": "1",
    "bool": True,
    "list": [1],
    "array": np.ones(1),
    "None?": "None",
}
SCALARS = {"1-d": T([1]), "float tensor": T(1.5), "bool tensor": T(True), "complex tensor": T(1j)}
SAMPLES = {"2**32": 1 << 32, "the last but one": (1 << 32) - B + 1, "tensor beyond": T((1 << 32) - 1)}
WHOLE = INTEGERS | SCALARS | {"-1": -1, "tensor -1": T(-1)}
OTHER = {
    "short": lambda x: x[:, 1:],
    "wide": lambda x: x.repeat(1, 2),
    "31 rows": lambda x: x.repeat(11, 1)[:31],
    "one row": lambda x: x[0],
    "3-d": lambda x: x[None],
    "float": lambda x: x.float(),
    "half": lambda x: x.half(),
    "complex": lambda x: x.cfloat(),
    "elsewhere": lambda x: x.to("meta"),
    "list": lambda x: x.tolist(),
    "array": lambda x: x.numpy(),
}
OTHER_INT = {"int32": lambda x: x.int(), "bool": lambda x: x.bool()}
AN_ID = {"beyond": lambda x: x + V, "below": lambda x: x - V}
EMPTY = {"B = 0": lambda x: x[:0], "S = 0": lambda x: x[:, :0], "both": lambda x: x[:0, :0]}
SHORT = {k: f for k, f in OTHER.items() if k not in ("short", "wide", "31 rows")}  # ids of any shape are ids
MASKS = {"additive": lambda x: torch.zeros(x.shape), "bf16": lambda x: torch.ones(x.shape, dtype=torch.bfloat16)}


def of_ids(changes):
    return {name: change(IDS) for name, change in changes.items()}


CALLS = {  # argument -> values that are refused
    "input_ids": of_ids(SHORT | OTHER_INT | AN_ID | EMPTY | {"long": lambda x: x.repeat(1, 5)}),
    "labels": of_ids(OTHER | OTHER_INT | AN_ID | EMPTY),
    "position_ids": of_ids(OTHER | OTHER_INT | {"32": lambda x: torch.full_like(x, 32), "-1": lambda x: -x}),
    "attention_mask": of_ids(OTHER | MASKS | EMPTY),
    "step": WHOLE | {"2**63": 1 << 63, "2**64": 1 << 64},
    "first_sample": WHOLE | SAMPLES,
    "loss_normalizer": FLOATS | {"0": 0, "0.0": 0.0, "1-d": T([1.0]), "nan tensor": T(NAN), "0 tensor": T(0.0)},
    "return_logits": {"text": "no", "1": 1, "tensor": T(True)},
    "max_seqlen": {"alone": 7},
}
PACKED = {
    "cu_seqlens": {
        "int64": T([0, 7]), "2-d": T([[0, 7]]).int(), "one": T([0]).int(), "none": T([]).int(), "float": T([0.0, 7.0]),
        "from 1": T([1, 7]).int(), "falls": T([0, 5, 3, 7]).int(), "beyond": T([0, 8]).int(),
        "negative": T([0, -1, 7]).int(),
        "list": [0, 7], "elsewhere": T([0, 7]).int().to("meta"),
    },
    "max_seqlen": INTEGERS | {"short": 6, "0": 0, "-1": -1, "tensor": T(7)},
}  # fmt: skip
GENERATE = {
    "input_ids": of_ids(SHORT | OTHER_INT | AN_ID | EMPTY),
    "attention_mask": of_ids(OTHER | MASKS) | {"none seen": torch.zeros_like(IDS)},
    "max_new_tokens": INTEGERS | {"0": 0, "-1": -1, "tensor": T(2), "too many": 26},
    "temperature": FLOATS | {"0": 0.0, "tensor": T(1.0), "tiny": 1e-320, "huge": 1e300},
    "top_p": FLOATS | {"0": 0.0, "above 1": 1.1},
    "top_k": INTEGERS | {"-1": -1},
    "repetition_penalty": FLOATS | {"0": 0.0, "huge": 1e300},
    "eos_token_id": INTEGERS | {"-1": -1, "inside": [1, 1.5], "tensor": T(1.5)},
    "pad_token_id": INTEGERS | {"2**63": 1 << 63},
    "seed": INTEGERS | {"2**64": 1 << 64},
    "min_p": FLOATS | {"above 1": 1.1},
    "num_return_sequences": INTEGERS | {"0": 0, "2**16": 1 << 16},
    "num_beams": INTEGERS | {"0": 0},
    "cuda_graph": {"1": 1, "text": "yes"},
    "do_sample": {"1": 1, "text": "yes"},
}
GENERATE["eos_token_id"].pop("list"), GENERATE["eos_token_id"].pop("array")

RIGHT = {  # what a call may be given, and what it must give the same loss as
    "labels": (dict(labels=IDS), {}),
    "a bool mask": (dict(attention_mask=torch.ones_like(IDS).bool()), {}),
    "an int8 mask of 2": (dict(attention_mask=torch.ones_like(IDS).to(torch.int8) * 2), {}),
    "step as numpy": (dict(step=np.int64(3)), dict(step=3)),
    "step as int32": (dict(step=T(3, dtype=torch.int32)), dict(step=3)),
    "the last sample": (dict(first_sample=T((1 << 32) - B)), dict(first_sample=(1 << 32) - B)),
    "the last step": (dict(step=(1 << 63) - 1), dict(step=T((1 << 63) - 1))),
    "normalizer as a tensor": (dict(loss_normalizer=T(2)), dict(loss_normalizer=2.0)),
}


def rows(*tables):
    """(argument, which, value) of tables"""
    return [(key, name, value) for table in tables for key, values in table.items() for name, value in values.items()]


def refused(call, given, key):
    with pytest.raises(ValueError) as caught:
        call(**given)
    message = str(caught.value)
    short = key.replace("loss_", "").replace("max_new_tokens", "max_new_tokens|tokens are more|positions are more")
    assert re.match(r"(GPT|Bert|generate|cross_entropy): ", message) and re.search(
        f"{short}|prompt|positions", message
    ), message


@pytest.fixture(scope="module")
def models():
    return {"gpt": GPT(GPT_CONFIG), "bert": Bert(BERT_CONFIG, masked_lm=True)}


@pytest.mark.parametrize("name", ["gpt", "bert"])
def test_a_call_is_refused_and_not_counted(models, name):
    model = models[name]
    before = model(IDS, labels=IDS, step=0).loss
    assert int(model.step) == 0
    for key, _, value in rows(CALLS):
        given = dict(input_ids=IDS, labels=IDS) | ({} if key != "input_ids" else dict(labels=None)) | {key: value}
        refused(model, given, key if (name, key) != ("bert", "max_seqlen") else "packed")
    assert int(model.step) == 0 and len(rows(CALLS)) > 100
    assert torch.equal(model(IDS, labels=IDS).loss, before) and int(model.step) == 1  # the first masks, not later ones
    model.step.zero_()


def test_packed_documents_and_token_types(models):
    ids, types = IDS[:1], {"float": IDS.float(), "2": IDS * 0 + 2, "-1": IDS * 0 - 1, "one row": IDS[0]}
    for key, _, value in rows(PACKED):
        given = dict(cu_seqlens=T([0, 3, 7]).int(), max_seqlen=None) | {key: value}
        given |= dict(cu_seqlens=T([0, 7]).int()) if key == "max_seqlen" else {}
        refused(models["gpt"], dict(input_ids=ids) | given, key)
    refused(models["gpt"], dict(input_ids=IDS, cu_seqlens=T([0, 7]).int()), "cu_seqlens")
    for value in types.values():
        refused(models["bert"], dict(input_ids=IDS, token_type_ids=value), "token_type_ids")
    assert int(models["gpt"].step) == int(models["bert"].step) == 0


def test_generate(models):
    for key, _, value in rows(GENERATE):
        given = dict(input_ids=IDS, max_new_tokens=2, do_sample=True) | {key: value}
        refused(models["gpt"].generate, given, key)
    assert models["gpt"].training and len(rows(GENERATE)) > 70
    right = models["gpt"].generate(
        IDS, max_new_tokens=2, eos_token_id=1000, temperature=1e-30, do_sample=True, top_p=0.5
    )
    assert torch.equal(right, models["gpt"].generate(IDS, max_new_tokens=2))


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("eos", [None, 5])
def test_logits_that_are_nan_are_no_token(sample, eos):
    model = GPT(GPT_CONFIG)
    torch.nn.init.constant_(model.blocks[1].mlp.fc2.bias, NAN)
    with pytest.raises(RuntimeError, match="generate: the model's logits are NaN"):
        model.generate(IDS, max_new_tokens=2, do_sample=sample, eos_token_id=eos)


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_taken(models, name):
    given, same = RIGHT[name]
    losses = [models["gpt"](**dict(input_ids=IDS, labels=IDS, step=1) | more).loss for more in (given, same)]
    assert torch.equal(*losses)


def late(model):
    """An error when everything else has run."""
    model.head.loss = model.head.loss_and_logits = lambda *args, **more: 1 / 0


def test_an_error_at_the_end_of_a_call_is_not_counted():
    model = GPT(GPT_CONFIG)
    late(model)
    with pytest.raises(ZeroDivisionError):
        model(IDS, labels=IDS)
    assert int(model.step) == 0


# ---- the same on every rank ----

AT_TWO = [
    row for key in ("input_ids", "attention_mask", "first_sample", "loss_normalizer") for row in rows({key: CALLS[key]})
]


def at_two(world):
    """-> the message of each; nobody waits for another, and what comes after is right"""
    model = GPT(GPT_CONFIG, tp=make_tp(world))
    found = []
    for key, _, value in AT_TWO:
        with pytest.raises(ValueError) as caught:
            model(**dict(input_ids=IDS, labels=IDS if key != "input_ids" else None) | {key: value})
        found.append(str(caught.value))
    assert int(model.step) == 0
    return found, results(model, batch(GPT_CONFIG))


def test_two_ranks_refuse_what_one_does(ranks):
    (first, values), (second, others) = ranks(2, at_two)
    assert first == second and all(message.startswith(("GPT: ", "cross_entropy: ")) for message in first)
    assert_equal(values, others)


# ---- public functions and layers ----

X, W = torch.ones(4, 8), torch.ones(8, 8)
QKV = torch.ones(4, 1, 3, 8)
LABELS = torch.ones(4, dtype=torch.long)
RNG = make_rng(0, 0)
P = FLOATS | {"1": 1.0}
ABOVE_0 = FLOATS | {"0": 0.0}


def block(**options):
    return TransformerBlock(8, 2, **options)


YARN = dict(rope_type="yarn", factor=2.0, original_max_position_embeddings=8)
NUMBERS = {  # function -> (argument, values, call)
    "layer_norm": ("eps", FLOATS, lambda v: K.layer_norm(X, W[0], eps=v)),
    "rms_norm": ("eps", FLOATS, lambda v: K.rms_norm(X, W[0], eps=v)),
    "norm eps": ("eps", FLOATS, lambda v: K.reduce_bias_dropout_add_norm(X, weight=W[0], eps=v)),
    "norm p": ("p", P, lambda v: K.reduce_bias_dropout_add_norm(X, p=v, rng=RNG)),
    "embed eps": ("eps", FLOATS, lambda v: K.embed_finish(X[None], weight=W[0], eps=v)),
    "dropout": ("p", P, lambda v: K.dropout(X, v, rng=RNG)),
    "scale": ("scale", ABOVE_0, lambda v: K.attention(QKV, batch=2, causal=True, scale=v)),
    "softcap": ("softcap", ABOVE_0, lambda v: K.attention(QKV, batch=2, causal=True, softcap=v)),
    "attention p": ("p", P, lambda v: K.attention(QKV, batch=2, causal=True, p=v, rng=RNG)),
    "batch": ("batch", INTEGERS | {"0": 0, "3 of 4": 3}, lambda v: K.attention(QKV, batch=v, causal=True)),
    "smoothing": ("label_smoothing", FLOATS | {"1": 1.0}, lambda v: K.cross_entropy(X, LABELS, label_smoothing=v)),
    "z_loss": ("z_loss", FLOATS, lambda v: K.linear_cross_entropy(X, W, LABELS, z_loss=v)),
    "normalizer": ("normalizer", ABOVE_0, lambda v: K.cross_entropy(X, LABELS, normalizer=v)),
    "ids": ("ids", {"float": X[0], "int32": LABELS.int()}, lambda v: K.embedding(W, v)),
    "theta": ("rope_theta", ABOVE_0, lambda v: K.rope_table(8, 4, theta=v)),
    "factor": ("factor", ABOVE_0, lambda v: K.rope_table(8, 4, theta=1e4, scaling=dict(rope_type="linear", factor=v))),
    "yarn": ("rope_theta", {"1": 1.0}, lambda v: K.rope_table(8, 4, theta=v, scaling=YARN)),
    "step": ("step", WHOLE, lambda v: make_rng(0, v)),
    "seed": ("seed", INTEGERS | {"2**64": 1 << 64}, lambda v: make_rng(v, 0)),
    "LayerNorm": ("eps", FLOATS, lambda v: LayerNorm(8, eps=v)),
    "RMSNorm": ("eps", FLOATS, lambda v: RMSNorm(8, eps=v)),
    "MLP": ("init_std", FLOATS, lambda v: ParallelMLP(8, 8, init_std=v)),
    "attention": ("p", P, lambda v: ParallelAttention(8, 2, dropout=v)),
    "block p": ("p", P, lambda v: block(dropout=v)),
    "block eps": ("eps", FLOATS, lambda v: block(eps=v)),
    "lora": ("alpha", ABOVE_0, lambda v: add_lora(block(), rank=1, alpha=v)),
    "rows": ("batch", {"31 rows": torch.ones(31, 8)}, lambda v: block()(v, batch=2)),
    "rows of attention": ("batch", {"31": torch.ones(31, 8)}, lambda v: ParallelAttention(8, 2)(v, batch=2)),
    "mask of a block": (
        "attention_mask", {k: f(torch.ones(2, 2)) for k, f in MASKS.items()},
        lambda v: block()(X, batch=2, attention_mask=v),
    ),
}  # fmt: skip
SKIPPED = {("step", "-1"), ("step", "tensor -1"), ("MLP", "text")}  # right here; "ones" and "zeros" are texts


@pytest.mark.parametrize("name", NUMBERS)
def test_a_public_function_names_what_it_refuses(name):
    key, values, call = NUMBERS[name]
    for which, value in values.items():
        if (name, which) not in SKIPPED:
            with pytest.raises(ValueError, match=rf"\w+: .*{key}") as caught:
                call(value)
            assert re.match(r"\w+: ", str(caught.value)), which
