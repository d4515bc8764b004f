"""What a function of tensors did, done again without its Python.

A :class:`Tape` is a function that is written for what was recorded, a line for each step: it allocates, calls torch,
and starts compiled kernels with addresses, on other tensors of the same shapes.  What was made is freed after its last
use, so that a replay holds no more memory than the function did.  ``print(tape.source)`` shows what it does.
"""

import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..runtime.counters import address
from ..runtime.triton import started_by
from .recorder import Address, Asked, Counters, Event, Made, Place, Places, Recorder, Unrepeatable

_torch: Any = torch._C._dynamo.guards  # untyped
SHORT: dict[Any, Callable[..., Any]] = {  # the same op, by a shorter way in
    torch.ops.aten.mm.default: torch.mm,
    torch.ops.aten.addmm.default: torch.addmm,
    torch.ops.aten.clone.default: torch.clone,
}
STREAM = object()  # in the stream's place
ALLOCATE = {  # by type of device: (shape, strides, dtype) -> a new tensor on the current one, past the dispatcher
    "cuda": _torch._empty_strided_cuda,
    "cpu": _torch._empty_strided_cpu,
}


class Tape:
    """What is done in each replay.  Its function is written when it is first wanted: many kinds of call come once."""

    def __init__(self, events: Sequence[Event], given: int, outputs: Sequence[Any], single: bool):
        self.events, self.given, self.outputs = events, given, outputs
        self.single = single  # the function returns one tensor, not a tuple

    @functools.cached_property
    def source(self) -> str:
        return self._written.source

    @functools.cached_property
    def replay(self) -> Callable[[list[Tensor], list[int], int], Any]:
        """The function: (tensors, addresses, stream) -> what the recorded one would return for ``tensors``, which lie
        at ``addresses``."""
        source, bound = self._written
        exec(source, bound)
        made: Callable[[list[Tensor], list[int], int], Any] = bound["replay"]
        return made

    @functools.cached_property
    def _written(self) -> "Written":
        return _Writer(self).written()


class Written(NamedTuple):
    source: str
    bound: dict[str, Any]  # what has no literal, by name


def tape(recorded: Recorder, result: Any) -> Tape | None:
    """Returns the tape of what gave ``result``, a tensor or a tuple of tensors and constants; None if none can be."""
    single = isinstance(result, Tensor)
    try:
        outputs = [recorded.place(t) if isinstance(t, Tensor) else t for t in ((result,) if single else result)]
    except Unrepeatable:
        return None
    if recorded.broken or not recorded.events:
        return None
    return Tape(recorded.events, len(recorded.given), outputs, single)


class _Writer:
    """Writes a tape's source: the i-th slot's tensor is t<i>, and it lies at a<i>."""

    def __init__(self, tape: Tape):
        self.tape = tape
        self.bound: dict[str, Any] = {}
        self.names: dict[int, str] = {}  # those of ``bound``, by identity
        leaves = list(_leaves([tape.outputs, *map(_arguments, tape.events)]))
        self.places = [leaf for leaf in leaves if isinstance(leaf, Place)]
        self.addressed = {leaf.slot for leaf in leaves if isinstance(leaf, Address)}
        self.whole: set[int] = set()  # slots whose tensors are made in the shape of their one view

    def written(self) -> Written:
        events, given, outputs = self.tape.events, self.tape.given, self.tape.outputs
        last = {slot: i for i, event in enumerate(events) for slot in _slots(event)}
        kept = {place.slot for place in _leaves(outputs) if isinstance(place, Place)}
        used = kept.union(*(_slots(event) for event in events if not isinstance(event, Made)))
        names = [f"{''.join(f'{letter}{i}, ' for i in range(given))}" for letter in "ta"]
        lines = [f"{names[0]}= tensors", f"{names[1]}= addresses"]
        for i, event in enumerate(events):
            if isinstance(event, Made) and event.slot not in used:  # as an op's result that nobody looks at
                continue
            lines += self._step(event)
            ended = sorted(s for s in _slots(event) if last[s] == i and s >= given and s not in kept)
            lines += [f"t{slot} = None" for slot in ended]
        results = [self._text(output) for output in outputs]
        lines.append(f"return {results[0] if self.tape.single else _tuple(results)}")
        return Written("\n    ".join(["def replay(tensors, addresses, stream):", *lines]) + "\n", self.bound)

    def _step(self, event: Event) -> Iterator[str]:
        if isinstance(event, Made):
            shape, strides = self._layout(event)
            yield f"t{event.slot} = {self._name(ALLOCATE[event.device])}({shape}, {strides}, {self._name(event.dtype)})"
            yield from self._address(event.slot)
        elif isinstance(event, Asked):
            given = [self._text(arg) for arg in event.args]
            given += [f"{name}={self._text(value)}" for name, value in event.options.items()]
            yield f"out = {self._name(SHORT.get(event.function, event.function))}({', '.join(given)})"
            for which, slot in event.made:
                yield f"t{slot} = out" if which is None else f"t{slot} = out[{which}]"
                yield from self._address(slot)
            yield "out = None"
        else:
            kernel, hooks = event.kernel, (None, None, None)  # nothing looks on: replay.py asks
            start = *event.grid, STREAM, kernel.function, kernel.packed_metadata, *hooks, *event.args
            function, args = started_by(kernel.run, start)
            yield f"{self._name(function)}({', '.join(map(self._text, args))})"

    def _layout(self, made: Made) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shape and strides in which a tensor is made: its own or, if all that is used of it is one view
        of the whole, those of the view."""
        views = {place.view for place in self.places if place.slot == made.slot}
        if len(views) == 1 and (view := next(iter(views))) is not None:
            shape, strides, offset = view
            length = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
            if offset == 0 and length == math.prod(shape) == math.prod(made.shape):
                self.whole.add(made.slot)
                return shape, strides
        return made.shape, made.strides

    def _address(self, slot: int) -> Iterator[str]:
        if slot in self.addressed:
            yield f"a{slot} = t{slot}.data_ptr()"

    def _text(self, value: Any) -> str:
        """Returns an argument or a result as it is written."""
        if isinstance(value, Place):
            slot, view = value
            if view is None or slot in self.whole:
                return f"t{slot}"
            shape, strides, offset = view
            start = f", t{slot}.storage_offset() + {offset}" if offset else ""  # its own, by default
            return f"t{slot}.as_strided({shape}, {strides}{start})"
        if isinstance(value, Places):
            return f"[{', '.join(map(self._text, value))}]"
        if isinstance(value, Address):
            return f"a{value.slot} + {value.offset}" if value.offset else f"a{value.slot}"
        if value is STREAM:
            return "stream"
        if isinstance(value, Counters):
            return f"{self._name(address)}({self._name(value.device)}, stream)"
        if type(value) is tuple:
            return _tuple(list(map(self._text, value)))
        return repr(value) if value is None or type(value) in (bool, int) else self._name(value)

    def _name(self, value: Any) -> str:
        """Returns the name that a value is bound to."""
        base = re.sub(r"\W", "_", getattr(value, "__name__", type(value).__name__))
        name = self.names.setdefault(id(value), f"{base}_{len(self.names)}")
        self.bound[name] = value
        return name


def _tuple(texts: list[str]) -> str:
    return f"({''.join(f'{text}, ' for text in texts)})"


def _arguments(event: Event) -> tuple[Any, ...]:
    return () if isinstance(event, Made) else event.args


def _leaves(value: Any) -> Iterator[Any]:
    """Yields what a nesting of lists and tuples holds; a Place and an Address are no nesting."""
    if isinstance(value, (list, tuple)) and not isinstance(value, (Place, Address)):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


def _slots(event: Event) -> set[int]:
    made = {event.slot} if isinstance(event, Made) else set()
    made |= {slot for _, slot in event.made} if isinstance(event, Asked) else set()
    return made | {leaf.slot for leaf in _leaves(_arguments(event)) if isinstance(leaf, (Place, Address))}
