import functools
import math

import pytest
import torch
import torch.nn.functional as F

from tests.kernels import common
from tests.kernels.common import RNG, gradcheck, leaf
from tpfuse.kernels import attention
from tpfuse.kernels.attn.op import attention_bwd, attention_decode, attention_fwd
from tpfuse.kernels.attn.options import TENSORS, DecodeOptions, Options, scores
from tpfuse.kernels.attn.reference import visible
from tpfuse.kernels.runtime.philox import keep, make_rng, mask_key, scale

FP32, FP64, BF16 = torch.float32, torch.float64, torch.bfloat16
QKV, O, LSE = torch.randn(8, 2, 4, 5), torch.randn(8, 20), torch.rand(2, 4, 4)
MASK = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1]]).bool()
TABLE, POSITIONS = torch.rand(2, 6, 2), torch.tensor([0, 5, 1, 1, 2, 3, 0, 4])
EVERYTHING = Options(
    MASK, None, torch.randn(4, 4, 4), *TABLE, POSITIONS, RNG, 2, 4, None, True, 3, 0.4, 7.0, True, 0.3, 1, 2
)  # fmt: skip
PACKED = Options(cu_seqlens=torch.tensor([0, 3, 3, 7]).int(), seq=8, scale=0.4)
PLAIN = Options(batch=2, seq=3, scale=0.4)
CACHE = QKV.view(2, 4, 2, 4, 5)
SAMPLES = [
    (attention_fwd, (QKV, *EVERYTHING)),
    (attention_fwd, (QKV, *PACKED)),
    (attention_fwd, (QKV.bfloat16(), *PLAIN)),
    (attention_bwd, (O, QKV, O, LSE, *EVERYTHING)),
    (attention_bwd, (O, QKV, O, LSE.view(1, 4, 8), *PACKED)),
    (attention_bwd, (O.bfloat16(), QKV.bfloat16(), O.bfloat16(), LSE[..., :3], *PLAIN)),
    (
        attention_decode,
        (QKV[:2, :, :2], CACHE[..., 2, :], CACHE[..., 3, :], MASK, torch.tensor([4, 2]).int(), 2, 0.4, 9.0),
    ),
    (attention_decode, (QKV[:2, :, :2], CACHE[..., 2, :], CACHE[..., 3, :], None, None, None, 0.4, None)),
]
test_opcheck = common.opcheck(SAMPLES)

DROPOUT = dict(p=0.3, rng=RNG, site=4, first_head=5)


def probability_mask(p, rng, site, first_head, batch, heads, seq, dtype):
    """[B, H, S, S], one head of one sample at a time, from the coordinates as the format names them."""
    *key, first_sample = mask_key(rng)
    rows, word = torch.arange(seq)[:, None], torch.tensor
    masks = [
        keep(key, rows, word(site << 16 | first_head + h), seq, word(first_sample + b), p, dtype)
        for b in range(batch)
        for h in range(heads)
    ]
    return torch.stack(masks).view(batch, heads, seq, seq) * scale(p)


def oracle(qkv, *, batch, seq=None, causal, key_mask=None, scale=None, p=0.0, **where):
    """Dense attention in torch's own ops; without dropout, torch's own attention."""
    seq = len(qkv) // batch if seq is None else seq
    G, Q, E = qkv.shape[1], qkv.shape[2] - 2, qkv.shape[3]
    t = qkv[: seq * batch].reshape(seq, batch, G, Q + 2, E).permute(1, 2, 3, 0, 4)  # [B, G, Q + 2, S, E]
    q, k, v = t[:, :, :Q].flatten(1, 2), *(t[:, :, i].repeat_interleave(Q, 1) for i in (Q, Q + 1))
    seen = torch.ones(batch, 1, seq, seq, dtype=torch.bool)
    seen = seen.tril() if causal else seen
    seen = seen if key_mask is None else seen & key_mask[:, None, None]
    if p == 0:
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
    else:
        s = q @ k.mT * (E**-0.5 if scale is None else scale)
        probs = torch.softmax(s.masked_fill(~seen, -math.inf), -1)
        o = probs * probability_mask(p, batch=batch, heads=G * Q, seq=seq, dtype=s.dtype, **where) @ v
    o = o.permute(2, 0, 1, 3).flatten(2).flatten(0, 1)
    return torch.cat([o, o.new_zeros(len(qkv) - len(o), o.shape[1])])


def bind(fn, **options):
    return functools.partial(fn, **options)


def right_padding(batch, seq):
    """Sample b sees all but its last b keys."""
    return torch.arange(seq) < seq - torch.arange(batch)[:, None].clamp(max=seq - 1)


CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
WHERE = pytest.mark.parametrize("where", [{}, DROPOUT], ids=["p=0", "dropout"])


# one position, less than a call of Philox, on both sides of a block of query rows (64), three blocks; plain, grouped
# and single-group heads
@pytest.mark.parametrize("seq", [1, 5, 63, 64, 65, pytest.param(130, marks=pytest.mark.slow)])
@pytest.mark.parametrize("G, Q", [(3, 1), (2, 3), pytest.param(1, 4, marks=pytest.mark.slow)])
@CAUSAL
@WHERE
def test_against_torch(seq, G, Q, causal, where):
    batch = 2
    for key_mask in (None, right_padding(batch, seq)):
        options = dict(batch=batch, causal=causal, key_mask=key_mask, **where)
        common.assert_same(bind(attention, **options), bind(oracle, **options), leaf(seq * batch, G, Q + 2, 4))


@pytest.mark.parametrize("seq, batch, G, Q, E", [(0, 2, 2, 1, 4), (1, 1, 1, 1, 1), (3, 2, 2, 2, 3)])
@CAUSAL
@WHERE
def test_gradcheck(seq, batch, G, Q, E, causal, where):
    key_mask = right_padding(batch, seq) if seq else None
    fn = bind(attention, batch=batch, causal=causal, key_mask=key_mask, seq=seq, **where)
    gradcheck(fn, leaf(seq * batch + 1, G, Q + 2, E))  # one row of padding


def left_padding(batch, seq):
    """Sample 0 sees nothing at all, sample b > 0 misses its first b keys: under a causal mask its first b queries see
    nothing."""
    mask = torch.arange(seq) >= torch.arange(batch)[:, None]
    mask[0] = False
    return mask


@pytest.mark.parametrize("seq", [1, 63, 64, 65, 130])
@CAUSAL
@WHERE
def test_cpu_is_the_reference(seq, causal, where):
    """Blocks against the dense definition, with rows that see nothing, and padding rows full of NaN."""
    batch, G, Q, E, padding = 3, 2, 3, 4, 5
    qkv, do = (
        torch.randn(seq * batch + padding, G, Q + 2, E).double(),
        torch.randn(seq * batch + padding, G * Q * E).double(),
    )
    qkv[-padding:], do[-padding:] = math.nan, math.nan
    for key_mask in (None, left_padding(batch, seq)):
        args = Options(key_mask, batch=batch, seq=seq, causal=causal, scale=0.5, **where)
        (o, lse), exact = attention_fwd.cpu(qkv, args), attention_fwd.reference(qkv, args)
        torch.testing.assert_close((o, lse), exact, rtol=1e-12, atol=1e-12)
        poisoned = o.clone()
        poisoned[-padding:] = math.nan
        dqkv = attention_bwd.cpu(do, qkv, poisoned, lse, args)
        torch.testing.assert_close(dqkv, attention_bwd.reference(do, qkv, poisoned, lse, args), rtol=1e-12, atol=1e-12)
        assert not o[-padding:].any() and not dqkv[-padding:].any()
        if key_mask is not None:
            assert (
                not o[: seq * batch : batch].any()
                and not dqkv[: seq * batch : batch].any()
                and (lse[0] == math.inf).all()
            )


@pytest.mark.parametrize("seq", [3, 70])
@CAUSAL
def test_fully_masked_rows_in_fp32(seq, causal):
    """0, not NaN, forward and backward; what other samples get does not change."""
    key_mask, qkv = left_padding(3, seq), leaf(seq * 3, 2, 4, 8, dtype=FP32)
    o = attention(qkv, batch=3, causal=causal, key_mask=key_mask)
    (dqkv,) = torch.autograd.grad(o.sum(), qkv)
    assert o.isfinite().all() and dqkv.isfinite().all() and not o[::3].any() and not dqkv[::3].any()
    alone = attention(qkv[2::3], batch=1, causal=causal, key_mask=key_mask[2:])
    torch.testing.assert_close(o[2::3], alone)
    if causal:
        assert not alone[:2].any() and alone[2:].any()


def test_sequence_zero():
    qkv = leaf(0, 2, 3, 4)
    assert attention(qkv, batch=2, causal=True).shape == (0, 8)
    common.assert_same(bind(attention, batch=2, causal=True), bind(oracle, batch=2, causal=True), qkv)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("seq", [17, 130])
@CAUSAL
@WHERE
def test_low_precision(seq, dtype, causal, where):
    options = dict(batch=2, causal=causal, key_mask=right_padding(2, seq), **where)
    common.assert_accurate(bind(attention, **options), bind(oracle, **options), leaf(seq * 2, 2, 4, 32), dtype=dtype)


@WHERE
def test_autocast(where):
    options = dict(batch=2, causal=True, **where)
    # q, k, v and o are saved in bf16; fp32 only lse, a number a row and head
    common.assert_autocast(bind(attention, **options), bind(oracle, **options), leaf(34, 2, 4, 32), size=34 * 2 * 32)


def test_scores_stay_fp32_under_autocast():
    """Scores of 300 and 303 are 300 and 304 in bf16."""
    q, k = torch.full((2, 1, 1, 64), 6.0), torch.tensor([6.25, 6.3125]).view(2, 1, 1, 1).expand(2, 1, 1, 64)
    v = torch.tensor([0.0, 1.0]).view(2, 1, 1, 1).expand(2, 1, 1, 64)
    qkv, args = torch.cat([q, k, v], 2).bfloat16(), Options(seq=2, scale=0.125)
    assert torch.tensor([300.0, 303.0]).bfloat16().tolist() == [300, 304]
    with torch.autocast("cpu", BF16):
        assert (attention(qkv, batch=1, causal=False) - torch.sigmoid(torch.tensor(3.0))).abs().max() < 2**-8
        o, lse = attention_fwd(qkv, args)
    assert lse.dtype == FP32 and torch.equal(lse, attention_fwd.cpu(qkv, args)[1])
    torch.testing.assert_close(lse, torch.full((1, 1, 2), 303.0486), rtol=1e-6, atol=0)


def test_shards_of_heads_and_samples():
    """Groups split over ranks by first_head, a batch by first_sample: bitwise the same outputs, so the same masks."""
    seq, batch, G, Q = 9, 2, 4, 2
    qkv, options = torch.randn(seq * batch, G, Q + 2, 8), dict(causal=True, p=0.4, site=4)
    whole = attention(qkv, batch=batch, rng=RNG, **options).view(seq, batch, G, Q * 8)
    for g in range(0, G, 2):
        shard = attention(qkv[:, g : g + 2], batch=batch, rng=RNG, first_head=g * Q, **options)
        assert torch.equal(shard.view(seq, batch, 2, -1), whole[:, :, g : g + 2])
    for b in range(batch):
        sample = attention(qkv[b::batch], batch=1, rng=RNG + torch.tensor([0, 0, b]), **options)
        assert torch.equal(sample.view(seq, G, -1), whole[:, b])
    # and a mask knows its site, head, step and sample
    for other in (dict(site=1), dict(first_head=1), dict(rng=make_rng(1, 4, 2)), dict(rng=make_rng(1, 3, 3))):
        assert not torch.equal(attention(qkv, batch=batch, **{"rng": RNG, **options, **other}).view_as(whole), whole)


def test_padding_length_does_not_move_the_mask():
    """Position, not row or tile: the first 9 of 70 positions of a causal sequence draw what 9 alone draw."""
    qkv, options = torch.randn(70, 1, 3, 4), dict(batch=1, causal=True, **DROPOUT)
    torch.testing.assert_close(attention(qkv, **options)[:9], attention(qkv[:9], **options))


def test_non_contiguous():
    qkv, options = leaf(5, 4, 2, 6).permute(2, 0, 1, 3).detach().requires_grad_(), dict(batch=1, causal=True)
    assert not qkv.is_contiguous()
    common.assert_same(bind(attention, **options), bind(oracle, **options), qkv, non_contiguous=True)


def test_scale():
    qkv, options = leaf(6, 1, 3, 4), dict(batch=1, causal=False, scale=0.1)
    common.assert_same(bind(attention, **options), bind(oracle, **options), qkv)
    assert not torch.allclose(attention(qkv, **options), attention(qkv, batch=1, causal=False))


@CAUSAL
@WHERE
def test_compile(causal, where):
    fn = bind(attention, batch=2, causal=causal, key_mask=right_padding(2, 5), **where)
    common.assert_compiles(fn, leaf(10, 2, 3, 4, dtype=FP32))


@pytest.mark.slow
def test_compile_inductor():
    common.assert_compiles(
        bind(attention, batch=2, causal=True, **DROPOUT), leaf(10, 2, 3, 4, dtype=FP32), backend="inductor"
    )


def test_compile_under_autocast():
    with torch.autocast("cpu", BF16):
        common.assert_compiles(bind(attention, batch=2, causal=True, **DROPOUT), leaf(10, 2, 3, 4, dtype=FP32))


def test_recompute():
    qkv = leaf(10, 2, 3, 4)
    fn = bind(attention, batch=2, causal=True, **DROPOUT)
    (first,) = torch.autograd.grad(fn(qkv).sum(), qkv)
    (again,) = torch.autograd.grad(torch.utils.checkpoint.checkpoint(fn, qkv, use_reentrant=False).sum(), qkv)
    assert torch.equal(first, again)


@pytest.mark.parametrize("dtype", [FP64, BF16])
def test_decode_is_the_last_row(dtype):
    """One token against a cache longer than the sequence: what attention gives at the last position."""
    batch, seq, G, Q, E = 2, 6, 2, 3, 8
    qkv = torch.randn(seq * batch, G, Q + 2, E).to(dtype)
    key_mask = left_padding(batch, seq)
    key_mask[0] = torch.arange(seq) != 2
    expected = attention(qkv, batch=batch, causal=True, key_mask=key_mask)[-batch:]
    cache = torch.full((batch, seq + 3, G, 2, E), 99.0).to(dtype)
    cache[:, :seq] = qkv.view(seq, batch, G, Q + 2, E)[:, :, :, Q:].transpose(0, 1)
    seen = F.pad(key_mask, (0, 3))
    q = qkv[-batch:, :, :Q]
    options = DecodeOptions(seen, lengths=None, window=None, scale=E**-0.5, softcap=None)
    decode = lambda options: attention_decode(q, cache[..., 0, :], cache[..., 1, :], options)
    got = decode(options)
    torch.testing.assert_close(got, expected, **({} if dtype == FP64 else dict(rtol=2**-7, atol=2**-9)))
    assert not torch.allclose(decode(options._replace(key_mask=None)), expected)
    assert not decode(options._replace(key_mask=torch.zeros_like(seen))).any()


def test_once_differentiable():
    common.assert_once_differentiable(bind(attention, batch=1, causal=True), leaf(3, 1, 3, 2))


@pytest.mark.parametrize(
    "shape, options, match",
    [
        ((6, 2, 4), {}, r"qkv must be \[M, G, Q \+ 2, E\], got \(6, 2, 4\)"),
        ((6, 2, 2, 4), {}, r"qkv must be \[M, G, Q \+ 2, E\], got \(6, 2, 2, 4\)"),
        ((6, 2, 3, 4), dict(seq=4), "seq x batch = 4 x 2 rows are more than qkv's 6"),
        ((6, 2, 3, 4), dict(key_mask=torch.ones(2, 3)), r"key_mask must be bool \(2, 3\), got torch.float32 \(2, 3\)"),
        (
            (6, 2, 3, 4),
            dict(key_mask=torch.ones(3, 2).bool()),
            r"key_mask must be bool \(2, 3\), got torch.bool \(3, 2\)",
        ),
        ((6, 2, 3, 4), dict(batch=0), "batch must be at least 1, got 0"),
        ((6, 2, 3, 4), dict(p=0.1), "dropout needs rng"),
        ((6, 2, 3, 4), dict(p=0.1, rng=RNG, site=-1), "site must lie in 0 to 65534, got -1"),
    ],
)
def test_errors(shape, options, match):
    with pytest.raises(ValueError, match="attention: " + match):
        attention(torch.randn(shape), **{"batch": 2, "causal": True, **options})


# ---- cost ----


@pytest.mark.parametrize(
    "seq, causal, window",
    [(300, False, None), (300, True, None), (300, True, 40), (128, True, None), (1, True, 7)]
    + [(300, False, 40), (300, False, 200), (300, False, 301), (1, False, 7)],
)
def test_scores_declared_are_counted(seq, causal, window):
    """Left: what the mask leaves, but that a triangle of n rows counts n^2 / 2.  Made: of every 128 queries, keys from
    the first that any of them sees to the last."""
    qkv = torch.empty(2 * seq, 2, 5, 8, device="meta")
    numbers = dict(
        batch=2, seq=seq, max_seqlen=None, causal=causal, window=window, scale=1.0, softcap=None, interleaved=False
    )
    options = Options(*[None] * TENSORS, **numbers, p=0.0, site=0, first_head=0)
    seen = visible(options, torch.device("cpu"))[0, 0, 0]
    spans = [block.any(0).nonzero() for block in seen.split(128)]
    made = sum(len(block) * int(keys.max() - keys.min() + 1) for block, keys in zip(seen.split(128), spans))
    heads = 2 * 2 * 3
    left = int(seen.sum()) - min(window or seq, seq) / 2 * causal
    assert scores(qkv, options) == (heads * int(left), heads * made)
    forward = attention_fwd.cost((qkv, options), (torch.empty(0), torch.empty(0)))
    assert (forward.flops, forward.scores) == (4 * 8 * heads * int(left), heads * made)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("extra", [{}, dict(softcap=5.0)])
def test_a_head_alone_has_the_bits_of_the_same_head_among_others(dtype, extra):
    """Document lengths are odd: a function that rounds the last elements of a tensor in another way is seen."""
    for S in range(33, 65, 4):
        qkv, do = torch.randn(S, 3, 3, 8).to(dtype), torch.randn(S, 3, 8).to(dtype)
        options = Options(seq=S, cu_seqlens=torch.tensor([0, 20, S], dtype=torch.int32), scale=8**-0.5, **extra)
        o, lse = attention_fwd(qkv, options)
        dqkv = attention_bwd(do.flatten(1), qkv, o, lse, options)
        for g in range(3):
            head = qkv[:, g : g + 1].contiguous()
            alone, lse_alone = attention_fwd(head, options)
            assert torch.equal(alone, o[:, 8 * g : 8 * g + 8]) and torch.equal(lse_alone[:, 0], lse[:, g])
            assert torch.equal(attention_bwd(do[:, g].contiguous(), head, alone, lse_alone, options)[:, 0], dqkv[:, g])


LEAVES = {
    "plain": dict(),
    "window, soft cap": dict(window=5, softcap=4.0),
    "both ways, mask": dict(causal=False, key_mask=True),
    "packed": dict(cu_seqlens=True),
    "rotary": dict(rope=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("feature", LEAVES)
def test_leaves_of_heads_have_the_bits_that_they_have_alone(feature, dtype):
    """Short sequences and narrow heads: a batched GEMM of another number of them may add in another order, and in 16
    bits that shows seldom."""
    options = dict(causal=True) | LEAVES[feature]
    rope = options.pop("rope", False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for seed in range(12):
            generator = torch.Generator().manual_seed(seed)
            seq, E = (13, 16, 7, 130)[seed % 4], (8, 6)[seed // 4 % 2]
            batch = 1 if options.get("cu_seqlens") is not None else 2
            call = dict(options, batch=batch, seq=seq, scale=E**-0.5, p=0.1, rng=make_rng(1, seed), site=3)
            if options.get("key_mask"):
                call["key_mask"] = torch.rand(batch, seq, generator=generator) > 0.2
            if options.get("cu_seqlens"):
                call["cu_seqlens"] = torch.tensor([0, seq // 3, seq], dtype=torch.int32)
            if rope:
                angles = torch.rand(seq, E // 2, generator=generator)
                call |= dict(cos=angles.cos(), sin=angles.sin())
            whole = Options(**call, leaves=4)
            qkv = torch.randn(seq * batch, 8, 4, E, generator=generator).mul(2).to(dtype)
            do = torch.randn(seq * batch, 8 * 2 * E, generator=generator).to(dtype)
            o, lse = attention_fwd(qkv, whole)
            dqkv = attention_bwd(do, qkv, o, lse, whole)
            for i in range(4):
                alone, part = whole._replace(leaves=1, first_head=4 * i), qkv[:, 2 * i : 2 * i + 2].contiguous()
                columns = slice(4 * i * E, 4 * (i + 1) * E)
                o_i, lse_i = attention_fwd(part, alone)
                assert torch.equal(o_i, o[:, columns]) and torch.equal(lse_i, lse[:, 4 * i : 4 * i + 4])
                dqkv_i = attention_bwd(do[:, columns].contiguous(), part, o_i, lse_i, alone)
                assert torch.equal(dqkv_i, dqkv[:, 2 * i : 2 * i + 2])
    finally:
        torch.set_num_threads(threads)
