"""A communication hook in a checkpoint: each replica's residual by parameter, and the thresholds of a rank.

A residual is a part of the gradient that is still to come: a step adds their mean over the replicas to the average.  So
at another number of replicas each starts from the mean of those that were saved, and the sum that is to come is kept.
Thresholds are of one layout: at another they are estimated anew.
"""

import math
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ok_topk import OkTopk, TopkState, Unit, unit_kind
from .meta import Meta
from .pieces import Piece, Sources, fill, full_piece, piece
from .ranks import Ranks
from .state import Entries, Stock, stored_name, stored_names

KEY = "hook"  # in meta.json


def _residual(replica: int, name: str) -> str:
    return f"residual.{replica}.{name}"


def _thresholds(rank: int, unit: int) -> str:
    return f"thresholds.{rank}.{unit}"


def hook_pieces(entries: Entries, hook: OkTopk | None, ranks: Ranks) -> tuple[list[Piece], Meta]:
    """Returns what is here of a hook, sharing its memory, and what meta.json says of it.

    ValueError where the hook's parameters are not the model's.
    """
    if hook is None:
        return [], {}
    names = {id(p): name for name, (p, *_) in entries.items()}
    stored = stored_names(entries)
    pieces: list[Piece] = []
    units: list[list[str]] = []
    for i, unit in enumerate(hook.units):
        missing = [p for p in unit.parameters if id(p) not in names]
        if missing:
            raise ValueError(f"the hook holds a parameter of shape {tuple(missing[0].shape)} that is not the model's")
        for p, part in unit.parts():
            _, spec, tp = entries[names[id(p)]]
            pieces.append(piece(_residual(hook.replica, stored[names[id(p)]]), part, spec, tp))
        pieces.append(full_piece(_thresholds(ranks.rank, i), _as_tensor(unit.state)))
        units.append([*dict.fromkeys(stored[names[id(p)]] for p in unit.parameters)])
    return pieces, {KEY: dict(replicas=hook.replicas, step=hook.step, units=units)}


def _as_tensor(state: TopkState) -> Tensor:
    values = [math.nan if x is None else x for x in (state.local, state.sums)]
    return torch.tensor([state.step, *values, *state.borders], dtype=torch.float64)


def _as_state(x: Tensor) -> TopkState:
    step, local, sums, *borders = x.tolist()
    local, sums = (None if math.isnan(v) else v for v in (local, sums))
    return TopkState(int(step), local, sums, tuple(map(int, borders)))


class HookState(NamedTuple):
    """The state of a hook as it was read, in new tensors."""

    step: int
    units: list[Unit]


class Reading(NamedTuple):
    """A checkpoint that is read, and the model and ranks that read it."""

    path: Path
    meta: Meta
    stock: Stock
    sources: Sources
    entries: Entries
    ranks: Ranks

    def part(self, key: str, name: str) -> Piece:
        """Returns what this rank needs of a tensor that is split as the parameter ``name``, in the file's dtype."""
        target = piece(key, *self.entries[name])
        part = target._replace(local=torch.empty(target.local.shape, dtype=self.stock[key][0]))
        fill(self.path, part, self.sources[key])
        return part


def read_hook(hook: OkTopk | None, reading: Reading) -> HookState | None:
    """Returns a hook's state; None where none is asked for, or the checkpoint has none.

    ValueError where the checkpoint's hook has other parameters than the model.
    """
    saved: Any = reading.meta.get(KEY)
    if saved is None or hook is None:
        if saved is not None and saved["units"] and reading.ranks.rank == 0:
            warnings.warn(
                f"load_checkpoint: {reading.path} holds the residuals of an OkTopk, and hook= is not given: what they"
                " hold of the gradients is left out",
                stacklevel=5,
            )
        return None
    local_names: dict[str, list[str]] = {}  # this model's names, by those of a checkpoint
    for name, stored_as in stored_names(reading.entries).items():
        local_names.setdefault(stored_as, []).append(name)
    units = []
    for i, names in enumerate(saved["units"]):
        unknown = [name for name in names if name not in local_names]
        if unknown:
            raise ValueError(f"{reading.path} has a residual of {unknown[0]}, which this model has no place for")
        own_names = [name for stored in names for name in local_names[stored]]
        of_unit = [_unit(hook, group, reading) for group in _by_kind(own_names, reading.entries)]
        key = _thresholds(reading.ranks.rank, i)
        if len(of_unit) == 1 and _same_layout(hook, reading) and key in reading.stock:
            thresholds = full_piece(key, torch.empty(reading.stock[key][1], dtype=torch.float64))
            fill(reading.path, thresholds, reading.sources[key])
            of_unit[0].state = _as_state(thresholds.local)
        units += of_unit
    return HookState(saved["step"], units)


def _by_kind(names: list[str], entries: Entries) -> list[list[str]]:
    """Divides a unit that was of one kind at another tensor-parallel size."""
    groups: dict[int, list[str]] = {}
    for name in names:
        _, spec, tp = entries[name]
        groups.setdefault(unit_kind(spec, tp), []).append(name)
    return list(groups.values())


def _unit(hook: OkTopk, names: list[str], reading: Reading) -> Unit:
    parts = [_mean(hook, name, reading) for name in names]
    return Unit([reading.entries[name][0] for name in names], torch.cat([part.flatten() for part in parts]))


def _same_layout(hook: OkTopk, reading: Reading) -> bool:
    world = sum(name.startswith("thresholds.") and name.endswith(".0") for name in reading.stock)
    return bool(reading.meta[KEY]["replicas"] == hook.replicas and world == reading.ranks.size)


def _mean(hook: OkTopk, name: str, reading: Reading) -> Tensor:
    """Returns this rank's part of a parameter's residual: its own, or the mean over the replicas that were."""
    p, spec, _ = reading.entries[name]
    replicas = reading.meta[KEY]["replicas"]
    averaged = [hook.replica] if replicas == hook.replicas else range(replicas)
    total = None
    for replica in averaged:
        key = _residual(replica, stored_name(name, spec))
        if key not in reading.stock:
            raise ValueError(f"{reading.path} has no {key}")
        part = reading.part(key, name).local
        total = part if total is None else total.add_(part)
    assert total is not None
    return total.div_(len(averaged)).to(p.device)


def put_hook(hook: OkTopk | None, read: HookState | None) -> None:
    if hook is not None:
        hook.step, hook.units = (0, []) if read is None else read
