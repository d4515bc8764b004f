"""Parameters as plain shards: the same weights at every split, seeds that must agree, gradients of replicated vectors
summed."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate

from tests.common import Recorder, assert_equal, fake_tp, make_tp
from tpfuse import layers
from tpfuse.kernels.runtime.philox import normal
from tpfuse.layers import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelMLP,
    RMSNorm,
    RowParallelLinear,
    TransformerBlock,
    VocabParallelEmbedding,
    module,
)
from tpfuse.layers.module import initialize, replicated
from tpfuse.layers.shards import named_specs

# 997 is prime; 4 kv heads with 2 query heads each are sharded on a dimension that is not rows; the row layer is
# sharded on columns
LAYERS = {
    "embedding": (VocabParallelEmbedding, (997, 6), {}),
    "attention": (ParallelAttention, (16, 8), dict(num_kv_heads=4)),
    "mlp": (ParallelMLP, (6, 20), {}),
    "block": (TransformerBlock, (8, 4), dict(out_init_std=0.01)),
    "rms": (RMSNorm, (6,), {}),
}


def _build(name, tp):
    torch.manual_seed(5)
    cls, args, options = LAYERS[name]
    return cls(*args, tp=tp, **options)


def _shards(world, name):
    layer = _build(name, make_tp(world))
    return {n: (spec.local(tp), p.detach()) for n, p, spec, tp in named_specs(layer)}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("R", [2, 4])
def test_initial_weights_are_slices_of_the_same(ranks, R, name):
    whole = dict(_build(name, None).named_parameters())
    covered = {n: torch.zeros_like(p) for n, p in whole.items()}
    for shards in ranks(R, _shards, name):
        assert shards.keys() == whole.keys()
        for n, (where, p) in shards.items():
            assert torch.equal(p, whole[n][where])
            covered[n][where] += 1
    specs = {n: spec for n, _, spec, _ in named_specs(_build(name, None))}
    for n, count in covered.items():  # every element is somebody's; a replicated one everybody's
        assert (count == (R if specs[n].dim is None else 1)).all()


def test_initial_weights_are_normal_and_differ():
    """Of the standard deviations asked for; another seed, and another layer after it, have others."""
    torch.manual_seed(5)
    first, second = (ColumnParallelLinear(100, 200, init_std=0.02).weight for _ in range(2))
    assert abs(first.std() / 0.02 - 1) < 0.02 and abs(first.mean()) < 1e-3 and not torch.equal(first, second)
    block = _build("block", None)
    assert block.attention.out.weight.std() < 0.015 < block.attention.qkv.weight.std()
    assert not block.mlp.fc1.bias.any() and (block.attention_norm.weight == 1).all()


def test_long_parameters_are_filled_in_pieces(monkeypatch):
    """By rows that end in the middle; the bits are those of one piece."""
    whole = _build("mlp", None)
    monkeypatch.setattr(module, "_CHUNK", 13)
    for p, q in zip(_build("mlp", None).parameters(), whole.parameters()):
        assert torch.equal(p, q)


def test_weights_are_philox_of_the_global_index():
    layer = _build("mlp", None)
    initialize(layer, 3)
    expected = normal(3, "fc2.weight", np.arange(6 * 20).reshape(6, 20)) * 0.02
    assert torch.equal(layer.fc2.weight, torch.from_numpy(expected).float())


@pytest.mark.parametrize("name", LAYERS)
def test_on_the_meta_device_nothing_is_drawn(name):
    state = torch.get_rng_state()
    cls, args, options = LAYERS[name]
    layer = cls(*args, tp=fake_tp(2), device="meta", **options)  # no group: nor is anything compared
    assert all(p.is_meta for p in layer.parameters()) and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("layer", [ColumnParallelLinear, RowParallelLinear, ParallelMLP, TransformerBlock, RMSNorm])
def test_a_layer_without_numbers_is_not_computed_with(layer, grad):
    """torch's own layers refuse it too."""
    with torch.device("meta"):
        empty = layer(*(8, 4)[: 1 if layer is RMSNorm else 2])
    call = dict(batch=3) if layer is TransformerBlock else {}
    x = torch.randn(6, 8, requires_grad=True)
    with torch.set_grad_enabled(grad), pytest.raises(ValueError, match="must have numbers, or none, .*init_weights"):
        empty(x, **call)
    assert empty(x.to("meta"), **call).is_meta


def _seeded(world, seeds):
    torch.manual_seed(seeds[world.rank])
    try:
        ColumnParallelLinear(4, 8, tp=make_tp(world))
    except ValueError as error:
        return str(error)


def test_seeds_that_differ_are_an_error_on_every_rank(ranks):
    assert ranks(4, _seeded, [7] * 4) == [None] * 4
    errors = ranks(4, _seeded, [7, 7, 8, 7])
    assert len(set(errors)) == 1 and "ColumnParallelLinear: the seed" in errors[0] and "torch.manual_seed" in errors[0]


def _copies(world):
    """Every rank's block after deepcopy, pickle and a state_dict round trip: the same bits, and it runs."""
    block = _build("block", make_tp(world))
    loaded = TransformerBlock(8, 4, tp=block.tp, out_init_std=0.01)
    loaded.load_state_dict(block.state_dict())
    x = torch.randn(6, 8)
    y = block(x, batch=3)
    for other in copy.deepcopy(block), pickle.loads(pickle.dumps(block)), loaded:
        assert other.tp == block.tp and other.attention.out.specs == block.attention.out.specs
        assert torch.equal(other(x, batch=3), y)
    return True


@pytest.mark.parametrize("R", [1, 2])
def test_copies(ranks, R):
    assert all(ranks(R, _copies))


def _written(world, folder):
    """Each rank's state dictionary, and one whose DTensors every rank has whole."""
    block = _build("block", make_tp(world))
    state = block.state_dict()
    full = {k: v.redistribute(placements=[Replicate()]) if isinstance(v, DTensor) else v for k, v in state.items()}
    for name, kept in (("slices", state), ("whole", full)):
        torch.save(kept, folder / f"{name}{world.rank}.pt")
    return {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in state.items()}


@pytest.mark.parametrize("assign", [False, True])
def test_one_rank_reads_what_several_saved(ranks, tmp_path, assign):
    """A whole is read; a slice is a ValueError that names it, before anything has changed."""
    exact = ranks(2, _written, tmp_path)[0]
    block = TransformerBlock(8, 4)
    before = copy.deepcopy(block.state_dict())
    with pytest.raises(ValueError, match=r"weight must be elements .* on rank 0 .* got a DTensor with elements"):
        block.load_state_dict(torch.load(tmp_path / "slices0.pt"), assign=assign)
    assert_equal(block.state_dict(), before)
    block.load_state_dict(torch.load(tmp_path / "whole0.pt"), assign=assign)
    assert_equal(block.state_dict(), exact)
    assert not any(isinstance(p, DTensor) for p in block.parameters())


def _renamed(world, own):
    """A row layer that reads a file of other names, and of a transposed weight, by a hook of its own or of its
    parent's."""
    layer = RowParallelLinear(8, 8, tp=make_tp(world))

    def rename(module, state_dict, prefix, *_):
        prefix += "" if own else "0."
        for name in ("weight", "bias"):
            state_dict[prefix + name] = state_dict.pop(f"{prefix}old_{name}").t()

    parent = torch.nn.Sequential(layer)
    (layer if own else parent).register_load_state_dict_pre_hook(rename)
    weight = torch.randn(8, 8)
    parent.load_state_dict({"0.old_weight": weight.t(), "0.old_bias": weight[0]})
    return torch.equal(layer.weight, weight.chunk(world.size, 1)[world.rank]) and torch.equal(layer.bias, weight[0])


@pytest.mark.parametrize("own", [False, True])
def test_hooks_of_load_state_dict_see_the_whole(ranks, own):
    assert ranks(2, _renamed, own) == [True, True]


def _packed(world, sp, dtypes):
    vectors = [
        None if d is None else torch.full((5,), float(i + 1), dtype=d, requires_grad=True) for i, d in enumerate(dtypes)
    ]
    with Recorder() as seen:
        out = replicated(make_tp(world, sp), *vectors)
        sum(((world.rank + 1) * i * v).sum() for i, v in enumerate(out) if v is not None).backward()
    return (
        [None if v is None else (v.dtype, v.tolist()) for v in out],
        [None if v is None else v.grad for v in vectors],
        seen.messages(),
    )


@pytest.mark.parametrize("sp", [True, False])
def test_replicated_vectors_travel_in_one_message(ranks, sp):
    """In fp32 beside bf16, None left out; the gradient of vector i is i (1 + 2), of one rank alone i (rank + 1)."""
    dtypes = torch.bfloat16, None, torch.float32, torch.bfloat16
    for rank, (out, grads, sent) in enumerate(ranks(2, _packed, sp, dtypes)):
        assert out == [(torch.float32, [1.0] * 5), None, (torch.float32, [3.0] * 5), (torch.float32, [4.0] * 5)]
        assert sent == ([("all_gather", (3, 5), torch.float32)] if sp else [])
        for i, (g, dtype) in enumerate(zip(grads, dtypes)):
            assert (g is None) == (dtype is None)
            assert g is None or (g.dtype == dtype and g.tolist() == [i * (3.0 if sp else rank + 1)] * 5)


def test_nothing_to_replicate():
    assert replicated(fake_tp(2), None, None) == [None, None]


# ---- what is no rows ----

ROWS = {
    "a batch": (
        (2, 3, 8),
        r"x must be \[rows, 8\], .* got \(2, 3, 8\); .*x.transpose\(0, 1\).reshape\(-1, D\) with batch",
    ),
    "another width": ((6, 7), r"x must be \[rows, 8\], .* got \(6, 7\)"),
    "one row": ((8,), r"x must be \[rows, 8\], .* got \(8,\)"),
    "rows that do not fit": ((7, 8), "x has 7 rows, which must be a multiple of batch, or seq given, with batch=2"),
}


@pytest.mark.parametrize("what", ROWS)
@pytest.mark.parametrize("layer", [TransformerBlock(8, 4), ParallelAttention(8, 4)], ids=["block", "attention"])
def test_what_is_no_rows(layer, what):
    shape, message = ROWS[what]
    with pytest.raises(ValueError, match=f"{type(layer).__name__}: {message}"):
        layer(torch.zeros(shape), batch=2)


def test_fewer_rows_than_positions():
    with pytest.raises(ValueError, match=r"TransformerBlock: x has 6 rows, which must be at least seq \* batch = 8"):
        TransformerBlock(8, 4)(torch.zeros(6, 8), batch=2, seq=4)


@pytest.mark.parametrize(
    "layer", [ParallelMLP(8, 16), ColumnParallelLinear(8, 16), RowParallelLinear(8, 16)], ids=["mlp", "column", "row"]
)
def test_another_width(layer):
    with pytest.raises(ValueError, match=rf"{type(layer).__name__}: x must be \[..., 8\], got \(2, 16\)"):
        layer(torch.zeros(2, 16))  # as many elements as 4 rows have


def test_an_mlp_takes_any_rows():
    mlp, x = ParallelMLP(8, 16), torch.randn(2, 3, 8)
    assert mlp(x).shape == x.shape and torch.equal(mlp(x).flatten(0, 1), mlp(x.flatten(0, 1)))


def representations(world):
    tp = make_tp(world)
    return repr(layers.ColumnParallelLinear(4, 8, tp=tp)), repr(layers.RowParallelLinear(8, 4, False, tp=tp))


def test_a_layer_says_its_sizes_its_bias_and_its_share(ranks):
    column, row = ranks(2, representations)[1]
    assert column == "ColumnParallelLinear(in_features=4, out_features=8, activation='none', bias=True, rank 1 of 2)"
    assert row == "RowParallelLinear(in_features=8, out_features=4, bias=False, rank 1 of 2)"
    assert repr(layers.RMSNorm(4)) == "RMSNorm(normalized_shape=4, eps=1e-06, bias=False)"
    assert repr(layers.VocabParallelEmbedding(9, 4)) == "VocabParallelEmbedding(num_embeddings=9, embedding_dim=4)"
    assert "head_width=4, dropout=0.0" in repr(layers.CrossAttention(8, 2))
    assert "(lora)" not in repr(layers.TransformerBlock(8, 2))
