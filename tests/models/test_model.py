"""Every model gives the same answer however it is split, and says what is wrong on every rank alike."""

import copy
import functools
import pickle
import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.common import DTYPES_AND_RANKS, assert_close, assert_equal, error, make_tp
from tests.models.common import GPT_CONFIG, MODELS, batch, default_dtype, results, run, scramble, whole
from tpfuse import TensorParallel
from tpfuse.models import GPT, Bert
from tpfuse.models import model as model_file

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16


@pytest.mark.parametrize("seed", [1.5, "0", None, float("nan"), True, 1 << 64], ids=str)
def test_a_seed_that_is_none_is_named(seed):
    with pytest.raises(ValueError, match="GPT: seed must (be an integer|lie in)"):
        GPT(GPT_CONFIG, seed=seed)


@functools.cache
def alone(name, dtype, pad="right", **options):
    """One process, no group."""
    cls, config, more = MODELS[name]
    return run(None, cls, config, batch(config, pad=pad), dtype=dtype, options=more | options | dict(perturb=True))


# ---- the split does not show ----


@pytest.mark.parametrize("saving", ["fastest", "smallest"])
@pytest.mark.parametrize("sp", [True, False], ids=["sp", "no sp"])
@pytest.mark.parametrize("dtype, R", DTYPES_AND_RANKS)
@pytest.mark.parametrize("name", MODELS)
def test_any_split_gives_the_same_values_and_gradients(ranks, name, dtype, R, sp, saving):
    """Dropout in all places, a padded batch; one wrong bit of a mask would show (see below)."""
    cls, config, options = MODELS[name]
    every = ranks(
        R, run, cls, config, batch(config, pad="right"), sp, dtype, options | dict(perturb=True, saving=saving)
    )
    for other in every[1:]:
        assert_equal(other, every[0])
    assert_close(every[0], alone(name, dtype), dtype)


@pytest.mark.parametrize("name", MODELS)
def test_another_mask_would_show(name):
    ours, other = alone(name, F64), alone(name, F64, seed=1)
    assert error(other["d blocks.0.attention.out.weight"], ours["d blocks.0.attention.out.weight"]) > 1e-2
    one = ours | {"d input_norm.weight": ours["d input_norm.weight"] * (1 + 1e-9)}
    with pytest.raises(AssertionError, match="input_norm"):
        assert_close(one, ours, F64)


def initial(world, name, sp):
    cls, config, options = MODELS[name]
    return whole(cls(config, tp=make_tp(world, sp), seed=5, **options))


@pytest.mark.parametrize("name", MODELS)
def test_weights_start_bitwise_equal_at_every_size(ranks, name):
    cls, config, options = MODELS[name]
    first = whole(cls(config, seed=5, **options))
    for R in (1, 2, 4, 3):
        for got in ranks(R, initial, name, True):
            assert_equal(got, first)
    assert not torch.equal(
        whole(cls(config, seed=6, **options))["blocks.0.mlp.fc1.weight"], first["blocks.0.mlp.fc1.weight"]
    )


# ---- precision ----


def rounded(world, name, dtype, sp, autocast=False):
    """From weights that bf16 holds exactly, so that what differs is the computation."""
    cls, config, options = MODELS[name]
    with default_dtype(dtype):
        model = cls(config, tp=None if world is None else make_tp(world, sp), **options)
    exact = cls(config, tp=model.tp, **options)
    scramble(exact)
    model.load_state_dict({k: p.bfloat16().to(dtype) for k, p in exact.state_dict().items()})
    with torch.autocast("cpu", BF16, enabled=autocast):
        found = results(model, batch(config, 4, 16, pad="right"))
    assert all(p.grad.dtype == dtype for p in model.parameters())
    return found


def total_error(ours, exact):
    """RMS over everything together: each tensor relative to its own size."""
    scaled = [(ours[k].double() - exact[k]).norm() / exact[k].norm() for k in exact]
    return torch.stack(scaled).square().mean().sqrt().item()


@pytest.mark.parametrize("autocast", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["bf16", "autocast"])
@pytest.mark.parametrize("name", MODELS)
def test_the_error_of_bf16_does_not_grow_with_the_split(ranks, name, autocast):
    """Under autocast the parameters and their gradients are fp32."""
    dtype = F32 if autocast else BF16
    exact = rounded(None, name, F64, False)
    one = total_error(rounded(None, name, dtype, False, autocast), exact)
    assert 1e-4 < one < 0.1, one  # bf16 was used, and worked
    for R, sp in ((2, True), (4, True), (4, False)):
        got = total_error(ranks(R, rounded, name, dtype, sp, autocast)[0], exact)
        assert got <= 1.6 * one, (R, sp, got, one)


# ---- the model as a module ----


def test_every_training_forward_draws_new_masks_and_a_step_its_own(monkeypatch):
    model, call = GPT(GPT_CONFIG), batch(GPT_CONFIG)
    loss = lambda **more: model(**call, **more).loss.item()
    first, second = loss(), loss()
    assert first != second and int(model.step) == 2
    assert loss(step=0) == first and loss(step=torch.tensor(1)) == second and int(model.step) == 2
    assert loss(step=0, first_sample=3) != first
    model.eval()
    monkeypatch.setattr(model_file, "make_rng", None)  # not called
    assert loss() == loss() and int(model.step) == 2


def test_masks_belong_to_samples_however_a_batch_is_cut():
    model, call = GPT(GPT_CONFIG), batch(GPT_CONFIG, 4)
    ids = call["input_ids"]
    both = model(ids, step=7).logits
    torch.testing.assert_close(model(ids[2:], step=7, first_sample=2).logits, both[2:])
    assert (model(ids[2:], step=7).logits - both[2:]).abs().max() > 1e-3


def roundtrips(world):
    model = GPT(GPT_CONFIG, tp=make_tp(world) if world else None)
    call, optimizer = batch(GPT_CONFIG), torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        model(**call).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    fresh = GPT(GPT_CONFIG, tp=model.tp, seed=0)
    assert fresh(**call, step=2).loss.item() != model(**call, step=2).loss.item()
    assert fresh.load_state_dict(model.state_dict()) == ([], [])
    want = model(**call, step=2).loss.item()
    copied = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for other in copied:
        assert other.step.item() == 2 and other.step is not model.step and other.tp == model.tp
    assert [other(**call).loss.item() for other in (*copied, model)] == [want] * 3  # from their own counters
    return fresh(**call, step=2).loss.item() == want


def test_a_model_copies_pickles_and_gives_its_state(ranks):
    assert roundtrips(None) and all(ranks(2, roundtrips))


def recomputed(world, saving, use):
    with default_dtype(F64):
        model = GPT(GPT_CONFIG, tp=make_tp(world) if world else None, saving=saving)
    if use:
        for block in model.blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return results(model, batch(GPT_CONFIG))


@pytest.mark.parametrize("saving", ["fastest", "smallest"])
def test_recompute_is_bitwise_the_same(ranks, saving):
    """With dropout: the masks are a function of the step, which the recomputed forward is given again."""
    assert_equal(recomputed(None, saving, True), recomputed(None, saving, False))
    for got, want in zip(ranks(2, recomputed, saving, True), ranks(2, recomputed, saving, False)):
        assert_equal(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("name, backend", [("gpt", "inductor"), ("bert-mlm", "aot_eager")])
def test_torch_compile(name, backend):
    cls, config, options = MODELS[name]
    torch._dynamo.reset()
    found = []
    for compiled in (False, True):
        with default_dtype(F64):
            model = cls(config, **options)
        call = batch(config)
        if compiled:
            model.compile(fullgraph=True, backend=backend)
        out = model(**call)
        out.loss.backward()
        second = model(**call).loss  # the counter goes on, in the same graph
        found.append(
            {"loss": out.loss.detach(), "second": second.detach(), "step": model.step.clone()} | whole(model, grad=True)
        )
    assert found[1]["loss"] != found[1]["second"] and found[1]["step"] == 2
    assert_close(found[1], found[0], F64)


# ---- errors: named, the same on every rank, nobody waits ----


def config(**changes):
    """The errors of a model made with another config; a function gives a value by the rank."""
    of = lambda value, rank: value(rank) if callable(value) else value
    return lambda world, call: GPT(
        replace(GPT_CONFIG, **{key: of(value, world.rank) for key, value in changes.items()}), tp=make_tp(world)
    )


def option(name, value, cls=GPT):
    """The errors of a model made with an option whose value the rank decides."""
    config = MODELS["gpt" if cls is GPT else "bert"][1]
    return lambda world, call: cls(config, tp=make_tp(world), **{name: value(world.rank)})


def dtype_differs(world, call):
    with default_dtype((F32, F64)[world.rank % 2]):
        GPT(GPT_CONFIG, tp=make_tp(world))


def no_dp(world, call):
    GPT(GPT_CONFIG, tp=TensorParallel(world.mesh(2, 2)["tp"]))(**call)


def calls(**changes):
    """The errors of a call, by what is passed."""
    return lambda world, call: GPT(GPT_CONFIG, tp=make_tp(world))(
        **(call | {k: f(call["input_ids"]) for k, f in changes.items()})
    )


ERRORS = {
    "split_heads": (
        config(num_heads=6),
        r"ParallelAttention: num_heads=6 is not divisible by tensor-parallel size 4; use 1, 2, 3 or 6",
    ),
    "split_ffn": (
        config(ffn_size=82),
        r"ParallelMLP: ffn_size=82 is not divisible by tensor-parallel size 4; use 1 or 2",
    ),
    # chunks of 3: the fourth rank has none
    "split_vocab": (config(vocab_size=9), r"VocabParallelEmbedding: num_embeddings=9 leaves a rank"),
    "config_differs": (
        config(dropout=lambda rank: 0.1 * (rank + 1)),
        r"GPT: config must be the same .* rank 0: GPTConfig\(.*dropout=0.1.* rank 1: .*dropout=0.2",
    ),
    "seed_differs": (option("seed", int), r"GPT: seed must be the same .* rank 0: 0; rank 1: 1"),
    "saving_differs": (
        option("saving", lambda rank: ("fastest", "smallest")[rank % 2]),
        r"GPT: saving must be the same .*smallest",
    ),
    "dtype_differs": (dtype_differs, r"GPT: dtype must be the same .*float64"),
    "sequence_parallel_differs": (
        lambda world, call: make_tp(world, world.rank == 0),
        r"TensorParallel: sequence_parallel must be the same .*True; rank 1: False",
    ),
    "head_differs": (option("masked_lm", lambda rank: rank == 0, Bert), r"Bert: pooler and masked_lm must be the same"),
    "unknown_saving": (option("saving", lambda rank: "none"), r"saving must be one of fastest, smallest, got 'none'"),
    "ids_differ": (
        lambda world, call: GPT(GPT_CONFIG, tp=make_tp(world))(call["input_ids"] + (world.rank == 1)),
        r"GPT: input_ids must be the same .* sampler over the whole world",
    ),
    "shape_differs": (
        lambda world, call: GPT(GPT_CONFIG, tp=make_tp(world))(call["input_ids"][:, world.rank :]),
        r"GPT: input_ids must be the same",
    ),
    "no_dp": (no_dp, r"GPT: dropout is on and the world is larger .* dp=, or the call first_sample="),
    "label": (calls(labels=lambda ids: ids.where(ids != ids[0, 1], 97)), r"labels must lie in 0 to 96, got \[97\]"),
    "label below": (
        calls(labels=lambda ids: ids.where(ids != ids[0, 1], -1)),
        r"labels must lie in 0 to 96, got \[-1\]",
    ),
    "id": (calls(input_ids=lambda ids: ids + 90), r"GPT: input_ids must lie in 0 to 96"),
    "id below": (calls(input_ids=lambda ids: ids - 97), r"GPT: input_ids must lie in 0 to 96"),
    "position": (
        calls(position_ids=lambda ids: torch.full_like(ids, 32)),
        r"GPT: position_ids must lie in 0 to 31, got \[32\]",
    ),
    "length": (
        calls(input_ids=lambda ids: ids.repeat(1, 5)),
        r"GPT: 35 positions are more than the model's max_positions=32",
    ),
    "rank of ids": (
        calls(input_ids=lambda ids: ids[0]),
        r"GPT: input_ids must be int64 \[B, S\], got torch.int64 \(7,\)",
    ),
    "dtype of ids": (calls(input_ids=lambda ids: ids.int()), r"GPT: input_ids must be int64 \[B, S\], got torch.int32"),
    "shape of labels": (
        calls(labels=lambda ids: ids[:, 1:]),
        r"GPT: labels must be int64 \(3, 7\) as input_ids, got torch.int64 \(3, 6\)",
    ),
    "dtype of labels": (calls(labels=lambda ids: ids.float()), r"GPT: labels must be int64"),
    "shape of the mask": (calls(attention_mask=lambda ids: ids[:2]), r"GPT: attention_mask must be .*\(2, 7\)"),
    "packed": (
        calls(cu_seqlens=lambda ids: torch.tensor([0, 7])),
        r"GPT: packed documents .* one row of tokens, .*; got a batch of 3",
    ),
    "types": (calls(token_type_ids=torch.zeros_like), r"GPT: .* no token types"),
}


def message(world, name):
    with pytest.raises(ValueError) as caught:
        ERRORS[name][0](world, batch(GPT_CONFIG))
    dist.barrier()  # nobody has been left behind
    return str(caught.value)


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_named_and_the_same_on_every_rank(ranks, name):
    (first, *others) = ranks(4, message, name)
    assert others == [first] * 3
    assert re.search(ERRORS[name][1], first), first


def with_first_sample(world):
    tp = TensorParallel(world.mesh(2, 2)["tp"])
    ids = batch(GPT_CONFIG)["input_ids"]
    model = GPT(GPT_CONFIG, tp=tp)
    given = model(ids, step=0, first_sample=3 * (world.rank // 2)).logits
    model = GPT(GPT_CONFIG, tp=tp, dp=world.mesh(2, 2)["dp"])
    return torch.equal(model(ids).logits, given) and model.eval()(ids) is not None


@pytest.mark.parametrize("dp", [3, "dp"])
def test_what_is_no_group_of_replicas(dp):
    with pytest.raises(ValueError, match=f"GPT: dp must be a DeviceMesh of one dimension .* got {dp!r}; pass mesh"):
        GPT(GPT_CONFIG, dp=dp)


def test_dp_or_first_sample_places_the_masks(ranks):
    assert all(ranks(4, with_first_sample))


# ---- what a user finds on a model ----

PUBLIC = {
    "config": "what it is made of, an instance of",
    "config_class": "GPTConfig or BertConfig",
    "from_pretrained": "in from a Hugging Face directory",
    "save_pretrained": "and out",
    "files": "its tensors there",
    "origin": "the directory that it came from",
    "input_embeddings": "ids -> rows, which may be changed and given back as inputs_embeds",
    "init_weights": "for a model that was made on the meta device",
    "saving": "what is kept for backward",
    "recompute": "and made again",
    "gradient_checkpointing_enable": "transformers' name for that",
    "gradient_checkpointing_disable": "transformers' name for that",
    "seed": "chooses weights and dropout masks",
    "step": "counts calls, and chooses masks too",
    "tp": "the tensor-parallel ranks",
    "groups": "all process groups",
    "stages": "the pipeline stages that are here",
}
PARTS = {"embedding", "positions", "input_norm", "blocks", "head", "classifier"}
OWN = {GPT: {"balance", "generate"}, Bert: {"types", "transform", "transform_norm", "pooler"}}


@pytest.mark.parametrize("name", MODELS)
def test_the_public_attributes_are_few(name):
    cls, config, options = MODELS[name]
    public = {key for key in set(dir(cls(config, **options))) - set(dir(nn.Module())) if key[0] != "_"}
    assert public == PUBLIC.keys() | PARTS | OWN[cls]


@pytest.mark.parametrize("cls", OWN)
def test_a_model_is_one_level_above_its_base(cls):
    assert [base.__name__ for base in cls.__mro__[1:3]] == ["Model", "Module"] and "forward" in vars(cls)
