"""Attention's optional features on a CPU, alone and together: packed documents, window, soft cap, bias, rotary
positions."""

import math

import pytest
import torch

from tests.kernels import common
from tests.kernels.attn.test_op import bind, left_padding, probability_mask
from tests.kernels.common import RNG, gradcheck, leaf
from tpfuse.kernels import attention
from tpfuse.kernels.attn import cpu
from tpfuse.kernels.attn.op import attention_bwd, attention_decode, attention_fwd
from tpfuse.kernels.attn.options import DecodeOptions, Options

DROPOUT = dict(p=0.3, rng=RNG, site=4, first_head=5)


def table(rows, half):
    angle = torch.rand(rows, half).double() * 6
    return dict(cos=1.1 * angle.cos(), sin=1.1 * angle.sin())


def ends(*positions):
    return torch.tensor(positions, dtype=torch.int32)


def rotate(x, cos, sin, interleaved):
    """x [B, H, S, E], cos and sin [B, 1, S, W / 2], as complex numbers, which have no bf16."""
    W = 2 * cos.shape[-1]
    pairs = x[..., :W].to(cos.dtype)
    pairs = pairs.unflatten(-1, (W // 2, 2)) if interleaved else pairs.unflatten(-1, (2, W // 2)).mT
    rotated = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.complex(cos, sin))
    return torch.cat([(rotated if interleaved else rotated.mT).flatten(-2).to(x.dtype), x[..., W:]], -1)


def oracle(
    qkv, *, batch, causal=False, key_mask=None, cu_seqlens=None, max_seqlen=None, window=None, softcap=None, bias=None,
    cos=None, sin=None, positions=None, interleaved=False, p=0.0, **coordinates,
):  # fmt: skip
    """The definition, dense and differentiated by autograd; what may be seen is written out pair by pair."""
    seq, G, Q, E = len(qkv) // batch, qkv.shape[1], qkv.shape[2] - 2, qkv.shape[3]
    t = qkv.view(seq, batch, G, Q + 2, E).permute(1, 2, 3, 0, 4)
    q, k, v = t[:, :, :Q].flatten(1, 2), *(t[:, :, i].repeat_interleave(Q, 1) for i in (Q, Q + 1))
    if cos is not None:
        row = torch.arange(seq)[:, None].expand(seq, batch) if positions is None else positions.view(seq, batch)
        angles = (cos[row].transpose(0, 1)[:, None], sin[row].transpose(0, 1)[:, None], interleaved)
        q, k = rotate(q, *angles), rotate(k, *angles)
    s = q @ k.mT * E**-0.5
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if bias is not None:
        s = s + bias.to(s.dtype)
    seen = (
        torch.ones(batch, 1, seq, seq, dtype=torch.bool)
        if key_mask is None
        else key_mask[:, None, None].expand(-1, 1, seq, -1).clone()
    )
    spans = [(0, seq)] if cu_seqlens is None else list(zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:]))
    for i in range(seq):
        for j in range(seq):
            together = any(a <= i < b and a <= j < b for a, b in spans)
            if not together or (causal and j > i) or (window is not None and abs(i - j) >= window):
                seen[:, :, i, j] = False
    s = s.masked_fill(~seen | (s == -math.inf), -1e30)
    probs = torch.softmax(s, -1) * (s > -1e29)  # a row that sees nothing gives 0
    if p > 0:
        probs = probs * probability_mask(p, batch=batch, heads=G * Q, seq=seq, dtype=s.dtype, **coordinates)
    return (probs @ v).permute(2, 0, 1, 3).flatten(2).flatten(0, 1)


def features(seq, batch, H, E):
    """name -> options; what is packed has one sample"""
    some = torch.randint(0, seq + 4, (seq * batch,))
    hidden = torch.randn(H, seq, seq).double()
    hidden[0, -1] = -math.inf  # a row that sees nothing
    packed = dict(cu_seqlens=ends(1, 1, seq // 2 + 1, seq // 2 + 2, seq - 1))
    return {
        "window": dict(causal=True, window=max(seq // 3, 1)),
        "window of one": dict(causal=True, window=1),
        "window on either side": dict(window=max(seq // 3, 1)),
        "softcap": dict(softcap=0.7),
        "bias": dict(bias=hidden),
        "bias of all heads": dict(bias=torch.randn(1, seq, seq), causal=True),
        "rope": table(seq, E // 2),
        "interleaved": dict(**table(seq + 4, E // 2), interleaved=True, positions=some),
        "partial": dict(**table(seq + 4, E // 4), positions=some, causal=True),
        "packed": packed,
        "packed, causal": dict(**packed, causal=True),
        "everything": dict(
            **table(seq + 4, E // 2), positions=some, causal=True, window=max(seq // 3, 1), softcap=2.0,
            bias=hidden.float(), key_mask=left_padding(batch, seq), **DROPOUT,
        ),
        "everything packed, on either side": dict(
            **packed, **table(seq + 4, E // 4), positions=some, window=3, softcap=2.0, bias=hidden, **DROPOUT,
        ),
        "everything packed": dict(
            **packed, **table(seq + 4, E // 4), positions=some, interleaved=True, causal=True, window=5, softcap=2.0,
            bias=hidden, **DROPOUT,
        ),
    }  # fmt: skip


NAMES = list(features(9, 1, 1, 8))


def of(name, seq, H, E):
    batch = 1 if "packed" in name else 2
    return dict(batch=batch, causal=False) | features(seq, batch, H, E)[name]


@pytest.mark.parametrize("name", NAMES)
def test_against_the_definition(name):
    options = of(name, 9, 4, 8)
    qkv = leaf(9 * options["batch"], 2, 4, 8)
    common.assert_same(bind(attention, **options), bind(oracle, **options), qkv)


@pytest.mark.parametrize("name", NAMES)
def test_each_feature_does_something(name):
    """So that a test in which it is left out would fail."""
    options = of(name, 9, 4, 8)
    qkv = torch.randn(9 * options["batch"], 2, 4, 8).double()
    plain = {k: options[k] for k in ("batch", "causal")}
    assert not torch.allclose(attention(qkv, **options), attention(qkv, **plain))


@pytest.mark.parametrize("name", ["everything", "everything packed", "everything packed, on either side"])
def test_gradcheck(name):
    options = of(name, 5, 2, 4)
    gradcheck(
        bind(attention, seq=5, **options), leaf(5 * options["batch"] + (1 if options["batch"] > 1 else 0), 1, 4, 4)
    )


# blocks of 128 query rows: within one, and over three, windows and documents that begin and end inside
@pytest.mark.parametrize("seq", [7, pytest.param(130, marks=pytest.mark.slow), 300])
@pytest.mark.parametrize("name", NAMES)
def test_cpu_is_the_reference(name, seq):
    given = of(name, seq, 2, 8)
    batch, padding = given["batch"], 3
    options = Options(**given, seq=seq, scale=0.5)
    qkv, do = torch.randn(seq * batch + padding, 1, 4, 8).double(), torch.randn(seq * batch + padding, 16).double()
    qkv[-padding:], do[-padding:] = math.nan, math.nan
    (o, lse), exact = attention_fwd.cpu(qkv, options), attention_fwd.reference(qkv, options)
    torch.testing.assert_close((o, lse), exact, rtol=1e-12, atol=1e-12)
    o[-padding:] = math.nan
    dqkv = attention_bwd.cpu(do, qkv, o, lse, options)
    torch.testing.assert_close(dqkv, attention_bwd.reference(do, qkv, o, lse, options), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("together", [1, 2, 5])
def test_samples_computed_together(monkeypatch, together):
    """Three samples, one by one, two and one, and all at once, of rows and masks of their own."""
    seq, E = 7, 8
    monkeypatch.setattr(cpu, "SCORES", together * 2 * seq * seq)  # of two heads
    one = features(seq, 3, 2, E)["everything"] | dict(bias=torch.randn(2, seq, seq).double())
    options = Options(**one, batch=3, seq=seq, scale=0.5)
    qkv, do = torch.randn(seq * 3, 1, 4, E).double(), torch.randn(seq * 3, 2 * E).double()
    counted = [len(samples.samples) for samples in cpu.Forward(qkv, options).samples()]
    assert counted == {1: [1, 1, 1], 2: [2, 1], 5: [3]}[together]
    (o, lse), exact = attention_fwd.cpu(qkv, options), attention_fwd.reference(qkv, options)
    torch.testing.assert_close((o, lse), exact, rtol=1e-12, atol=1e-12)
    gradients = [run(do, qkv, o, lse, options) for run in (attention_bwd.cpu, attention_bwd.reference)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
    by_leaves = cpu.Forward(qkv, options._replace(leaves=2)).samples()
    assert [len(samples.samples) for samples in by_leaves] == [1, 1, 1]


@pytest.mark.parametrize("name", ["packed, causal", "everything", "everything packed", "interleaved"])
def test_compile(name):
    options = of(name, 6, 2, 8)
    common.assert_compiles(bind(attention, **options), leaf(6 * options["batch"], 1, 4, 8, dtype=torch.float32))


@pytest.mark.parametrize("name", ["rope", "everything", "everything packed"])
def test_low_precision(name):
    """q and k are rounded after rotation, as they are where a model rotates them in its own dtype."""
    options = of(name, 40, 2, 32)
    common.assert_accurate(
        bind(attention, **options), bind(oracle, **options), leaf(40 * options["batch"], 1, 4, 32), dtype=torch.bfloat16
    )


# ---- documents ----


@pytest.mark.parametrize(
    "more",
    [dict(), dict(causal=True), dict(causal=True, window=4), table(20, 2)],
    ids=["full", "causal", "window", "rope"],
)
def test_documents_are_as_if_alone(more):
    """Values and gradients of each, with positions that start anew; a document of one position and an empty one among
    them."""
    lengths, options = [9, 1, 0, 10], dict(batch=1, causal=False) | more
    qkv = leaf(20, 2, 3, 4)
    packed = dict(cu_seqlens=ends(0, 9, 10, 10, 20), max_seqlen=10)
    if "cos" in more:
        packed["positions"] = torch.cat([torch.arange(n) for n in lengths])
    (o,), (dqkv,) = common.run(bind(attention, **options, **packed), [qkv])
    parts = [bind(attention, **options)(x) for x in qkv.split(lengths)]
    torch.testing.assert_close(o, torch.cat(parts))
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(dqkv, torch.autograd.grad(torch.cat(parts), qkv, do)[0])


def test_packing_restarts_no_mask():
    """A probability's coordinates are those of the packed row."""
    qkv, options = torch.randn(9, 1, 3, 4).double(), dict(batch=1, causal=False, **DROPOUT)
    together = attention(qkv, cu_seqlens=ends(0, 4, 9), **options)
    apart = oracle(qkv, cu_seqlens=ends(0, 4, 9), **options)
    torch.testing.assert_close(together, apart)
    assert not torch.allclose(together[4:], attention(qkv[4:], **options))


def test_rows_outside_documents():
    """0, and no gradient, whatever they hold."""
    qkv = torch.randn(8, 1, 3, 4)
    qkv[[0, 6, 7]] = math.nan
    qkv.requires_grad_()
    o = attention(qkv, batch=1, causal=True, cu_seqlens=ends(1, 3, 6))
    (dqkv,) = torch.autograd.grad(o, qkv, torch.randn_like(o))
    assert not o[[0, 6, 7]].any() and not dqkv[[0, 6, 7]].any()
    assert o[1:6].all() and dqkv[1:6].isfinite().all()


# ---- conventions ----


def test_window_is_transformers():
    """sliding_window counts the query itself there too."""
    masking = pytest.importorskip("transformers.masking_utils")
    sees = masking.sliding_window_causal_mask_function(3)
    one = torch.arange(7)
    theirs = sees(0, 0, one[:, None], one[None, :]) & (one[None, :] <= one[:, None])
    qkv = torch.zeros(7, 1, 3, 7)
    qkv[:, 0, 2] = torch.eye(7)
    assert torch.equal(attention(qkv, batch=1, causal=True, window=3) > 0, theirs)
    either = masking.sliding_window_bidirectional_overlay(2)(0, 0, one[:, None], one[None, :])  # which leaves it out
    assert torch.equal(attention(qkv, batch=1, causal=False, window=3) > 0, either)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_is_transformers(interleaved):
    """Llama's rotate-half and GPT-J's interleaved columns."""
    llama, gptj = (pytest.importorskip(f"transformers.models.{name}.modeling_{name}") for name in ("llama", "gptj"))
    angles, qkv = table(6, 4), torch.randn(6, 1, 3, 8).double()
    q, k = qkv[:, 0, 0][None, None], qkv[:, 0, 1][None, None]
    if interleaved:
        q, k = (
            gptj.apply_rotary_pos_emb(x.transpose(1, 2), angles["sin"][None], angles["cos"][None]).transpose(1, 2)
            for x in (q, k)
        )
    else:
        q, k = llama.apply_rotary_pos_emb(q, k, *(torch.cat([angles[t], angles[t]], -1)[None] for t in ("cos", "sin")))
    rotated = torch.stack([q[0, 0], k[0, 0], qkv[:, 0, 2]], 1)[:, None]
    plain = dict(batch=1, causal=True)
    torch.testing.assert_close(attention(qkv, interleaved=interleaved, **angles, **plain), attention(rotated, **plain))


# ---- decode ----


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_decode_with_everything(dtype):
    """The last row of each sample, against a cache of rotated keys longer than any of them."""
    lengths, G, Q, E, L = [6, 3, 1], 2, 2, 8, 9
    angles, more = {k: v.float() for k, v in table(L, 4).items()}, dict(softcap=1.5, scale=0.4)
    cache, q, expected = torch.full((3, L, G, 2, E), 99.0, dtype=dtype), [], []
    for b, n in enumerate(lengths):
        qkv = torch.randn(n, G, Q + 2, E).to(dtype)
        expected.append(attention(qkv, batch=1, causal=True, window=4, **angles, **more)[-1])
        cos, sin = (angles[t][:n, None, None].double() for t in ("cos", "sin"))
        rotated = rotate(qkv[:, :, : Q + 1].double(), cos, sin, False).to(dtype)
        cache[b, :n] = torch.stack([rotated[:, :, Q], qkv[:, :, Q + 1]], 2)
        q.append(rotated[-1, :, :Q])
    given = torch.stack(q), cache[..., 0, :], cache[..., 1, :]
    options = DecodeOptions(None, ends(*lengths), window=4, scale=0.4, softcap=1.5)
    got = attention_decode(*given, options)
    torch.testing.assert_close(
        got, torch.stack(expected), **({} if dtype == torch.float64 else dict(rtol=2**-6, atol=2**-8))
    )
    assert not torch.allclose(attention_decode(*given, options._replace(window=None)), got)
    assert not torch.allclose(attention_decode(*given, options._replace(softcap=None)), got)


# ---- errors ----

ROPE = {k: v.float() for k, v in table(6, 2).items()}


@pytest.mark.parametrize(
    "options, match",
    [
        (dict(window=0, causal=False), "window must be at least 1, got 0"),
        (dict(window=0), "window must be at least 1, got 0"),
        (dict(window=2.5), "window must be an integer, got 2.5"),
        (dict(cu_seqlens=ends(0, 6), max_seqlen="6"), "max_seqlen must be an integer, got '6'"),
        (dict(scale=0.0), "scale must be positive and finite, got 0.0"),
        (dict(softcap=-1.0), "softcap must be positive and finite, got -1.0"),
        (dict(batch=2, cu_seqlens=ends(0, 3)), "cu_seqlens needs batch = 1, got 2"),
        (dict(cu_seqlens=torch.tensor([0, 3])), r"cu_seqlens must be int32 \(2,\), got torch.int64"),
        (dict(cu_seqlens=ends(0, 4, 3)), r"cu_seqlens must rise from 0 or more to at most seq = 6, got \[0, 4, 3\]"),
        (dict(cu_seqlens=ends(0, 7)), ".*at most seq = 6"),
        (dict(cu_seqlens=ends(0, 4, 6), max_seqlen=3), "max_seqlen=3, but a document has 4 positions; give at least 4"),
        (dict(max_seqlen=3), "max_seqlen needs cu_seqlens"),
        (dict(bias=torch.zeros(1, 6, 6, requires_grad=True)), "bias is not differentiated"),
        (dict(bias=torch.zeros(3, 6, 6)), r"bias must be float32 \(2, 6, 6\), got torch.float32 \(3, 6, 6\)"),
        (dict(bias=torch.zeros(1, 6, 6).int()), "bias must be floating"),
        (dict(cos=ROPE["cos"]), "cos and sin go together"),
        (dict(positions=torch.arange(6)), "positions need cos and sin"),
        (dict(**ROPE, positions=torch.arange(5)), r"positions must be int64 \(6,\), got torch.int64 \(5,\)"),
        (dict(**ROPE, positions=torch.arange(6) - 1), r"positions must lie in 0 to \d, got \[-1\]"),
        (dict(cos=ROPE["cos"], sin=ROPE["sin"][:5]), r"cos and sin must be floating \[positions, W / 2\], alike"),
        (table(6, 3), "cos turns 6 columns, a head has 4"),
        (table(5, 2), "cos has 5 rows for 6 positions; give at least 6, or positions"),
    ],
)
def test_errors(options, match):
    with pytest.raises(ValueError, match="attention: " + match):
        attention(torch.randn(6, 1, 4, 4), **{"batch": 1, "causal": True, **options})
