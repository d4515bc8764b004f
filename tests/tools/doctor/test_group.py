"""A group's ranks and their links: measured over real gloo processes, and wrong on one of them."""

import contextlib
import functools

import pytest
import torch

from tests.planted import Mistaken, planted, scaled
from tpfuse.tools.doctor import group, run
from tpfuse.tools.doctor.links import pairs
from tpfuse.tools.doctor.report import FAULT, NOTE, OK
from tpfuse.tools.doctor.selftest import block

CPU = torch.device("cpu")


DOCTOR = "tpfuse.tools.doctor"


def examined(world, folders, mistakes):
    """The group's findings by name, with mistakes {address: function} on the last rank."""
    with contextlib.ExitStack() as stack:
        for address, mistake in mistakes.items() if world.rank == world.size - 1 else ():
            stack.enter_context(planted(f"{DOCTOR}.{address}", mistake))
        return {f.name: f for f in group.findings(folders[world.rank], world.group)}


def test_two_ranks_that_are_alike(ranks, tmp_path):
    here, there = ranks(2, examined, [tmp_path] * 2, {})
    assert here == there and {f.status for f in here.values()} <= {OK, NOTE}
    wanted = {"ranks", "versions", "GPUs", "threads", "one-way delay", "bandwidth", "clocks", "folder"}
    assert here.keys() == wanted and here["ranks"].value == "2 on one host"
    assert here["folder"].value == "all ranks see the same one" and here["clocks"].status == OK
    assert list(tmp_path.iterdir()) == []


def ahead(right) -> float:
    return right() + 5


def old(right, name: str) -> str:
    return "1.0"


def elsewhere(right) -> tuple[str, int]:
    return "other", 1


WRONG = {"links.now": ahead, "group.installed": old, "group.host": elsewhere}


def test_what_differs_is_found(ranks, tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    here, there = ranks(2, examined, folders, WRONG)
    assert here == there
    assert here["clocks"].status == NOTE and "rank 1's is 5 s ahead of rank 0's" in here["clocks"].value
    assert here["versions"].status == FAULT and "torch (rank 0: 2." in here["versions"].value
    assert here["folder"].status == FAULT and "rank 1 does not see" in here["folder"].value
    assert "2 on 2 hosts" in here["ranks"].value and "other: 1" in here["ranks"].value
    assert all(f.advice for f in here.values() if f.status != OK)
    assert [path for folder in folders for path in folder.iterdir()] == []


def test_a_folder_that_rank_0_cannot_write_to(ranks, tmp_path):
    here, there = ranks(2, examined, [tmp_path / "nowhere", tmp_path], {})
    assert here == there and here["folder"].status == FAULT and "nowhere" in here["folder"].value


def test_many_ranks_are_measured_in_a_ring():
    assert pairs(3) == [(0, 1), (0, 2), (1, 2)]
    assert len(pairs(8)) == 28 and len(pairs(9)) == 9 and pairs(9)[-1] == (8, 0)


@pytest.mark.slow
def test_four_ranks(ranks, tmp_path):
    lines = ranks(4, examined, [tmp_path] * 4, {"links.now": ahead})[0]
    assert "rank 3's is 5 s ahead" in lines["clocks"].value and "median" in lines["bandwidth"].value


# ---- an error on one rank ----


def raising(right, *args):
    raise KeyError("planted")


def report_of(world, folder):
    with planted(f"{DOCTOR}.selftest.kernels.results", nothing), planted(f"{DOCTOR}.selftest.block.alone", nothing):
        report = run.examine(folder, world.group)
    torch.distributed.barrier()  # the caller's own group is whole
    return report.text, report.json()["sections"]


def nothing(right, device):
    return []


@pytest.mark.parametrize(
    "title, address",
    [
        ("group", "links._answer"),
        ("group", "group.myself"),
        ("self-test over the group", "selftest.block.rows"),
        ("ops on cpu", "ops.findings"),
    ],
    ids=["link", "host", "block", "local"],
)
def test_no_rank_waits_for_one_that_has_raised(ranks, tmp_path, title, address):
    broken = Mistaken(report_of, f"{DOCTOR}.{address}", raising, rank=1)
    (text, sections), (other, _) = ranks(2, broken, tmp_path)
    assert text == other and "planted" in text
    assert {key for key, lines in sections.items() if any(f["status"] == FAULT for f in lines)} == {title}


# ---- blocks ----


def with_a_wrong_op(world):
    """-> for every op that a split names: the findings when it is wrong by a part in a thousand."""
    results = {}
    for split in block.SPLIT:
        tp = split.split(world.group)
        for name in split.ops:
            with planted(name, functools.partial(scaled, 1.001)):
                results[split.name, name] = block.compared(split, tp, CPU)
    return results


@pytest.mark.slow
def test_a_wrong_message_is_found_and_named(ranks):
    torch.manual_seed(0)
    for (split, name), lines in ranks(2, with_a_wrong_op)[0].items():
        assert {f.status for f in lines} == {FAULT} and all(name in f.value for f in lines), (split, name)
