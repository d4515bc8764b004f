"""Differences between a group's ranks, and the links between them."""

import itertools
import statistics
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..._version import __version__
from ...ranks.messages import gather, gather_results
from ...ranks.shared_memory import host
from ..ledger.text import duration, quantity
from . import folder as folders
from . import limits
from .connections import connections, device_of
from .links import ClockOffset, LinkSpeed, clocks, links
from .report import FAULT, NOTE, Finding
from .versions import TESTED, installed

APART = 1.0  # seconds that clocks may be apart


class Rank(NamedTuple):
    """A rank's host, versions and devices."""

    host: tuple[str, int]
    versions: dict[str, str | None]
    gpus: int
    threads: int
    cores: float


def findings(folder: Path, group: dist.ProcessGroup | None) -> list[Finding]:
    """Returns the group's lines, the same on every rank.  Each rank calls it."""
    if group is None or group.size() == 1:
        return [Finding("ranks", "1")]
    with connections(group) as connected:
        device = device_of(group)
        ranks = gather_results(myself, connected)
        measured = list(itertools.chain.from_iterable(gather(links(connected, device), connected)))
        offsets, *_ = gather(clocks(connected, device), connected)
        same = folders.shared(folder, connected)
    return [_hosts(ranks), _versions(ranks), _gpus(ranks), _threads(ranks), *_links(measured), _clocks(offsets), same]


def myself() -> Rank:
    versions = {name: installed(name) for name in TESTED} | {"tpfuse": __version__}
    return Rank(host(), versions, torch.cuda.device_count(), threads=torch.get_num_threads(), cores=limits.cores())


def _hosts(ranks: list[Rank]) -> Finding:
    hosts = {rank.host: [str(i) for i, r in enumerate(ranks) if r.host == rank.host] for rank in ranks}
    if len(hosts) == 1:
        return Finding("ranks", f"{len(ranks)} on one host")
    members = "; ".join(f"{name}: {', '.join(numbers)}" for (name, _), numbers in hosts.items())
    return Finding("ranks", f"{len(ranks)} on {len(hosts)} hosts: {members}")


def _differing(values: list[object]) -> str:
    return ", ".join(f"rank {i}: {value}" for i, value in enumerate(values))


def _versions(ranks: list[Rank]) -> Finding:
    columns = {name: [rank.versions[name] for rank in ranks] for name in ranks[0].versions}
    differing = [f"{name} ({_differing([*column])})" for name, column in columns.items() if len(set(column)) > 1]
    if not differing:
        return Finding("versions", "the same on all ranks")
    advice = "Install the same versions on every host: other versions compute other bits."
    return Finding("versions", "; ".join(differing), FAULT, advice)


def _gpus(ranks: list[Rank]) -> Finding:
    counts = [rank.gpus for rank in ranks]
    if len(set(counts)) == 1:
        return Finding("GPUs", f"all ranks see {counts[0]}")
    return Finding("GPUs", _differing([*counts]), NOTE, "Find out why some ranks see other GPUs than the rest.")


def _threads(ranks: list[Rank]) -> Finding:
    """Compares the threads of all ranks of a host with its cores, where ranks compute on CPUs."""
    sums = {rank.host: sum(r.threads for r in ranks if r.host == rank.host) for rank in ranks}
    worst = max(ranks, key=lambda rank: sums[rank.host] / rank.cores)
    threads, cores = sums[worst.host], worst.cores
    value = f"{threads} of all ranks of a host on {cores:g} cores"
    if threads <= cores or worst.gpus:
        return Finding("threads", value)
    return Finding("threads", value, NOTE, "Call torch.set_num_threads with fewer: threads wait for cores.")


def _links(measured: list[LinkSpeed]) -> list[Finding]:
    slow, narrow = max(measured, key=lambda link: link.delay), min(measured, key=lambda link: link.bandwidth)
    delays, widths = [link.delay for link in measured], [link.bandwidth for link in measured]
    delay = f"{duration(min(delays))} at least, {duration(statistics.median(delays))} median, {duration(slow.delay)}"
    rate = lambda width: quantity(width, "B/s")
    width = f"{rate(max(widths))} at most, {rate(statistics.median(widths))} median, {rate(narrow.bandwidth)}"
    ends = lambda link: "between ranks {} and {}".format(*link.pair)
    if len(measured) == 1:
        delay, width = duration(slow.delay), rate(narrow.bandwidth)
    return [
        Finding("one-way delay", f"{delay} {ends(slow)}"),
        Finding("bandwidth", f"{width} {ends(narrow)}"),
    ]


def _clocks(offsets: list[ClockOffset]) -> Finding:
    worst = max(offsets, key=lambda clock: abs(clock.ahead))
    far = duration(abs(worst.ahead))
    if abs(worst.ahead) - worst.within <= APART:
        return Finding("clocks", f"at most {far} apart, to within {duration(worst.within)}")
    value = f"rank {worst.rank}'s is {far} {'ahead of' if worst.ahead > 0 else 'behind'} rank 0's"
    return Finding("clocks", value, NOTE, "Set the hosts' clocks by NTP: times in logs and of files mislead otherwise.")
