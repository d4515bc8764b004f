"""Delay and bandwidth of messages between pairs of ranks, one pair at a time, and offsets of the ranks' clocks."""

import itertools
import time
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

ALL = 8  # ranks up to which every pair is measured, beyond them neighbours of the ring
PINGS, SENDS = 8, 3
BYTES = 1 << 22


class LinkSpeed(NamedTuple):
    pair: tuple[int, int]
    delay: float  # seconds one way, the least of PINGS
    bandwidth: float  # bytes a second, the most of SENDS


class ClockOffset(NamedTuple):
    rank: int
    ahead: float  # seconds that its clock is ahead of rank 0's
    within: float  # what the estimate may be off by, half of the ping


def now() -> float:
    return time.time()


def pairs(size: int) -> list[tuple[int, int]]:
    if size <= ALL:
        return list(itertools.combinations(range(size), 2))
    return [(i, (i + 1) % size) for i in range(size)]


def links(group: dist.ProcessGroup, device: torch.device) -> list[LinkSpeed]:
    """Returns the links that this rank has measured, the first of each of its pairs; every rank calls it."""
    word, data = torch.zeros(1, dtype=torch.float64, device=device), torch.zeros(BYTES // 8, device=device).double()
    measured = []
    for pair in pairs(group.size()):
        dist.barrier(group=group)
        if group.rank() == pair[0]:
            delay = min(_ask(word, word, pair[1], group) for _ in range(PINGS + 1)) / 2
            seconds = min(_ask(data, word, pair[1], group) for _ in range(SENDS))
            measured.append(LinkSpeed(pair, delay, BYTES / max(seconds - delay, 1e-9)))
        elif group.rank() == pair[1]:
            for question in (*[word] * (PINGS + 1), *[data] * SENDS):
                _answer(question, pair[0], group)
    return measured


def clocks(group: dist.ProcessGroup, device: torch.device) -> list[ClockOffset]:
    """Returns on rank 0 every other rank's clock, by the quickest of PINGS; every rank calls it."""
    word, offsets = torch.zeros(1, dtype=torch.float64, device=device), []
    for rank in range(1, group.size()):
        if group.rank() == 0:
            offsets.append(min((_compare(word, rank, group) for _ in range(PINGS)), key=lambda clock: clock.within))
        elif group.rank() == rank:
            for _ in range(PINGS):
                _answer(word, 0, group)
    return offsets


def _compare(word: Tensor, rank: int, group: dist.ProcessGroup) -> ClockOffset:
    start = now()
    seconds = _ask(word, word, rank, group)
    return ClockOffset(rank, word.item() - (start + seconds / 2), seconds / 2)


def _ask(question: Tensor, answer: Tensor, peer: int, group: dist.ProcessGroup) -> float:
    """Sends a question and waits for the answer; returns the seconds between."""
    start = time.perf_counter()
    dist.send(question, group=group, group_dst=peer)
    dist.recv(answer, group=group, group_src=peer)
    answer.item()  # waits for a GPU
    return time.perf_counter() - start


def _answer(question: Tensor, peer: int, group: dist.ProcessGroup) -> None:
    """Receives a question and answers with this rank's clock."""
    dist.recv(question, group=group, group_src=peer)
    question[0].item()
    dist.send(torch.full((1,), now(), dtype=torch.float64, device=question.device), group=group, group_dst=peer)
