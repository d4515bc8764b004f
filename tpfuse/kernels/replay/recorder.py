"""The events of a call: tensors allocated, other ops of torch (a GEMM, a sum, a fill) and kernels started.

Each event names its tensors by where they come from: an argument or a tensor made on the way, whole or a view of it.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..runtime.counters import are_counters

FRESH = {"aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty_strided"}


class TensorSource(NamedTuple):
    """The origin of a tensor: a slot's tensor (arguments have the first slots, tensors made on the way the next), or
    a view of it."""

    slot: int
    view: tuple[tuple[int, ...], tuple[int, ...], int] | None  # shape, strides, elements behind the slot's first


class TensorSources(tuple[TensorSource, ...]):
    """Those of a list of tensors."""


class Allocation(NamedTuple):
    """A dense tensor without values, and the slot that holds it from then on."""

    slot: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: str  # its type; the device is the one of the call


class TorchCall(NamedTuple):
    """A call of an op of torch's that makes or writes a tensor."""

    function: Callable[..., Any]
    args: tuple[Any, ...]  # a TensorSource for each tensor, TensorSources for a list of them
    options: Mapping[str, object]
    results: tuple[tuple[int | None, int], ...]  # (index among its outputs, None: its only one; the slot that holds it)


class Start(NamedTuple):
    """A kernel that was started, with every argument in order, constants included; an Address for each tensor."""

    kernel: Any
    grid: tuple[int, int, int]
    args: tuple[Any, ...]


class Address(NamedTuple):
    slot: int
    offset: int  # bytes


class CounterAddress(NamedTuple):
    """The address of the stream's counters, which is looked up at each start."""

    device: torch.device


Event = Allocation | TorchCall | Start


class Unrepeatable(Exception):
    """The call did something that a tape cannot do again on other tensors."""


class Recorder(TorchDispatchMode):
    """Records what is done to ``arguments`` and to tensors made of them; ``broken`` where that cannot be repeated."""

    def __init__(self, arguments: Sequence[Tensor]):
        super().__init__()
        self.arguments = arguments
        self.events: list[Event] = []
        self.broken = False
        self.slots = [_Slot(t) for t in arguments]
        self.storages: dict[int, int | None] = {}  # storage -> its slot; None: of several arguments
        for i, t in enumerate(arguments):
            self.storages[_storage(t)] = None if _storage(t) in self.storages else i

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        out = func(*args, **named)
        try:
            self._called(func, args, named, out)
        except Unrepeatable:
            self.broken = True
        return out

    def _called(self, func: Any, args: tuple[Any, ...], named: Mapping[str, object], out: Any) -> None:
        if func.namespace != "aten":
            raise Unrepeatable
        several = isinstance(out, (tuple, list))
        outputs = out if several else (out,)
        if not all(isinstance(o, Tensor) for o in outputs):  # a value was read, but for functions of dtypes
            for value in (*args, *named.values()):
                _plain(value)
            return
        inputs = {_storage(t) for t in tree_leaves((args, named)) if isinstance(t, Tensor)}
        views = [_storage(o) in inputs for o in outputs]  # not by the schema: reshape(), to() and their like may copy
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
        if func._schema.name in FRESH and outputs[0].is_contiguous():
            self.events.append(self._allocation(outputs[0]))
        elif writes or not views or not all(views):
            sources = tuple(map(self._torch_argument, args))
            for value in named.values():
                _plain(value)
            results = tuple((i if several else None, self._new_slot(o)) for i, o in enumerate(outputs) if not views[i])
            self.events.append(TorchCall(func, sources, named, results))

    def _allocation(self, t: Tensor) -> Allocation:
        if self.arguments and t.device != self.arguments[0].device:
            raise Unrepeatable
        return Allocation(self._new_slot(t), tuple(t.shape), t.stride(), dtype=t.dtype, device=t.device.type)

    def _torch_argument(self, arg: Any) -> Any:
        """Returns an argument of torch's with a TensorSource for a tensor, and TensorSources for a list of tensors."""
        if isinstance(arg, (tuple, list)) and arg and all(isinstance(part, Tensor) for part in arg):
            return TensorSources(map(self.source, arg))
        return self.source(arg) if isinstance(arg, Tensor) else _plain(arg)

    def _new_slot(self, t: Tensor) -> int:
        """Returns a slot for a new tensor, whose storage may have the identity of one that was freed."""
        self.storages[_storage(t)] = len(self.slots)
        self.slots.append(_Slot(t))
        return len(self.slots) - 1

    def start(self, kernel: Any, grid: tuple[int, int, int], args: tuple[Any, ...]) -> None:
        try:
            self.events.append(Start(kernel, grid, tuple(map(self._argument, args))))
        except Unrepeatable:
            self.broken = True

    def _argument(self, arg: Any) -> Any:
        if isinstance(arg, tuple) and any(isinstance(part, Tensor) for part in arg):
            return tuple(map(self._argument, arg))
        if hasattr(arg, "block_shape"):  # a descriptor, which holds an address
            raise Unrepeatable
        return self._address(arg) if isinstance(arg, Tensor) else arg

    def _slot(self, t: Tensor) -> int:
        for i, argument in enumerate(self.arguments):
            if t is argument:
                return i
        slot = self.storages.get(_storage(t))
        if slot is None:  # older than the call; or two arguments in one storage, which may lie otherwise next time
            raise Unrepeatable
        return slot

    def _address(self, t: Tensor) -> Address | CounterAddress | int:
        if t.numel() == 0:  # it has none
            return 0
        if are_counters(t):
            return CounterAddress(t.device)
        slot = self._slot(t)
        return Address(slot, int(t.data_ptr()) - self.slots[slot].address)

    def source(self, t: Tensor) -> TensorSource:
        """Returns where a tensor comes from; Unrepeatable for one that is older than the call."""
        index = self._slot(t)
        slot = self.slots[index]
        if t.dtype != slot.dtype:
            raise Unrepeatable
        offset = int(t.storage_offset()) - slot.offset
        same = offset == 0 and t.shape == slot.shape and t.stride() == slot.stride
        return TensorSource(index, None if same else (tuple(t.shape), t.stride(), offset))


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


def active_recorder() -> Recorder | None:
    """Returns the recorder of this thread; None while it records nothing."""
    return _current.recorder


@contextlib.contextmanager
def recording(tensors: Sequence[Tensor]) -> Iterator[Recorder]:
    """Records what this thread does inside."""
    previous, _current.recorder = _current.recorder, Recorder(tensors)
    try:
        with _current.recorder as active:
            yield active
    finally:
        _current.recorder = previous
