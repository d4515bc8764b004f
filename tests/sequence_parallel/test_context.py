"""Attention over pieces of sequences: the same bits at every number of context-parallel ranks."""

import re

import pytest
import torch

from tests.common import error
from tests.planted import Mistaken
from tpfuse import TensorParallel
from tpfuse.kernels.attn import torch_cpu
from tpfuse.kernels.attn.op import attend
from tpfuse.kernels.attn.options import Options
from tpfuse.kernels.runtime.op import flatten
from tpfuse.kernels.runtime.philox import make_rng
from tpfuse.sequence_parallel.context import HeadSplit, attend_pieces
from tpfuse.sequence_parallel.overlap.heads import HeadRounds, attention_of_heads_bwd, attention_of_heads_fwd

G, E = 4, 8
CASES = {
    "causal": dict(S=24, causal=True),
    "an odd number of positions, dropout": dict(S=29, causal=True, Q=2, p=0.3),
    "fewer positions than ranks": dict(S=3, B=1, causal=True),
    "bidirectional, key mask": dict(S=23, causal=False, key_mask=True),
    "window, soft cap, rotary positions": dict(S=26, causal=True, window=5, softcap=3.0, rope=True, Q=3),
    "packed documents, dropout": dict(S=31, B=1, causal=True, cu_seqlens=(0, 9, 10, 30), p=0.3, Q=2),
}
COPIES = {
    "one kv head": dict(S=13, causal=True, G=1, Q=8, p=0.3),
    "two kv heads, odd": dict(S=13, causal=True, G=2, Q=6, p=0.3),
    "six kv heads": dict(S=13, causal=True, G=6, Q=2, p=0.3),  # over four ranks, each with a head and a half
}


def problem(case, dtype):
    """-> qkv and do of whole sequences, and options."""
    case = dict(B=2, Q=1, G=G) | case
    g = torch.Generator().manual_seed(0)
    r = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)
    S, B, Q, groups = (case.pop(key) for key in ("S", "B", "Q", "G"))
    options = dict(seq=S, batch=B, scale=E**-0.5, first_head=3, site=4)
    if case.pop("rope", False):
        angle = torch.outer(torch.arange(S), torch.tensor([1.0, 0.3, 0.1]))
        options |= dict(cos=angle.cos(), sin=angle.sin())
    if case.pop("key_mask", False):
        options |= dict(key_mask=torch.arange(S).expand(B, -1) < torch.tensor([[S], [S - 5]]))
    if "cu_seqlens" in case:
        case["cu_seqlens"] = torch.tensor(case["cu_seqlens"], dtype=torch.int32)
    if "p" in case:
        options |= dict(rng=make_rng(7, 3))
    return r(S * B, groups, Q + 2, E), r(S * B, groups * Q * E), Options(**options, **case)


def whole(case, dtype):
    qkv, do, options = problem(case, dtype)
    qkv.requires_grad_()
    o = attend(qkv, options)
    o.backward(do)
    return o.detach(), qkv.grad


def over_keys(world, case, dtype, padding):
    return in_pieces(world, case, dtype, padding, cp_kind="keys")


def in_rounds(world, case, dtype, padding):
    return in_pieces(world, case, dtype, padding, overlap="pairwise")


def in_pieces(world, case, dtype, padding, **splits):
    """-> this rank's rows of o and of qkv's gradient, and what stands in the padding."""
    qkv, do, options = problem(case, dtype)
    tp = TensorParallel(cp=world.group, **dict(cp_kind="heads", overlap="off") | splits)
    rows = torch.arange(len(qkv)).view(options.seq, -1)[tp.positions(options.seq)].flatten()
    filled = lambda x: torch.cat(
        [x[rows], x.new_full((tp.piece(options.seq) * options.batch - len(rows), *x.shape[1:]), 7)]
    )
    mine = torch.cat([filled(qkv), qkv.new_full((padding, *qkv.shape[1:]), 1e4)]).requires_grad_()
    o = attend_pieces(mine, options, tp)
    o.backward(torch.cat([filled(do), do.new_ones(padding, do.shape[1])]))
    n = len(rows)
    return rows, o[:n].detach(), mine.grad[:n], o[n:].detach().abs().sum() + mine.grad[n:].abs().sum()


def joined(ranks, case, R, dtype, padding=1, function=in_pieces):
    rows, o, dqkv, beyond = zip(*ranks(R, function, case, dtype, padding))
    assert not any(map(bool, beyond)), "padding has a gradient"
    order = torch.cat(rows).argsort()
    return torch.cat(o)[order], torch.cat(dqkv)[order]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("R", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_bits_of_one_rank(ranks, name, R, dtype):
    for got, exact in zip(joined(ranks, CASES[name], R, dtype), whole(CASES[name], dtype), strict=True):
        assert torch.equal(got, exact), (got != exact).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "groups, R", [(4, 2), (6, 2), (10, 2), (8, 4)]
)  # two rounds, three, five, and two of four ranks
@pytest.mark.parametrize("name", CASES)
def test_messages_under_attention(ranks, name, groups, R, dtype):
    """Bits do not depend on the rounds that heads are exchanged in."""
    case = CASES[name] | dict(G=groups)
    for got, exact in zip(joined(ranks, case, R, dtype, function=in_rounds), whole(case, dtype), strict=True):
        assert torch.equal(got, exact), (got != exact).sum()


def first_round_again(right, options, index, heads):
    return options


def test_a_wrong_first_head_of_a_round_is_seen(ranks):
    case = CASES["an odd number of positions, dropout"]
    mistaken = Mistaken(in_rounds, "tpfuse.sequence_parallel.overlap.heads._of_round", first_round_again)
    o, _ = joined(ranks, case, 2, torch.float32, function=mistaken)
    assert not torch.equal(o, whole(case, torch.float32)[0])


def checked(world):
    """torch.library.opcheck of both ops, and attention compiled, whose results are returned beside those of eager."""
    qkv, do, options = problem(CASES["causal"], torch.float64)
    tp, rows = TensorParallel(cp=world.group, cp_kind="heads", overlap="pairwise"), len(qkv) // world.size
    mine, dmine = (x[world.rank * rows :][:rows].contiguous() for x in (qkv, do))
    split = HeadRounds(2, world.size, world.group.group_name)
    _, *saved = attention_of_heads_fwd(mine, options, split)
    calls = {attention_of_heads_fwd: (mine, options, split), attention_of_heads_bwd: (dmine, *saved, options, split)}
    for op, args in calls.items():
        torch.library.opcheck(op.overload, tuple(flatten(args)), test_utils=("test_schema", "test_faketensor"))
    results = []
    for call in (attend_pieces, torch.compile(attend_pieces, fullgraph=True, backend="aot_eager")):
        leaf = mine.clone().requires_grad_()
        o = call(leaf, options, tp)
        o.backward(dmine)
        results.append((o.detach(), leaf.grad))
    return results


@pytest.mark.slow
def test_rounds_as_ops_and_compiled(ranks):
    for eager, compiled in ranks(2, checked):
        assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))


SIZES = dict.fromkeys(["causal", "one kv head", "packed documents, dropout"], (1, 2, 4, 8))  # the others: 1, 2 and 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*CASES, *COPIES])
def test_gathered_keys(ranks, name, dtype, monkeypatch):
    """o and q's gradient have the bits of one rank without pieces, by tpfuse's own attention; those of k and v are one
    tree at every size."""
    monkeypatch.setattr(torch_cpu, "is_plain", lambda *_, **__: False)
    case = (CASES | COPIES)[name]
    (one, done), (exact, dexact) = joined(ranks, case, 1, dtype, function=over_keys), whole(case, dtype)
    assert torch.equal(one, exact) and torch.equal(done[:, :, :-2], dexact[:, :, :-2])
    limit = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 8e-3}[dtype]
    assert error(done[:, :, -2:], dexact[:, :, -2:]) <= limit
    for R in SIZES.get(name, (1, 2, 4))[1:]:
        o, dqkv = joined(ranks, case, R, dtype, function=over_keys)
        assert torch.equal(o, one) and torch.equal(dqkv, done), f"{R} ranks: {(dqkv != done).sum()} differ"


def pair_a_rank(right, ranks):
    return ranks


def test_sums_by_rank_are_seen(ranks):
    """A pair of chunks for each rank: as many leaves as there are ranks."""
    case = CASES["causal"] | dict(S=64)  # chunks of positions as they are
    mistaken = Mistaken(over_keys, "tpfuse.sequence_parallel.context.pairs_of", pair_a_rank)
    by_rank, by_leaf = (joined(ranks, case, 2, torch.float32, function=f) for f in (mistaken, over_keys))
    assert torch.equal(by_rank[0], by_leaf[0]) and not torch.equal(by_rank[1], by_leaf[1])


@pytest.mark.parametrize("R", [2, 4])
@pytest.mark.parametrize("name", COPIES)
def test_copied_kv_heads(ranks, name, R):
    """Masks and values of one rank; the gradients of k and v are sums over ranks."""
    for got, exact in zip(
        joined(ranks, COPIES[name], R, torch.float64), whole(COPIES[name], torch.float64), strict=True
    ):
        assert error(got, exact) <= 1e-14
    o, _ = joined(ranks, COPIES[name], R, torch.bfloat16)
    assert torch.equal(o, whole(COPIES[name], torch.bfloat16)[0])


def first_heads_forgotten(right, qkv, options):
    return right(qkv, options._replace(first_head=3))


def test_a_wrong_first_head_is_seen(ranks):
    """Every rank would draw the masks of the first one's heads."""
    case = CASES["an odd number of positions, dropout"]
    mistaken = Mistaken(in_pieces, "tpfuse.sequence_parallel.context.attend", first_heads_forgotten)
    o, _ = joined(ranks, case, 2, torch.float32, function=mistaken)
    assert not torch.equal(o, whole(case, torch.float32)[0])


def test_heads_that_cannot_be_divided():
    words = "attention: 12 query heads in 4 groups a tensor-parallel rank are not divisible by context-parallel size 8"
    with pytest.raises(ValueError, match=re.escape(f"{words}; use size 1, 2, 3, 4, 6, 12, or cp_kind='keys'")):
        HeadSplit(4, 3, 8).check("attention")
    assert HeadSplit(6, 2, 4).copies == 2 and HeadSplit(1, 8, 4).copies == 4


def test_heads_of_any_number_are_checked_at_once():
    """A spoilt file may ask for as many as an integer holds."""
    HeadSplit(1, 1 << 60, 1).check("attention")
    with pytest.raises(ValueError, match=r"use size 1, 2, 4, 8, or cp_kind='keys'"):
        HeadSplit(1, 1 << 60, 3).check("attention")
