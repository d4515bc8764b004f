"""A launcher's call, repeated without running the launcher.

A launcher allocates, takes views, calls torch's GEMMs and starts kernels, and does all of this as a function of its
arguments' metadata.  Two calls whose tensors agree in shape, strides, dtype and device, and whose numbers are equal,
therefore differ in addresses only.  The first call of a kind runs the launcher and is recorded; later ones replay the
tape, which spares the host the launcher's Python and Triton's look at every argument.  From its first replay on, a kind
is recognised by torch's guards, which compare the metadata of all tensors in one call: reading it in Python takes about
a microsecond a tensor.

A launcher that does what a tape cannot hold (it reads a value, or makes a host-side descriptor) always runs.
``tpfuse.kernels.replay.REPLAY = False`` runs every launcher every time.
"""

import functools
import itertools
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import _C, Tensor
from torch._C._dynamo.guards import TensorGuards

from ..runtime.triton import hooked
from .recorder import active_recorder, recording
from .tape import Tape, tape

_room = sys.modules[__package__]  # its REPLAY is read at each call
LIMIT = 1024  # tapes of a launcher; one more and all are dropped
COMPARED = 8  # kinds, alike but for their tensors, that guards tell apart
ALIGNMENT = 16  # bytes: kernels are specialised for pointers that are multiples of this, and for others
UNKNOWN = object()  # in a result's place
LAUNCHED = {"cuda"}  # types of devices that launchers run on
TENSORS = Tensor, torch.nn.Parameter
CONSTANTS = int, float, bool, str, type(None), torch.dtype


def eager() -> bool:
    """Returns whether nothing watches or transforms calls of ops: no compiler or tracer (asked first: a trace never
    sees the rest), no dispatch mode, no functorch transform, no autocast, no profiler, no gradients to record."""
    return not (
        torch.compiler.is_compiling()
        or torch.is_grad_enabled()
        or _C._len_torch_dispatch_stack()
        or _C._is_any_autocast_enabled()
        or _C._are_functorch_transforms_active()
        or _C._autograd._profiler_enabled()
        or _C._get_tracing_state()
    )


class Arguments:
    """A call's arguments: its tensors, each once, and ``kind``, which stands for everything else."""

    __slots__ = "kind", "tensors"

    def __init__(self, kind: tuple[Any, ...], tensors: tuple[Tensor, ...]):
        self.kind, self.tensors = kind, tensors

    @property
    def device(self) -> torch.device | None:
        """The device of all tensors; None where the dispatcher has to resolve the call: it has no tensor, tensors on
        several devices, or a lazily negated one."""
        devices = {t.device for t in self.tensors}
        return devices.pop() if len(devices) == 1 and not any(t.is_neg() for t in self.tensors) else None

    @property
    def double(self) -> bool:
        return any(t.dtype is torch.float64 for t in self.tensors)

    def key(self) -> tuple[Any, ...]:
        """Returns everything but addresses that a launcher or a check may depend on."""
        return self.kind, *((t.device, t.dtype, t.shape, t.stride(), t.requires_grad) for t in self.tensors)


class _Layout:
    """The positions of tensors and of constants among arguments of certain types."""

    def __init__(self, types: tuple[type, ...]):
        self.nested = any(issubclass(t, tuple) for t in types)  # records in records
        self.plain = all(t in TENSORS or t in CONSTANTS for t in types)
        self.tensors = _getter([i for i, t in enumerate(types) if t in TENSORS])
        self.constants = _getter([i for i, t in enumerate(types) if t not in TENSORS])


def _getter(indices: list[int]) -> Callable[[list[Any]], tuple[Any, ...]]:
    """Returns a function that picks the elements at ``indices``."""
    return operator.itemgetter(*indices) if len(indices) > 1 else lambda values: tuple(values[i] for i in indices)


_layouts: dict[tuple[type, ...], _Layout] = {}


def read(args: Iterable[Any]) -> Arguments | None:
    """Returns a call's arguments; None where the dispatcher has to resolve one by its type, such as a tensor's subclass
    or a symbolic number."""
    flat: list[Any] = []
    for arg in args:
        flat.extend(arg) if isinstance(arg, tuple) else flat.append(arg)
    types = tuple(map(type, flat))
    layout = _layouts.get(types)
    if layout is None:
        layout = _layouts[types] = _Layout(types)
    if not layout.plain:
        return read(flat) if layout.nested else None
    tensors = layout.tensors(flat)
    identities = tuple(map(id, tensors))
    if len({*identities}) == len(tensors):
        return Arguments((layout, layout.constants(flat)), tensors)
    sources = tuple(map(identities.index, identities))  # of a tensor given twice a kernel's address came from the first
    return Arguments(
        (layout, layout.constants(flat), sources), tuple(t for i, t in enumerate(tensors) if sources[i] == i)
    )


def on_cpu(args: Iterable[Any]) -> bool:
    """Returns whether a call's tensors are all plain ones on a CPU, so that it has no tape; False where the dispatcher
    has to resolve an argument by its type."""
    for arg in args:
        kind = type(arg)
        if kind in TENSORS:
            if not arg.is_cpu or arg.is_neg():
                return False
        elif kind not in CONSTANTS and not (isinstance(arg, tuple) and on_cpu(arg)):
            return False
    return True


def stream_of(device: torch.device) -> int | None:
    """Returns the stream to start on; None for what a launcher takes care of: another device is current, the stream is
    being captured (whose kernels have counters of their own), or hooks of Triton's look at starts."""
    if _C._cuda_getDevice() != device.index or _C._cuda_isCurrentStreamCapturing() or hooked():
        return None
    return _C._cuda_getCurrentRawStream(device.index)


class Guarded(NamedTuple):
    """A kind of call that has been replayed, and the guards that recognise its tensors."""

    guards: TensorGuards  # of types, dispatch keys, dtypes, devices, requires_grad, shapes and strides
    device: torch.device
    replay: Callable[[Sequence[Tensor], list[int], int], Any]  # of its tape


class Replayed:
    """A function of tensors that starts kernels: the first call of each kind is recorded, later ones are replayed.  It
    returns a tensor or a tuple of tensors and Nones.

    A call is looked up by its kind and its tensors' guards (``guarded``), then by its key (``tapes``).
    """

    def __init__(self, launcher: Callable[..., Any]):
        self.launcher = launcher
        self.tapes: dict[tuple[Any, ...], Tape | None] = {}  # None: this kind of call cannot be replayed
        self.guarded: dict[tuple[Any, ...], tuple[Guarded, ...]] = {}
        functools.update_wrapper(self, launcher)

    def __call__(self, *args: Any) -> Any:
        call = read(args)
        if call is None:
            return self.launcher(*args)
        result = self.replay_known(call)
        return self.run(args, call) if result is UNKNOWN else result

    def replay_known(self, call: Arguments) -> Any:
        """Replays a call of a kind that was replayed before; UNKNOWN where there is none, or it must not be now."""
        if _room.REPLAY and active_recorder() is None:
            tensors = call.tensors
            for guards, device, replay in self.guarded.get(call.kind, ()):
                if guards.check(*tensors):
                    addresses, stream = [t.data_ptr() for t in tensors], stream_of(device)
                    if stream is not None and aligned(addresses):
                        return replay(tensors, addresses, stream)
                    break
        return UNKNOWN

    def run(self, args: tuple[Any, ...], call: Arguments) -> Any:
        """Replays a call by its key, or runs the launcher, which is recorded the first time."""
        device, tensors = call.device, call.tensors
        if not _room.REPLAY or active_recorder() is not None or device is None or device.type not in LAUNCHED:
            return self.launcher(*args)
        addresses, stream = [t.data_ptr() for t in tensors], stream_of(device)
        if stream is None or not aligned(addresses):
            return self.launcher(*args)
        key = call.key()
        if key not in self.tapes:
            return self._record(key, args, tensors)
        recorded = self.tapes[key]
        if recorded is None:
            return self.launcher(*args)
        self._guard(call, device, recorded)
        return recorded.replay(tensors, addresses, stream)

    def _guard(self, call: Arguments, device: torch.device, recorded: Tape) -> None:
        """Makes guards by which later calls of this kind are recognised."""
        tensors, kinds = call.tensors, self.guarded.get(call.kind, ())
        if len(kinds) < COMPARED:
            sizes: list[Any] = [list(t.shape) for t in tensors]
            strides: list[Any] = [list(t.stride()) for t in tensors]
            guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
            self.guarded[call.kind] = (*kinds, Guarded(guards, device, recorded.replay))

    def _record(self, key: tuple[Any, ...], args: tuple[Any, ...], tensors: Sequence[Tensor]) -> Any:
        """Runs the launcher, and keeps the tape of its call, or None if there can be none."""
        with recording(tensors) as recorded:
            result = self.launcher(*args)
        if len(self.tapes) >= LIMIT:
            self.forget()
        self.tapes[key] = tape(recorded, result)
        return result

    def forget(self) -> None:
        self.tapes.clear()
        self.guarded.clear()


class Composed(Replayed):
    """A function of tensors that calls ops, such as a transformer block, recorded and replayed whole.  Where something
    watches or transforms calls of ops, they are made one by one."""

    def __call__(self, *args: Any) -> Any:
        return super().__call__(*args) if eager() and _may_launch(args) else self.launcher(*args)


def _may_launch(args: Iterable[Any]) -> bool:
    """Returns whether a call may start kernels, by its first tensor: of one on a CPU nothing else need be read."""
    flat = itertools.chain.from_iterable(arg if isinstance(arg, tuple) else (arg,) for arg in args)
    tensor = next((arg for arg in flat if isinstance(arg, Tensor)), None)
    return tensor is not None and tensor.device.type in LAUNCHED


def aligned(addresses: list[int]) -> bool:
    """Returns whether all addresses are multiples of ALIGNMENT."""
    union = 0
    for address in addresses:
        union |= address
    return union % ALIGNMENT == 0
