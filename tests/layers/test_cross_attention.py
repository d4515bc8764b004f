"""Cross-attention with its heads split: torch's MultiheadAttention and SDPA in one process, forward and gradients."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.common import assert_close, error, make_tp, my_rows
from tests.layers.sharded import Case, compare
from tests.layers.sharded import build as built
from tests.planted import Mistaken
from tpfuse import TensorParallel
from tpfuse.kernels.runtime.philox import keep, make_rng, mask_key
from tpfuse.layers import CrossAttention, LayerNorm, TransformerBlock
from tpfuse.layers.shards import named_specs

F64 = torch.float64
B, S, T, D, C, H = 2, 6, 10, 32, 24, 8
MASK = torch.tensor([[1, 1, 1, 0, 0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1, 0, 1, 1]])
NOTHING = torch.stack([torch.zeros(T, dtype=torch.int64), MASK[1]])  # the first sample sees no key
CASES = {
    "plain": {},
    "key mask": dict(mask=MASK),
    "a sample sees nothing": dict(mask=NOTHING),
    "another width": dict(memory_size=C, mask=MASK),
    "grouped, no bias": dict(num_kv_heads=4, bias=False),
    "one kv head": dict(num_kv_heads=1, out_bias=False),
    "two kv heads, wide heads": dict(num_kv_heads=2, head_width=6),
    "dropout": dict(dropout=0.3, mask=MASK),
    "grouped, dropout, padding": dict(num_kv_heads=2, dropout=0.3, seq=5, memory_seq=9),
}


def case_of(name):
    """-> the layer's options, the call's, and whether something is dropped."""
    options = dict(CASES[name])
    call = {key: options.pop(key) for key in ("seq", "memory_seq") if key in options}
    mask = options.pop("mask", None)
    return options, call | dict(batch=B, attention_mask=None if mask is None else mask)


def data(width):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(n * B, w, generator=g, dtype=F64) for n, w in ((S, D), (T, width), (S, D))]


def step(layer, options, call):
    """-> y, the gradients of both sequences and of every parameter; rows beyond seq count nothing."""
    rows = data(options.get("memory_size", D))
    x, memory, dy = (my_rows(t, layer.tp).to(layer.out.weight.dtype, copy=True) for t in rows)
    rows = my_rows(torch.arange(S * B), layer.tp)
    valid = rows[:, None] < B * call.get("seq", S)
    x.requires_grad_(), memory.requires_grad_()
    y = layer(x, memory, rng=make_rng(7, 3), **call)
    y.backward(torch.where(valid, dy, 0))
    y = torch.where(valid, y.detach(), 0)
    return dict(y=y, x=x.grad, memory=memory.grad) | {name: p.grad for name, p in layer.named_parameters()}


CASE = Case(CrossAttention, (D, H), (), ())


def build(options, tp):
    return built(CASE(**options), tp, F64)


def run(world, name, sp, cp):
    options, call = case_of(name)
    mesh = world.pieces(1, cp, world.size // cp)
    layer = build(options, TensorParallel(mesh["tp"], sequence_parallel=sp, cp=mesh["cp"]))
    weights = {name: p.detach() for name, p in layer.named_parameters()}
    slices = {name: spec.local(tp) for name, _, spec, tp in named_specs(layer)}
    return layer.tp, step(layer, options, call), weights, slices


@functools.cache
def whole(name):
    options, call = case_of(name)
    layer = build(options, TensorParallel())
    return step(layer, options, call), {name: p.detach() for name, p in layer.named_parameters()}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "R, sp, cp",
    [(2, True, 1), (4, True, 1), (4, True, 2), *(pytest.param(4, False, cp, marks=pytest.mark.slow) for cp in (1, 2))],
)
def test_sharded_is_whole(ranks, R, sp, cp, name):
    compare(CASE, F64, whole(name), ranks(R, run, name, sp, cp))


# ---- pieces whose keys are gathered ----


def over_keys(world, name):
    """-> this rank's positions of x, y and x's gradient there, and the sums over ranks of what is a sum."""
    options, call = case_of(name)
    tp = TensorParallel(cp=world.group, cp_kind="keys")
    layer, seq, memory_seq = build(options, tp), call.get("seq", S), call.get("memory_seq", T)

    def piece(t, seq):
        rows = t.view(-1, B, t.shape[-1])[tp.positions(seq)].flatten(0, 1)
        return F.pad(rows, (0, 0, 0, tp.piece(seq) * B - len(rows)))

    x, memory, dy = data(options.get("memory_size", D))
    x, memory, dy = piece(x, seq).requires_grad_(), piece(memory, memory_seq).requires_grad_(), piece(dy, seq)
    y = layer(x, memory, rng=make_rng(7, 3), **call | dict(seq=seq, memory_seq=memory_seq))
    y.backward(dy)
    return dict(
        positions=(tp.positions(seq), tp.positions(memory_seq)), y=y.detach(), x=x.grad, memory=memory.grad,
    ) | {name: p.grad for name, p in layer.named_parameters()}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("R", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_gathered_keys(ranks, R, name):
    exact, _ = whole(name)
    for got in ranks(R, over_keys, name):
        queries, keys = got.pop("positions")
        for key, places in dict(y=queries, x=queries, memory=keys).items():
            rows = exact[key].view(-1, B, exact[key].shape[-1])[places].flatten(0, 1)
            assert error(got.pop(key)[: len(rows)], rows) <= 1e-12
        assert_close(got, {name: exact[name] for name in got}, F64)


# ---- one process against torch ----


def dense(layer, x, memory, *, mask, seq=S, memory_seq=T):
    """Plain torch from the layer's weights, by SDPA; with dropout, from the definition and the mask's formula."""
    E, p = layer.head_width, layer.dropout
    heads = lambda t, seq, n: t[: seq * B].view(seq, B, n, E).permute(1, 2, 0, 3)
    bias = lambda b: None if b is None else b.flatten()
    q = heads(F.linear(x, layer.q.weight.flatten(0, 1), bias(layer.q.bias)), seq, H)
    kv = F.linear(memory, layer.kv.weight.flatten(0, 2), bias(layer.kv.bias))
    groups = layer.kv.groups
    k, v = (heads(t.flatten(1), memory_seq, groups) for t in kv.view(-1, groups, 2, E).unbind(2))
    k, v = (t.repeat_interleave(H // groups, 1) for t in (k, v))
    seen = None if mask is None else mask.bool()[:, None, None]
    if p == 0:
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    else:
        s = q @ k.transpose(-1, -2) / E**0.5
        probs = (s if seen is None else s.masked_fill(~seen, -torch.inf)).softmax(-1)
        *key, first = mask_key(make_rng(7, 3))
        queries = torch.arange(seq)[:, None]
        mask_of = lambda b, h: keep(
            key, queries, torch.tensor((32768 << 16) + h),
            columns=memory_seq, sample=torch.tensor(first + b), p=p, dtype=F64,
        )  # fmt: skip
        kept = torch.stack([torch.stack([mask_of(b, h) for h in range(H)]) for b in range(B)])
        o = probs * kept * 65536 / (65536 - int(65536 * p + 0.5)) @ v
    o = F.pad(o.nan_to_num(0).permute(2, 0, 1, 3).flatten(2).flatten(0, 1), (0, 0, 0, (S - seq) * B))
    return F.linear(o, layer.out.weight, layer.out.bias)


@pytest.mark.parametrize("name", [name for name in CASES if name != "a sample sees nothing"])
def test_against_sdpa(name):
    options, call = case_of(name)
    layer = build(options, TensorParallel())
    got = step(layer, options, call)
    layer.zero_grad()
    x, memory, dy = data(options.get("memory_size", D))
    x.requires_grad_(), memory.requires_grad_()
    lengths = {key: call[key] for key in ("seq", "memory_seq") if key in call}
    y = dense(layer, x, memory, mask=call["attention_mask"], **lengths)
    valid = torch.arange(S * B)[:, None] < B * call.get("seq", S)
    y.backward(torch.where(valid, dy, 0))
    want = dict(y=torch.where(valid, y.detach(), 0), x=x.grad, memory=memory.grad)
    assert_close(got, want | {name: p.grad for name, p in layer.named_parameters()}, F64)


def test_against_multihead_attention():
    theirs = nn.MultiheadAttention(D, H, kdim=C, vdim=C, dtype=F64)
    ours = CrossAttention(D, H, memory_size=C, dtype=F64)
    q_bias, k_bias, v_bias = torch.randn(3 * D, dtype=F64).view(3, H, D // H)
    with torch.no_grad():
        theirs.in_proj_bias.copy_(torch.cat([q_bias, k_bias, v_bias]).flatten())
        ours.q.weight.copy_(theirs.q_proj_weight.view_as(ours.q.weight))
        ours.q.bias.copy_(q_bias)
        shape = H, D // H, C
        ours.kv.weight.copy_(torch.stack([theirs.k_proj_weight.view(shape), theirs.v_proj_weight.view(shape)], 1))
        ours.kv.bias.copy_(torch.stack([k_bias, v_bias], 1))
        ours.out.weight.copy_(theirs.out_proj.weight)
    x, memory, _ = data(C)
    y = ours(x, memory, batch=B, attention_mask=MASK)
    rows = memory.view(T, B, C)
    exact, _ = theirs(x.view(S, B, D), rows, rows, key_padding_mask=MASK == 0)
    assert error(y, exact.flatten(0, 1)) <= 1e-12


def test_a_sample_that_sees_nothing_gives_0():
    options, call = case_of("a sample sees nothing")
    layer = build(options, TensorParallel())
    got = step(layer, options, call)
    assert all(torch.isfinite(g).all() for g in got.values())
    assert torch.equal(got["y"][::B], layer.out.bias.detach().expand(S, D))  # of the first sample
    assert not got["x"][::B].any() and not got["memory"][::B].any() and got["x"][1::B].any()


# ---- in an encoder-decoder ----


class EncoderDecoder(nn.Module):
    def __init__(self, tp):
        super().__init__()
        torch.manual_seed(0)
        shared = dict(tp=tp, dtype=F64, dropout=0.2)
        self.encoder = TransformerBlock(D, H, causal=False, **shared)
        self.own = TransformerBlock(D, H, causal=True, layer=1, **shared)
        self.norm = LayerNorm(D, tp=tp, dtype=F64)
        self.cross = CrossAttention(D, H, layer=1, **shared)

    def forward(self, x, memory):
        rng = make_rng(1, 2)
        memory = self.encoder(memory, batch=B, rng=rng)
        h = self.own(x, batch=B, rng=rng)
        return h + self.cross(self.norm(h), memory, batch=B, attention_mask=MASK, rng=rng)


def encode_decode(world, sp):
    tp = make_tp(world, sp)
    model = EncoderDecoder(tp)
    x, memory, dy = (my_rows(t, tp).clone().requires_grad_() for t in data(D))
    y = model(x, memory)
    y.backward(dy.detach())
    gradients = {name: p.grad for name, p in model.named_parameters()}
    weights = {name: p.detach() for name, p in model.named_parameters()}
    slices = {name: spec.local(tp) for name, _, spec, tp in named_specs(model)}
    return tp, dict(y=y.detach(), x=x.grad, memory=memory.grad, **gradients), weights, slices


@pytest.mark.parametrize("R, sp", [(2, True), (4, True), pytest.param(2, False, marks=pytest.mark.slow)])
def test_an_encoder_decoder(ranks, R, sp):
    ((_, exact, weights, _),) = ranks(1, encode_decode, sp)
    compare(CASE, F64, (exact, weights), ranks(R, encode_decode, sp))


# ---- what is refused ----


@pytest.mark.parametrize(
    "call, words",
    [
        (dict(x=(B, S, D)), r"CrossAttention: x must be rows \[m, 32\], row s \* batch \+ b, got \(2, 6, 32\)"),
        (dict(memory=(20, 5)), r"CrossAttention: memory must be rows \[m, 32\], row s \* batch \+ b, got \(20, 5\)"),
        (dict(memory=(21, D)), "CrossAttention: 21 rows of memory are not divisible by batch=2; give seq"),
        (dict(seq=7), "CrossAttention: seq x batch = 7 x 2 rows of x, and there are 12"),
        (dict(attention_mask=MASK[:, :4]), r"CrossAttention: attention_mask must be \(2, 10\), got \(2, 4\)"),
        (dict(attention_mask=MASK.double()), "CrossAttention: attention_mask must be bool or integer"),
        (dict(rng=None), "CrossAttention: dropout needs rng"),
        (dict(batch=0), "CrossAttention: batch must be at least 1, got 0"),
    ],
)
def test_what_is_refused(call, words):
    layer = CrossAttention(D, H, dropout=0.1)
    given = dict(x=(S * B, D), memory=(T * B, D), batch=B, rng=make_rng(0, 0)) | call
    x, memory = (torch.zeros(given.pop(key)) for key in ("x", "memory"))
    with pytest.raises(ValueError, match=words):
        layer(x, memory, **given)


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(num_kv_heads=3), "CrossAttention: num_heads=8 is not divisible by num_kv_heads=3"),
        (dict(hidden_size=30), "CrossAttention: hidden_size=30 is not divisible by num_heads=8"),
        (dict(dropout=1.0), "dropout: p must lie in"),
        (dict(num_kv_heads=0), "CrossAttention: num_kv_heads must be at least 1, got 0"),
    ],
)
def test_heads_that_do_not_fit(options, words):
    with pytest.raises(ValueError, match=words):
        CrossAttention(options.pop("hidden_size", D), H, **options)


# ---- by leaves ----


def _by_leaves(world, name, dtype, options):
    """-> by name this rank's tensor, and where it lies in the whole."""
    torch.set_num_threads(1)
    sizes, call = case_of(name)
    torch.manual_seed(0)
    tp = TensorParallel(world.group, bitwise=4, **options)
    layer = CrossAttention(D, H, tp=tp, dtype=dtype, **sizes)
    places = {name: spec.local(tp) for name, _, spec, _ in named_specs(layer)}
    tensors = step(layer, sizes, call)
    for key in "y", "x", "memory":
        n = len(tensors[key])
        places[key] = (slice(tp.row_rank * n, (tp.row_rank + 1) * n),)
    return {key: (t, places[key]) for key, t in tensors.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["plain", "one kv head", "grouped, dropout, padding"])
def test_bits_do_not_depend_on_the_split(name, dtype, ranks):
    (one,) = ranks(1, _by_leaves, name, dtype, {})
    for size, sequence_parallel in (2, False), (4, False), (4, True):
        for tensors in ranks(size, _by_leaves, name, dtype, dict(sequence_parallel=sequence_parallel)):
            assert _differ(one, tensors) == set()


def _differ(one, tensors):
    return {key for key, (t, place) in tensors.items() if (one[key][0][place] != t).any()}


def _by_autograd(right, x, leaves):
    return [x] * leaves


def test_copies_added_in_another_order_are_seen(ranks):
    wrong = Mistaken(_by_leaves, "tpfuse.layers.module.per_leaf", _by_autograd)
    (one,) = ranks(1, wrong, "one kv head", torch.float32, {})
    assert "kv.weight" in _differ(one, ranks(4, wrong, "one kv head", torch.float32, {})[0])
