"""TensorParallel is a value: it copies and pickles, and divides with errors that help."""

import copy
import itertools
import pickle

import pytest
import torch
import torch.distributed as dist

from tests.common import fake_tp
from tpfuse import TensorParallel, data_parallel
from tpfuse.kernels.runtime import processor
from tpfuse.kernels.runtime.philox import RowPieces
from tpfuse.models import GPT, GPTConfig


def _raised(fn, *args):
    """The message of the ValueError that ``fn`` raises here, or None."""
    try:
        fn(*args)
    except ValueError as error:
        return str(error)


def test_nothing_is_a_group_of_one():
    tp = TensorParallel(sequence_parallel=True)
    assert (tp.rank, tp.size, tp.group, tp.row_shards, tp.row_rank) == (0, 1, None, 1, 0)
    tp.agree("GPT", {"seed": 1})


def _fields(world, dp, tp):
    mesh = world.mesh(dp, tp)
    made = [TensorParallel(group, sequence_parallel=True) for group in (mesh["tp"], mesh["tp"].get_group())]
    assert made[0] == made[1] != TensorParallel(mesh["tp"])
    for other in copy.deepcopy(made[0]), pickle.loads(pickle.dumps(made[0])):
        assert other == made[0] and hash(other) == hash(made[0]) and other.group is made[0].group
    return made[0].rank, made[0].size, made[0].row_rank, made[0].row_shards, _raised(TensorParallel, mesh)


def test_from_a_mesh_or_a_group(ranks):
    """Of the mesh (2, 2) every rank sees its own pair; the whole mesh is no tensor-parallel group."""
    for world_rank, (rank, size, row_rank, row_shards, error) in enumerate(ranks(4, _fields, 2, 2)):
        assert (rank, size, row_rank, row_shards) == (world_rank % 2, 2, world_rank % 2, 2)
        assert "one dimension" in error and "mesh['tp']" in error


def test_it_is_frozen():
    with pytest.raises(AttributeError):
        TensorParallel().size = 2


@pytest.mark.parametrize("group", ["tp", 4, object()])
def test_a_wrong_group_is_named(group):
    with pytest.raises(
        ValueError, match="TensorParallel: group must be a DeviceMesh of one dimension or a ProcessGroup"
    ):
        TensorParallel(group)


def test_a_bad_overlap_is_named():
    with pytest.raises(ValueError, match="overlap must be one of auto, pairwise, off, got 'on'"):
        TensorParallel(overlap="on")


@pytest.mark.parametrize(
    "n, size, error",
    [
        (12, 4, None),
        (0, 4, None),
        (12, 8, "heads=12 is not divisible by tensor-parallel size 8; use 1, 2, 3, 4, 6 or 12"),
        (7, 2, "heads=7 is not divisible by tensor-parallel size 2; use 1 or 7"),
        (1, 2, "heads=1 is not divisible by tensor-parallel size 2; use 1"),
        (10**12 + 39, 2, "use 1"),  # a prime: the message does not search for its divisors
    ],
)
def test_divide(n, size, error):
    if error is None:
        assert fake_tp(size).divide(n, "heads") == n // size
    else:
        assert error in _raised(fake_tp(size).divide, n, "heads")


@pytest.mark.parametrize("n, size", [(997, 4), (50257, 8), (4, 4), (8, 3), (5, 1)])
def test_chunk_is_torch_chunk(n, size):
    chunks = torch.arange(n).chunk(size)
    assert [fake_tp(size, rank).chunk(n) for rank in range(size)] == [(int(c[0]), int(c[-1]) + 1) for c in chunks]


def test_chunk_leaves_no_rank_with_nothing():
    """6 over 4 is 2 + 2 + 2 + 0: an error on every rank, not only on the last."""
    for rank in range(4):
        assert "vocab=6 leaves a rank of tensor-parallel size 4 with nothing" in _raised(
            fake_tp(4, rank).chunk, 6, "vocab"
        )


def _with_bitwise(world, bitwise):
    return _raised(
        lambda: TensorParallel(world.group, bitwise=bitwise if type(bitwise) is int else bitwise[world.rank])
    )


@pytest.mark.parametrize(
    "bitwise, size, message",
    [
        (6, 1, "bitwise must be a power of two from 1 to 32, got 6"),
        (True, 1, "bitwise must be a power of two from 1 to 32, got True"),
        (2, 3, "bitwise=2 leaves are not divisible by tensor-parallel size 3; use size 1 or 2"),
        ((4, 8), 2, "bitwise must be the same on every tensor-parallel rank"),
    ],
    ids=str,
)
def test_leaves_that_do_not_fit(bitwise, size, message, ranks):
    if size == 1:
        with pytest.raises(ValueError, match=message):
            TensorParallel(bitwise=bitwise)
    else:
        assert all(message in error for error in ranks(size, _with_bitwise, bitwise))


def _each_rank_another(world, options):
    return _raised(lambda: TensorParallel(world.group, **options[world.rank]))


@pytest.mark.parametrize("options", [
    (dict(bitwise=2), dict(bitwise=3)),
    (dict(overlap="off"), dict(overlap="on")),
    (dict(cp_kind="heads"), dict(cp_kind="both")),
    (dict(bitwise=2), dict(bitwise=2, batch_invariant=13)),
], ids=str)  # fmt: skip
def test_an_option_that_one_rank_cannot_have_is_an_error_on_every_rank(options, ranks):
    errors = ranks(2, _each_rank_another, options)
    assert errors[0] == errors[1] and "must be the same on every tensor-parallel rank, got rank 0" in errors[0]


def _unlike(world, what):
    """What a tensor-parallel group, a model and replicas say of one rank with other threads, or another limit."""
    mesh, nothing = world.mesh(world.size, 1), torch.nn.Linear(1, 1)
    config = GPTConfig(vocab_size=8, max_positions=8, hidden_size=8, num_layers=1, num_heads=1)
    one = TensorParallel(mesh["tp"], bitwise=1)
    with pytest.MonkeyPatch.context() as patch:
        threads = torch.get_num_threads()
        if world.rank == 1 and what == "threads":
            patch.setattr(torch, "get_num_threads", lambda: threads + 1)
        elif world.rank == 1:
            patch.setitem(processor.LIMITS, what, "another")
        TensorParallel(world.group)  # whose sums are those of its ranks anyway
        return threads, [
            _raised(lambda: TensorParallel(world.group, bitwise=2)),
            _raised(lambda: GPT(config, tp=one, dp=mesh["dp"])),
            _raised(lambda: data_parallel(nothing, mesh["dp"], bitwise_micro_batches=2)),
        ]


@pytest.mark.parametrize("what", ["threads", "MKL_ENABLE_INSTRUCTIONS"])
def test_ranks_whose_sums_have_other_orders(what, ranks):
    for threads, errors in ranks(2, _unlike, what):
        values = f"rank 0: {processor.LIMITS.get(what)!r}; rank 1: 'another'"
        values = f"rank 0: {threads}; rank 1: {threads + 1}" if what == "threads" else values
        axes = zip(("TensorParallel", "GPT", "data_parallel"), ("tensor", "data", "data"), strict=True)
        for error, (name, axis) in zip(errors, axes, strict=True):
            assert f"{name}: {what} must be the same on every {axis}-parallel rank, got {values}" in error


def test_leaves_do_not_go_with_pieces():
    with pytest.raises(ValueError, match="overlap='pairwise' adds in another order than bitwise"):
        TensorParallel(bitwise=8, overlap="pairwise")


@pytest.mark.parametrize("n", [227, 96, 50257, 30522])
def test_slices_are_of_whole_leaves(n):
    """Every border of a split is one of the splits with more ranks."""
    tp = TensorParallel(bitwise=8)
    leaf, borders = tp.leaf(n), []
    for size in 1, 2, 4, 8:
        slices = []
        for rank in range(size):
            object.__setattr__(tp, "size", size)
            object.__setattr__(tp, "rank", rank)
            slices.append(tp.chunk(n))
        assert slices[0][0] == 0 and slices[-1][1] == n
        assert all(a[1] == b[0] and a[1] % leaf == 0 for a, b in itertools.pairwise(slices))
        borders.append({stop for _, stop in slices})
    assert all(a < b for a, b in itertools.pairwise(borders))


def test_what_leaves_do_not_divide():
    tp = TensorParallel(bitwise=8)
    with pytest.raises(ValueError, match="heads=12 is not divisible by bitwise=8 leaves; use bitwise 1, 2 or 4"):
        tp.divide_leaves(12, "heads")
    with pytest.raises(ValueError, match="vocab_size=9 leaves one of bitwise=8 leaves empty; use bitwise 1 or 2"):
        tp.chunk(9, "vocab_size")


@pytest.mark.parametrize("options, message", [
    (dict(bitwise=8, batch_invariant=8), "batch_invariant must be 12, 24, 48 or 96 rows, got 8"),
    (dict(batch_invariant=12), "batch_invariant needs bitwise"),
], ids=str)  # fmt: skip
def test_tiles_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        TensorParallel(**options)


# ---- context-parallel ranks ----


def _in_pieces(world):
    mesh = world.pieces(1, 2, 2)
    tp = TensorParallel(mesh["tp"], sequence_parallel=True, cp=mesh["cp"])
    again = TensorParallel(mesh["tp"].get_group(), sequence_parallel=True, cp=mesh["cp"].get_group())
    assert tp == again != TensorParallel(mesh["tp"], sequence_parallel=True)
    for other in copy.deepcopy(tp), pickle.loads(pickle.dumps(tp)):
        assert other == tp and hash(other) == hash(tp) and other.call_group is tp.call_group
    assert TensorParallel(mesh["tp"], cp=world.pieces(4, 1, 1)["cp"]) == TensorParallel(mesh["tp"])  # one has no piece
    errors = [
        _raised(lambda: TensorParallel(mesh["tp"], cp=mesh)),
        _raised(lambda: TensorParallel(mesh["tp"], cp="cp")),
        _raised(lambda: TensorParallel(mesh["tp"], cp=mesh["cp"], bitwise=4)),
        _raised(lambda: TensorParallel(mesh["tp"], cp=mesh["tp"])),
        _raised(lambda: TensorParallel(mesh["tp"], cp=mesh["cp"] if world.rank % 2 else None)),
        _raised(lambda: TensorParallel(mesh["tp"], cp=mesh["cp"], overlap="auto" if world.rank < 2 else "off")),
        _raised(lambda: tp.agree("f", {"x": world.rank // 2})),
    ]
    keys = tp.of_kind("keys")
    positions = [ranks.positions(seq).tolist() for ranks in (tp, keys) for seq in (7, 29)]
    places = [keys.first_row(29, 10, start=start, rows=20) for start in (0, 70, 80)]
    numbers = (
        (tp.rank, tp.cp_rank, tp.cp_size, tp.call_rank, tp.call_size, tp.piece(7), keys.piece(9)),
        positions,
        places,
    )
    return numbers, dist.get_process_group_ranks(tp.call_group), errors


def test_context_parallel_ranks(ranks):
    for rank, (numbers, calls, errors) in enumerate(ranks(4, _in_pieces)):
        numbers, positions, places = numbers
        assert numbers == (rank % 2, rank // 2, 2, rank, 4, 4, 8) and calls == [0, 1, 2, 3]
        r = lambda *bounds: [i for start, stop in zip(bounds[::2], bounds[1::2]) for i in range(start, stop)]
        of_heads, of_keys = ((0, 4), (0, 15)), ((0, 4), (0, 8, 24, 29))  # 16 chunks: of 1 position, of 2
        of_others = ((4, 7), (15, 29)), ((4, 7), (8, 24))
        expected = (*of_heads, *of_keys) if rank < 2 else itertools.chain(*of_others)
        assert positions == [r(*bounds) for bounds in expected]
        assert places == ([0, RowPieces(70, 10, 240), 240] if rank < 2 else [80, RowPieces(150, 10, 160), 160])
        dimension, kind, bits, fits, left_out, differ, values = errors
        assert "cp must be a DeviceMesh of one dimension" in dimension and "mesh['cp']" in dimension
        assert kind.startswith("TensorParallel: cp must be a DeviceMesh of one dimension") and "got 'cp'" in kind
        assert bits == "TensorParallel: cp= is not built for bitwise=4; leave one of them off"
        assert "cp must be mesh['cp'] of a mesh with 'cp' and 'tp'" in fits and "tensor-parallel ranks [[" in fits
        assert "cp must be the same on every tensor-parallel rank, got rank 0: None; rank 1: 2" in left_out
        assert "overlap must be the same on every context-parallel rank" in differ
        assert "f: x must be the same on every tensor- and context-parallel rank, got rank 0: 0" in values
