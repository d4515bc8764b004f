"""Tensors of every kind come back to the bit, at another split too, from files that torch itself reads; no pickle."""

import json
import math
from contextlib import nullcontext

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.training.checkpoint.common import made
from tpfuse import save_checkpoint
from tpfuse.training.checkpoint.pieces import Piece, PieceInfo, Stored, check_apart, fill, full_piece, shares
from tpfuse.training.checkpoint.shards import DTYPES, parts, sha256, verify, write_shard


def tensors():
    """One of each dtype, 0-d, empty and strided ones."""
    g = torch.Generator().manual_seed(0)
    bits = lambda n: torch.randint(0, 2, (n,), generator=g, dtype=torch.uint8)
    found = {name: bits(15).to(dtype).view(3, 5) for name, dtype in DTYPES.items()}
    found["random"] = torch.randn(7, 3, generator=g)
    found["nan"] = torch.tensor([math.nan, -0.0, math.inf], dtype=torch.bfloat16)
    return found | dict(number=torch.tensor(3.0), empty=torch.ones(0, 4), strided=found["random"].T)


def test_every_kind_of_tensor_comes_back(tmp_path):
    path, given = tmp_path / "shard.safetensors", tensors()
    shard = write_shard(path, {name: full_piece(name, x) for name, x in given.items()})
    assert shard.size == path.stat().st_size and shard.sha256 == sha256(open(path, "rb"))
    verify(path, shard)
    found = parts(path)
    assert found.keys() == given.keys()
    for name, x in given.items():
        assert found[name] == (x.dtype, (0,) * x.dim(), tuple(x.shape))


def test_torch_reads_what_was_saved(tmp_path):
    """By its own reader of safetensors: the files are of its format, and no other program is needed."""
    model, optimizer = made(steps=2)
    path = save_checkpoint(tmp_path, model, optimizer, step=2)
    stored = {name: shape for name, (_, shape) in json.loads((path / "meta.json").read_text())["tensors"].items()}
    found = {name: torch.zeros(shape) for name, shape in stored.items() if shape}
    dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(path)), no_dist=True)
    for name, p in model.named_parameters():
        assert torch.equal(found[f"model.{name}"], p)
        assert torch.equal(found[f"optimizer.{name}.exp_avg_sq"], optimizer.state[p]["exp_avg_sq"])
    assert {file.name for file in path.iterdir()} == {"meta.json", "shard-00000.safetensors"}  # nothing pickled


SPLITS = [(7,), (4, 3), (3, 3, 1), (1, 1, 1, 1, 1, 1, 1), (0, 7)]


@pytest.mark.parametrize("before", SPLITS)
@pytest.mark.parametrize("after", SPLITS)
def test_any_split_is_read_at_any_other(before, after):
    x = torch.arange(21.0).view(7, 3)
    start, stored = 0, []
    for rows in before:
        stored.append(Stored((start, 0), (rows, 3), lambda where, s=start, n=rows: x[s : s + n][where]))
        start += rows
    start = 0
    for rows in after:
        target = Piece("x", torch.full((rows, 3), -1.0), (start, 0), (7, 3))
        fill("file", target, stored)
        assert torch.equal(target.local, x[start : start + rows])
        start += rows
    with pytest.raises(OSError, match="file: x is not whole: .* of 21 elements are there"):
        fill("file", full_piece("x", torch.empty(7, 3)), [s for s in stored if s.offset != (0, 0) or not s.size[0]])


APART = {
    "of one row and of the others": ([((0, 0), (1, 3)), ((1, 0), (6, 3))], None),
    "a grid": ([((r, c), (1, 1)) for r in range(7) for c in range(3)], None),
    "an empty one inside": ([((0, 0), (7, 3)), ((3, 0), (0, 3)), ((7, 0), (0, 3))], None),
    "twice": ([((0, 0), (7, 3)), ((0, 0), (7, 3))], r"x has pieces that overlap, at \(0, 0\) and at \(0, 0\)"),
    "a row twice, a row not": ([((0, 0), (4, 3)), ((3, 0), (3, 3))], r"overlap, at \(0, 0\) and at \(3, 0\)"),
    "a column twice": ([((0, 0), (7, 2)), ((0, 2), (2, 1)), ((1, 1), (2, 1))], "overlap"),
    "beyond": ([((1, 0), (7, 3))], r"x of shape \(7, 3\) has a piece at \(1, 0\) of shape \(7, 3\)"),
}


@pytest.mark.parametrize("places, said", APART.values(), ids=APART)
def test_pieces_are_apart(places, said):
    for order in (places, places[::-1]):
        with nullcontext() if said is None else pytest.raises(ValueError, match=said):
            check_apart("x", (7, 3), order)
    check_apart("x", (), [((), ())])
    with pytest.raises(ValueError, match="overlap"):
        check_apart("x", (), [((), ()), ((), ())])


def held(name, offset, size, shape, dtype=torch.float32):
    return PieceInfo(name, offset, size, shape=shape, dtype=dtype)


def test_each_piece_is_written_once_and_the_bytes_are_shared():
    both = [held(f"r{i}", (0,), (10,), (10,)) for i in range(4)]
    ranks = [[*both, held("s", (0,), (4,), (7,))], [*both, held("s", (4,), (3,), (7,))]]
    first, second = ({name for name, _ in places} for places in shares(ranks))
    assert "s" in first and "s" in second
    assert first | second == {"s", "r0", "r1", "r2", "r3"} and first & second == {"s"}
    assert len(first) == len(second) == 3


WRONG = [
    ([[held("s", (0,), (4,), (8,))]], "s has 8 elements, the ranks hold 4 of them"),
    (
        [[held("s", (0,), (4,), (8,))], [held("s", (2,), (4,), (8,))]],
        r"s has pieces that overlap, at \(0,\) and at \(2,\)",
    ),
    ([[held("s", (0,), (4,), (4,))], [held("s", (0,), (4,), (5,))]], "s must be the same tensor on every rank"),
    (
        [[held("s", (0,), (4,), (4,))], [held("s", (0,), (4,), (4,), torch.float64)]],
        r"s must be the same tensor on every rank, got \(4,\) of torch.float32 and \(4,\) of torch.float64 on rank 1",
    ),
]


@pytest.mark.parametrize("ranks, said", WRONG)
def test_ranks_that_disagree_on_a_tensor_are_told(ranks, said):
    with pytest.raises(ValueError, match=said):
        shares(ranks)
