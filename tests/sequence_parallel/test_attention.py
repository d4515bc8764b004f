"""Attention between its projections in one overlapped op: the three ops' values and gradients, and their messages."""

import contextlib

import pytest
import torch

from tests.common import assert_equal, error, fake_tp, my_rows
from tests.planted import planted
from tests.sequence_parallel import test_overlap as overlap
from tests.sequence_parallel.test_overlap import overlapping, restoring
from tpfuse.kernels.attn import cpu as _attention_cpu
from tpfuse.kernels.attn.op import attention
from tpfuse.kernels.attn.options import Options
from tpfuse.kernels.norm import norm_in
from tpfuse.kernels.runtime.op import flatten
from tpfuse.kernels.runtime.philox import make_rng
from tpfuse.sequence_parallel import flight, gather_linear, linear_exchange
from tpfuse.sequence_parallel.attention import gather_attention_exchange
from tpfuse.sequence_parallel.choice import sizes
from tpfuse.sequence_parallel.overlap import attention as module

D, E, G = 10, 6, 12  # G kv heads of Q queries each divide by 1, 2, 3 and 4
S, B = 24, 2  # 48 rows: tiles of 12 to 48, of whole positions at every R
BLOCK = 4  # positions: a tile of 6 and more is attended in several goes

CASES = {
    "bidirectional": dict(causal=False),
    "causal": dict(causal=True),
    "window": dict(causal=True, window=5),
    "window on either side": dict(causal=False, window=5),
    "grouped, dropout": dict(causal=True, Q=2, p=0.3, site=4),
    "rope, padding mask": dict(causal=False, rope=True, key_mask=True),
    "padded rows": dict(causal=True, seq=S - 3),  # the last rank at R = 4 has no more than padding in places
    "split positions": dict(
        causal=True, batch=3, seq=15
    ),  # 48 rows, 45 of them used: a tile at R = 4 is 12 rows, 4 positions
    "tiles that cut positions": dict(causal=True, batch=5, seq=9),  # attention as a whole
    "packed": dict(causal=True, batch=1, seq=48, cu_seqlens=(0, 7, 20, 48)),
}


def _data(case, dtype):
    """x, gradient, weights by name, options; of all ranks."""
    case = dict(batch=B, seq=None, Q=1) | CASES[case]
    r = lambda *shape: torch.randn(*shape, dtype=torch.float64).to(dtype)
    Q, M = case.pop("Q"), S * B
    weights = dict(w=r(G, Q + 2, E, D) / 3, b=r(G, Q + 2, E), w_out=r(D, G, Q * E) / 3)
    seq = case["seq"] or M // case["batch"]
    if case.pop("rope", False):
        angle = torch.outer(torch.arange(seq), torch.tensor([1.0, 0.3, 0.1]))
        case |= dict(cos=angle.cos(), sin=angle.sin())
    if case.pop("key_mask", False):
        case |= dict(key_mask=torch.arange(seq).expand(case["batch"], -1) < torch.tensor([[seq], [seq - 5]]))
    if "cu_seqlens" in case:
        case |= dict(cu_seqlens=torch.tensor(case["cu_seqlens"], dtype=torch.int32))
    if "p" in case:
        case |= dict(rng=make_rng(7, 3))
    return r(M, D), r(M, D), weights, case, (r(D), r(D))


def _mine(weights, tp):
    slices = dict(w=(weights["w"], 0), b=(weights["b"], 0), w_out=(weights["w_out"], 1))
    return {name: t.chunk(tp.size, dim)[tp.rank].clone().requires_grad_() for name, (t, dim) in slices.items()}


def _flat(w):
    return w["w"].flatten(0, 2), w["b"].flatten(), w["w_out"].flatten(1)


def _call(n, w, options, tp, recompute=None):
    _, slots, width, _ = w["w"].shape
    seq, scale = (options.get(key) for key in ("seq", "scale"))
    given = options | dict(
        seq=n.shape[-2] * tp.row_shards // options["batch"] if seq is None else seq,
        scale=width**-0.5 if scale is None else scale,
        first_head=tp.rank * len(w["w"]) * (slots - 2),
    )
    how = dict(heads=(slots, width), options=Options(**given), tp=tp, recompute=recompute)
    return gather_attention_exchange(n, *_flat(w), **how)


def _run(tp, form, x, dy, weights, options, norm):
    w, x, recompute = _mine(weights, tp), my_rows(x, tp).clone().requires_grad_(), None
    n = x
    if form != "plain":
        _, n, recompute = norm_in(x, *norm, eps=1e-5, ranks=tp.row_shards, recompute=True)
    y = _call(n, w, options, tp, recompute if form == "recomputed" else None)
    (y * my_rows(dy, tp)).sum().backward()
    return dict(y=y.detach(), dx=x.grad, **{"d" + name: t.grad for name, t in w.items()})


@contextlib.contextmanager
def _blocks(positions):
    before = module.BLOCK
    module.BLOCK = _attention_cpu.BLOCK = positions
    try:
        yield
    finally:
        module.BLOCK = _attention_cpu.BLOCK = before


@restoring
def _forms(world, form, data):
    with _blocks(BLOCK):
        return [_run(overlapping(world, True, overlap), form, *data) for overlap in ("off", "pairwise", "pairwise")]


EVERY = [(R, case) for R in (1, 2, 3, 4) for case in CASES]
DAILY = [(R, case) for R, case in EVERY if R == 4 or case == "causal"]  # tiles are smallest at 4


@pytest.mark.parametrize(
    "R, case", [one if one in DAILY else pytest.param(*one, marks=pytest.mark.slow) for one in EVERY]
)
def test_equal_to_plain(ranks, R, case):
    """fp64, all gradients, pieces of 2 rows and more."""
    for off, once, again in ranks(R, _forms, "plain", _data(case, torch.float64)):
        assert_equal(once, again)
        wrong = {name: e for name in off if not (e := error(once[name], off[name])) <= 1e-13}
        assert not wrong, wrong


@pytest.mark.parametrize("form", ["normed", "recomputed"])
def test_from_a_norm(ranks, form):
    for off, once, _ in ranks(3, _forms, form, _data("causal", torch.float64)):
        assert all(error(once[name], off[name]) <= 1e-13 for name in off)


@restoring
def _parts(world, how, data):
    """The three ops by name, or the one."""
    x, dy, weights, options, _ = data
    tp = overlapping(world, True, how)
    if how == "pairwise":
        return _run(tp, "plain", *data)
    w, x = _mine(weights, tp), my_rows(x, tp).clone().requires_grad_()
    weight, bias, out = _flat(w)
    qkv = gather_linear(x, weight, bias, tp=tp)
    y = linear_exchange(attention(qkv.view(len(qkv), -1, *w["w"].shape[1:3]), **options), out, tp=tp)
    (y * my_rows(dy, tp)).sum().backward()
    return dict(y=y.detach(), dx=x.grad, **{"d" + name: t.grad for name, t in w.items()})


def test_is_the_three_ops(ranks):
    data = _data("causal", torch.float64)
    for three, one in zip(*(ranks(2, _parts, how, data) for how in ("off", "pairwise"))):
        assert all(error(one[name], three[name]) <= 1e-13 for name in three)


@restoring
def _aligned(world, data):
    """The three ops, their GEMMs in pieces, and the one op twice."""
    with _blocks(16):
        with overlap.multiplying_in_pieces(world, halved=False):
            off = _run(overlapping(world, True, "off", 16), "plain", *data)
        return off, *(_run(overlapping(world, True, "pairwise", 16), "plain", *data) for _ in range(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("R", [2, 4])
def test_bitwise_where_tiles_agree(ranks, monkeypatch, R, dtype):
    """Forward, in tiles of 64 rows: 32 positions, two blocks of 16, against the plain form in the same pieces.  Of the
    gradients only k's and v's are added in another order."""
    for name, value in dict(D=32, E=16, G=R * 4, S=32 * R).items():
        monkeypatch.setattr(f"{__name__}.{name}", value)
    for off, on, again in ranks(R, _aligned, _data("causal", dtype)):
        assert_equal(on, again)
        assert torch.equal(on["y"], off["y"])
        assert torch.equal(on["dw_out"], off["dw_out"])
        assert all(error(on[name], off[name]) <= (1e-5 if dtype == torch.float32 else 2e-2) for name in off)


@restoring
def _planted(world, data):
    """The first position of every range is taken twice."""

    def twice(attend, self, sample, first, last):
        attend(self, sample, first, last)
        attend(self, sample, first, first + 1)

    with planted("tpfuse.kernels.attn.cpu.Backward.attend", twice):
        return _forms(world, "plain", data)


def test_a_planted_mistake_is_seen(ranks):
    """k's gradients get what a range's first position gives once more: the plain form has one range, the other
    several."""
    for off, on, _ in ranks(2, _planted, _data("bidirectional", torch.float64)):
        assert error(on["dw"], off["dw"]) > 1e-3


def _whole(tiles):
    """What a tile is attended in: ranges that join, and end with it."""
    made = []
    work = type("Work", (), {})()
    work.options, work.samples = type("Options", (), dict(batch=B, seq=S)), lambda: range(B)
    work.attend = lambda sample, first, last: made.append((sample, first, last))
    return module.Tiles(work, S * B // tiles), made


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("tiles", [1, 2, 3, 4])
def test_a_tile_is_attended_once_and_to_its_end(monkeypatch, tiles, ahead):
    """In blocks, never beyond what has landed, never short of what leaves; B rows a position."""
    monkeypatch.setattr(module, "BLOCK", BLOCK)
    monkeypatch.setattr(flight, "LEAST_ROWS", 3)  # pieces that end within a position
    order, made = _whole(tiles)
    for tile in reversed(range(tiles)):
        start, m = tile * S // tiles, S * B // tiles
        for rows in flight.pieces(m):
            order.attend(tile, rows.stop, ahead)
            reached = max(
                (last for _, first, last in made if first >= start and last <= start + S // tiles), default=start
            )
            landed = start + rows.stop / B
            assert reached >= landed if ahead else reached <= landed
            assert reached == start + S // tiles or (reached - start) % BLOCK == 0
    for sample in range(B):
        covered = [p for s, first, last in made if s == sample for p in range(first, last)]
        assert sorted(covered) == list(range(S))


@restoring
def _in_pairs(world, data):
    flight.in_pairs = lambda x: True
    return _forms(world, "plain", data)


def test_in_pairs_equals_plain(ranks):
    """As on NCCL."""
    for off, on, again in ranks(3, _in_pairs, _data("causal", torch.float64)):
        assert_equal(on, again)
        assert all(error(on[name], off[name]) <= 1e-13 for name in off)


@restoring
def _frozen(world, data, frozen):
    """Gradients with some weights frozen."""
    x, dy, weights, options, _ = data
    results = []
    for how in "off", "pairwise":
        tp = overlapping(world, True, how)
        w, mine = _mine(weights, tp), my_rows(x, tp).clone().requires_grad_()
        for name in frozen:
            w[name].requires_grad_(False)
        (_call(mine, w, options, tp) * my_rows(dy, tp)).sum().backward()
        results.append(dict(x=mine.grad, **{name: t.grad for name, t in w.items() if t.requires_grad}))
        assert all(w[name].grad is None for name in frozen)
    return results


@pytest.mark.parametrize("frozen", [("w",), ("w_out",), ("w", "b", "w_out"), ("b",)], ids=" ".join)
def test_frozen_weights(ranks, frozen):
    for off, on in ranks(2, _frozen, _data("causal", torch.float64), frozen):
        assert on.keys() == off.keys() and all(error(on[name], off[name]) <= 1e-13 for name in off)


@restoring
def _sent(world, data):
    """(bytes, messages) sent forward, and backward."""
    x, dy, weights, options, _ = data
    tp = overlapping(world)
    x, dy = (my_rows(t, tp).expand(tp.size, -1, -1) for t in (x, dy))
    return overlap.sent(world, lambda: _call(x.requires_grad_(), _mine(weights, tp), options, tp), lambda y: dy)


@pytest.mark.parametrize("R", [2, 3, 4])
def test_messages(ranks, monkeypatch, R):
    """Two messages of m D elements to each peer forward and three backward, in pieces but for n's second; and the rule
    knows them."""
    monkeypatch.setattr(flight, "LEAST_ROWS", 2)
    m = S * B // R
    one, cut = (R - 1) * m * D * 8, (R - 1) * len(flight.pieces(m))
    data = _data("causal", torch.float64)
    assert ranks(R, _sent, data) == [[(2 * one, 2 * cut), (3 * one, 2 * cut + R - 1)]] * R
    known = sizes(
        "gather_attention_exchange",
        S * B,
        (4 * E, D),
        dtype=torch.float64,
        device=torch.device("cpu"),
        tp=fake_tp(R, 0, True),
    )
    assert known[:2] == (5 * one, 4 * cut + R - 1)


@restoring
def _opcheck(world, data):
    with overlap.recorded() as calls:
        _run(overlapping(world), "plain", *data)
    overlap.check_ops(calls)
    assert [op.name for op, _ in calls] == ["gather_attention_exchange_fwd", "gather_attention_exchange_bwd"]
    with torch.no_grad():
        return [op.cost(args, op.overload(*flatten(args))) for op, args in calls]


def test_opcheck_and_costs(ranks):
    """Bidirectional: GEMMs of M D (3 + 1) H E over R, twice backward, and attention's 4 and 10 B H S S E."""
    R, M = 2, S * B
    gemms, products = 2 * M * D * 4 * G * E // R, B * G // R * S * S * E
    for forward, backward in ranks(R, _opcheck, _data("bidirectional", torch.float64)):
        assert forward.flops == gemms + 4 * products and backward.flops == 2 * gemms + 10 * products
        assert (forward.sent, backward.sent) == (2 * M // R * D * 8, 3 * M // R * D * 8)
        assert forward.scores == backward.scores == B * G // R * S * S


@restoring
def _peak(world, how):
    """As in test_overlap, of forward, then backward; and what one gathered tensor has."""
    tp = overlapping(world, overlap=how, least=64)
    rows, width, heads = 2048, 64, 8
    w = torch.randn(heads // tp.size * 3 * 8, width).requires_grad_()
    out = torch.randn(width, heads // tp.size * 8).requires_grad_()
    x = torch.randn(rows // tp.size, width).expand(tp.size, -1, -1).requires_grad_()
    options = Options(batch=16, seq=rows // 16, causal=True, window=rows)  # without a window it would be torch's own
    forward = lambda: gather_attention_exchange(x, w, None, out, heads=(3, 8), options=options, tp=tp)
    return overlap.peaks(forward, (x, w, out)), 4 * rows * width


def test_memory(ranks):
    """Beyond the plain form's peak: forward k and v of all samples, half of a gathered tensor each at R = 2; backward
    also their gradients in fp32, n, which lands meanwhile, and dn with what leaves of it."""
    for (off, gathered), (on, _) in zip(ranks(2, _peak, "off"), ranks(2, _peak, "pairwise")):
        assert on[0] <= off[0] + 1.5 * gathered and on[1] <= off[1] + 5 * gathered, (off, on, gathered)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(heads=(2, E)), "qkv_weight must have a multiple of 12 rows, got 36"),
        (dict(heads=(3, 7)), "qkv_weight must have a multiple of 21 rows, got 36"),
        (dict(out_weight=torch.zeros(D, 5)), r"out_weight must be \(10, 12\), got \(10, 5\)"),
        (dict(options=Options(batch=0, seq=4, causal=True)), "batch must be at least 1, got 0"),
    ],
)
def test_bad_input(change, message):
    given = dict(out_weight=torch.zeros(D, 12), heads=(3, E), options=Options(batch=2, seq=4, causal=True)) | change
    with pytest.raises(ValueError, match=message):
        gather_attention_exchange(torch.zeros(8, D), torch.zeros(36, D), None, **given, tp=fake_tp(1))
