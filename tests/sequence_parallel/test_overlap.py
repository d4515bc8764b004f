"""The overlapped forms: the plain forms' bits, the same messages in pieces, nothing gathered twice, and errors instead
of hangs."""

import contextlib
import functools
import os
import random
import re
import socket
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.common import TOLERANCE, assert_equal, error, fake_tp, my_rows
from tests.kernels.common import peak
from tests.planted import planted
from tests.pool import RankFailed
from tests.sequence_parallel import test_plain as plain
from tests.sequence_parallel.test_plain import FORMS, OPS, D, M, N
from tpfuse import TensorParallel, parallel
from tpfuse.kernels.attn.options import Options
from tpfuse.kernels.runtime.op import OPS as ALL_OPS
from tpfuse.kernels.runtime.op import flatten
from tpfuse.kernels.runtime.philox import make_rng
from tpfuse.layers import TransformerBlock
from tpfuse.ranks import gloo
from tpfuse.ranks.shared_memory import SharedMemory
from tpfuse.sequence_parallel import (
    choice,
    flight,
    gather_attention_exchange,
    gather_linear,
    gather_mlp_exchange,
    linear_exchange,
)
from tpfuse.sequence_parallel.choice import sizes
from tpfuse.sequence_parallel.flight import pieces
from tpfuse.sequence_parallel.forms import overlapped

CASES = [(op, form) for op in OPS for form in FORMS if op != "linear_exchange" or form == "plain"]


PATCHED = [
    (flight, "LEAST_ROWS"),
    (flight.Flight, "post"),
    (flight, "in_pairs"),
    (choice, "measured"),
    (choice, "_measured"),
    (plain, "make_tp"),
    (parallel, "host"),
    (gloo, "send"),
    (SharedMemory, "all_gather"),
    (dist, "batch_isend_irecv"),
]


ARRIVED = "tpfuse.sequence_parallel.flight.Flight.arrived"


def restoring(fn):
    """For what runs in a worker, which other tests use after it: what it patches is put back."""

    @functools.wraps(fn)
    def run(world, *args):
        with contextlib.ExitStack() as stack:
            for owner, name in PATCHED:
                stack.callback(setattr, owner, name, getattr(owner, name))
            return fn(world, *args)

    return run


def overlapping(world, sp=True, overlap="pairwise", least=2):
    """This world's TensorParallel, as if every rank had its own machine, in pieces small enough for the tests."""
    flight.LEAST_ROWS, parallel.host = least, lambda: world.rank
    return TensorParallel(world.group, sequence_parallel=sp, overlap=overlap)


@pytest.mark.parametrize("rows", [0, 1, 255, 256, 511, 512, 513, 1000, 4096, 16385])
def test_pieces_halve(rows):
    cut = pieces(rows)
    lengths = [piece.stop - piece.start for piece in cut]
    assert sum(lengths) == rows and [piece.start for piece in cut] == [sum(lengths[:i]) for i in range(len(cut))]
    assert lengths == sorted(lengths, reverse=True) and all(lengths)
    assert all(length % flight.LEAST_ROWS == 0 for length in lengths[:-1])
    if rows >= 2 * flight.LEAST_ROWS:
        assert lengths[0] <= rows / 2 + flight.LEAST_ROWS and lengths[-1] < 2 * flight.LEAST_ROWS


# ---- equal ----


@restoring
def _forms(world, sp, op, form, data, least=2):
    """One op by both forms, the overlapped one twice."""
    results = []
    for overlap in "off", "pairwise", "pairwise":
        plain.make_tp = lambda world, sp: overlapping(world, sp, overlap, least)  # noqa: B023
        results.append(plain._sharded(world, sp, op, form, *data))
    return results


@pytest.mark.parametrize("op, form", CASES)
@pytest.mark.parametrize("sp", [True, False], ids=["sp", "no sp"])
@pytest.mark.parametrize("R", [1, pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)])
def test_equal_to_plain(ranks, R, sp, op, form):
    """fp64, all gradients; pieces of 2 rows and more, so that a tile of 24 / R is cut, and one of 7 rows a rank halves
    into 4 and 3."""
    for rows in (M, 7 * R) if form == "plain" else (M,):
        x, dy, *others = plain._data(op, torch.float64)
        data = *(torch.cat([t, t])[:rows] for t in (x, dy)), *others
        for off, once, again in ranks(R, _forms, sp, op, form, data):
            assert_equal(once, again)
            wrong = {name: e for name in off if not (e := error(once[name], off[name])) <= 1e-14}
            assert not wrong, wrong


def in_pieces(world, halved, multiply, x, w, *args):
    """A GEMM and the rest of its op, of as many rows at a time as in the overlapped form: a peer's tile in ``pieces``,
    this rank's own as one, or ``halved`` as that of an MLP."""
    m, rows = len(x) // world.size, []
    for tile in range(world.size):
        cut = pieces(m)
        if tile == world.rank:
            cut = [cut[0], slice(cut[0].stop, m)] if halved else [slice(m)]
        rows += [range(tile * m, (tile + 1) * m)[piece] for piece in cut]
    z = args and isinstance(args[0], torch.Tensor) and args[0].dim() > 1  # has its rows too
    results = []
    for r in (slice(r.start, r.stop) for r in rows):
        results.append(multiply(x[r], w, *((args[0][r], *args[1:]) if z else args)))
    if isinstance(results[0], torch.Tensor):
        return torch.cat(results)
    joined = [torch.cat(parts) for parts in zip(*results)]
    if z:
        joined[1] = multiply(x, w, *args)[1]  # the bias gradient, a sum over all rows
    return tuple(joined)


@contextlib.contextmanager
def multiplying_in_pieces(world, halved):
    """Every GEMM over rows of the plain form, in the pieces of the overlapped one."""
    with contextlib.ExitStack() as stack:
        for name in "linear_fwd", "linear_dgrad", "linear_dgrad_act":
            stack.enter_context(planted(name, functools.partial(in_pieces, world, halved)))
        yield


@restoring
def _aligned(world, op, data):
    """One op by the plain form in pieces, and by the overlapped form."""
    plain.make_tp = lambda world, sp: overlapping(world, sp, "off", 16)
    with multiplying_in_pieces(world, "mlp" in op):
        off = plain._sharded(world, True, op, "plain", *data)
    plain.make_tp = lambda world, sp: overlapping(world, sp, "pairwise", 16)
    return off, plain._sharded(world, True, op, "plain", *data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("R", [2, 4])
def test_bitwise_where_tiles_agree(ranks, monkeypatch, R, op, dtype):
    """Tiles of 64 rows in pieces of 32, 16 and 16, columns in multiples of 16, against the plain form in the same
    pieces: whether a GEMM gives a row the same bits among fewer rows is up to the processor.  The MLP's bias gradient
    alone is added in pieces."""
    for name, value in dict(M=64 * R, D=32, N=64 * R).items():
        monkeypatch.setattr(plain, name, value)
    for off, on in ranks(R, _aligned, op, plain._data(op, dtype)):
        if "mlp" in op:
            assert error(on.pop("db"), off.pop("db")) <= 1e-5
        assert_equal(on, off)


@restoring
def _planted(world, op, data):
    """A tile whose rows land in one another's place."""
    with planted(ARRIVED, lambda arrived, *args: arrived(*args).flip(0)):
        return _forms(world, True, op, "plain", data)


@pytest.mark.parametrize("op", OPS)
def test_a_planted_mistake_is_seen(ranks, op):
    for off, on, _ in ranks(2, _planted, op, plain._data(op, torch.float64)):
        assert max(error(on[name], off[name]) for name in off) > TOLERANCE[torch.float64]


@restoring
def _in_pairs(world, op, data):
    """As on NCCL, where a receive is posted with its send."""
    post, posted = dist.batch_isend_irecv, []
    flight.in_pairs = lambda x: True
    dist.batch_isend_irecv = lambda ops: (posted.append(len(ops)), post(ops))[1]
    return _forms(world, True, op, "plain", data), posted


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("R", [2, 3])
def test_in_pairs_equals_plain(ranks, R, op):
    for (off, on, again), posted in ranks(R, _in_pairs, op, plain._data(op, torch.float64)):
        assert posted and set(posted) <= {2, 2 * (R - 1)}
        assert_equal(on, again)
        assert all(error(on[name], off[name]) <= 1e-14 for name in off)


@restoring
def _gathered_in_pairs(world):
    """-> what arrived, and the size of each batch; rows are asked for in an order of their own."""
    flight.LEAST_ROWS, flight.in_pairs = 2, lambda x: True
    post, posted = dist.batch_isend_irecv, []
    dist.batch_isend_irecv = lambda ops: (posted.append(len(ops)), post(ops))[1]
    x = torch.arange(8.0)[None, :, None] + 100 * world.rank
    into, cut = torch.full((world.size, 8, 1), -1.0), pieces(8)
    flying = flight.Flight("test", x.expand(world.size, 8, 1), into, world.group.group_name, cut, copy_own=True)
    flying.post_all()
    for rows in cut:
        for source in reversed(flying.before):
            assert (flying.arrived(source, rows)[:, 0] == torch.arange(8.0)[rows] + 100 * source).all()
    return flying.finish(), posted, len(cut)


@pytest.mark.parametrize("R", [2, 3, 4])
def test_a_piece_for_all_peers_is_one_batch(ranks, R):
    for into, posted, cut in ranks(R, _gathered_in_pairs):
        assert cut > 1 and posted == [2 * (R - 1)] * cut
        assert torch.equal(into[:, :, 0], torch.arange(8.0) + 100 * torch.arange(R)[:, None])


# ---- a block, compiled too ----


@restoring
def _block(world, overlap, sp, saving, compiled):
    torch.manual_seed(1)
    tp = overlapping(world, sp, overlap)
    block = TransformerBlock(32, 4, 64, tp=tp, dropout=0.1, saving=saving)
    x = my_rows(torch.randn(32, 32, generator=torch.Generator().manual_seed(2)), tp).clone().requires_grad_()
    call = torch.compile(block, fullgraph=True, backend="aot_eager") if compiled else block
    y = call(x, batch=2, rng=make_rng(7, 3))
    y.square().sum().backward()
    return dict(y=y.detach(), x=x.grad, **{name: p.grad for name, p in block.named_parameters()})


@pytest.mark.parametrize(
    "sp, saving",
    [pytest.param(*c, marks=pytest.mark.slow) for c in [(True, "smallest"), (True, "fastest"), (False, "smallest")]],
)
def test_a_block_compiled_in_one_graph(ranks, sp, saving):
    off = ranks(2, _block, "off", sp, saving, False)
    on, compiled = (ranks(2, _block, "pairwise", sp, saving, c) for c in (False, True))
    for a, b, c in zip(off, on, compiled):
        assert_equal(b, c)
        assert all(error(b[name], a[name]) <= 1e-5 for name in a)


@contextlib.contextmanager
def recorded():
    """-> (op, arguments) of each call of an overlapped op."""
    calls = []
    with contextlib.ExitStack() as stack:
        for name in [name for name in ALL_OPS if name.startswith(("gather_", "linear_exchange", "linear_reduce"))]:
            record = lambda right, *args, op=ALL_OPS[name]: (calls.append((op, args)), right(*args))[1]
            stack.enter_context(planted(name, record))
        yield calls


def check_ops(calls):
    for op, args in calls:
        torch.library.opcheck(op.overload, flatten(args), test_utils=("test_schema", "test_faketensor"))


@restoring
def _opcheck(world, op, data):
    plain.make_tp = overlapping
    with recorded() as calls:
        for sp in True, False:
            plain._sharded(world, sp, op, "normed", *data)
    check_ops(calls)
    return sorted({op.name for op, _ in calls})


@pytest.mark.parametrize("op", ["gather_linear", "gather_mlp_exchange"])
def test_opcheck(ranks, op):
    expected = sorted([f"{op}_fwd", f"{op}_bwd", "linear_reduce_bwd"])
    assert ranks(2, _opcheck, op, plain._data(op, torch.float64)) == [expected] * 2


# ---- messages ----


@restoring
def _in_other_groups(world):
    """Rank 0 is in one group more than rank 1."""
    dist.new_group([0])
    tp = overlapping(world)
    return gather_linear(torch.ones(4, 8), torch.ones(6, 8), tp=tp).sum().item()


def test_ranks_may_be_in_other_groups_too(ranks):
    assert ranks(2, _in_other_groups) == [8 * 6 * 8.0] * 2


@restoring
def _sent(world, op, sp):
    """(bytes, messages) that this rank sends in forward, in backward, and to itself."""
    tp = overlapping(world, sp)
    _, _, weights, _ = plain._data(op, torch.float32)
    w = {name: plain._columns(t, name, tp.rank, tp.size).clone().requires_grad_() for name, t in weights.items()}
    m = M // tp.row_shards
    x = torch.ones(M, N // tp.size) if op == "linear_exchange" else torch.ones(m, D).expand(tp.row_shards, -1, -1)
    dy = lambda y: torch.ones_like(y) if y.dim() == 2 else torch.ones(m, D).expand(tp.row_shards, -1, -1)
    return sent(world, lambda: plain._call(op, x.requires_grad_(), w, tp), dy)


def sent(world, forward, dy):
    """(bytes, messages) of forward, and of backward by ``dy(y)``; none to this rank itself."""
    send, messages = gloo.send, []

    def counted(x, group, to):
        assert x.is_contiguous() and to != world.rank
        messages.append(x.numel() * x.element_size())
        return send(x, group, to)

    all_gather = SharedMemory.all_gather

    def counted_gather(memory, result, x):
        messages.extend([x.numel() * x.element_size()] * (world.size - 1))
        return all_gather(memory, result, x)

    gloo.send, SharedMemory.all_gather = counted, counted_gather
    y = forward()
    count = len(messages)
    y.backward(dy(y))
    return [(sum(part), len(part)) for part in (messages[:count], messages[count:])]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("R", [2, 3, 4])
def test_messages(ranks, monkeypatch, R, op):
    """(R - 1) m D elements a gather and an exchange; a message a piece and peer, n's second gather in one."""
    monkeypatch.setattr(flight, "LEAST_ROWS", 2)
    m = M // R
    one, cut = (R - 1) * m * D * 4, (R - 1) * len(pieces(m))
    assert cut >= 2 * (R - 1)
    expected = {
        "linear_exchange": [(one, cut), (one, cut)],
        "gather_mlp_exchange": [(2 * one, 2 * cut), (3 * one, 2 * cut + R - 1)],
    }.get(op.removesuffix("_gated"), [(one, cut), (2 * one, cut + R - 1)])
    assert ranks(R, _sent, op, True) == [expected] * R
    # without sequence parallelism: a small sum is one gather of everything; of dx's, an all-to-all (not counted here)
    # and a gather of sums
    none, everything, sums = (0, 0), (R * one, R - 1), (one, R - 1)
    expected = {"linear_exchange": [everything, none], "gather_mlp_exchange": [everything, sums]}.get(
        op.removesuffix("_gated"), [none, sums]
    )
    assert ranks(R, _sent, op, False) == [expected] * R


# ---- memory ----


@restoring
def _peak(world, op, overlap):
    M, D, F = 2048, 64, 128
    tp = overlapping(world, overlap=overlap, least=64)
    w1, w2 = torch.randn(F // tp.size, D), torch.randn(D, F // tp.size)
    x = (
        torch.randn(M, F // tp.size)
        if op == "linear_exchange"
        else torch.randn(M // tp.size, D).expand(tp.size, -1, -1)
    )
    leaves = [t.requires_grad_() for t in (x, w1, w2)]
    return peaks(lambda: _call(op, *leaves, tp=tp), leaves), 4 * M * D


def _call(op, x, w1, w2, *, tp):
    if op == "gather_linear":
        return gather_linear(x, w1, tp=tp)
    if op == "linear_exchange":
        return linear_exchange(x, w2, tp=tp)
    return gather_mlp_exchange(x, w1, None, w2, activation="relu", tp=tp)


def peaks(forward, leaves):
    """Bytes that forward, then backward, hold at most beyond what was there before."""
    for _ in range(2):  # the first warms up
        y, ahead = peak(forward)
        dy = torch.randn(y.shape) if y.dim() == 2 else torch.randn(y.shape[1:]).expand(y.shape)
        _, back = peak(functools.partial(y.backward, dy))
        for leaf in leaves:
            leaf.grad = None
        del y, dy
    return ahead, back


@pytest.mark.parametrize("op", ["gather_linear", "linear_exchange", "gather_mlp_exchange"])
def test_nothing_is_gathered_twice(ranks, op):
    """The peak is the plain form's: a hidden piece more forward, and backward one tensor, as n lands while dn leaves,
    and a piece of dz."""
    for (off, gathered), (on, _) in zip(ranks(2, _peak, op, "off"), ranks(2, _peak, op, "pairwise")):
        assert on[0] <= off[0] + gathered / 2 and on[1] <= off[1] + gathered * 9 / 8, (off, on, gathered)
        assert min(off) > gathered  # or nothing would have been measured


# ---- slow, hung and dead ranks ----


@restoring
def _late(world, op, data):
    """Rank 1 is late, in forward and, by its GEMMs, within the pieces."""
    late = world.rank == 1
    time.sleep(0.3 * late)
    with planted(ARRIVED, lambda arrived, *args: (time.sleep(0.05 * late), arrived(*args))[1]):
        return _forms(world, True, op, "plain", data)


@pytest.mark.slow
def test_a_slow_rank_changes_nothing(ranks):
    """The MLP, which gathers and exchanges in both directions."""
    op = "gather_mlp_exchange"
    for off, on, again in ranks(3, _late, op, plain._data(op, torch.float64)):
        assert_equal(on, again)
        assert all(error(on[name], off[name]) <= 1e-14 for name in off)


LIMIT = 3  # seconds


@restoring
def _leaves_in_the_middle(world, op, backward, dies):
    """The last rank, its first message of the direction posted, dies or stays away; -> what the others' error says, and
    after how long."""
    overlapping(world)
    group = dist.new_group(list(range(world.size)), timeout=timedelta(seconds=LIMIT))
    tp = TensorParallel(group, sequence_parallel=True, overlap="pairwise")
    w1, w2 = torch.randn(16, 8, requires_grad=True), torch.randn(8, 16, requires_grad=True)
    x = torch.randn(8 * tp.size, 16) if op == "linear_exchange" else torch.randn(8, 8)
    x.requires_grad_()

    def forward():
        if op == "gather_attention_exchange":
            options = Options(batch=2, seq=4 * tp.size, causal=True)
            return gather_attention_exchange(x, w1[:12], None, w2[:, :4], heads=(3, 4), options=options, tp=tp)
        return _call(op, x, w1, w2, tp=tp)

    y = forward() if backward else None
    dist.barrier(group)
    start, send = time.monotonic(), gloo.send

    def last(*args, **kwargs):
        send(*args, **kwargs)
        if dies:
            os._exit(7)
        time.sleep(2 * LIMIT)
        raise KeyboardInterrupt

    try:
        gloo.send = last if world.rank == world.size - 1 else send
        y.sum().backward() if backward else forward()
    except (RuntimeError, KeyboardInterrupt) as e:
        if dies:  # the dead rank makes the call fail; failures are shown with it, results are not
            raise
        return str(e), time.monotonic() - start


DIRECTIONS = [
    ("gather_linear", False),
    ("gather_mlp_exchange", True),
    ("linear_exchange", True),
    ("gather_mlp_exchange", False),
    ("gather_attention_exchange", True),
    ("gather_attention_exchange", False),
]
DIRECTIONS = [case if i == 0 else pytest.param(*case, marks=pytest.mark.slow) for i, case in enumerate(DIRECTIONS)]


@pytest.mark.parametrize("op, backward", DIRECTIONS)
def test_a_dead_rank_is_an_error_that_names_the_op(ranks, op, backward):
    with pytest.raises(RankFailed, match=r"rank 2 died \(exit code 7\)") as info:
        ranks(3, _leaves_in_the_middle, op, backward, True)
    text, direction = str(info.value.__cause__), "backward" if backward else "forward"
    for rank in 0, 1:
        assert re.search(rf"RuntimeError: {op} {direction}.*, rank {rank} of 3", text), text


@pytest.mark.slow
@pytest.mark.parametrize("op, backward", [("gather_attention_exchange", False), ("gather_mlp_exchange", True)])
def test_a_rank_that_stays_away_is_an_error_within_the_time_limit(ranks, op, backward):
    *others, _ = ranks(3, _leaves_in_the_middle, op, backward, False)
    for rank, (text, seconds) in enumerate(others):
        assert re.match(rf"{op} {'backward' if backward else 'forward'}.*, rank {rank} of 3", text), text
        assert seconds < LIMIT + 2


# ---- beside DDP's own messages ----


@restoring
def _trained(world, overlap, steps):
    """Weights after some steps of SGD; each rank of a 2 x 2 mesh is late at random wherever messages are to go."""
    mesh = world.mesh(2, 2)
    flight.LEAST_ROWS = 2
    tp = TensorParallel(mesh["tp"], sequence_parallel=True, overlap=overlap)
    torch.manual_seed(1)
    block = TransformerBlock(16, 4, 32, tp=tp, dtype=torch.float64)
    model = DistributedDataParallel(block, process_group=mesh["dp"].get_group(), bucket_cap_mb=0.002)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    uneven, post = random.Random(world.rank), flight.Flight.post

    def late(self, *args):
        if uneven.random() < 0.2:
            time.sleep(uneven.random() * 0.004)
        post(self, *args)

    flight.Flight.post = late
    for step in range(steps):
        x = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        model(my_rows(x[world.rank // 2], tp), batch=2).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in block.named_parameters()}


@pytest.mark.slow
def test_sixty_steps_beside_ddp(ranks):
    """dp x tp = 2 x 2: DDP's buckets go over one group while tiles go over the other; no deadlock, and the weights of
    the plain form."""
    off, on, again = (ranks(4, _trained, overlap, 60) for overlap in ("off", "pairwise", "pairwise"))
    for a, b, c in zip(off, on, again):
        assert_equal(b, c)
        assert all(error(b[name], a[name]) < 1e-9 for name in a)
    for tp_rank in 0, 1:
        assert_equal(on[tp_rank], on[tp_rank + 2])


# ---- the choice ----

FAST = 1e12, 1e9, 1e-4  # flop/s, bytes/s, seconds a message


def test_auto_is_a_rule_of_sizes(monkeypatch):
    """Little to hide, or little to hide it under, is not worth a message; nor is what nobody measured."""
    monkeypatch.setattr(choice, "measured", lambda device, dtype, ranks: FAST if dtype == torch.float32 else None)
    wins = lambda rows, weight, sp=True, dtype=torch.float32, op="gather_linear": (
        sizes(op, rows, weight, dtype=dtype, device=torch.device("cpu"), tp=fake_tp(2, 0, sp)).wins
    )
    assert [wins(rows, (1024, 1024)) for rows in (2, 16, 4096, 65536)] == [False, False, True, True]
    assert not wins(4096, (1, 1024))  # no GEMM to hide under
    assert not wins(4096, (1024, 1024), dtype=torch.float64)
    assert wins(4096, (1024, 1024), sp=False) and not wins(4096, (1024, 1024), sp=False, op="linear_exchange")


def test_sizes_are_what_is_sent(ranks):
    """The rule's bytes and messages are those that a call sends, forward and backward."""
    for op, weight in (
        ("gather_linear", (N // 2, D)),
        ("linear_exchange", (D, N // 2)),
        ("gather_mlp_exchange", (N // 2, D)),
    ):
        sent = ranks(2, _sent, op, True)[0]
        expected = ranks(2, _expected, op, weight)[0]
        assert tuple(map(sum, zip(*sent))) == expected


@restoring
def _expected(world, op, weight):
    tp = overlapping(world)
    return sizes(op, M, weight, dtype=torch.float32, device=torch.device("cpu"), tp=tp)[:2]


@restoring
def _paths(world, rows):
    """Whether a call in auto overlaps."""
    choice.measured = lambda device, dtype, ranks: FAST
    tp, posted, post = overlapping(world, overlap="auto", least=64), [], flight.Flight.post
    flight.Flight.post = lambda self, *args: (posted.append(args), post(self, *args))
    gather_linear(torch.zeros(rows // tp.size, 256), torch.zeros(1024, 256), tp=tp)
    return bool(posted)


def test_auto_follows_the_rule(ranks):
    assert [ranks(2, _paths, rows) for rows in (16, 4096)] == [[False] * 2, [True] * 2]


@restoring
def _on_machines(world, machines):
    choice.measured = lambda device, dtype, ranks: FAST
    parallel.host = lambda: machines[world.rank]
    tp = TensorParallel(world.group, sequence_parallel=True)
    on_gpu = sizes("gather_linear", 4096, (1024, 256), dtype=torch.float32, device=torch.device("cuda"), tp=tp)
    form = choice.choose("gather_linear", torch.zeros(4096, 256), torch.zeros(1024, 256), tp=tp)
    return tp.one_machine, form is overlapped, on_gpu.wins


def test_on_cpus_of_one_machine_nothing_hides(ranks):
    """Ranks that are on two machines in all overlap, and all decide alike."""
    assert ranks(3, _on_machines, "aaa") == [(True, False, True)] * 3
    assert ranks(3, _on_machines, "aab") == [(False, True, True)] * 3


def test_hosts_are_told_apart(ranks):
    assert len({str(h) for h in ranks(2, _host)}) == 1 and parallel.host()[0] == socket.gethostname()


def _host(world):
    return parallel.host()


@restoring
def _dynamic(world):
    """One compiled function, many numbers of rows -> whether each call overlapped; values as in eager."""
    choice._measured = lambda device, dtype: [(2, FAST)]
    tp, posted, post = overlapping(world, overlap="auto", least=64), [], flight.Flight.post
    flight.Flight.post = lambda self, *args: (posted.append(args), post(self, *args))
    weight, overlapped = torch.randn(1024, 256), []
    call = torch.compile(lambda x: gather_linear(x, weight, tp=tp), fullgraph=True, backend="aot_eager", dynamic=True)
    for m in 512, 8, 520, 1024:
        x = torch.randn(m, 256)
        posted.clear()
        y = call(x)
        overlapped.append(bool(posted))
        assert torch.equal(y, gather_linear(x, weight, tp=tp))
    return overlapped


@pytest.mark.slow
def test_auto_compiled_with_dynamic_rows(ranks):
    assert ranks(2, _dynamic) == [[True, False, True, True]] * 2


def test_no_overlap_without_peers():
    tp = TensorParallel(sequence_parallel=True, overlap="pairwise")
    assert torch.equal(gather_linear(torch.ones(3, 4), torch.ones(5, 4), tp=tp), torch.full((3, 5), 4.0))


def test_what_cannot_be_had_is_an_error(monkeypatch):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        TensorParallel(dist.group.WORLD, overlap="auto")
        with pytest.raises(ValueError, match="overlap='pairwise' needs a gloo or NCCL group, got .*fake"):
            TensorParallel(dist.group.WORLD, overlap="pairwise")
    finally:
        dist.destroy_process_group()
