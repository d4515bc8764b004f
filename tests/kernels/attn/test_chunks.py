"""Attention of a chunk of queries over all keys, on every path.

Spans: tpfuse/kernels/attn: what its files have for a chunk beside a whole call.
"""

import functools
import itertools

import pytest
import torch

from tests.kernels import common
from tests.kernels.common import RNG, gradcheck, leaf
from tests.planted import planted
from tpfuse.kernels.attn import attend_queries, attention
from tpfuse.kernels.attn.cpu import bwd_cpu, fwd_cpu
from tpfuse.kernels.attn.op import attention_bwd, attention_fwd, attention_of_queries_bwd, attention_of_queries_fwd
from tpfuse.kernels.attn.options import Options, QueryChunk, scores
from tpfuse.kernels.attn.triton_forward import kv_in_range

FP32, FP64, BF16 = torch.float32, torch.float64, torch.bfloat16
DROPOUT = dict(rng=RNG, p=0.3, site=4, first_head=5)
E = 8


def features(name, batch, seq, heads):
    """What attention takes beside shapes; a chunk takes the same."""
    generator = torch.Generator().manual_seed(seq)
    angle = torch.rand(seq + 3, E // 2, generator=generator) * 6
    rope = dict(cos=angle.cos(), sin=angle.sin())
    return {
        "causal, dropout": dict(causal=True, **DROPOUT),
        "key mask": dict(causal=False, key_mask=torch.rand(batch, seq, generator=generator) < 0.6),
        "window, soft cap, rotary": dict(causal=True, window=seq // 4 + 1, softcap=2.0, **rope),
        "window on either side, positions": dict(
            causal=False, window=seq // 5 + 1, interleaved=True, cos=rope["cos"][:, :3], sin=rope["sin"][:, :3],
            positions=torch.randint(0, seq, (seq * batch,), generator=generator),
        ),
        "bias": dict(causal=True, bias=torch.randn(heads, seq, seq, generator=generator)),
        "packed": dict(
            causal=True, cu_seqlens=torch.tensor([1, seq // 3, seq // 3, seq // 3 + 2, seq - 2], dtype=torch.int32),
            **rope, **DROPOUT,
        ),
    }[name]  # fmt: skip


NAMES = "causal, dropout", "key mask", "window, soft cap, rotary", "window on either side, positions", "bias", "packed"


class Problem:
    """A whole call, in which ``padding`` rows follow, and chunks of it that end where nothing else does."""

    def __init__(self, name, seq, dtype, G=2, Q=3, padding=2, **more):
        self.batch, self.seq, self.Q = 1 if name == "packed" else 2, seq, Q
        self.options = Options(batch=self.batch, seq=seq, scale=0.4, **features(name, self.batch, seq, G * Q), **more)
        generator = torch.Generator().manual_seed(1)
        random = lambda *shape: torch.randn(seq * self.batch, *shape, generator=generator).to(dtype)
        self.qkv, self.do = random(G, Q + 2, E), random(G * Q * E)
        padded = lambda t: torch.cat([t, t.new_full((padding, *t.shape[1:]), torch.nan)])
        self.padded, self.kv = padded, padded(self.qkv[:, :, Q:])
        self.cuts = sorted({0, seq // 7, seq // 3 + 1, seq // 3 + 2, 3 * seq // 4, seq})

    def whole(self, path):
        """o, lse and dqkv; of "cpu", tpfuse's own attention, also where a whole call would be torch's."""
        forward, backward = getattr(attention_fwd, path), getattr(attention_bwd, path)
        if path == "cpu":
            forward, backward = fwd_cpu, bwd_cpu
        o, lse = forward(self.qkv, self.options)
        return o, lse, backward(self.do, self.qkv, o, lse, self.options)

    def chunks(self, path):
        """o, lse, dq and the sum of dkv, of all chunks one after another; rows of padding are NaN where they enter."""
        pieces, total = [], 0
        for first, end in itertools.pairwise(self.cuts):
            rows = slice(first * self.batch, end * self.batch)
            q, do = self.padded(self.qkv[rows, :, : self.Q]), self.padded(self.do[rows])
            chunk = QueryChunk(self.kv, first, end - first)
            o, lse = getattr(attention_of_queries_fwd, path)(q, chunk, self.options)
            poisoned = self.padded(o[: rows.stop - rows.start])
            dq, dkv = getattr(attention_of_queries_bwd, path)(do, q, chunk, poisoned, lse, self.options)
            n = rows.stop - rows.start
            assert not o[n:].any() and not dq[n:].any() and not dkv[self.seq * self.batch :].any()
            assert dq.dtype == q.dtype and dkv.dtype == (FP64 if q.dtype == FP64 else FP32)
            pieces.append((o[:n], lse, dq[:n]))
            total = total + dkv[: self.seq * self.batch]
        o, lse, dq = zip(*pieces, strict=True)
        return torch.cat(o), torch.cat(lse, 2), torch.cat(dq), total

    def assert_bits(self, path):
        """o, lse and dq have the whole call's bits, wherever chunks end; and returns the error of dk and dv."""
        (o, lse, dqkv), (*of_chunks, dkv) = self.whole(path), self.chunks(path)
        for got, want in zip(of_chunks, (o, lse, dqkv[:, :, : self.Q]), strict=True):
            assert torch.equal(got, want)
        return (dkv - dqkv[:, :, self.Q :]).abs().max()


# ---- the reference and the CPU ----


@pytest.mark.parametrize("name", NAMES)
def test_chunks_are_the_whole_call(name):
    """The reference of chunks against that of a whole call, which torch's own attention is held against elsewhere; and
    the CPU's blocks against it: more than one, and ends inside of blocks and documents."""
    problem = Problem(name, 40 if name == "bias" else 290, FP64)
    whole = problem.whole("reference")
    want = *whole[:2], *whole[2].split([problem.Q, 2], 2)
    for path in ("reference", "cpu"):
        torch.testing.assert_close(problem.chunks(path), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_bits_on_a_cpu(name, dtype):
    error = Problem(name, 290, dtype).assert_bits("cpu")
    assert error < (1e-5 if dtype == FP32 else 0.1)


def test_bits_with_leaves_and_in_tiles():
    Problem("causal, dropout", 150, FP32, G=4, Q=1, leaves=4).assert_bits("cpu")
    for name in ("packed", "key mask"):
        problem = Problem(name, 50, FP32, tile=12)
        problem.cuts = [0, 13, 40, 50]
        torch.testing.assert_close(problem.chunks("cpu")[:2], problem.whole("cpu")[:2], rtol=1e-5, atol=1e-5)


def test_a_block_that_does_not_begin_where_the_whole_calls_does_is_seen():
    """Without the rows of other chunks a block has other keys, and a GEMM other bits."""
    problem = Problem("window, soft cap, rotary", 290, FP32)
    with planted("tpfuse.kernels.attn.cpu._whole_blocks", lambda right, spans, rows: (rows.start, rows.stop)):
        problem.chunks("cpu")
        with pytest.raises(AssertionError):
            for width in range(1, 60):
                problem.cuts = [0, width, 2 * width, 290]
                problem.assert_bits("cpu")


def test_a_cpu_works_on_the_keys_in_range_alone():
    """Of two chunks under a window the keys that are read and rotated are those that it sees."""
    from tpfuse.kernels.attn.cpu import Forward

    options = Options(seq=1000, causal=True, window=50)
    q, kv = torch.randn(100, 1, 1, 4), torch.randn(1000, 1, 2, 4)
    forward = Forward(q, options, QueryChunk(kv, 640, 100))
    assert [(s.keys.start, s.keys.stop, s.k.shape[1]) for s in forward.samples()] == [(591, 768, 177)]


# ---- with gradients ----


def of_queries(q, kv, *, first_query, batch, queries=None, seq=None, **options):
    """attend_queries, of arguments as attention takes them."""
    options = dict(scale=q.shape[-1] ** -0.5) | options
    options = Options(batch=batch, seq=len(kv) // batch if seq is None else seq, **options)
    return attend_queries(q, QueryChunk(kv, first_query, len(q) // batch if queries is None else queries), options)


def chunks_of(qkv, *, cuts, batch, **options):
    """attention, made of chunks."""
    kv, q = qkv[:, :, -2:], qkv[:, :, :-2]
    pieces = (
        of_queries(q[first * batch : end * batch], kv, first_query=first, batch=batch, **options)
        for first, end in itertools.pairwise(cuts)
    )
    return torch.cat(list(pieces))


@pytest.mark.parametrize("name", ["causal, dropout", "packed"])
def test_gradients_of_chunks_are_those_of_attention(name):
    """Autograd adds up what chunks give k and v."""
    batch = 1 if name == "packed" else 2
    options = dict(batch=batch, **features(name, batch, 21, 4))
    of_chunks = functools.partial(chunks_of, cuts=[0, 5, 5, 12, 21], **options)
    common.assert_same(of_chunks, functools.partial(attention, **options), leaf(21 * batch, 2, 4, E))


def test_gradcheck():
    options = dict(first_query=2, queries=2, batch=2, seq=5, **features("packed", 1, 5, 2) | dict(cu_seqlens=None))
    gradcheck(functools.partial(of_queries, **options), leaf(5, 1, 2, E), leaf(11, 1, 2, E))


def test_no_queries():
    q, kv = leaf(0, 2, 3, E), leaf(12, 2, 2, E)
    o = of_queries(q, kv, first_query=4, batch=2, causal=True, **DROPOUT)
    dq, dkv = torch.autograd.grad(o.sum(), (q, kv))
    assert o.shape == (0, 6 * E) and dq.shape == q.shape and not dkv.any()


def test_masks_are_counted_in_positions_of_the_whole_sequence():
    """Uniform probabilities, and v the unit matrix: o is what was kept."""
    S = 40
    qkv = torch.zeros(S, 2, 3, S)
    qkv[:, :, 2] = torch.eye(S)[:, None]
    options = dict(batch=1, causal=False, **DROPOUT)
    kept = attention(qkv, **options) > 0
    assert torch.equal(chunks_of(qkv, cuts=[0, 7, 33, S], **options) > 0, kept) and 0.6 < kept.float().mean() < 0.8
    moved = of_queries(qkv[7:33, :, :1], qkv[:, :, 1:], first_query=8, **options) > 0
    assert not torch.equal(moved, kept[7:33])


SAMPLES = [
    (op, args)
    for chunk_of, dtype in ((lambda kv: QueryChunk(kv, 1, 2), FP32), (lambda kv: QueryChunk(kv, 3, 1), BF16))
    for options in (Options(batch=2, seq=4, scale=0.4, **features("causal, dropout", 2, 4, 4)),)
    for q, kv in ((torch.randn(5, 2, 2, E).to(dtype), torch.randn(9, 2, 2, E).to(dtype)),)
    for chunk in (chunk_of(kv),)
    for op, args in (
        (attention_of_queries_fwd, (q, chunk, options)),
        (
            attention_of_queries_bwd,
            (q.flatten(1), q, chunk, q.flatten(1), torch.rand(2, 4, chunk.queries), options),
        ),
    )
]
test_opcheck = common.opcheck(SAMPLES)


def test_compile():
    fn = functools.partial(of_queries, first_query=1, batch=2, causal=True, **DROPOUT)
    common.assert_compiles(fn, leaf(4, 2, 2, E, dtype=FP32), leaf(10, 2, 2, E, dtype=FP32))


def test_autocast():
    fn = functools.partial(of_queries, first_query=1, batch=2, causal=True)
    q, kv = leaf(4, 2, 2, E, dtype=FP32), leaf(10, 2, 2, E, dtype=FP32)
    with torch.autocast("cpu", BF16):
        o = fn(q, kv)
    dq, dkv = torch.autograd.grad(o.float().sum(), (q, kv))
    assert o.dtype == BF16 and dq.dtype == dkv.dtype == FP32
    torch.testing.assert_close(o, fn(q.bfloat16(), kv.bfloat16()), rtol=0, atol=0)


@pytest.mark.parametrize(
    "q, kv, options, match",
    [
        ((4, 2, 3), (8, 2, 2, E), {}, r"q must be \[m, G, Q, E\] .*, got torch.float32 \(4, 2, 3\) and"),
        ((4, 2, 3, E), (8, 1, 2, E), {}, r"q must be .* of one dtype, got torch.float32 \(4, 2, 3, 8\) and"),
        ((4, 2, 3, E), (8, 2, 3, E), {}, r"q must be .* and torch.float32 \(8, 2, 3, 8\)"),
        ((4, 2, 3, E), (8, 2, 2, E), dict(first_query=-1), "first_query must be at least 0, got -1"),
        ((4, 2, 3, E), (8, 2, 2, E), dict(first_query=3), r"first_query \+ queries = 3 \+ 2 are more than seq = 4"),
        ((4, 2, 3, E), (8, 2, 2, E), dict(queries=3), "queries x batch = 3 x 2 rows are more than q's 4"),
    ],
)
def test_errors(q, kv, options, match):
    with pytest.raises(ValueError, match="attention_of_queries: " + match):
        call = dict(first_query=0, batch=2, causal=True) | options
        of_queries(torch.randn(q), torch.randn(kv), **call)


@pytest.mark.parametrize("causal, window", [(True, None), (True, 40), (False, None), (False, 40), (False, 400)])
def test_scores_of_chunks_add_up(causal, window):
    options, q = Options(batch=2, seq=300, causal=causal, window=window), torch.empty(600, 2, 3, E, device="meta")
    chunks = [QueryChunk(q, first, end - first) for first, end in itertools.pairwise([0, 100, 101, 290, 300])]
    left = sum(scores(q, options, chunk)[0] for chunk in chunks)
    whole, computed = scores(torch.empty(600, 2, 5, E, device="meta"), options)
    assert left - whole in range(-12 * len(chunks), 1)  # a half is left out where a chunk has an odd number
    assert scores(q, options, QueryChunk(q, 0, 300)) == (whole, computed)


# ---- the Triton side, under the interpreter ----


def launch_problem(name, seq=70, **more):
    return Problem(name, seq, FP32, **dict(G=1, Q=2) | more)


@pytest.mark.parametrize(
    "name",
    [
        "packed",
        "window on either side, positions",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in NAMES
            if name not in ("packed", "window on either side, positions")
        ),
    ],
)
def test_launchers(poisoned, name):
    """Bits of the launchers' whole call, wherever chunks end in tiles of 32; dk and dv as the reference has them."""
    pytest.importorskip("triton")
    problem = launch_problem(name)
    problem.cuts = [0, 20, 23, 70]
    assert problem.assert_bits("launch") < 1e-5
    want = problem.whole("reference")
    torch.testing.assert_close(problem.chunks("launch")[0], want[0], rtol=2e-5, atol=2e-5)


def test_launchers_of_no_queries(poisoned):
    pytest.importorskip("triton")
    problem = launch_problem("causal, dropout")
    chunk, q = QueryChunk(problem.kv, 35, 0), problem.kv[:0, :, :2]
    o, lse = attention_of_queries_fwd.launch(q, chunk, problem.options)
    dq, dkv = attention_of_queries_bwd.launch(o, q, chunk, o, lse, problem.options)
    assert len(o) == len(dq) == 0 and lse.shape == (2, 2, 0) and not dkv.any()


@pytest.mark.parametrize("name", ["causal, dropout", pytest.param("window, soft cap, rotary", marks=pytest.mark.slow)])
def test_declared_bytes(name):
    """Chunks of whole tiles; a window reaches into a tile, which is read as a whole."""
    pytest.importorskip("triton")
    from tests.kernels.interpreter_bytes import assert_declared

    options = Options(batch=2, seq=128, scale=0.4, **features(name, 2, 128, 2))
    if options.cos is not None:
        options = options._replace(window=33, cos=options.cos[:128], sin=options.sin[:128])
    q, do, o = torch.randn(64, 1, 2, 16), torch.randn(64, 32), torch.randn(64, 32)
    chunk = QueryChunk(torch.randn(256, 1, 2, 16), 64, 32)
    assert len(kv_in_range(chunk, options)) == 2 * (64 if options.window else 96)
    if options.cos is None:
        assert_declared(attention_of_queries_fwd, (q, chunk, options))
        assert_declared(attention_of_queries_bwd, (do, q, chunk, o, torch.rand(2, 2, 32), options))


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu(monkeypatch, name):
    """Compiled, tpfuse's own kernels for the whole call too: its bits, and dk and dv to rounding."""
    from tpfuse.kernels.attn import torch_forward

    monkeypatch.setattr(torch_forward, "has_flash", lambda device: False)
    attention_fwd.launch.forget()
    with torch.device("cuda"):
        problem = Problem(name, 700, BF16)
        problem.qkv, problem.do, problem.kv = (t.cuda() for t in (problem.qkv, problem.do, problem.kv))
        moved = (t.cuda() if isinstance(t, torch.Tensor) else t for t in problem.options)
        problem.options = Options(*moved)
        assert problem.assert_bits("launch") < 0.2
