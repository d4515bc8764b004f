"""What several ranks hold is held equal, bit for bit: parameters and the optimizer's state over tensor-parallel ranks,
pipeline stages and replicas.

Each rank sends 8 bytes of all that it holds, and where those differ 8 of every piece that another may hold too: an
element's bits are multiplied by an odd number of its place, folded, and added up in integers of 64 bits.  One flipped
bit always shows, NaN's payloads and the sign of a zero count, and the sum is the same on every device.  Beside the
pieces there is one block of them in wider integers at a time.
"""

import functools
import json
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

from ...kernels.runtime.rules import check_number, integer, listed
from ...layers.hooks import onlooker
from ...layers.shards import named_specs
from ...models.model import AT_CALLS, Model
from ...parallel import resolve
from ...ranks.agreement import digest, is_checking
from ...ranks.messages import channel, gather
from ..data_parallel import replica_of
from .pieces import Place
from .ranks import ranks_named
from .state import STATE, Optimizers, as_tuple, entries_of, groups_of, owners_of, pieces_of, unwrap

Bits = Mapping[Place, int]  # 8 bytes of a rank's pieces, by where they are
_BLOCK = 1 << 16  # elements that are widened at a time: as much as a core's cache holds
SAME_BITS = "what several ranks hold must have the same bits on all of them"
_GROUPS = "the optimizer's groups"
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # by bytes of an element
_watches: "weakref.WeakKeyDictionary[nn.Module, _CallCount]" = weakref.WeakKeyDictionary()


@torch.no_grad()
def bits_of(x: Tensor) -> int:
    """Returns 8 bytes of a tensor's bits and their order, the same for the same bits on any device."""
    words = x.detach().reshape(-1)
    words = words.view(_WORDS.get(x.element_size(), torch.uint8)) if words.numel() else words
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    odd = _odd_numbers(x.device)
    for block in words.split(_BLOCK):
        products = block.to(torch.int64) * odd[: len(block)]
        total = total * 0x5851F42D4C957F2D + (products ^ (products >> 32)).sum()
    return int(total)


@functools.lru_cache(maxsize=4)
def _odd_numbers(device: torch.device) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    drawn = torch.randint(-(1 << 63), (1 << 63) - 1, (_BLOCK,), generator=generator, dtype=torch.int64, device="cpu")
    return (drawn | 1).to(device)


def differences(bits_by_rank: Mapping[int, Bits]) -> list[str]:
    """Says which ranks hold other bits of which tensors: the odd ones, where more than half of the holders agree."""
    by_place: dict[Place, dict[int, int]] = {}
    for rank, bits in bits_by_rank.items():
        for place, value in bits.items():
            by_place.setdefault(place, {})[rank] = value
    names: dict[str, list[str]] = {}
    for (name, _), values in sorted(by_place.items(), key=lambda item: item[0][0].startswith(STATE)):
        if len(set(values.values())) > 1:
            names.setdefault(_verdict(values), []).append(name)
    return [f"{verdict} in {listed(list(dict.fromkeys(differing)))}" for verdict, differing in names.items()]


def _verdict(values: Mapping[int, int]) -> str:
    alike: dict[int, list[int]] = {}
    for rank, value in values.items():
        alike.setdefault(value, []).append(rank)
    camps = sorted(alike.values(), key=lambda ranks: (-len(ranks), ranks))
    if 2 * len(camps[0]) > len(values):
        odd = sorted(rank for camp in camps[1:] for rank in camp)
        return f"{ranks_named(odd)} {'differ' if len(odd) > 1 else 'differs'} from {ranks_named(camps[0])}"
    return f"{' and '.join(map(ranks_named, camps))} differ"


# ---- over the axes of a model ----


class _Axis(NamedTuple):
    """Ranks that hold pieces of one model, and which of these several of them may hold: "whole", "copied" or "all"."""

    group: dist.ProcessGroup
    alike: str


def check_replicas(model: nn.Module, optimizer: Optimizers | None = None) -> None:
    """Compares the bits of all that several ranks hold of a model, and of its optimizer's state if that is given, and
    what decides the model's next call: its seed and step, dropout and the modes of its parts.

    Compared are tensor-parallel ranks (what is not split, and kv heads that several hold), context-parallel ones,
    replicas (a model's ``dp``, or those of its DistributedDataParallel or FSDP) and pipeline stages.  Buffers are not:
    statistics, as nn.BatchNorm1d keeps, are of each replica's own rows.  Every rank calls it.  ValueError on every one
    where something differs: it names the parameters and the ranks, and which rank is the odd one where most of three
    or more agree.
    """
    with _disable_current_modes():
        axes = _axes(model)
        differing = {text for axis in axes for text in _compared(unwrap(model), optimizer, axis)}
        for axis in axes:  # one after the other, so that each rank comes to know of all
            links = channel(axis.group)
            if links is not None and bool(links.exchange("check_replicas' end", int(bool(differing))).any()):
                differing = set().union(*gather(differing, links))
    if differing:
        raise ValueError(f"check_replicas: {'; '.join(sorted(differing))}: {SAME_BITS}")


def _axes(model: nn.Module) -> list[_Axis]:
    inner, replica = unwrap(model), replica_of(model)
    ranks = {tp.group_name: tp.replicas for *_, tp in named_specs(inner) if tp.group_name is not None}
    names = {name: "whole" for name, replicas in ranks.items() if replicas == 1}
    if isinstance(inner, Model):
        groups = inner.groups
        names |= {name: kind for name, kind in ((groups.dp_name, "all"), (groups.pp_name, "copied")) if name}
    names |= {tp.cp.group_name: "all" for *_, tp in named_specs(inner) if tp.cp is not None and tp.cp.group_name}
    if replica is not None:
        names.setdefault(replica.process_group.group_name, "all")
    for p in inner.parameters():
        if isinstance(p, DTensor):
            for group in p.device_mesh.get_all_groups():
                names.setdefault(group.group_name, "all")
    return [_Axis(group, kind) for name, kind in names.items() if (group := resolve(name)).size() > 1]


def _compared(model: nn.Module, optimizer: Optimizers | None, axis: _Axis) -> list[str]:
    links = channel(axis.group)
    if links is None:
        return []
    mine = bits_held(model, optimizer, axis.alike)
    heads = links.exchange("check_replicas", digest(sorted(mine.items())))
    if not bool((heads != heads[0]).any()):
        return []
    ranks = dist.get_process_group_ranks(axis.group)
    return differences(dict(zip(ranks, gather(mine, links), strict=True)))


def bits_held(model: nn.Module, optimizer: Optimizers | None, kind: str) -> Bits:
    """Returns the bits of what other ranks of such an axis may hold too."""
    bits: dict[Place, int] = {}
    optimizers = as_tuple(optimizer)
    owners = owners_of(optimizers)
    copies_of = model.stages.copies_of if isinstance(model, Model) else lambda name: 1
    for name, entry in entries_of(model).items():
        _, spec, tp = entry
        if tp.replicas > 1 or (kind == "copied" and copies_of(name) == 1):  # no other rank holds it
            continue
        for part in pieces_of({name: entry}, owners):
            whole = part.local.shape == part.shape or spec.dim is None or spec.copies > 1
            if kind != "whole" or whole:
                bits[part.name, part.offset] = bits_of(part.local)
    if isinstance(model, Model):
        state = {"whether the model trains": model.training} | model._decisive_state(staged=kind == "copied")
        bits |= {(name, ()): digest(value) for name, value in state.items()}
    if optimizers:
        groups = groups_of(entries_of(model), optimizers)
        numbers = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        bits[_GROUPS, ()] = digest(json.dumps(numbers, default=str))
    return bits


# ---- now and then ----


class _CallCount:
    """The calls of a model, of which every n-th compares."""

    def __init__(self, model: nn.Module, optimizer: Optimizers | None, every: int):
        self.model, self.optimizer, self.every = weakref.ref(model), optimizer, every
        self.calls = 0

    def call(self) -> None:
        model = self.model()
        if model is None or not model.training:
            return
        self.calls += 1
        if self.calls % self.every == 0:
            check_replicas(model, self.optimizer)


def watch_replicas(model: nn.Module, optimizer: Optimizers | None = None, *, every: int = 100) -> None:
    """Makes every ``every``-th call of a model in training, or step of its pipeline, begin with :func:`check_replicas`.

    Calls are counted, and not the optimizer's steps: a rank that left one out is found.  Every rank calls this, with
    the same ``every``; a second time it replaces the first.  ValueError for an ``every`` that is no
    positive integer, and for what is no optimizer nor a list of them.
    """
    check_number("watch_replicas: every", every, integer())
    as_tuple(optimizer)
    inner = unwrap(model)
    if inner not in _watches and not isinstance(inner, Model):
        inner.register_forward_pre_hook(_before_call)
    _watches[inner] = _CallCount(model, optimizer, every)


@onlooker
def _before_call(module: nn.Module, args: Any) -> None:
    if not torch.compiler.is_compiling() and module in _watches:
        _watches[module].call()


def _at_call(model: Model) -> None:
    if torch.compiler.is_compiling():
        return
    if is_checking():
        check_replicas(model)
    elif model in _watches:
        _watches[model].call()


AT_CALLS.append(_at_call)
