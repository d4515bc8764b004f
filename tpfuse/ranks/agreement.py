"""What the ranks of a group must share is compared before it is used: one table of rank and value, the same ValueError
on every rank.

Messages of a comparison have connections of their own (gloo, on the host), so that a rank whose call differs waits for
an answer, and not inside a collective of other sizes, which gloo ends with an abort and NCCL never.

Each call of a model exchanges 16 bytes: a digest of its kind (shapes, dtypes, modes) and one of the values that are
read without waiting for a device.  At the first call of a kind, or under :func:`checking` at each, everything is.
These messages are no part of what a ledger counts.
"""

import contextlib
import contextvars
import hashlib
import math
import pickle
import weakref
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..kernels.runtime.rules import some
from .failure import explained, note_failures
from .gloo import connect, limit, receive, send

SAMPLE = 64  # elements of a float tensor that are compared
CLOSE = 1e-2  # of the largest: what a kernel of another order of sums may differ by, and other data does not
_always: contextvars.ContextVar[bool] = contextvars.ContextVar("always", default=False)
_channels: "weakref.WeakKeyDictionary[dist.ProcessGroup, Channel]" = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def checking() -> Iterator[None]:
    """In it, every call of a model or layer compares all that the ranks must share, as a first call does."""
    token = _always.set(True)
    try:
        yield
    finally:
        _always.reset(token)


class Channel:
    """Connections between the hosts of a group's ranks.  Made by all of them."""

    def __init__(self, group: dist.ProcessGroup):
        note_failures()
        self.rank, self.size, self.timeout = group.rank(), group.size(), limit(group)
        self.gloo = connect(group)

    def exchange(self, mine: Tensor) -> Tensor:
        """int64 [n] of every rank -> [R, n]"""
        every = mine.new_empty(self.size, *mine.shape)
        every[self.rank] = mine
        others = [rank for rank in range(self.size) if rank != self.rank]
        try:
            messages = [receive(every[rank], self.gloo, rank) for rank in others]
            for message in messages + [send(mine, self.gloo, rank) for rank in others]:
                message.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank} of {self.size} compares its call with the other ranks', and one of them has ended or"
                f" has come to no such call within {self.timeout.total_seconds():g} s: {explained(error)}"
            ) from error
        return every

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, in rank order."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        lengths = self.exchange(torch.tensor([len(data)], device="cpu"))[:, 0].tolist()
        words = -(-max(lengths) // 8)
        padded = torch.nn.functional.pad(data, (0, 8 * words - len(data))).view(torch.int64)
        every = self.exchange(padded).view(torch.uint8)
        return [pickle.loads(row[:n].numpy().tobytes()) for row, n in zip(every, lengths, strict=True)]


def channel(group: dist.ProcessGroup | None) -> Channel | None:
    """Returns the connections of a group's hosts; None for a group of one, or one without real messages."""
    if group is None or group.size() == 1 or "fake" in dist.get_backend_config(group):
        return None
    if group not in _channels:
        _channels[group] = Channel(group)
    return _channels[group]


def any_rank(group: dist.ProcessGroup | None, mine: bool) -> bool:
    """Whether ``mine`` is true on any rank of the group; each rank calls it."""
    between = channel(group)
    return mine if between is None else bool(between.exchange(torch.tensor([int(mine)], device="cpu")).any())


# ---- one comparison ----


class Described(NamedTuple):
    """A value as ranks compare it: in words, and of a float tensor some elements."""

    text: str
    sample: tuple[float, ...] = ()

    def __str__(self) -> str:
        return self.text + (f" of {', '.join(f'{x:.4g}' for x in self.sample[:3])} ..." if self.sample else "")


class Asked(NamedTuple):
    """Who compares, and what an error says beside the table: for some keys the usual cause."""

    name: str
    axis: str = "tensor-parallel"
    causes: tuple[tuple[str, str], ...] = ()


def agree(group: dist.ProcessGroup | None, asked: Asked, values: Mapping[str, Any]) -> None:
    """Compares ``values`` over the ranks of ``group``; each rank calls it.

    ValueError on every rank where they differ: "NAME: KEY must be the same on every AXIS rank", and each rank's value.
    """
    with _disable_current_modes():
        between = channel(group)
        if between is not None:
            _compare(between, asked, {key: described(value) for key, value in values.items()})


def _compare(between: Channel, asked: Asked, mine: Mapping[str, Described]) -> None:
    every: list[Mapping[str, Described]] = between.gather(dict(mine))
    absent = Described("not given")
    keys = dict.fromkeys(key for each in every for key in each)
    columns = {key: [each.get(key, absent) for each in every] for key in keys}
    differing = [key for key, column in columns.items() if not all(_alike(column[0], other) for other in column)]
    if differing:
        table = {key: "; ".join(f"rank {r}: {value}" for r, value in enumerate(columns[key])) for key in differing}
        table |= {key: f"{table[key]}; {cause}" for key, cause in asked.causes if key in table}
        rows = "".join(f"\n    {key}: {row}" for key, row in table.items()) if len(table) > 1 else table[differing[0]]
        raise ValueError(
            f"{asked.name}: {' and '.join(differing)} must be the same on every {asked.axis} rank, got {rows}"
        )


def _alike(a: Described, b: Described) -> bool:
    if a.text != b.text or len(a.sample) != len(b.sample):
        return False
    limit = CLOSE * max((abs(x) for x in a.sample + b.sample if math.isfinite(x)), default=0.0)
    same = lambda x, y: x == y or (math.isnan(x) and math.isnan(y)) or abs(x - y) <= limit
    return all(same(x, y) for x, y in zip(a.sample, b.sample, strict=True))


def described(value: Any, *, floats: bool = True) -> Described:
    """Describes any value: of a tensor its dtype, shape, device and elements, those of float tensors if ``floats``."""
    if not isinstance(value, Tensor):
        return Described(_words(value))
    text = f"{value.dtype} {tuple(value.shape)} on {value.device.type}" + ", requires grad" * value.requires_grad
    if value.is_meta:
        return Described(text)
    x = value.detach()
    if x.dim() == 0:
        return Described(f"{text} {x.item()}")
    if not x.is_floating_point():
        return Described(f"{text} #{_crc(x):08x}")
    step = max(1, x.numel() // SAMPLE)
    return Described(text, tuple(x.reshape(-1)[::step][:SAMPLE].double().tolist()) if floats else ())


def names(many: Sequence[str]) -> str:
    """Returns words for names that are equal where the names are, and not long."""
    return f"{some(many) or 'none'} #{zlib.crc32(repr(many).encode()):08x}"


def _words(value: Any) -> str:
    """Returns the value's own words; of an object that has none but its address, its type."""
    words = repr(value)
    return f"a {type(value).__name__}" if " at 0x" in words else words


def _crc(x: Tensor) -> int:
    return zlib.crc32(x.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


# ---- the calls of a module ----


class Agreement:
    """Compares the calls of one model or layer over a group, before their first message.

    ``every``: digests are exchanged at each call; else only the first of each kind is compared.  ``floats``: the
    elements of float tensors are the same on every rank too.
    """

    def __init__(self, asked: Asked, *, every: bool, floats: bool = True):
        self.asked, self.every, self.floats = asked, every, floats
        self._digests: dict[Hashable, int] = {}

    def __call__(
        self,
        group: dist.ProcessGroup | None,
        arguments: Mapping[str, Any],
        modes: Mapping[str, Hashable],
        more: Callable[[], Mapping[str, Any]],
    ) -> None:
        """Compares ``arguments`` (anything), ``modes`` (part of the kind) and, at the first call of a kind, ``more``.

        Nothing is compared inside a compiled graph, in a CUDA graph's capture, or on tensors without values.
        """
        if torch.compiler.is_compiling() or not _comparable(arguments):
            return
        with _disable_current_modes():
            between = channel(group)
            if between is not None and self._is_new(between, arguments, modes := {**modes, **_torch_modes()}):
                whole = {**arguments, **modes, **more()}
                _compare(between, self.asked, {k: described(v, floats=self.floats) for k, v in whole.items()})
                self._digests[_kinds(arguments, modes)] = _digest(_kinds(arguments, modes))

    def _is_new(self, between: Channel, arguments: Mapping[str, Any], modes: Mapping[str, Hashable]) -> bool:
        """Whether everything is to be compared: at a kind's first call, under :func:`checking`, and where ranks differ.

        A kind is known once it has been compared and found alike, so it is new on all ranks or on none.
        """
        kind = _kinds(arguments, modes)
        known = self._digests.get(kind)
        if not self.every:
            return known is None or _always.get()
        read = _digest([_quick(value) for value in arguments.values()])
        mine = torch.tensor([_digest(kind) if known is None else known, read], device="cpu")
        every = between.exchange(mine)
        return known is None or _always.get() or bool((every != every[0]).any())


_functions: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Agreement]]" = weakref.WeakKeyDictionary()


def agreement_of(group: dist.ProcessGroup, name: str, *, every: bool) -> Agreement:
    """Returns what compares the calls of a function over a group."""
    known = _functions.setdefault(group, {})
    if name not in known:
        known[name] = Agreement(Asked(name), every=every, floats=False)
    return known[name]


def _comparable(arguments: Mapping[str, Any]) -> bool:
    tensors = [x for x in arguments.values() if isinstance(x, Tensor)]
    capturing = any(x.is_cuda for x in tensors) and torch.cuda.is_current_stream_capturing()
    return not capturing and all(type(x) in (Tensor, torch.nn.Parameter) and not x.is_meta for x in tensors)


def _torch_modes() -> dict[str, Hashable]:
    devices = [d for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]
    return {
        "grad mode": torch.is_grad_enabled(),
        "autocast": tuple((d, str(torch.get_autocast_dtype(d))) for d in devices),
        "checking": _always.get(),
    }


def _kinds(arguments: Mapping[str, Any], modes: Mapping[str, Hashable]) -> Hashable:
    return tuple(arguments), tuple(map(_kind, arguments.values())), tuple(modes.values())


def _kind(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), value.device.type, value.requires_grad
    return type(value).__name__


def _quick(value: Any) -> Hashable:
    """What is known of a value without waiting for a device."""
    if not isinstance(value, Tensor):
        return _words(value)
    return None if not value.is_cpu else _crc(value.detach())


def _digest(value: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "little", signed=True)
