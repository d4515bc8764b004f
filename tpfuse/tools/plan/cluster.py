"""A cluster: devices of one kind, in levels of units that hold one another, each with the links that join its parts.

A group of ranks in a mesh ("pp", "dp", "tp"), tp fastest, sends around a ring.  Inside the smallest unit that holds the
whole group the ring's rate is a device's own.  Between units it is the least of what each level gives: a ring of m
members a unit enters and leaves it by m network cards, since as many rings as that run at a time, each begun at another
card, and the groups that lie side by side in a unit share its cards.

    device = "a100-80gb"             # or a table: name, peak.bfloat16, bandwidth, memory, gemm, attention, ...
    devices = 64
    [[levels]]
    ranks = 8                        # devices of a unit
    bandwidth = 230e9                # bytes a second that a device sends inside it
    latency = 3.4e-6                 # seconds
    [[levels]]
    ranks = 64
    bandwidth = 25e9
    latency = 14e-6
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from ...kernels.runtime.errors import check
from ...kernels.runtime.launch import MULTIPROCESSORS
from ...kernels.runtime.rules import COUNT, NOT_NEGATIVE, POSITIVE, Rule, brief, check_number, number, one_of, shown
from ..ledger.machine import Machine
from .collectives import ALL_REDUCE, Link
from .devices import DEVICES, AnyDevice, Device, device, here


class Level(NamedTuple):
    """Units of ``ranks`` devices, and what joins the units below, or the devices, in one.

    ``bandwidth``: bytes a second, each way, of a device; ``latency``: seconds of a message.
    """

    ranks: int
    bandwidth: float
    latency: float


class Cluster(NamedTuple):
    """``levels`` from the inside out; the last holds all ``devices``."""

    device: AnyDevice
    devices: int
    levels: tuple[Level, ...]

    def link(self, ranks: int, stride: int) -> Link:
        """Returns a port in a ring of ``ranks`` devices that are ``stride`` apart; ValueError for more than there
        are."""
        crossed = self._crossed(ranks, stride)
        return Link(crossed[-1][1].latency, min(m * level.bandwidth for m, level in crossed))

    def direct(self, ranks: int, stride: int) -> Link:
        """Returns a port in such a group where each rank sends to every other, over its own card: of n members, m of
        them in a unit, n - m of n - 1 messages leave it."""
        crossed = self._crossed(ranks, stride)
        rates = (level.bandwidth * (ranks - 1) / (ranks - m) for m, level in crossed if m < ranks)
        return Link(crossed[-1][1].latency, min(rates, default=self.levels[0].bandwidth))

    def neighbour(self, ranks: int, stride: int) -> Link:
        """Returns the link from one to the next of a line of ``ranks`` devices that are ``stride`` apart: the slowest
        of the line's, over each device's own card."""
        crossed = self._crossed(ranks, stride)
        return Link(crossed[-1][1].latency, min(level.bandwidth for _, level in crossed))

    def _crossed(self, ranks: int, stride: int) -> list[tuple[int, Level]]:
        """The levels up to the first that has every such group inside one unit, each with the group's members in one of
        the parts that the level joins."""
        check(ranks >= 1 and stride >= 1, f"plan: a group needs ranks and stride of at least 1, got {ranks}, {stride}")
        span = ranks * stride
        check(span <= self.devices, f"plan: {ranks} ranks {stride} apart need {span} devices, got {self.devices}")
        last = next((i for i, x in enumerate(self.levels) if x.ranks % span == 0), len(self.levels) - 1)
        parts = [1, *(level.ranks for level in self.levels)]
        return [(min(ranks, max(1, size // stride)), level) for size, level in zip(parts, self.levels[: last + 1])]


NODE = 8
RING = 230 / 300  # of a link's rate that a ring reaches: A100's, as the published checks take it; else an assumption
INSIDE, BETWEEN = 3.4e-6, 14e-6  # seconds of a ring's step over NVLink and a network, as NCCL's own tuning takes them


class Links(NamedTuple):
    """A device's rates in bytes/s, each way: inside a node of eight, and of its share of the node's network cards."""

    inside: float
    network: float


# NVLink of NVIDIA's data sheets, Infinity Fabric of AMD's (seven links of 64 GB/s each way).  Network, by device: four
# EDR cards a node of eight V100 (DGX-1), eight HDR (DGX A100), eight NDR (DGX H100 and H200; assumed of MI300X).
LINKS: Mapping[str, Links] = MappingProxyType(
    {
        "v100": Links(150e9, 6.25e9),
        "a100-80gb": Links(300e9, 25e9),
        "h100": Links(450e9, 50e9),
        "h200": Links(450e9, 50e9),
        "mi300x": Links(448e9, 50e9),
    }
)


def preset(name: str, devices: int) -> Cluster:
    """Returns ``devices`` of a kind in nodes of eight; ValueError for an unknown kind, and for more devices than a node
    that do not fill nodes."""
    chosen, links = device(name), LINKS.get(name)
    assert links is not None  # every preset has both
    check_number("plan: devices", devices, COUNT)
    check(devices <= NODE or devices % NODE == 0, f"plan: devices must fill nodes of {NODE}, got {devices}")
    levels = [Level(min(devices, NODE), RING * links.inside, INSIDE)]
    if devices > NODE:
        levels.append(Level(devices, links.network, BETWEEN))
    return Cluster(chosen, devices, tuple(levels))


def this_machine(machine: Machine, devices: int, dtype: torch.dtype) -> Cluster:
    """Returns ``devices`` CPU ranks of this machine, whose links are gloo's all-reduce as it was calibrated.

    ValueError where that was not, of as many ranks or fewer.
    """
    check_number("plan: devices", devices, COUNT)
    if devices == 1:
        return Cluster(here(machine, 1), 1, (Level(1, float("inf"), 0.0),))
    speeds, _ = machine.table(dtype, devices)
    line = speeds.message("all_reduce", devices)
    if line is None:
        raise ValueError(f"plan: all_reduce over {devices} ranks was not calibrated; run python -m tpfuse calibrate")
    measured = max(int(name.split(" of ")[1]) for name in speeds.messages if name.startswith("all_reduce of "))
    rounds = ALL_REDUCE["ring"].rounds(min(measured, devices))
    bandwidth = 1 / line.per_byte if line.per_byte else float("inf")  # a fit may have found no bytes in the time
    return Cluster(here(machine, devices), devices, (Level(devices, bandwidth, line.alpha / rounds),))


# ---- from a file ----

_SHARE = number(0, 1, "(]")
_CLUSTER = "device", "devices", "levels"
_LEVEL: dict[str, Rule] = dict(ranks=COUNT, bandwidth=POSITIVE, latency=NOT_NEGATIVE)
_DEVICE: dict[str, Rule] = dict(bandwidth=POSITIVE, memory=POSITIVE)
_SHARES: dict[str, Rule] = dict(gemm=_SHARE, attention=_SHARE, reached=_SHARE)
_MORE: dict[str, Rule] = _SHARES | dict(launch=NOT_NEGATIVE, arch=one_of(MULTIPROCESSORS))


def read(path: Path) -> Cluster:
    """Reads a cluster from TOML.  ValueError of one line that names the field, its rule and what stands there."""
    if sys.version_info < (3, 11):
        raise ValueError(f"plan: {path} is TOML, which Python reads from 3.11 on")
    import tomllib

    try:
        values = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"plan: {path} cannot be read as TOML: {brief(error)}") from None
    return _cluster(f"plan: {path.name}", values)


def _cluster(where: str, values: Mapping[str, Any]) -> Cluster:
    _fields(where, values, _CLUSTER)
    check_number(f"{where}: devices", values["devices"], COUNT)
    levels = values["levels"]
    check(isinstance(levels, list) and bool(levels), f"{where}: levels must be [[levels]] tables, got {shown(levels)}")
    made = tuple(_level(f"{where}: level {i + 1}", given) for i, given in enumerate(levels))
    _check_levels(where, made, values["devices"])
    return Cluster(_device(where, values["device"]), values["devices"], made)


def _level(where: str, values: Any) -> Level:
    _fields(where, values, tuple(_LEVEL))
    for name, rule in _LEVEL.items():
        check_number(f"{where}: {name}", values[name], rule)
    return Level(values["ranks"], float(values["bandwidth"]), float(values["latency"]))


def _check_levels(where: str, levels: Sequence[Level], devices: int) -> None:
    for inner, outer in zip(levels, levels[1:]):
        check(
            outer.ranks > inner.ranks and outer.ranks % inner.ranks == 0,
            f"{where}: ranks of a level must be a multiple of those inside it, {inner.ranks}, and more, got"
            f" {outer.ranks}",
        )
    last = levels[-1].ranks
    check(last == devices, f"{where}: ranks of the last level must be all devices={devices}, got {last}")


def _device(where: str, values: Any) -> Device:
    if isinstance(values, str):
        known = one_of(DEVICES)(values)
        check(known is None, f"{where}: device must be a table or one of {', '.join(DEVICES)}, got {shown(values)}")
        return DEVICES[values]
    where = f"{where}: device"
    _fields(where, values, ("name", "peak", *_DEVICE), tuple(_MORE))
    check(isinstance(values["name"], str), f"{where}: name must be a string, got {shown(values['name'])}")
    peak = values["peak"]
    check(
        isinstance(peak, dict) and bool(peak),
        f"{where}: peak must be a table of flop/s by dtype, such as peak.bfloat16 = 312e12, got {shown(peak)}",
    )
    for name, value in peak.items():
        dtype = getattr(torch, name, None)
        check(isinstance(dtype, torch.dtype), f"{where}: peak must be by dtypes such as bfloat16, got {shown(name)}")
        check_number(f"{where}: peak.{name}", value, POSITIVE)
    for name, rule in (_DEVICE | _MORE).items():
        if name in values:
            check_number(f"{where}: {name}", values[name], rule)
    return Device(**values)


def _fields(where: str, values: Any, needed: Sequence[str], more: Sequence[str] = ()) -> None:
    """Holds a table to its fields."""
    check(isinstance(values, dict), f"{where} must be a table, got {shown(values)}")
    missing = [name for name in needed if name not in values]
    check(not missing, f"{where}: needs {', '.join(missing)}, got {', '.join(values) or 'nothing'}")
    unknown = [brief(name) for name in values if name not in (*needed, *more)]
    check(not unknown, f"{where}: knows {', '.join((*needed, *more))}, got {', '.join(unknown)}")
