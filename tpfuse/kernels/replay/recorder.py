"""Writes down what a function does to tensors: allocations, other calls of torch's ops (a GEMM, a sum, a fill) and
kernels started, each with where its tensors came from: an argument, or one that was made on the way, as it is or a view
of it."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..runtime.counters import are_counters

FRESH = {"aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty_strided"}


class Place(NamedTuple):
    """Where a tensor comes from: a slot's tensor (arguments come first, then what was made), or a view of it."""

    slot: int
    view: tuple[tuple[int, ...], tuple[int, ...], int] | None  # shape, strides, elements behind the slot's first


class Places(tuple[Place, ...]):
    """Those of a list of tensors."""


class Made(NamedTuple):
    """A tensor that was allocated, dense, and the slot that holds it from then on."""

    slot: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: str  # its type; the device is the one of the call


class Asked(NamedTuple):
    """A call of torch's that was not merely a view."""

    function: Callable[..., Any]
    args: tuple[Any, ...]  # a Place for each tensor, Places for a list of them
    options: dict[str, Any]
    made: tuple[tuple[int | None, int], ...]  # (which of its outputs, None: its one; the slot that holds it)


class Started(NamedTuple):
    """A kernel that was started, with every argument in order, constants included; an Address for each tensor."""

    kernel: Any
    grid: tuple[int, int, int]
    args: tuple[Any, ...]


class Address(NamedTuple):
    slot: int
    offset: int  # bytes


class Counters(NamedTuple):
    """The address of those of the stream, which is asked for at each start."""

    device: torch.device


Event = Made | Asked | Started


class Unrepeatable(Exception):
    """What was done cannot be done again on other tensors."""


class Recorder(TorchDispatchMode):
    """Writes down what is done to ``given`` and to what is made of them; ``broken`` where it cannot be repeated."""

    def __init__(self, given: Sequence[Tensor]):
        super().__init__()
        self.given = given
        self.events: list[Event] = []
        self.broken = False
        self.slots = [_Slot(t) for t in given]
        self.storages: dict[int, int | None] = {}  # storage -> its slot; None: of several arguments
        for i, t in enumerate(given):
            self.storages[_storage(t)] = None if _storage(t) in self.storages else i

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        out = func(*args, **named)
        try:
            self._called(func, args, named, out)
        except Unrepeatable:
            self.broken = True
        return out

    def _called(self, func: Any, args: tuple[Any, ...], named: dict[str, Any], out: Any) -> None:
        if func.namespace != "aten":
            raise Unrepeatable
        several = isinstance(out, (tuple, list))
        outputs = out if several else (out,)
        if not all(isinstance(o, Tensor) for o in outputs):  # a value was read, but for functions of dtypes
            for value in (*args, *named.values()):
                _plain(value)
            return
        lie = {_storage(t) for t in tree_leaves((args, named)) if isinstance(t, Tensor)}
        views = [_storage(o) in lie for o in outputs]  # not by the schema: reshape(), to() and their like may copy
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
        if func._schema.name in FRESH and outputs[0].is_contiguous():
            self.events.append(self._made(outputs[0]))
        elif writes or not views or not all(views):
            places = tuple(map(self._asked, args))
            for value in named.values():
                _plain(value)
            made = tuple((i if several else None, self._make(o)) for i, o in enumerate(outputs) if not views[i])
            self.events.append(Asked(func, places, named, made))

    def _made(self, t: Tensor) -> Made:
        """Returns what is written down of a tensor that was allocated."""
        if self.given and t.device != self.given[0].device:
            raise Unrepeatable
        return Made(self._make(t), tuple(t.shape), t.stride(), dtype=t.dtype, device=t.device.type)

    def _asked(self, arg: Any) -> Any:
        """Returns an argument of torch's with a Place for a tensor, and Places for a list of tensors."""
        if isinstance(arg, (tuple, list)) and arg and all(isinstance(part, Tensor) for part in arg):
            return Places(map(self.place, arg))
        return self.place(arg) if isinstance(arg, Tensor) else _plain(arg)

    def _make(self, t: Tensor) -> int:
        """Returns a new slot for what a call made, whose storage may have the identity of one that was freed."""
        self.storages[_storage(t)] = len(self.slots)
        self.slots.append(_Slot(t))
        return len(self.slots) - 1

    def start(self, kernel: Any, grid: tuple[int, int, int], args: tuple[Any, ...]) -> None:
        try:
            self.events.append(Started(kernel, grid, tuple(map(self._argument, args))))
        except Unrepeatable:
            self.broken = True

    def _argument(self, arg: Any) -> Any:
        if isinstance(arg, tuple) and any(isinstance(part, Tensor) for part in arg):
            return tuple(map(self._argument, arg))
        if hasattr(arg, "block_shape"):  # a descriptor, which holds an address
            raise Unrepeatable
        return self._address(arg) if isinstance(arg, Tensor) else arg

    def _slot(self, t: Tensor) -> int:
        for i, given in enumerate(self.given):
            if t is given:
                return i
        slot = self.storages.get(_storage(t))
        if slot is None:  # older than the call; or two arguments in one storage, which may lie otherwise next time
            raise Unrepeatable
        return slot

    def _address(self, t: Tensor) -> Address | Counters | int:
        if t.numel() == 0:  # it has none
            return 0
        if are_counters(t):
            return Counters(t.device)
        slot = self._slot(t)
        return Address(slot, int(t.data_ptr()) - self.slots[slot].address)

    def place(self, t: Tensor) -> Place:
        index = self._slot(t)
        slot = self.slots[index]
        if t.dtype != slot.dtype:
            raise Unrepeatable
        offset = int(t.storage_offset()) - slot.offset
        same = offset == 0 and t.shape == slot.shape and t.stride() == slot.stride
        return Place(index, None if same else (tuple(t.shape), t.stride(), offset))


class _Slot:
    """The metadata of a slot's tensor, which may be freed before the recording ends."""

    def __init__(self, t: Tensor):
        self.dtype, self.shape, self.stride = t.dtype, t.shape, t.stride()
        self.offset, self.address = int(t.storage_offset()), int(t.data_ptr())


def _storage(t: Tensor) -> int:
    return t.untyped_storage()._cdata


def _plain(value: Any) -> Any:
    """Returns an argument that is not a tensor and holds none."""
    if isinstance(value, Tensor) or (isinstance(value, (tuple, list)) and any(isinstance(v, Tensor) for v in value)):
        raise Unrepeatable
    return value


class _Current(threading.local):  # backward runs in a thread of its own
    recorder: Recorder | None = None


_current = _Current()


def recorder() -> Recorder | None:
    """Returns that of this thread, while it records."""
    return _current.recorder


@contextlib.contextmanager
def recording(tensors: Sequence[Tensor]) -> Iterator[Recorder]:
    """Records what this thread does inside."""
    before, _current.recorder = _current.recorder, Recorder(tensors)
    try:
        with _current.recorder as made:
            yield made
    finally:
        _current.recorder = before
