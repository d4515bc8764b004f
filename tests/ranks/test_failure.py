"""A rank that raises ends the others at once, and they say which rank it was and why."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.examples.launch import run
from tpfuse import TensorParallel
from tpfuse.collectives import reduce
from tpfuse.ranks import failure

SCRIPT = Path(__file__).with_name("failing.py")


@pytest.mark.slow
@pytest.mark.parametrize("where", [pytest.param("backward", marks=pytest.mark.rare), "between calls", "forward"])
def test_every_rank_names_the_one_that_failed(where):
    """The group's own limit is torch's, half an hour; run() has one of five minutes."""
    done = run(SCRIPT, where, procs=3, forked=False)
    assert done.returncode == 1
    for rank in 0, 2:
        said = [line for line in done.stderr.splitlines() if re.search(rf"\[rank{rank}\]: RuntimeError: .* of 3", line)]
        assert said and "rank 1 has failed: KeyError: 'document 7 has no text'" in said[-1], done.stderr


def test_without_a_note_the_error_has_its_own_words():
    assert failure.noted() == "" and failure.explained(RuntimeError("closed")) == "closed"


def spawned(rank, folder):
    """Rank 1 raises; rank 0 writes down what it is told."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    tp = TensorParallel(dist.group.WORLD)
    reduce(torch.ones(3), tp)
    if rank == 1:
        raise KeyError("document 7 has no text")
    try:
        reduce(torch.ones(3), tp)
    except RuntimeError as error:
        Path(folder, "error").write_text(str(error))
        raise


@pytest.mark.slow
def test_a_spawned_process_leaves_a_note(tmp_path):
    """torch.multiprocessing.spawn catches what its function raises."""
    context = torch.multiprocessing.spawn(spawned, (str(tmp_path),), nprocs=2, join=False)
    for process in context.processes:
        process.join(120)
    assert [process.exitcode for process in context.processes] == [1, 1]
    said = (tmp_path / "error").read_text()
    assert said.endswith("rank 0 of 2: rank 1 has failed: KeyError: 'document 7 has no text'")
