"""Hugging Face directories in and out, against transformers itself: random weights, no network.

Spans: models/files/names.py, read.py, write.py, disk.py: a directory in, and out again.
"""

import contextlib
import functools
import itertools
import json
import os
import re
import shutil
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, BertForPreTraining, BertModel, GPT2Config, GPT2LMHeadModel

from tests.common import assert_close, assert_equal, make_tp
from tests.models.common import MODELS, batch, of_files, of_transformers, results, whole
from tpfuse import TensorParallel
from tpfuse.layers.shards import named_specs
from tpfuse.models import GPT, Bert, GPTConfig
from tpfuse.models.files import disk as hf_disk
from tpfuse.models.files import read as hf_read
from tpfuse.models.files import source as hf_source
from tpfuse.models.files import write as hf_write
from tpfuse.pipeline import schedule

transformers.utils.logging.disable_progress_bar()
F64 = torch.float64
SIZES = dict(vocab_size=97, initializer_range=0.2)


def gpt_config(heads):
    sizes = dict(n_positions=32, n_embd=48, n_layer=2, n_head=heads, n_inner=84)
    return GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, **SIZES)


def bert_config(heads):
    sizes = dict(max_position_embeddings=32, hidden_size=48, num_hidden_layers=2, num_attention_heads=heads)
    return BertConfig(**sizes, intermediate_size=84, **SIZES)


THEIRS = {
    "gpt": (GPT2LMHeadModel, gpt_config),
    "bert": (BertModel, bert_config),
    "bert-mlm": (BertForMaskedLM, bert_config),
    "bert-pretraining": (BertForPreTraining, bert_config),
}
OURS = {name: cls for name, (cls, *_) in MODELS.items()} | {"bert-pretraining": Bert}
TOKENIZER = {"tokenizer.json": "{}", "vocab.txt": "[PAD]\n", "tokenizer_config.json": '{"a": 1}'}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """(name, heads, tied) -> a model of transformers in fp64, and the directory that it saved."""

    @functools.cache
    def make(name, heads=6, tie=True):
        cls, config = THEIRS[name]
        torch.manual_seed(1)
        config = config(heads)
        config.tie_word_embeddings = tie
        config._attn_implementation = "eager"
        model = cls(config).double().eval()
        with torch.no_grad():
            for p in model.parameters():  # no norm, bias or row is trivial
                p += 0.1 * torch.randn_like(p)
        path = tmp_path_factory.mktemp(name)
        model.save_pretrained(path)
        for file, text in TOKENIZER.items():
            (path / file).write_text(text)
        (path / "README.md").write_text("not copied")
        return model, path

    return make


CASES = [  # heads, ranks, sequence parallel, tied, padding
    (6, 1, False, True, "right"),
    (6, 2, True, False, "left"),
    (6, 3, True, True, "right"),
    (6, 3, False, False, None),
    (12, 4, True, True, "left"),
    (12, 4, True, False, "right"),
]
MORE = [  # with those above every pair of values comes at R = 1, 2 and 3
    (6, 1, True, False, None),
    (6, 1, False, True, "left"),
    (6, 2, False, True, None),
    (6, 2, True, False, "right"),
    (6, 3, True, False, "left"),
    (6, 3, False, True, "right"),
]


@pytest.mark.parametrize("heads, R, sp, tie, pad", CASES + [pytest.param(*c, marks=pytest.mark.slow) for c in MORE])
@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients_are_those_of_transformers(ranks, theirs, reached, name, heads, R, sp, tie, pad):
    model, path = theirs(name, heads, tie)
    call = batch(model.config, pad=pad)
    exact = comparable(of_transformers(model, call, name == "gpt"), call, name)
    for got in ranks(R, of_files, str(path), OURS[name], call, sp):
        if not tie and name == "bert-mlm":
            got.pop("d cls.predictions.bias")  # transformers keeps it, idle, beside the decoder's
        errors = assert_close(comparable(got, call, name), exact, F64)
        if name != "bert":  # whose body has no head to be tied
            reached(MODELS[name][0].config_class.from_hf(model.config.to_dict()), R, errors, sp=sp)


def comparable(found, call, name):
    """Without what means nothing: what a padding row of GPT attends to, and a key's bias alone, whose gradient is zero
    but for rounding."""
    if name == "gpt" and "attention_mask" in call:
        found["logits"] = found["logits"][call["attention_mask"].bool()]
    for key in [key for key in found if key.endswith("query.bias")]:
        found[key] = torch.cat([found.pop(key.replace("query", leaf)) for leaf in ("query", "key", "value")])
    return found


def test_a_wrong_weight_would_show(theirs):
    model, path = theirs("gpt")
    call = batch(model.config)
    exact = of_transformers(model, call)
    wrong = GPT.from_pretrained(path, dtype=F64)
    with torch.no_grad():
        wrong.blocks[1].mlp_norm.bias[3] += 1e-6
    got = results(wrong, call)
    with pytest.raises(AssertionError):
        assert_close({"logits": got["logits"]}, {"logits": exact["logits"]}, F64)


# ---- the same model in other files ----


def rewritten(source: Path, target: Path, names=lambda name: name, extra=None, config=lambda c: c) -> Path:
    """A copy with its tensors renamed, more tensors, another config."""
    target.mkdir()
    tensors = {names(k): v for k, v in load_file(source / "model.safetensors").items()}
    extra = extra(tensors) if callable(extra) else extra or {}
    save_file(tensors | {name: tensor.clone() for name, tensor in extra.items()}, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(config(json.loads((source / "config.json").read_text()))))
    return target


def gamma_beta(name):
    return re.sub(r"LayerNorm\.bias", "LayerNorm.beta", re.sub(r"LayerNorm\.weight", "LayerNorm.gamma", name))


NEWER = dict(n_positions="max_position_embeddings", n_embd="hidden_size", n_layer="num_hidden_layers")
NEWER |= dict(n_head="num_attention_heads")  # those of transformers' attribute_map
one = torch.ones(2)
WTE, WORDS, DECODER = "transformer.wte.weight", "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder"
REWRITES = {
    "gpt without prefix": ("gpt", dict(names=lambda n: n.removeprefix("transformer."))),
    "gpt with buffers": (
        "gpt",
        dict(extra={"transformer.h.0.attn.bias": one, "transformer.h.1.attn.masked_bias": one + 1}),
    ),
    "gpt with the tied head": ("gpt", dict(extra=lambda t: {"lm_head.weight": t[WTE]})),
    "gpt with newer keys": ("gpt", dict(config=lambda c: {NEWER.get(k, k): v for k, v in c.items()})),
    "bert with prefix": ("bert", dict(names=lambda n: f"bert.{n}")),
    "bert gamma, beta": ("bert", dict(names=gamma_beta)),
    "bert with a buffer": ("bert", dict(extra={"embeddings.position_ids": torch.arange(32)[None]})),
    "mlm gamma, beta": ("bert-mlm", dict(names=gamma_beta)),
    "mlm with copies": (
        "bert-mlm",
        dict(extra=lambda t: {f"{DECODER}.weight": t[WORDS], f"{DECODER}.bias": t["cls.predictions.bias"]}),
    ),
    "mlm with a second head": (
        "bert-mlm",
        dict(extra={"cls.seq_relationship.weight": one, "cls.seq_relationship.bias": one + 1}),
    ),
}


@pytest.mark.parametrize("case", REWRITES)
def test_names_and_keys_of_every_generation(theirs, tmp_path, case):
    name, change = REWRITES[case]
    _, path = theirs(name)
    other = rewritten(path, tmp_path / "other", **change)
    model = OURS[name].from_pretrained(other)
    assert_equal(whole(model), whole(OURS[name].from_pretrained(path)))
    model.save_pretrained(tmp_path / "again")  # in today's names, whatever they were
    again, info = THEIRS[name][0].from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and again.config.num_hidden_layers == 2


def test_an_untied_bias_under_its_older_name(theirs, tmp_path):
    _, path = theirs("bert-mlm", tie=False)
    tensors = load_file(path / "model.safetensors")
    bias = tensors.pop("cls.predictions.decoder.bias")
    assert not torch.equal(tensors["cls.predictions.bias"], bias)  # which transformers ignores, and so do we
    assert torch.equal(Bert.from_pretrained(path, dtype=F64).head.bias, bias)
    other = rewritten(path, tmp_path / "older")
    save_file(tensors, other / "model.safetensors")
    assert torch.equal(Bert.from_pretrained(other, dtype=F64).head.bias, tensors["cls.predictions.bias"])


@pytest.mark.parametrize(
    "options, head, pooler", [({}, True, False), (dict(masked_lm=False), False, True), (dict(pooler=True), True, True)]
)
def test_a_file_with_two_heads_gives_the_one_wanted(theirs, options, head, pooler):
    model = Bert.from_pretrained(theirs("bert-pretraining")[1], **options)
    assert (model.head is not None, model.pooler is not None) == (head, pooler)


@pytest.mark.parametrize("shard", ["20KB", "70KB"])
def test_index_sharded_files(ranks, theirs, tmp_path, shard):
    model, path = theirs("bert-mlm")
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert_equal(ranks(2, loaded, str(tmp_path), "bert-mlm", None)[1], whole(Bert.from_pretrained(path)))


def loaded(world, path, name, dtype):
    return whole(OURS[name].from_pretrained(path, tp=make_tp(world), dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, F64])
def test_the_dtype_is_the_one_asked_for(ranks, theirs, dtype):
    _, path = theirs("gpt", 12)
    exact = {k: v.to(dtype) for k, v in whole(GPT.from_pretrained(path, dtype=F64)).items()}
    for got in ranks(4, loaded, str(path), "gpt", dtype):
        assert_equal(got, exact)
    assert all(p.dtype == torch.float32 for p in GPT.from_pretrained(path).parameters())


class Spy:
    """A lazily read tensor that counts what is read."""

    def __init__(self, stored, name, count):
        self.stored, self.name, self.count = stored, name, count

    def __getitem__(self, index):
        x = self.stored[index]
        self.count[self.name] += x.numel()
        return x

    def __getattr__(self, name):
        return getattr(self.stored, name)


def spied(world, path, name):
    """-> elements read by name, elements of the parameters here, and the names that make sharded parameters"""
    count, tensor = Counter(), hf_read.ModelDirectory.tensor
    with mock.patch.object(hf_read.ModelDirectory, "tensor", lambda self, raw: Spy(tensor(self, raw), raw, count)):
        model = OURS[name].from_pretrained(path, tp=make_tp(world))
    sharded = {
        model.files.hf_name(n)
        for key, _, spec, _ in named_specs(model)
        if spec.dim is not None
        for n in model.files.sources()[key].names
    }
    return count, sum(p.numel() for p in model.parameters()), sharded


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_each_rank_reads_its_own_slices_only(ranks, theirs, name, tie):
    _, path = theirs(name, 12, tie)
    sizes = {k: v.numel() for k, v in load_file(path / "model.safetensors").items()}
    every = ranks(4, spied, str(path), name)
    for count, parameters, sharded in every:
        assert count.total() == parameters and len(sharded) > 8
        for key in count:
            assert count[key] < sizes[key] if key in sharded else count[key] == sizes[key]
    together = sum((count for count, *_ in every), Counter())
    assert all(together[key] == sizes[key] for key in sharded)  # each element once


# ---- errors: before anything is read, named, the same on every rank ----


def edit(file, change):
    def apply(path: Path):
        value = json.loads((path / file).read_text())
        (path / file).write_text(json.dumps(change(value)))

    return apply


def config(**changes):
    return edit("config.json", lambda c: c | changes)


def tensors(change):
    def apply(path: Path):
        found = load_file(path / "model.safetensors")
        change(found)
        save_file(found, path / "model.safetensors")

    return apply


def write(file, text):
    return lambda path: (path / file).write_bytes(text)


def truncate(path: Path):
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[:-1000])


def shard_missing(path: Path):
    with mock.patch.object(hf_write, "MAX_SHARD_BYTES", 30_000):
        GPT.from_pretrained(path).save_pretrained(path)
    next(path.glob("model-00002-of-*.safetensors")).unlink()


def index_of(value):
    def apply(path: Path):
        (path / "model.safetensors").unlink()
        (path / "model.safetensors.index.json").write_text(json.dumps(value))

    return apply


def rename(old, new):
    return tensors(lambda t: t.update({new: t.pop(old)}))


ERRORS = {  # what is done to a good directory, and what is said
    "no directory": ("gpt", lambda path: shutil.rmtree(path), r"no config.json"),
    "no config": ("gpt", lambda path: (path / "config.json").unlink(), r"has no config.json; it must be a local"),
    "corrupt config": ("gpt", write("config.json", b'{"model_type": '), r"config.json is not valid JSON"),
    "binary config": ("gpt", write("config.json", b"\xff\xfe\x00"), r"config.json is not valid JSON"),
    "config not an object": ("gpt", write("config.json", b"[1]"), r"config.json must hold a JSON object, got list"),
    "model type": (
        "gpt",
        config(model_type="mamba"),
        r"GPTConfig: model_type must be one of gpt2, llama, .*, got 'mamba'",
    ),
    "no model type": (
        "bert",
        edit("config.json", lambda c: {k: v for k, v in c.items() if k != "model_type"}),
        r"must be one of bert, .*got None",
    ),
    "activation": ("gpt", config(activation_function="mish"), r"activation 'mish' is not built; one of .*gelu_new"),
    "scale": ("gpt", config(scale_attn_weights=False), r"GPTConfig: scale_attn_weights=False is not built"),
    "size of a kind": ("gpt", config(n_layer="2"), r"GPTConfig: num_layers must be a positive integer, got '2'"),
    "heads": ("gpt", config(n_head=5), r"GPTConfig: hidden_size=48 is not divisible by num_heads=5"),
    "no weights": ("gpt", lambda path: (path / "model.safetensors").unlink(), r"neither model.safetensors nor"),
    "missing": ("gpt", tensors(lambda t: t.pop(WTE)), r"lacks wte.weight$"),
    "missing head": ("gpt", config(tie_word_embeddings=False), r"lacks lm_head.weight$"),
    "missing many": ("gpt", config(n_layer=3), r"lacks h.2.ln_1.* and \d+ more"),
    "extra": (
        "gpt",
        tensors(lambda t: t.update({"transformer.h.0.adapter": one})),
        r"holds transformer.h.0.adapter, which GPT has no place for",
    ),
    "extra in a module": (
        "gpt",
        tensors(lambda t: t.update({"transformer.ln_f.scale": one})),
        r"holds transformer.ln_f.scale, which GPT has no place for",
    ),
    "quantized by its config": (
        "gpt",
        config(quantization_config=dict(quant_method="gptq", bits=4)),
        r"quantization_config={.*'quant_method': 'gptq'.*} is not built",
    ),
    "twice": ("gpt", tensors(lambda t: t.update({"wte.weight": one})), r"holds wte.weight twice"),
    "mis-shaped": (
        "gpt",
        tensors(lambda t: t.update({WTE: t[WTE][:96].clone()})),
        r"transformer.wte.weight in .* must be \(97, 48\) .* got \(96, 48\)",
    ),
    "transposed": (
        "gpt",
        tensors(lambda t: t.update({n: t[n].t().contiguous() for n in ["transformer.h.0.mlp.c_fc.weight"]})),
        r"c_fc.weight in .* must be \(48, 84\)",
    ),
    "other width": ("bert", config(intermediate_size=96), r"intermediate.dense.weight in .* must be \(96, 48\)"),
    "quantized": (
        "gpt",
        tensors(lambda t: t.update({WTE: t[WTE].to(torch.int8)})),
        r"wte.weight in .* must be one of .*F32.* got I8",
    ),
    "truncated": ("gpt", truncate, r"model.safetensors cannot be read \(truncated or missing\?\)"),
    "not safetensors": ("gpt", write("model.safetensors", b"PK" * 100), r"model.safetensors cannot be read"),
    "shard missing": (
        "gpt",
        shard_missing,
        r"model-00002-of-0000\d.safetensors cannot be read \(truncated or missing\?\)",
    ),
    "index": ("gpt", index_of({"weight_map": [1]}), r"index.json is not a valid index"),
    "empty index": ("gpt", index_of({}), r"index.json is not a valid index"),
}


NOT_BUILT = {
    "gpt": [("scale_attn_by_inverse_layer_idx", True), ("reorder_and_upcast_attn", True), ("add_cross_attention", True)]
    + [("is_causal", False), ("is_causal", None)],
    "bert": [("position_embedding_type", "relative_key"), ("is_decoder", True), ("add_cross_attention", True)],
}


@pytest.mark.parametrize("name", NOT_BUILT)
def test_an_option_that_is_not_built_is_named(theirs, name):
    config, cls = theirs(name)[0].config.to_dict(), OURS[name].config_class
    for key, value in NOT_BUILT[name]:
        with pytest.raises(ValueError, match=f"{cls.__name__}: {key}={value!r} is not built"):
            cls.from_hf(config | {key: value})


def refusal(world, path, name, only=None):
    """The message, after nothing was read; with ``only`` the directory is bad on one rank only."""
    path = Path(path)
    if only is not None:
        path = path.parent / ("bad" if world.rank == only else "good")
    with mock.patch.object(hf_source, "read_slice", None), pytest.raises(ValueError) as caught:
        OURS[name].from_pretrained(path, tp=None if world is None else make_tp(world))
    if world is not None:
        dist.barrier()
    return str(caught.value)


@pytest.mark.parametrize("case", ERRORS)
def test_what_is_wrong_with_a_directory_is_said_before_anything_is_read(theirs, tmp_path, case):
    name, spoil, said = ERRORS[case]
    shutil.copytree(theirs(name, 12)[1], tmp_path / "bad")
    spoil(tmp_path / "bad")
    message = refusal(None, str(tmp_path / "bad"), name)
    assert re.search(said, message), message


@pytest.mark.parametrize("case", ["truncated", "missing", "corrupt config", "activation"])
def test_a_directory_that_is_bad_for_one_rank_is_refused_by_all(ranks, theirs, tmp_path, case):
    """Two nodes, one half-copied; and one for both."""
    name, spoil, said = ERRORS[case]
    for folder in ("good", "bad"):
        shutil.copytree(theirs(name, 12)[1], tmp_path / folder)
    spoil(tmp_path / "bad")
    for only in (0, 1, None):
        first, second = ranks(2, refusal, str(tmp_path / "bad"), name, only)
        assert first == second and re.search(said, first), first


def test_an_option_that_is_the_default_is_no_error(theirs, tmp_path):
    path = rewritten(
        theirs("gpt")[1],
        tmp_path / "other",
        config=lambda c: c | dict(scale_attn_weights=True, add_cross_attention=False),
    )
    assert GPT.from_pretrained(path).config.num_layers == 2


def dtypes_differ(world, path):
    with pytest.raises(
        ValueError,
        match="GPT: dtype must be the same .*float64.*float32|GPT: dtype must be the same .*float32.*float64",
    ):
        GPT.from_pretrained(path, tp=make_tp(world), dtype=(F64, torch.float32)[world.rank])
    dist.barrier()


def test_dtypes_that_differ_over_the_ranks(ranks, theirs):
    ranks(2, dtypes_differ, str(theirs("gpt")[1]))


def disks_differ(world, folder, axis):
    mesh = world.stages(*(world.size if axis == name else 1 for name in ("pp", "dp", "tp")))
    options = dict(tp=TensorParallel(mesh["tp"]), dp=mesh["dp"])
    if axis == "pp":
        options["stage"] = (world.rank, world.size, "1f1b")
    with pytest.raises(ValueError) as caught:
        model = GPT.from_pretrained(f"{folder}/{world.rank}", **options)
        schedule(model, mesh["pp"], "1f1b", 2)
    dist.barrier()
    return str(caught.value)


@pytest.mark.parametrize("axis", ["tp", "dp", "pp"])
def test_disks_that_hold_other_weights(ranks, theirs, tmp_path, axis):
    """Of the same names and shapes: what a node had from an earlier download."""
    for folder in ("0", "1"):
        shutil.copytree(theirs("gpt")[1], tmp_path / folder)
    tensors = load_file(tmp_path / "1" / "model.safetensors")
    tensors = {name: x + 1e-3 * torch.randn(x.shape) for name, x in tensors.items()}
    save_file(tensors, tmp_path / "1" / "model.safetensors", metadata={"format": "pt"})
    first, second = ranks(2, disks_differ, tmp_path, axis)
    assert first == second and re.search("the weights in the files must be the same on every .*, got rank 0: ", first)


def test_disks_that_hold_other_models(ranks, theirs, tmp_path):
    """Of which the rest of from_pretrained makes other calls: the head of one is tied."""
    for folder, heads, tie in (("0", 6, True), ("1", 3, False)):
        shutil.copytree(theirs("gpt", heads, tie)[1], tmp_path / folder)
    first, second = ranks(2, disks_differ, tmp_path, "tp")
    assert first == second and first.startswith("GPT.from_pretrained: num_heads and tie_embeddings must be the same")
    assert "num_heads: rank 0: '6'; rank 1: '3'" in first


def sources_differ(world):
    if world.rank:
        mock.patch("tpfuse.parallel._sources", lambda: "other").start()
    try:
        make_tp(world)
    except ValueError as error:
        return str(error)
    finally:
        mock.patch.stopall()


def test_packages_of_one_version_with_other_sources(ranks):
    first, second = ranks(2, sources_differ)
    assert first == second and re.search(r"versions must be the same on .* rank 0: 'tpfuse \S+ #\w{8}, .*#other", first)


# ---- out ----


def content(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in Path(path).iterdir()}


def resaved(world, source, target, name, limit=hf_write.MAX_SHARD_BYTES):
    """-> files written by this rank"""
    calls = mock.Mock(wraps=hf_write.save_file)
    tp = TensorParallel(world.mesh(2, 2)["tp"]) if "2x2" in target else make_tp(world)
    dp = world.mesh(2, 2)["dp"] if "2x2" in target else None
    with mock.patch.object(hf_write, "save_file", calls), mock.patch.object(hf_write, "MAX_SHARD_BYTES", limit):
        OURS[name].from_pretrained(source, tp=tp, dp=dp, dtype=F64).save_pretrained(target)
    return calls.call_count


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_saved_is_bytewise_the_same_at_every_size_and_loads_in_transformers(
    ranks, theirs, reached, tmp_path, name, tie
):
    for heads, sizes in ((12, (2, 4, "2x2")), (6, (3,))):
        model, path = theirs(name, heads, tie)
        one = tmp_path / f"{heads}"
        assert ranks(1, resaved, str(path), str(one), name) == [1]
        for R in sizes:
            target = tmp_path / f"{heads}-{R}"
            written = ranks(4 if R == "2x2" else R, resaved, str(path), str(target), name)
            assert written == [1] + [0] * (len(written) - 1)
            assert content(target) == content(one)
        assert content(one).keys() == {"config.json", "model.safetensors", *TOKENIZER} | (
            {"generation_config.json"} if name == "gpt" else set()
        )
        assert {file: (one / file).read_text() for file in TOKENIZER} == TOKENIZER
        again, info = type(model).from_pretrained(one, output_loading_info=True, attn_implementation="eager")
        assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
        assert again.dtype == F64 and again.config.architectures == model.config.architectures
        state = dict(model.state_dict())
        if not tie and name == "bert-mlm":
            state["cls.predictions.bias"] = state["cls.predictions.decoder.bias"]  # the idle copy
        assert_equal(dict(again.state_dict()), state)  # no padding, no rounding
        for R in sizes:
            reached(MODELS[name][1], 4 if R == "2x2" else R, {"saved and loaded": 0.0})
        call = {k: v for k, v in batch(model.config, pad="right").items() if k != "labels"}
        torch.testing.assert_close(again(**call)[0], model(**call)[0], rtol=1e-12, atol=1e-12)
        ignore = {"_name_or_path", "transformers_version", "torch_dtype"}
        read = [
            {k: v for k, v in json.loads((p / "config.json").read_text()).items() if k not in ignore}
            for p in (one, path)
        ]
        assert read[0] == read[1]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_made_here_loads_in_transformers(tmp_path, name):
    cls, config, options = MODELS[name]
    model = cls(config, **options).eval()
    model.save_pretrained(tmp_path)
    again, info = THEIRS[name][0].from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    call = {k: v for k, v in batch(config).items() if k != "labels"}
    ours, theirs = model(**call), again.eval()(**call)
    torch.testing.assert_close(
        ours.last_hidden_state if name == "bert" else ours.logits, theirs[0], rtol=1e-4, atol=1e-5
    )
    assert cls.from_pretrained(tmp_path).config == config


def test_saving_again_leaves_nothing_of_before(ranks, theirs, tmp_path):
    _, path = theirs("gpt", 12)
    ranks(2, resaved, str(path), str(tmp_path), "gpt")
    single = content(tmp_path)
    (tmp_path / "model-notes.txt").write_text("mine")
    ranks(2, resaved, str(path), str(tmp_path), "gpt", 30_000)
    found = content(tmp_path)
    count = len([name for name in found if name.startswith("model-0")])
    shards = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    assert count > 2 and set(found) == set(single) - {"model.safetensors"} | {
        *shards,
        "model.safetensors.index.json",
        "model-notes.txt",
    }
    assert set(json.loads(found["model.safetensors.index.json"])["weight_map"].values()) == set(shards)
    assert_equal(whole(GPT.from_pretrained(tmp_path)), whole(GPT.from_pretrained(path)))
    assert GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)[1]["missing_keys"] == set()
    for limit in (
        60_000,
        hf_write.MAX_SHARD_BYTES,
        hf_write.MAX_SHARD_BYTES,
    ):  # fewer shards, then one file, twice
        ranks(2, resaved, str(path), str(tmp_path), "gpt", limit)
    assert content(tmp_path) == single | {"model-notes.txt": b"mine"}


@pytest.mark.parametrize("ends", [False, True], ids=["fails", "ends"])
@pytest.mark.parametrize("before, after", [(8_000, 8_000), (None, 8_000), (8_000, None)])
def test_files_of_two_saves_are_never_read_together(tmp_path, before, after, ends):
    """Whichever file cannot be moved: the earlier ones are back, or aside without a config where the process ended."""
    sizes = dict(vocab_size=31, max_positions=8, hidden_size=16, num_layers=2)
    first, second = (GPT(GPTConfig(**sizes, num_heads=heads), seed=heads) for heads in (2, 4))
    path, move, moves = tmp_path / "out", os.replace, 0
    hf_write.save(first.files, path, before)
    earlier = content(path)

    def moved(source, target):
        nonlocal moves
        moves -= path in (Path(source).parent, Path(target).parent)
        if moves == 0 or (ends and moves < 0):
            raise KeyboardInterrupt
        move(source, target)

    for count in itertools.count(1):
        moves, removed = count, mock.patch.object(hf_disk.shutil, "rmtree") if ends else contextlib.nullcontext()
        with mock.patch.object(os, "replace", moved), removed, contextlib.suppress(KeyboardInterrupt):
            with mock.patch.object(Path, "unlink") if ends else contextlib.nullcontext():
                hf_write.save(second.files, path, after)
            break
        if not ends:
            assert content(path) == earlier
            continue
        files = [file for file in path.rglob("*") if file.is_file()]
        assert earlier.items() <= {(file.name, file.read_bytes()) for file in files}
        if count > 1:
            with pytest.raises(ValueError, match=r"has no config\.json; a save ended .* earlier ones are in .*/old:"):
                GPT.from_pretrained(path)
        shutil.rmtree(path)
        hf_write.save(first.files, path, before)
    assert count > 5
    assert_equal(whole(GPT.from_pretrained(path)), whole(second))


def test_saving_over_the_source(theirs, tmp_path):
    shutil.copytree(theirs("gpt")[1], tmp_path / "here")
    model = GPT.from_pretrained(tmp_path / "here", dtype=F64)
    before = whole(model)
    model.save_pretrained(tmp_path / "here")
    assert_equal(whole(GPT.from_pretrained(tmp_path / "here", dtype=F64)), before)


def cannot(world, source, target, broken):
    """Saves where writing fails -> the error's text."""
    model = GPT.from_pretrained(source, tp=make_tp(world))

    def full(*args, **kwargs):
        raise OSError("no space left")

    patch = (
        mock.patch.object(hf_disk if broken == "fsync" else hf_write, broken, full)
        if broken
        else mock.patch.object(hf_write, "INDEX", hf_write.INDEX)
    )
    with patch, pytest.raises((OSError, RuntimeError)) as caught:
        model.save_pretrained(target)
    dist.barrier()
    return str(caught.value)


@pytest.mark.parametrize("broken", ["save_file", "fsync", None], ids=["writing", "at the end", "no directory"])
def test_an_error_while_writing_is_every_ranks_and_leaves_the_old_files(ranks, theirs, tmp_path, broken):
    _, path = theirs("gpt", 12)
    target = tmp_path / "out"
    if broken is None:
        target.write_text("a file where a directory should be")
        first, second = ranks(2, cannot, str(path), str(target), broken)
        assert first == second and "exists" in first and target.read_text().startswith("a file")
        return
    ranks(1, resaved, str(path), str(target), "gpt")
    before = content(target)
    first, second = ranks(2, cannot, str(path), str(target), broken)
    assert first == second == "no space left"
    assert content(target) == before  # and no temporary folder
