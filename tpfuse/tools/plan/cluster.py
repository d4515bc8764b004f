"""A cluster: devices of one kind in nested units (a node, the whole), each level with links of its own.

A group of ranks in a mesh ("pp", "dp", "tp"), tp fastest, sends around a ring.  Inside the smallest unit that holds the
whole group the ring's rate is one device's.  Between units it is the smallest rate of the levels crossed: with m
members in a unit, m rings run at a time, each entering and leaving by another network card, so a group has m cards;
groups that lie side by side in a unit share its cards.

A cluster can be read from a TOML file (docs/plan.md).
"""

import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from ...kernels.runtime import rules
from ...kernels.runtime.errors import check
from ...kernels.runtime.launch import MULTIPROCESSORS
from ...kernels.runtime.rules import Rule, brief, check_number, check_numbers, quoted
from ...models.files.directory import read_limited
from ...pipeline.clock import Array
from ..ledger.machine import Machine
from .collectives import ALL_REDUCE, Link
from .devices import DEVICES, AnyDevice, Device, device, local_cpu


class Level(NamedTuple):
    """A level of units of ``ranks`` devices, and the links inside such a unit between the units below, or devices.

    ``bandwidth``: bytes a second, each way, of a device.  ``latency``: seconds of a message.
    """

    ranks: int
    bandwidth: float
    latency: float


class Cluster(NamedTuple):
    """A cluster of ``devices``; ``levels`` from the innermost to the one that holds all devices."""

    device: AnyDevice
    devices: int
    levels: tuple[Level, ...]

    def link(self, ranks: int, stride: int) -> Link:
        """Returns a device's link in a ring of ``ranks`` devices that are ``stride`` apart; ValueError for more than
        there are."""
        crossed = self._crossed(ranks, stride)
        return Link(crossed[-1][1].latency, min(m * level.bandwidth for m, level in crossed))

    def direct(self, ranks: int, stride: int) -> Link:
        """Returns a device's link in such a group where each rank sends to every other, over its own card: with m of n
        members in a unit, n - m of a rank's n - 1 messages leave it."""
        crossed = self._crossed(ranks, stride)
        rates = (level.bandwidth * (ranks - 1) / (ranks - m) for m, level in crossed if m < ranks)
        return Link(crossed[-1][1].latency, min(rates, default=self.levels[0].bandwidth))

    def joining_levels(self, groups: int, size: int) -> Array:
        """Returns the index of the level that joins each two of so many ``groups`` of ``size`` devices, which stand
        side by side: the innermost whose units hold every device of one with its partner in the other."""
        span = groups * size
        check(span <= self.devices, f"plan: {groups} groups of {size} need {span} devices, got {self.devices}")
        return _joining(self.levels, groups, size)

    def _crossed(self, ranks: int, stride: int) -> list[tuple[int, Level]]:
        """Returns the levels up to the first whose units hold every such group whole, each with the number of members
        that lie in one part of its units."""
        check(ranks >= 1 and stride >= 1, f"plan: a group needs ranks and stride of at least 1, got {ranks}, {stride}")
        span = ranks * stride
        check(span <= self.devices, f"plan: {ranks} ranks {stride} apart need {span} devices, got {self.devices}")
        outermost = next((i for i, x in enumerate(self.levels) if x.ranks % span == 0), len(self.levels) - 1)
        parts = [1, *(level.ranks for level in self.levels)]
        return [(min(ranks, max(1, size // stride)), level) for size, level in zip(parts, self.levels[: outermost + 1])]


@lru_cache(maxsize=256)
def _joining(levels: tuple[Level, ...], groups: int, size: int) -> Array:
    devices, joining = np.arange(groups * size).reshape(groups, size), np.zeros((groups, groups), dtype=np.int64)
    for level in levels[:-1]:
        unit = devices // level.ranks
        joining += (unit[:, None] != unit).any(-1)
    return joining


NODE = 8
RING = 230 / 300  # share of a link's rate that a ring reaches: A100's, as the published checks take it; else assumed
INSIDE, BETWEEN = 3.4e-6, 14e-6  # seconds of a ring's step over NVLink and a network, as NCCL's own tuning takes them


class NodeRates(NamedTuple):
    """Rates of a device in bytes/s, each way: inside a node of eight, and its share of the node's network cards."""

    inside: float
    network: float


# NVLink of NVIDIA's data sheets, Infinity Fabric of AMD's (seven links of 64 GB/s each way).  Network, by device: four
# EDR cards a node of eight V100 (DGX-1), eight HDR (DGX A100), eight NDR (DGX H100, H200, B200; assumed of MI300X).
LINKS: Mapping[str, NodeRates] = MappingProxyType(
    {
        "v100": NodeRates(150e9, 6.25e9),
        "a100-80gb": NodeRates(300e9, 25e9),
        "h100": NodeRates(450e9, 50e9),
        "h200": NodeRates(450e9, 50e9),
        "b200": NodeRates(900e9, 50e9),
        "mi300x": NodeRates(448e9, 50e9),
    }
)


def preset(name: str, devices: int) -> Cluster:
    """Returns a cluster of ``devices`` of a kind in nodes of eight; ValueError for an unknown kind, and for more than
    eight devices that do not fill nodes."""
    chosen, rates = device(name), LINKS[name]
    check_number("plan: devices", devices, rules.COUNT)
    check(devices <= NODE or devices % NODE == 0, f"plan: devices must fill nodes of {NODE}, got {devices}")
    levels = [Level(min(devices, NODE), RING * rates.inside, INSIDE)]
    if devices > NODE:
        levels.append(Level(devices, rates.network, BETWEEN))
    return Cluster(chosen, devices, tuple(levels))


def this_machine(machine: Machine, devices: int, dtype: torch.dtype) -> Cluster:
    """Returns a cluster of ``devices`` CPU ranks of this machine, with links from the calibrated line of gloo's
    all-reduce.

    ValueError where it was not calibrated, for as many ranks or fewer.
    """
    check_number("plan: devices", devices, rules.COUNT)
    if devices == 1:
        return Cluster(local_cpu(machine, 1), 1, (Level(1, float("inf"), 0.0),))
    speeds, _ = machine.table(dtype, devices)
    line = speeds.message("all_reduce", devices)
    if line is None:
        raise ValueError(f"plan: all_reduce over {devices} ranks was not calibrated; run python -m tpfuse calibrate")
    measured = max(int(name.split(" of ")[1]) for name in speeds.messages if name.startswith("all_reduce of "))
    rounds = ALL_REDUCE["ring"].rounds(min(measured, devices))
    bandwidth = 1 / line.per_byte if line.per_byte else float("inf")  # a fit may have no term in bytes
    return Cluster(local_cpu(machine, devices), devices, (Level(devices, bandwidth, line.alpha / rounds),))


# ---- from a file ----

_MOST_BYTES, _MOST_PARTS = 1 << 16, 1000  # of a file: sixty times what a large one has
_SHARE = rules.number(0, 1, "(]")
_LEVEL: Mapping[str, Rule] = dict(ranks=rules.COUNT, bandwidth=rules.POSITIVE, latency=rules.NOT_NEGATIVE)
_REQUIRED: Mapping[str, Rule] = dict(bandwidth=rules.POSITIVE, memory=rules.POSITIVE)
_OPTIONAL: Mapping[str, Rule] = dict(
    gemm=_SHARE,
    attention=_SHARE,
    reached=_SHARE,
    launch=rules.NOT_NEGATIVE,
    arch=rules.one_of(MULTIPROCESSORS),
    multiprocessors=rules.COUNT,
)


def read(path: Path) -> Cluster:
    """Reads a cluster from TOML.  ValueError of one line that names the field, its rule and the value."""
    if sys.version_info < (3, 11):
        raise ValueError(f"plan: {path} is TOML, which Python reads from 3.11 on")
    import tomllib

    try:
        text = read_limited(path, _MOST_BYTES, "TOML").decode()
        parts = sum(map(text.count, ".[{"))  # tomllib takes seconds for a key of 10,000 parts
        check(parts <= _MOST_PARTS, f"it must hold at most {_MOST_PARTS} dots, lists and tables, got {parts}")
        values = tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"plan: {path} cannot be read as TOML: {brief(error)}") from None
    table = f"plan: {path.name}"
    _check_fields(table, values, ("device", "devices", "levels"))
    check_number(f"{table}: devices", values["devices"], rules.COUNT)
    levels = values["levels"]
    check(isinstance(levels, list) and bool(levels), f"{table}: levels must be [[levels]] tables, got {quoted(levels)}")
    levels = tuple(_level(f"{table}: level {i + 1}", level) for i, level in enumerate(levels))
    _check_levels(table, levels, values["devices"])
    return Cluster(_device(table, values["device"]), values["devices"], levels)


def _level(table: str, values: Any) -> Level:
    _check_fields(table, values, tuple(_LEVEL))
    check_numbers(table, values, _LEVEL)
    return Level(values["ranks"], float(values["bandwidth"]), float(values["latency"]))


def _check_levels(table: str, levels: Sequence[Level], devices: int) -> None:
    for inner, outer in zip(levels, levels[1:]):
        check(
            outer.ranks > inner.ranks and outer.ranks % inner.ranks == 0,
            f"{table}: ranks of a level must be a multiple of those inside it, {inner.ranks}, and more, got"
            f" {outer.ranks}",
        )
    ranks = levels[-1].ranks
    check(ranks == devices, f"{table}: ranks of the last level must be all devices={devices}, got {ranks}")


def _device(table: str, values: Any) -> Device:
    if isinstance(values, str):
        preset_name = rules.one_of(DEVICES)(values) is None
        check(preset_name, f"{table}: device must be a table or one of {', '.join(DEVICES)}, got {quoted(values)}")
        return DEVICES[values]
    table = f"{table}: device"
    _check_fields(table, values, ("name", "peak", *_REQUIRED), tuple(_OPTIONAL))
    name = values["name"]
    printed = isinstance(name, str) and name == brief(name)
    check(printed, f"{table}: name must be a string of one printable line, got {quoted(name)}")
    peak = values["peak"]
    check(
        isinstance(peak, dict) and bool(peak),
        f"{table}: peak must be a table of flop/s by dtype, such as peak.bfloat16 = 312e12, got {quoted(peak)}",
    )
    for name, value in peak.items():
        dtype = getattr(torch, name, None)
        check(isinstance(dtype, torch.dtype), f"{table}: peak must be by dtypes such as bfloat16, got {quoted(name)}")
        check_number(f"{table}: peak.{name}", value, rules.POSITIVE)
    check_numbers(table, dict.fromkeys(_OPTIONAL) | values, {**_REQUIRED, **_OPTIONAL})
    return Device(**values)


def _check_fields(table: str, values: Any, required: Sequence[str], optional: Sequence[str] = ()) -> None:
    """Raises ValueError for a table that lacks fields, or has unknown ones."""
    check(isinstance(values, dict), f"{table} must be a table, got {quoted(values)}")
    missing = [name for name in required if name not in values]
    check(not missing, f"{table}: needs {', '.join(missing)}, got {', '.join(values) or 'nothing'}")
    unknown = [brief(name) for name in values if name not in (*required, *optional)]
    check(not unknown, f"{table}: knows {', '.join((*required, *optional))}, got {', '.join(unknown)}")
