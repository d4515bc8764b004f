"""Attention with its heads split, sharded and whole; masks, grouped heads, padding, decoding with a cache."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.common import TOLERANCE, Recorder, error, fake_tp, make_tp
from tests.layers.sharded import Case, assert_seen, build, data, sharded_is_whole
from tpfuse.kernels.runtime.philox import make_rng
from tpfuse.layers import Call, ParallelAttention
from tpfuse.layers.cache import KVCache

B, S = 2, 6
MASK = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 0, 1, 1, 1, 1]])
CASE = Case(ParallelAttention, (32, 8), (S * B, 32), (S * B, 32), call=dict(batch=B))  # head width 4
CASES = {
    "both ways": CASE(causal=False),
    "causal, dropout": replace(CASE(causal=True, dropout=0.3), rng=True),
    "grouped, no bias": CASE(num_kv_heads=4, bias=False, causal=True),
    "norms over all heads": CASE(num_kv_heads=4, qk_norm=True, qk_norm_all=True, causal=True),
    "scale, soft cap": CASE(causal=False, scale=0.3, softcap=1.5, qk_norm=True, qk_norm_kind="gemma_rms"),
    "key mask": replace(CASE(causal=False), call=dict(batch=B, attention_mask=MASK)),
    "padded": replace(CASE(causal=True), call=dict(batch=3, seq=3), valid=9),
}


test_sharded_is_whole = sharded_is_whole(CASES, brief=("norms over all heads", "scale, soft cap"))


def _local_heads(right, layer, *args, **options):
    """The mistake that every rank counts its heads from 0."""
    right(layer, *args, **options)
    layer.first_head = 0


def test_masks_of_local_heads_are_seen(ranks):
    target = "tpfuse.layers.attention.ParallelAttention.__init__"
    assert_seen(ranks, CASES["causal, dropout"], target, _local_heads, "qkv.weight")


def _probabilities(world):
    """With values that are one-hot in the key's position (8 keys, head width 8), the output is the row of dropped
    probabilities."""
    layer = build(
        Case(ParallelAttention, (64, 8), (), (), dict(causal=False, dropout=0.5)), make_tp(world, False), torch.float64
    )
    with torch.no_grad():
        for p in layer.qkv.parameters():
            p.zero_()
        layer.qkv.weight[:, 2, range(8), range(8)] = 1.0  # v = x[:8], every head
    columns = torch.eye(64, dtype=torch.float64).chunk(world.size, 1)[world.rank]
    layer.out.weight, layer.out.bias = torch.nn.Parameter(columns.clone()), None
    x = torch.eye(8, 64, dtype=torch.float64)[:, None].expand(-1, 2, -1).reshape(16, 64)
    return (layer(x, batch=2, rng=make_rng(7, 3)).detach() != 0).view(8, 2, 8, 8)


def test_dropped_probabilities_are_bitwise_the_same(ranks):
    """[query, sample, head, key]: about half are dropped, and the same ones at every size."""
    (one,) = ranks(1, _probabilities)
    assert (
        0.4 < one.double().mean() < 0.6
        and not torch.equal(one[:, :, 0], one[:, :, 4])
        and not torch.equal(one[:, 0], one[:, 1])
    )
    for R in 2, 4:
        assert all(torch.equal(mask, one) for mask in ranks(R, _probabilities))


@pytest.mark.parametrize("name", ["both ways", "grouped, no bias", "key mask"])
def test_equal_to_torch(name):
    """The layer's rows, heads and masks, against scaled_dot_product_attention of the same weights."""
    case = CASES[name]
    layer = build(case, None, torch.float64)
    x, _ = data(case, torch.float64)
    bias = None if layer.qkv.bias is None else layer.qkv.bias.flatten()
    qkv = (
        F.linear(x, layer.qkv.weight.flatten(0, 2), bias).view(S, B, *layer.qkv.weight.shape[:3]).permute(1, 2, 3, 0, 4)
    )
    q, k, v = (t.flatten(1, 2) for t in (qkv[:, :, :-2], qkv[:, :, -2:-1], qkv[:, :, -1:]))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    mask = MASK.bool()[:, None, None] if name == "key mask" else None
    o = F.scaled_dot_product_attention(q, k, v, mask, is_causal=layer.causal).permute(2, 0, 1, 3).reshape(S * B, -1)
    expected = F.linear(o, layer.out.weight, layer.out.bias)
    assert error(layer(x, **case.call), expected) <= TOLERANCE[torch.float64]


def _small_messages(world):
    """Of one step of a layer whose one kv head every rank has: those of two numbers a row, forward and backward."""
    layer = build(CASE(num_kv_heads=1, qk_norm=True, qk_norm_all=True, causal=True), make_tp(world), torch.bfloat16)
    x = torch.randn(S * B // world.size, 32, dtype=torch.bfloat16, requires_grad=True)
    with Recorder() as forward:
        y = layer(x, batch=B)
    with Recorder() as backward:
        y.sum().backward()
    return [[m for m in ran.messages() if m[1] == (2, S * B)] for ran in (forward, backward)]


def test_norms_over_all_heads_send_one_small_message_each_way(ranks):
    assert ranks(2, _small_messages) == [[[("all_gather", (2, S * B), torch.float32)]] * 2] * 2


def _decoded(world, x, seq):
    """A prompt of ``seq`` positions, then the rest one by one; every rank's rows are all rows, as generation has
    them."""
    layer = build(CASE(num_kv_heads=4, causal=True), make_tp(world, False), torch.float64).eval()
    full = layer.parts(x, call=Call(B)).sum(0)
    cache = KVCache(torch.ones(B, len(x) // B, dtype=torch.bool))
    steps = [layer.parts(x[: seq * B], call=Call(B, seq, cache=cache))]
    steps += [layer.parts(x[i : i + B], call=Call(B, 1, cache=cache)) for i in range(seq * B, len(x), B)]
    return error(torch.cat([s.sum(0) for s in steps]), full)


@pytest.mark.parametrize("R", [1, 2, 4])
def test_decoding_with_a_cache(ranks, R):
    x = torch.randn(S * B, 32, dtype=torch.float64)
    with torch.no_grad():
        assert max(ranks(R, _decoded, x, 4)) <= TOLERANCE[torch.float64]


@pytest.mark.parametrize(
    "size, args, match",
    [
        (8, (48, 12), "num_heads=12 is not divisible by tensor-parallel size 8; use 1, 2, 3, 4, 6 or 12"),
        (1, (50, 12), "hidden_size=50 is not divisible by num_heads=12"),
        (1, (48, 0), "num_heads must be at least 1, got 0"),
        (1, (48, 2.0), "num_heads must be an integer, got 2.0"),
        (1, (48.0, 2), "hidden_size must be an integer, got 48.0"),
        (1, (48, 12, -3), "num_kv_heads must be at least 1, got -3"),
        (1, (48, 12, 5), "num_heads=12 is not divisible by num_kv_heads=5"),
        (
            4,
            (48, 12, 6),
            "num_kv_heads=6 and tensor-parallel size 4: one must divide the other; use size 1, 2, 3, 6, 12",
        ),
        (4, (1 << 40, 1 << 40, 5 << 3), "num_heads=1099511627776 is not divisible by num_kv_heads=40"),
        (
            48,
            (3 << 40, 3 << 40, 32),
            "num_kv_heads=32 and tensor-parallel size 48: one must divide the other; use size 1,",
        ),
    ],
)
def test_heads_that_cannot_be_split(size, args, match):
    hidden, heads, *groups = args
    with pytest.raises(ValueError, match=f"ParallelAttention: {match}"):
        ParallelAttention(hidden, heads, num_kv_heads=groups[0] if groups else None, tp=fake_tp(size))


@pytest.mark.parametrize("R", [1, 2])
def test_a_batch_without_rows(ranks, R):
    assert ranks(R, _without_rows) == [(0, 8, 0.0)] * R


def _without_rows(world):
    layer = ParallelAttention(8, 2, qk_norm=True, tp=make_tp(world))
    y = layer(torch.randn(0, 8), batch=1)
    y.sum().backward()
    return *y.shape, float(layer.out.weight.grad.abs().sum())


def test_dropout_needs_rng():
    layer = ParallelAttention(8, 2, dropout=0.1)
    with pytest.raises(ValueError, match="attention: dropout needs rng"):
        layer(torch.randn(4, 8), batch=2)
    with pytest.raises(ValueError, match="dropout needs rng, an int64 tensor .*, got 3"):
        layer(torch.randn(4, 8), batch=2, rng=3)
    layer.eval()(torch.randn(4, 8), batch=2)


def test_ranks_are_a_record():
    with pytest.raises(ValueError, match="ParallelAttention: tp must be a TensorParallel, .* got 2"):
        ParallelAttention(8, 2, tp=2)
