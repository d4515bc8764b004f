"""What a launcher did, done again without running it.

A launcher allocates, takes views, calls torch's GEMMs and starts kernels, and does all of this as a function of its
arguments' metadata.  A call whose tensors have the same shapes, strides, dtypes and device as those of an earlier one,
and whose numbers are the same, can therefore differ from it in addresses only.  The first call of a kind runs the
launcher and is recorded; later ones replay the tape, which spares the host the launcher's Python and Triton's look at
every argument.  A replayed kind is from then on told by torch's guards, which compare the metadata of all tensors in
one call: to read it in Python takes about a microsecond a tensor.

A launcher that does what a tape cannot hold (it reads a value, or makes a host-side descriptor) always runs itself.
``REPLAY = False`` here runs every launcher every time.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards

from ..runtime.triton import hooked
from .recorder import recorder, recording
from .tape import Tape, tape

REPLAY = True
LIMIT = 1024  # tapes of a launcher; one more and they are made anew
COMPARED = 8  # calls that differ in tensors alone are told apart by comparing them with at most so many
ALIGNMENT = 16  # bytes: kernels are specialised for pointers that are multiples of this, and for others


UNKNOWN = object()  # in a result's place
LAUNCHED = {"cuda"}  # types of devices that launchers run on
_TENSOR = {Tensor: True, torch.nn.Parameter: True} | dict.fromkeys(
    (int, float, bool, str, type(None), torch.dtype), False
)


class Call:
    """The metadata of a call: what a tape may depend on."""

    __slots__ = "key", "tensors", "device", "double", "places"

    def __init__(self) -> None:
        self.key: list[Any] = []
        self.tensors: list[Tensor] = []  # each once
        self.device: torch.device | None = None  # the one of all tensors
        self.double = False  # a tensor is fp64
        self.places: dict[int, int] = {}  # of the tensors, by identity

    def read(self, args: tuple[Any, ...]) -> bool:
        """Adds arguments.  Returns False for what the dispatcher has to resolve: a tensor's subclass, a lazily negated
        tensor, a symbolic number, tensors on several devices."""
        for arg in args:
            tensor = _TENSOR.get(type(arg))
            if tensor:
                place = self.places.setdefault(id(arg), len(self.tensors))
                if place < len(self.tensors):  # given twice: a kernel's address came from this one
                    self.key += Tensor, place
                    continue
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
                self.key += dtype, arg.shape, arg.stride(), arg.requires_grad  # the last is for checks alone
            elif tensor is False:
                self.key.append(arg)
            elif not (isinstance(arg, tuple) and self.read(arg)):
                return False
        return True


def call_of(args: tuple[Any, ...]) -> Call | None:
    """Returns the metadata of a call; None where the dispatcher has to resolve it."""
    call = Call()
    return call if call.read(args) and call.device is not None else None


def stream_of(device: torch.device) -> int | None:
    """Returns the stream to start on; None for what a launcher takes care of: another device is current, the stream is
    being captured (whose kernels have counters of their own), or hooks of Triton's look at starts."""
    if torch._C._cuda_getDevice() != device.index or torch._C._cuda_isCurrentStreamCapturing() or hooked():
        return None
    return torch._C._cuda_getCurrentRawStream(device.index)


class Known(NamedTuple):
    """A kind of call that has been replayed: what its tensors must be like, which torch compares without Python."""

    guards: TensorGuards  # of types, dispatch keys, dtypes, devices, requires_grad, shapes and strides
    device: torch.device
    replay: Callable[[list[Tensor], list[int], int], Any]  # of its tape


class Spread:
    """A call's arguments as two lists: tensors, each once, and all else, in which tensors' places are marked."""

    __slots__ = "constants", "tensors", "places"

    def __init__(self) -> None:
        self.constants: list[Any] = []
        self.tensors: list[Tensor] = []
        self.places: dict[int, int] = {}  # of the tensors, by identity

    def read(self, args: tuple[Any, ...]) -> bool:
        """Adds arguments.  Returns False for one that no tape is of."""
        kind_of, constants, tensors, places = _TENSOR.get, self.constants, self.tensors, self.places
        for arg in args:
            tensor = kind_of(type(arg))
            if tensor is False:
                constants.append(arg)
            elif tensor:
                place = places.setdefault(id(arg), len(tensors))
                if place == len(tensors):
                    tensors.append(arg)
                    constants.append(Tensor)
                else:
                    constants += Spread, place
            elif not (isinstance(arg, tuple) and self.read(arg)):
                return False
        return True


class Replayed:
    """A launcher, or another function of tensors that starts kernels, whose calls are recorded, the first of each kind,
    and replayed.  It returns a tensor or a tuple of tensors and Nones.

    A call's kind is looked up by all that is not a tensor, then by the tensors' metadata: first by comparing them with
    those of calls that were replayed before (``known``), then by a key of all metadata (``tapes``).
    """

    def __init__(self, launcher: Callable[..., Any]):
        self.launcher = launcher
        self.tapes: dict[tuple[Any, ...], Tape | None] = {}  # None: this kind of call cannot be replayed
        self.known: dict[tuple[Any, ...], tuple[Known, ...]] = {}
        functools.update_wrapper(self, launcher)

    def __call__(self, *args: Any, **named: Any) -> Any:
        if named:
            return self.launcher(*args, **named)
        result = self.again(args)
        if result is not UNKNOWN:
            return result
        call = call_of(args)
        return self.launcher(*args) if call is None else self.run(args, call)

    def again(self, args: tuple[Any, ...]) -> Any:
        """Replays a call of a known kind; UNKNOWN where it is of none, or cannot be replayed now."""
        spread = Spread()
        if REPLAY and recorder() is None and spread.read(args):
            tensors = spread.tensors
            for guards, device, replay in self.known.get(tuple(spread.constants), ()):
                if guards.check(*tensors):
                    addresses, stream = [t.data_ptr() for t in tensors], stream_of(device)
                    if stream is not None and aligned(addresses):
                        return replay(tensors, addresses, stream)
                    break
        return UNKNOWN

    def run(self, args: tuple[Any, ...], call: Call) -> Any:
        """Makes the call: replays it, or runs the launcher, which is recorded the first time."""
        device, tensors = call.device, call.tensors
        if not REPLAY or recorder() is not None or device is None or device.type not in LAUNCHED:
            return self.launcher(*args)
        key = tuple(call.key)
        made = self.tapes.get(key, self)
        if isinstance(made, Tape):
            addresses, stream = [t.data_ptr() for t in tensors], stream_of(device)
            if stream is not None and aligned(addresses):
                self._know(args, made)
                return made.replay(tensors, addresses, stream)
        elif made is self and stream_of(device) is not None and aligned([t.data_ptr() for t in tensors]):
            return self._record(key, args, tensors)
        return self.launcher(*args)

    def _know(self, args: tuple[Any, ...], made: Tape) -> None:
        """Lets later calls like this one be found by comparison."""
        spread = Spread()
        spread.read(args)
        constants, tensors = tuple(spread.constants), spread.tensors
        kinds = self.known.get(constants, ())
        if len(kinds) < COMPARED:
            sizes: list[Any] = [list(t.shape) for t in tensors]
            strides: list[Any] = [list(t.stride()) for t in tensors]
            guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
            self.known[constants] = (*kinds, Known(guards, tensors[0].device, made.replay))

    def _record(self, key: tuple[Any, ...], args: tuple[Any, ...], tensors: list[Tensor]) -> Any:
        """Runs the launcher, and keeps the tape of what it did, or that there can be none."""
        with recording(tensors) as recorded:
            result = self.launcher(*args)
        if len(self.tapes) >= LIMIT:
            self.forget()
        self.tapes[key] = tape(recorded, result)
        return result

    def forget(self) -> None:
        self.tapes.clear()
        self.known.clear()


def aligned(addresses: list[int]) -> bool:
    joined = 0
    for address in addresses:
        joined |= address
    return joined % ALIGNMENT == 0
