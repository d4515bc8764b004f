"""Ranks compare the values that they must share before they use them: one table of rank and value, the same ValueError
on every rank.

Messages of a comparison have connections of their own (gloo, on the host), so that a rank whose call differs waits for
an answer, and not inside a collective of other sizes, which gloo ends with an abort and NCCL never.

Each call of a model exchanges 24 bytes: which function it is, a digest of its kind (shapes, dtypes, modes), and one of
the state that decides it and of the values that are read without waiting for a device.  At the first call of a kind, or
under :func:`checking` at each, everything is compared.
These messages are no part of what a ledger counts.
"""

import contextlib
import contextvars
import functools
import hashlib
import math
import weakref
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..kernels.runtime.rules import listed
from .messages import Channel, attempt, channel, gather, raise_together

SAMPLE = 64  # elements of a float tensor that are compared
CLOSE = 1e-2  # of the largest: what a kernel of another order of sums may differ by, and other data does not
_always: contextvars.ContextVar[bool] = contextvars.ContextVar("always", default=False)


@contextlib.contextmanager
def checking() -> Iterator[None]:
    """In it, every call of a model or layer compares all that the ranks must share, as a first call does."""
    token = _always.set(True)
    try:
        yield
    finally:
        _always.reset(token)


def is_checking() -> bool:
    """Returns whether this is inside :func:`checking`; within a graph of torch.compile nothing is."""
    return not torch.compiler.is_compiling() and _always.get()


def any_rank(group: dist.ProcessGroup | None, flag: bool) -> bool:
    """Returns whether ``flag`` is true on any rank of the group; each rank calls it."""
    links = channel(group)
    return flag if links is None else bool(links.exchange("any_rank", int(flag)).any())


def gather_number(group: dist.ProcessGroup, call: str, number: int) -> list[int]:
    """Returns the number of every rank; each rank calls it.  Of a group without messages all have this rank's."""
    with _disable_current_modes():
        links = channel(group)
        return [number] * group.size() if links is None else links.exchange(call, number)[:, 0].tolist()


# ---- one comparison ----


class Described(NamedTuple):
    """A value as ranks compare it: a text, and of a float tensor some elements."""

    text: str
    sample: tuple[float, ...] = ()

    def __str__(self) -> str:
        return self.text + (f" of {', '.join(f'{x:.4g}' for x in self.sample[:3])} ..." if self.sample else "")


class Header(NamedTuple):
    """Caller, axis, and hints for an error: (key, its usual cause)."""

    name: str
    axis: str = "tensor-parallel"
    causes: tuple[tuple[str, str], ...] = ()


def agree(group: dist.ProcessGroup | None, header: Header, values: Mapping[str, Any]) -> None:
    """Compares ``values`` over the ranks of ``group``; each rank calls it.

    ValueError on every rank where they differ: "NAME: KEY must be the same on every AXIS rank", and each rank's value.
    """
    with _disable_current_modes():
        links = channel(group)
        if links is not None:
            _compare(links, header, {key: described(value) for key, value in values.items()})


def agree_over(axes: Sequence[tuple[dist.ProcessGroup | None, Header]], values: Mapping[str, Any]) -> None:
    """Compares ``values`` over several groups, as :func:`agree` over each.  Each rank calls it.

    Where they differ over one group, ValueError on every rank of all: another rank of the mesh would wait for one that
    has left.
    """
    errors = [attempt(functools.partial(agree, group, header, values))[1] for group, header in axes]
    raise_together(next((error for error in errors if error is not None), None), [group for group, _ in axes])


def raise_everywhere(error: Exception | None, groups: Sequence[dist.ProcessGroup], *, call: str) -> None:
    """Raises an error that one rank of a mesh has on every rank of it, as :func:`raise_together`, in ``call``.

    Each rank calls it with its groups in one order; where no rank has an error it costs 24 bytes to each other rank.
    """
    found = error is not None
    for group in groups:
        found = any_rank(group, found)
    if found:
        raise_together(error, groups, call=call)


def _compare(links: Channel, header: Header, values: Mapping[str, Described], detail: str = "") -> None:
    tables: list[Mapping[str, Described]] = gather(dict(values), links, call=header.name, detail=detail)
    absent = Described("not given")
    keys = dict.fromkeys(key for table in tables for key in table)
    columns = {key: [table.get(key, absent) for table in tables] for key in keys}
    differing = [key for key, column in columns.items() if not all(_alike(column[0], value) for value in column)]
    if differing:
        lines = {key: "; ".join(f"rank {r}: {value}" for r, value in enumerate(columns[key])) for key in differing}
        lines |= {key: f"{lines[key]}; {cause}" for key, cause in header.causes if key in lines}
        text = "".join(f"\n    {key}: {line}" for key, line in lines.items()) if len(lines) > 1 else lines[differing[0]]
        raise ValueError(
            f"{header.name}: {' and '.join(differing)} must be the same on every {header.axis} rank, got {text}"
        )


def _alike(a: Described, b: Described) -> bool:
    if a.text != b.text or len(a.sample) != len(b.sample):
        return False
    limit = CLOSE * max((abs(x) for x in a.sample + b.sample if math.isfinite(x)), default=0.0)
    same = lambda x, y: x == y or (math.isnan(x) and math.isnan(y)) or abs(x - y) <= limit
    return all(same(x, y) for x, y in zip(a.sample, b.sample, strict=True))


def described(value: Any, *, floats: bool = True, elements: bool = True) -> Described:
    """Describes any value: of a tensor its dtype, shape, device and, with ``elements``, its elements, those of float
    tensors if ``floats``.

    What is described already is returned as it is.
    """
    if isinstance(value, Described):
        return value
    if not isinstance(value, Tensor):
        return Described(_text(value))
    text = f"{value.dtype} {tuple(value.shape)} on {value.device.type}" + ", requires grad" * value.requires_grad
    if value.is_meta or not elements:
        return Described(text)
    x = value.detach()
    if x.dim() == 0 and (floats or not x.is_floating_point()):
        return Described(f"{text} {x.item()}")
    if not x.is_floating_point():
        return Described(f"{text} #{_crc(x):08x}")
    step = max(1, x.numel() // SAMPLE)
    return Described(text, tuple(x.reshape(-1)[::step][:SAMPLE].double().tolist()) if floats else ())


def names(keys: Sequence[str]) -> str:
    """Returns a short text for names: some of them and a checksum, equal where the names are."""
    return f"{listed(keys) or 'none'} #{zlib.crc32(repr(keys).encode()):08x}"


def _text(value: Any) -> str:
    """Returns the value's repr; of an object whose repr is an address, its type."""
    text = repr(value)
    return f"a {type(value).__name__}" if " at 0x" in text else text


def _crc(x: Tensor) -> int:
    return zlib.crc32(x.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


# ---- the calls of a module ----


class Agreement:
    """Compares the calls of one model or layer over a group, before their first message.

    ``each_call``: digests are exchanged at each call; else only the first of each kind is compared.  ``floats``: the
    elements of float tensors are the same on every rank too.  ``different``: names of arguments whose tensors have
    other elements on every rank.
    """

    def __init__(self, header: Header, *, each_call: bool, floats: bool = True, different: Sequence[str] = ()):
        self.header, self.each_call, self.floats, self.different = header, each_call, floats, different
        self._digests: dict[Hashable, int] = {}

    def __call__(
        self,
        group: dist.ProcessGroup | None,
        arguments: Mapping[str, Any],
        modes: Mapping[str, Hashable],
        state: Callable[[], Mapping[str, Any]] = dict,
        mark: Callable[[], Hashable] = tuple,
    ) -> bool:
        """Compares ``arguments`` (anything), ``modes`` (part of the kind) and, at a kind's first call, ``state()``.

        Returns whether everything was compared.  ``mark()``, which has a repr of its value, changes when that state
        does, and is part of each call's digest.  Nothing is compared inside a compiled graph, in a CUDA graph's
        capture, or on tensors without values.
        """
        if torch.compiler.is_compiling() or not comparable(arguments.values()):
            return False
        with _disable_current_modes():
            links = channel(group)
            if links is None:
                return False
            links.threads.enter()
            if not self._is_new(links, arguments, modes := {**modes, **torch_modes()}, mark):
                return False
            call = {**arguments, **modes, **state()}
            describe = lambda key: described(call[key], floats=self.floats, elements=key not in self.different)
            values = {key: describe(key) for key in call}
            new = ", ".join(f"{key} {values[key].text}" for key in arguments)
            _compare(links, self.header, values, f", for the first time with {new}")
            self._digests[_kinds(arguments, modes)] = digest(_kinds(arguments, modes))
            return True

    def _is_new(
        self, links: Channel, arguments: Mapping[str, Any], modes: Mapping[str, Hashable], mark: Callable[[], Hashable]
    ) -> bool:
        """Returns whether to compare everything: at a kind's first call, under :func:`checking`, where digests differ.

        A kind is stored once it was equal on all ranks, so it is new on all ranks or on none.
        """
        kind = _kinds(arguments, modes)
        stored = self._digests.get(kind)
        if not self.each_call:
            return stored is None or _always.get()
        values = digest([*map(_quick, arguments.values()), mark()])
        call = f"{self.header.name} {modes.get('call', '')}"
        digests = links.exchange(call, digest(kind) if stored is None else stored, values)
        return stored is None or _always.get() or bool((digests != digests[0]).any())


_numbers: "weakref.WeakKeyDictionary[dist.ProcessGroup, int]" = weakref.WeakKeyDictionary()
_functions: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Agreement]]" = weakref.WeakKeyDictionary()


def agreement_of(
    group: dist.ProcessGroup,
    name: str,
    *,
    each_call: bool,
    axis: str = "tensor-parallel",
    different: Sequence[str] = (),
) -> Agreement:
    """Returns the Agreement of a function's calls over a group, each time with the same options."""
    agreements = _functions.setdefault(group, {})
    key = f"{name} over {axis} ranks"
    if key not in agreements:
        header = Header(name, axis=axis)
        agreements[key] = Agreement(header, each_call=each_call, floats=False, different=different)
    return agreements[key]


def next_number(group: dist.ProcessGroup | None) -> int:
    """Returns the number of a thing that all ranks of a group make, in one order: a model, a pipeline."""
    if group is None:
        return 0
    _numbers[group] = _numbers.get(group, 0) + 1
    return _numbers[group]


def comparable(values: Iterable[Any]) -> bool:
    """Returns whether tensors among ``values`` can be read now: none is traced, captured or without elements."""
    tensors = [x for x in values if isinstance(x, Tensor)]
    capturing = any(x.is_cuda for x in tensors) and torch.cuda.is_current_stream_capturing()
    return not capturing and all(type(x) in (Tensor, torch.nn.Parameter) and not x.is_meta for x in tensors)


def torch_modes() -> dict[str, Hashable]:
    """Returns the modes of torch that decide a call."""
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
    """Returns of a value as much as needs no wait for a device."""
    if not isinstance(value, Tensor):
        return _text(value)
    return None if not value.is_cpu else _crc(value.detach())


def digest(value: Any) -> int:
    """Returns 8 bytes of a value's repr."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "little", signed=True)
