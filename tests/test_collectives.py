"""Each collective is a linear map whose backward is its adjoint; sums are in fp32 in rank order, rounded once."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.common import Recorder, fake_tp, make_tp
from tests.no_sync import GPU, no_sync
from tpfuse import TensorParallel, collectives
from tpfuse.collectives import (
    _CopyWithin,
    _reduce_scatter,
    all_gather,
    all_reduce,
    all_to_all,
    collect,
    copy,
    gather,
    reduce,
    scatter_sum,
    split,
)
from tpfuse.tools.ledger.dryrun import fake_world

# name: the collective, and how a tensor before and after it counts in an inner product. "once": the same on every
# rank, counted once; "each": every rank's own, counted over the ranks.
TABLE = {
    "copy": (copy, "once", "each"),
    "reduce": (reduce, "each", "once"),
    "gather": (gather, "each", "each"),
    "scatter_sum": (scatter_sum, "each", "each"),
    "split": (split, "once", "each"),
    "collect": (collect, "each", "once"),
}


def _tensor(shape, counted, rank, salt):
    """Small integers: every sum and product below is exact."""
    generator = torch.Generator().manual_seed(10 * salt + (rank if counted == "each" else 9))
    return torch.randint(-4, 5, shape, generator=generator).double()


def _inner(world, a, b, counted):
    total = (a * b).sum().detach()
    if counted == "each":
        dist.all_reduce(total, group=world.group)
    return total.item()


def _adjoint(world, name, dim, y_counted):
    """<Ax, y> and <x, A'y>, for x [R, 2 R, 3] and a y that no stride makes easy."""
    tp = make_tp(world)
    op, x_counted, counted = TABLE[name]
    x = _tensor((world.size, 2 * world.size, 3 * world.size), x_counted, world.rank, 0).requires_grad_()
    out = op(x, tp) if dim is None else op(x, tp, dim)
    y = _tensor(out.shape[::-1], y_counted or counted, world.rank, 1).permute(2, 1, 0)
    out.backward(y)
    return _inner(world, out, y, y_counted or counted), _inner(world, x, x.grad, x_counted)


CASES = [(name, dim) for name in TABLE for dim in ([None] if name in ("copy", "reduce") else [0, 1, -1])]


@pytest.mark.parametrize("name, dim", CASES)
@pytest.mark.parametrize("R", [2, 4])
def test_backward_is_the_adjoint(ranks, R, name, dim):
    for there, back in ranks(R, _adjoint, name, dim, None):
        assert there == back != 0


@pytest.mark.parametrize("R", [2, 4])
def test_gather_in_the_place_of_collect_counts_every_rank(ranks, R):
    """Where all ranks go on to compute the same, gather's gradient is R times too large, and the test above sees it."""
    for there, back in ranks(R, _adjoint, "gather", 0, "once"):
        assert back == R * there != 0


def _values(world, x):
    """Every collective's value on ``x + rank``, without the group too."""
    tp = make_tp(world)
    mine = x + world.rank
    out = {name: op(mine.clone(), tp) for name, (op, _, _) in TABLE.items()}
    assert all(torch.equal(mine, x + world.rank) for _ in out)  # no input was touched
    return out


@pytest.mark.parametrize("R", [1, 2, 4])
def test_values(ranks, R):
    x = torch.arange(24.0).view(8, 3)
    every = [x + r for r in range(R)]
    total = sum(every)
    for r, out in enumerate(ranks(R, _values, x)):
        part = slice(r * 8 // R, (r + 1) * 8 // R)
        expected = dict(copy=every[r], reduce=total, gather=torch.cat(every), collect=torch.cat(every))
        expected |= dict(scatter_sum=total[part], split=every[r][part])
        assert out.keys() == expected.keys() and all(torch.equal(out[name], expected[name]) for name in out)


# ---- sums ----


def _reduced(world, x, limit):
    """The all-reduce of ``x[rank]`` with the one-message limit put at ``limit``, and the messages it took."""
    before, collectives._ONE_MESSAGE = collectives._ONE_MESSAGE, limit
    try:
        with Recorder() as seen:
            y = all_reduce(x[world.rank], make_tp(world))
    finally:
        collectives._ONE_MESSAGE = before
    return y, [kind for kind, _, _ in seen.messages()]


# 7 and 1 elements are padded for the exchange; 0 elements must not hang or fail; the last is read through strides
SHAPES = {"[7]": (7,), "[]": (), "[0, 3]": (0, 3), "[3, 0]": (3, 0), "[5, 3]'": (5, 3)}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("R", [2, 4])
def test_a_sum_is_exact_to_one_rounding(ranks, R, shape):
    """bf16 values of one magnitude, whose sum fp32 holds exactly: rounded once it is the fp64 sum rounded, on both
    paths, everywhere."""
    x = (torch.randn(R, *SHAPES[shape]) + 8).bfloat16()
    x = x.transpose(1, 2) if shape.endswith("'") else x
    exact = x.double().sum(0).bfloat16()
    one = ranks(R, _reduced, x, 1 << 16)
    several = ranks(R, _reduced, x, -1)
    assert all(torch.equal(y, exact) for y, _ in one + several)
    assert {tuple(kinds) for _, kinds in one} == {("all_gather",)}
    assert {tuple(kinds) for _, kinds in several} == {("all_to_all", "all_gather")}


@pytest.mark.parametrize("limit", [1 << 16, -1], ids=["one message", "exchange"])
def test_a_sum_does_not_depend_on_the_position(ranks, limit):
    """256 on one rank and 1 on the three others: 259 rounds to 260. Rounded after each addition it would be 256 or 260
    by position."""
    x = torch.ones(4, 6).bfloat16()
    x[[0, 1, 2, 3, 0, 3], range(6)] = 256
    assert set(sum(x[1:], x[0]).tolist()) == {256.0, 260.0}
    for y, _ in ranks(4, _reduced, x, limit):
        assert y.tolist() == [260.0] * 6


def _noise(world):
    x = torch.randn(1000, generator=torch.Generator().manual_seed(world.rank)) * 10 ** torch.linspace(-4, 4, 1000)
    flat = x.expand(world.size, -1)
    return flat, _reduced(world, flat, 1 << 16)[0], _reduced(world, flat, -1)[0], scatter_sum(x, make_tp(world))


def test_both_paths_add_in_rank_order(ranks):
    """fp32 values over eight decades at R = 4, where another order of additions gives other bits."""
    out = ranks(4, _noise)
    x = [o[0][0] for o in out]
    forward, other = ((x[0] + x[1]) + x[2]) + x[3], (x[0] + x[1]) + (x[2] + x[3])
    assert not torch.equal(forward, other)
    for rank, (_, one, several, scattered) in enumerate(out):
        assert torch.equal(one, forward) and torch.equal(several, forward)
        assert torch.equal(scattered, forward[rank * 250 : (rank + 1) * 250])


# ---- errors, and what traces ----


@pytest.mark.parametrize("op", [scatter_sum, split])
def test_a_dimension_that_does_not_divide_is_the_same_error_on_every_rank(op):
    errors = set()
    for rank in range(4):
        with pytest.raises(
            ValueError, match=f"{op.__name__}: dim 1=6 is not divisible by tensor-parallel size 4; use 1, 2, 3 or 6"
        ) as e:
            op(torch.zeros(4, 6), fake_tp(4, rank), 1)
        errors.add(str(e.value))
    assert len(errors) == 1


def test_at_size_one_nothing_is_sent():
    x = torch.randn(3, requires_grad=True)
    with Recorder() as seen:
        for op, _, _ in TABLE.values():
            op(x, fake_tp(1)).sum().backward()
    assert seen.messages() == [] and torch.equal(x.grad, torch.full((3,), 6.0))


def _opcheck(world, op, shape):
    args = (world.size,) if op == "all_gather" else ()
    x = torch.randn(shape)
    torch.library.opcheck(getattr(collectives, op).overload, (x, *args, world.group.group_name))


@pytest.mark.parametrize("op", [all_gather, all_to_all], ids=lambda op: op.name)
@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 4)])
def test_opcheck(ranks, op, shape):
    ranks(2, _opcheck, op.name, shape)


def _all_of_them(x, tp):
    for op, _, _ in TABLE.values():
        x = x + op(x, tp).sum() * x
    return x


def _compiled(world):
    tp = make_tp(world)
    results = []
    for fn in _all_of_them, torch.compile(_all_of_them, fullgraph=True, backend="aot_eager"):
        x = _tensor((4, 3), "each", world.rank, 2).requires_grad_()
        y = fn(x / 100, tp)
        y.sum().backward()
        results.append((y.detach(), x.grad))
    return results


def test_compiled(ranks):
    for eager, compiled in ranks(2, _compiled):
        assert all(torch.equal(a, b) for a, b in zip(eager, compiled))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_over_ranks_is_one_kernel(dtype):
    """Of vectors and matrices, by one message and by two."""
    with fake_world(8) as mesh:
        tp, empty = TensorParallel(mesh["tp"]), lambda *shape: torch.empty(shape, dtype=dtype, device=GPU)
        for sum_of in (
            lambda: all_reduce(empty(1000), tp),
            lambda: all_reduce(empty(64, 768), tp),
            lambda: all_reduce(empty(2048, 1000), tp),
            lambda: scatter_sum(empty(64, 768), tp),
            lambda: scatter_sum(empty(6, 64, 5), tp, dim=1),
            lambda: _CopyWithin.backward(SimpleNamespace(args=(4, tp)), empty(6, 5)),
        ):
            with no_sync() as watch, torch.no_grad():  # as autograd runs a backward
                sum_of()
            assert watch.started["_fwd_kernel"] == 1
            assert not {"add", "add_", "sum", "_to_copy"} & watch.started.keys()


def uneven(world, size, bitwise, told):
    """The whole of uneven slices, and this rank's gradient."""
    tp = TensorParallel(world.group, sequence_parallel=True, bitwise=bitwise)
    x = torch.arange(float(size)).expand(3, -1)[:, slice(*tp.chunk(size))].clone().requires_grad_()
    whole = collect(x, tp, dim=-1, size=size if told else None)
    (whole * torch.arange(float(size))).sum().backward()
    with pytest.raises(ValueError, match="collect: dim -1 must be this rank's"):
        collect(x, tp, dim=-1, size=2 * size)
    return whole.detach(), x.grad


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("R, size, bitwise", [(2, 101, None), (4, 97, None), (2, 101, 8)])  # 8 leaves: 52 and 49
def test_slices_of_a_dimension_that_ranks_do_not_divide(ranks, R, size, bitwise, told):
    results = ranks(R, uneven, size, bitwise, told)
    want = torch.arange(float(size)).expand(3, -1)
    assert all(torch.equal(whole, want) for whole, _ in results)
    assert torch.equal(torch.cat([grad for _, grad in results], -1), want)


def other_sizes(world, calls):
    """Collects rows of this rank's size, call by call -> the whole's size, or the error."""
    tp, said = make_tp(world), []
    for sizes in calls:
        try:
            said.append(len(collect(torch.zeros(sizes[world.rank], 5), tp)))
        except ValueError as error:
            said.append(str(error))
    return said


def test_sizes_are_compared_in_each_call(ranks):
    """A rank that has collected 6 rows before does not take the other's for as many."""
    first, second = ranks(2, other_sizes, [(6, 6), (6, 5), (6, 6), (5, 6), (6, 3)])
    assert first == second and first[:3] == [12, 11, 12]
    rule = "collect: dim 0 must be the same on every tensor-parallel rank, or less on the last ones as by"
    assert [s.removeprefix(rule) for s in first[3:]] == [
        f" TensorParallel.chunk, got rank 0: {a}; rank 1: {b}" for a, b in ((5, 6), (6, 3))
    ]


def _integers(world):
    tp, x = make_tp(world), torch.full((4,), (1 << 24) + 1, dtype=torch.int32)
    return all_reduce(x, tp), _reduce_scatter(x, tp, 0)


def test_integers_are_added_exactly(ranks):
    """2^24 + 1 is no fp32."""
    for total, mine in ranks(2, _integers):
        assert total.dtype == mine.dtype == torch.int32
        assert total.tolist() == [(1 << 25) + 2] * 4 and mine.tolist() == [(1 << 25) + 2] * 2


def _unlike_integers(world):
    tp, x = make_tp(world), torch.tensor([world.rank, 4])
    return reduce(x, tp).tolist(), scatter_sum(x, tp).tolist(), gather(x, tp).tolist(), collect(x, tp).tolist()


def test_integers_may_differ_over_ranks(ranks):
    for rank, (total, mine, *wholes) in enumerate(ranks(2, _unlike_integers)):
        assert total == [1, 8] and mine == [total[rank]] and wholes == [[0, 4, 1, 4]] * 2
