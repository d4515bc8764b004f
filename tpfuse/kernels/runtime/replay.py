"""What a launcher did, done again without running it.

A launcher allocates, takes views and starts kernels, and does all of this as a function of its arguments' metadata.  A
call whose tensors have the same shapes, strides, dtypes and device as those of an earlier one, and whose numbers are
the same, can therefore differ from it in addresses only.  The first call of a kind runs the launcher and is watched;
later ones allocate, add offsets to addresses and start the compiled kernels, which spares the host the launcher's
Python and Triton's look at every argument.

A launcher that does anything else (a GEMM of torch's, a copy of what was strided, a host-side descriptor) always runs
itself.  ``REPLAY = False`` here runs every launcher every time.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .launch import Start, is_recording, recording

REPLAY = True
LIMIT = 1024  # plans of an op; one more and they are made anew
BLOCK = 512  # bytes: temporaries are parts of one allocation, aligned as the caching allocator aligns
ALIGNMENT = 16  # bytes: kernels are specialised for pointers that are multiples of this, and for others
FRESH = {"aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty_strided"}


LAUNCHED = {"cuda"}  # types of devices that launchers run on
_TENSOR = {Tensor: True, torch.nn.Parameter: True} | dict.fromkeys(
    (int, float, bool, str, type(None), torch.dtype), False
)


class Call:
    """The metadata of a call: what a plan may depend on."""

    __slots__ = "key", "tensors", "device", "double"

    def __init__(self, tensors: list[Tensor]):
        self.tensors = tensors
        self.device: torch.device | None = None  # the one of all tensors
        self.double = False  # a tensor is fp64
        self.key: list[Any] = []

    def read(self, args: tuple[Any, ...]) -> bool:
        """Adds arguments.  Returns False for what the dispatcher has to resolve: a tensor's subclass, a lazily negated
        tensor, a symbolic number, tensors on several devices."""
        for arg in args:
            tensor = _TENSOR.get(type(arg))
            if tensor:
                device, dtype = arg.device, arg.dtype
                if device != self.device:
                    if self.device is not None:
                        return False
                    self.device = device
                    self.key.append(device)
                if arg.is_neg():
                    return False
                self.double |= dtype is torch.float64
                self.tensors.append(arg)
                self.key += dtype, arg.shape, arg.stride()
            elif tensor is False:
                self.key.append(arg)
            elif not (isinstance(arg, tuple) and self.read(arg)):
                return False
        return True


def call_of(args: tuple[Any, ...]) -> Call | None:
    """Returns the metadata of a call; None where the dispatcher has to resolve it."""
    call = Call([])
    return call if call.read(args) and call.device is not None else None


def stream_of(device: torch.device) -> int | None:
    """Returns the stream to start on; None where another device is current, which a launcher takes care of."""
    if torch._C._cuda_getDevice() != device.index:
        return None
    return torch._C._cuda_getCurrentRawStream(device.index)


class Plan(NamedTuple):
    """What a call did: it allocated ``outputs`` and ``workspace``, and started ``starts``.

    A kernel's arguments are gathered from one list: the addresses of the call's tensors, of the outputs and of the
    workspace, then ``derived`` ones (index of an address in that list, offset in bytes), then ``constants``.
    """

    outputs: tuple[Tensor, ...]  # one element each, expanded
    single: bool  # the launcher returns its one output, not a tuple
    workspace: Tensor | None  # bytes, expanded
    derived: tuple[tuple[int, int], ...]
    constants: list[Any]
    starts: tuple[tuple[Callable[..., Any], Callable[[list[Any]], tuple[Any, ...]], tuple[int | slice, ...]], ...]

    def replay(self, tensors: list[Tensor]) -> Any:
        """Returns what the launcher would return; None where it has to run itself: for a tensor whose address is not
        aligned as the recorded ones were, or on another device than the current one."""
        values: list[Any] = [t.data_ptr() for t in tensors]
        joined = 0
        for address in values:
            joined |= address
        stream = stream_of(self.outputs[0].device)
        if joined % ALIGNMENT or stream is None:
            return None
        made = [torch.empty_like(o, memory_format=torch.contiguous_format) for o in self.outputs]
        for o in made:
            values.append(o.data_ptr())
        if self.workspace is not None:  # held until the kernels are queued
            workspace = torch.empty_like(self.workspace, memory_format=torch.contiguous_format)
            values.append(workspace.data_ptr())
        for at, offset in self.derived:
            values.append(values[at] + offset)
        values += self.constants
        for start, gather, arguments in self.starts:
            flat = gather(values)
            start(*[flat[part] for part in arguments], stream=stream)
        return made[0] if self.single else tuple(made)


class _Watch(TorchDispatchMode):
    """Sees whether torch is asked for nothing but allocations, ``made``, and views."""

    def __init__(self) -> None:
        super().__init__()
        self.pure = True
        self.made: dict[int, Tensor] = {}  # by storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.name in FRESH:
            self.made[_storage(out)] = out
        elif not any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):
            self.pure = False
        return out


class Replayed:
    """A launcher whose calls are recorded, the first of each kind, and replayed."""

    def __init__(self, launcher: Callable[..., Any]):
        self.launcher = launcher
        self.plans: dict[tuple[Any, ...], Plan | None] = {}  # None: this kind of call cannot be replayed
        functools.update_wrapper(self, launcher)

    def __call__(self, *args: Any, **named: Any) -> Any:
        call = None if named else call_of(args)
        return self.launcher(*args, **named) if call is None else self.run(args, call)

    def run(self, args: tuple[Any, ...], call: Call) -> Any:
        """Makes the call: replays it, or runs the launcher, which is recorded the first time."""
        if not REPLAY or is_recording() or call.device is None or call.device.type not in LAUNCHED:
            return self.launcher(*args)
        key = tuple(call.key)
        if key in self.plans:
            plan = self.plans[key]
            result = None if plan is None else plan.replay(call.tensors)
            return self.launcher(*args) if result is None else result
        result, plan = self._record(args, call.tensors)
        if plan is not None or (aligned(call.tensors) and distinct(call.tensors)):
            if len(self.plans) >= LIMIT:
                self.plans.clear()
            self.plans[key] = plan
        return result

    def _record(self, args: tuple[Any, ...], tensors: list[Tensor]) -> tuple[Any, Plan | None]:
        """Runs the launcher; returns its result and the plan that repeats the call, or None where none can."""
        with recording() as starts, _Watch() as watch:
            result = self.launcher(*args)
        outputs = (result,) if isinstance(result, Tensor) else tuple(result)
        if not (watch.pure and starts and aligned(tensors) and distinct(tensors) and all(_whole(o) for o in outputs)):
            return result, None
        return result, _Addresses(tensors, outputs, watch.made).plan(starts, isinstance(result, Tensor))


def aligned(tensors: list[Tensor]) -> bool:
    return all(t.data_ptr() % ALIGNMENT == 0 for t in tensors)


def distinct(tensors: list[Tensor]) -> bool:
    """Whether no tensor is given twice: which of its two places a kernel's pointer came from could not be told."""
    return len({id(t) for t in tensors}) == len(tensors)


def _whole(t: Tensor) -> bool:
    """Whether t is contiguous and all of its storage."""
    return t.is_contiguous() and t.untyped_storage().nbytes() == t.numel() * t.element_size()


def _storage(t: Tensor) -> int:
    return t.untyped_storage()._cdata


class _Addresses:
    """Tells the addresses that a call used from those of its tensors, its outputs and one workspace."""

    def __init__(self, tensors: list[Tensor], outputs: tuple[Tensor, ...], made: dict[int, Tensor]):
        self.tensors, self.outputs, self.made = tensors, outputs, made
        self.bases = {_storage(o): len(tensors) + i for i, o in enumerate(outputs)}
        self.given: dict[int, list[int]] = {}
        for i, t in enumerate(tensors):
            self.given.setdefault(_storage(t), []).append(i)
        self.own = len(self.bases) == len(outputs) and not self.bases.keys() & self.given.keys()
        self.temporaries: dict[int, int] = {}  # storage -> its offset in the workspace
        self.size = 0  # of the workspace

    def origin(self, t: Tensor) -> tuple[int, int] | None:
        """Returns (index of an address, offset in bytes from it); None where it cannot be told."""
        for i, given in enumerate(self.tensors):
            if t is given:
                return i, 0
        storage = _storage(t)
        if storage in self.bases:
            base = self.bases[storage]
            return base, t.data_ptr() - self.outputs[base - len(self.tensors)].data_ptr()
        if storage in self.given:  # two arguments in one storage may lie otherwise in another call
            index, *others = self.given[storage]
            return None if others else (index, t.data_ptr() - self.tensors[index].data_ptr())
        if storage not in self.made:  # it is older than the call
            return None
        if storage not in self.temporaries:
            self.temporaries[storage] = self.size
            self.size += -(-t.untyped_storage().nbytes() // BLOCK) * BLOCK
        offset = self.temporaries[storage] + int(t.storage_offset()) * t.element_size()
        return len(self.tensors) + len(self.outputs), offset

    def plan(self, starts: list[Start], single: bool) -> Plan | None:
        kernels = [(start, _leaves(start.args)) for start in starts]
        leaves = [leaf for _, (flat, _) in kernels for leaf in flat]
        origins = {id(leaf): self.origin(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
        descriptors = any(hasattr(leaf, "block_shape") for leaf in leaves)
        if not self.own or descriptors or None in origins.values():
            return None
        addresses = len(self.tensors) + len(self.outputs) + (self.size > 0)
        derived = list(dict.fromkeys(o for o in origins.values() if o is not None and o[1]))
        constants: list[Any] = []
        made = []
        for start, (flat, arguments) in kernels:
            places = []
            for leaf in flat:
                origin = origins[id(leaf)] if isinstance(leaf, Tensor) else None
                if origin is None:
                    places.append(addresses + len(derived) + len(constants))
                    constants.append(leaf)
                else:
                    places.append(addresses + derived.index(origin) if origin[1] else origin[0])
            made.append((start.kernel[start.grid], operator.itemgetter(*places), arguments))
        one = [o.new_empty(()).expand(o.shape) for o in self.outputs]
        workspace = self.outputs[0].new_empty((), dtype=torch.uint8).expand(self.size) if self.size else None
        return Plan(tuple(one), single, workspace, derived=tuple(derived), constants=constants, starts=tuple(made))


def _leaves(args: tuple[Any, ...]) -> tuple[list[Any], tuple[int | slice, ...]]:
    """Returns a kernel's arguments with records spelled out, and where each is: an index, or a record's slice."""
    flat: list[Any] = []
    where: list[int | slice] = []
    for arg in args:
        if isinstance(arg, tuple) and any(isinstance(part, Tensor) for part in arg):
            where.append(slice(len(flat), len(flat) + len(arg)))
            flat += arg
        else:
            where.append(len(flat))
            flat.append(arg)
    return flat, tuple(where)
