"""A Python function that repeats recorded events on other tensors of the same shapes.

It has a line for each event: it allocates, calls torch, and starts compiled kernels with addresses.  A tensor is freed
after its last use, so that a replay holds no more memory than the recorded call did.  ``print(tape.source)`` shows it.
"""

import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..runtime.counters import address
from ..runtime.triton import started_by
from .recorder import (
    Address,
    Allocation,
    CounterAddress,
    Event,
    Recorder,
    TensorSource,
    TensorSources,
    TorchCall,
    Unrepeatable,
)

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
    """The events of a call, and its outputs.  The function is written when it is first needed: many kinds come once."""

    def __init__(self, events: Sequence[Event], arguments: int, outputs: Sequence[Any], single: bool):
        self.events, self.outputs = events, outputs
        self.arguments = arguments  # number of tensors in the call
        self.single = single  # the function returns one tensor, not a tuple

    @functools.cached_property
    def _writer(self) -> "_Writer":
        return _Writer(self)

    @property
    def source(self) -> str:
        return self._writer.source

    @functools.cached_property
    def replay(self) -> Callable[[Sequence[Tensor], list[int], int], Any]:
        """The function: (tensors, addresses, stream) -> what the recorded one would return for ``tensors``, which lie
        at ``addresses``."""
        exec(self._writer.source, self._writer.bound)
        return self._writer.bound["replay"]


def tape(recorded: Recorder, result: Any) -> Tape | None:
    """Returns the tape of a call that returned ``result``, a tensor or a tuple of tensors and constants; None if it
    cannot be repeated."""
    single = isinstance(result, Tensor)
    try:
        outputs = [recorded.source(t) if isinstance(t, Tensor) else t for t in ((result,) if single else result)]
    except Unrepeatable:
        return None
    if recorded.broken or not recorded.events:
        return None
    return Tape(recorded.events, len(recorded.arguments), outputs, single)


class _Writer:
    """Writes a tape's source: the i-th slot's tensor is t<i>, and it lies at a<i>."""

    def __init__(self, tape: Tape):
        self.bound: dict[str, Any] = {}  # by name: what has no literal
        self.names: dict[int, str] = {}  # those of ``bound``, by identity
        leaves = list(_leaves([tape.outputs, *map(_arguments, tape.events)]))
        self.sources = [leaf for leaf in leaves if isinstance(leaf, TensorSource)]
        self.addressed = {leaf.slot for leaf in leaves if isinstance(leaf, Address)}
        self.reshaped: set[int] = set()  # slots whose tensors are made in the shape of their one view
        self.source = self._source(tape)

    def _source(self, tape: Tape) -> str:
        events, arguments = tape.events, tape.arguments
        last_use = {slot: i for i, event in enumerate(events) for slot in _slots(event)}
        returned = {leaf.slot for leaf in _leaves(tape.outputs) if isinstance(leaf, TensorSource)}
        used = returned.union(*(_slots(event) for event in events if not isinstance(event, Allocation)))
        names = [f"{''.join(f'{letter}{i}, ' for i in range(arguments))}" for letter in "ta"]
        lines = [f"{names[0]}= tensors", f"{names[1]}= addresses"]
        for i, event in enumerate(events):
            if isinstance(event, Allocation) and event.slot not in used:  # as an op's empty result
                continue
            lines += self._step(event)
            ended = sorted(s for s in _slots(event) if last_use[s] == i and s >= arguments and s not in returned)
            lines += [f"t{slot} = None" for slot in ended]
        results = [self._text(output) for output in tape.outputs]
        lines.append(f"return {results[0] if tape.single else _tuple(results)}")
        return "\n    ".join(["def replay(tensors, addresses, stream):", *lines]) + "\n"

    def _step(self, event: Event) -> Iterator[str]:
        if isinstance(event, Allocation):
            shape, strides = self._layout(event)
            if shape == (0,):  # stands for an output that is not there: every replay returns the same one
                with torch.inference_mode(False):  # a later call may save it for backward
                    empty = torch.empty(0, dtype=event.dtype, device=event.device)
                yield f"t{event.slot} = {self._name(empty)}"
                return
            yield f"t{event.slot} = {self._name(ALLOCATE[event.device])}({shape}, {strides}, {self._name(event.dtype)})"
            yield from self._address(event.slot)
        elif isinstance(event, TorchCall):
            args = [self._text(arg) for arg in event.args]
            args += [f"{name}={self._text(value)}" for name, value in event.options.items()]
            yield f"out = {self._name(SHORT.get(event.function, event.function))}({', '.join(args)})"
            for index, slot in event.results:
                yield f"t{slot} = out" if index is None else f"t{slot} = out[{index}]"
                yield from self._address(slot)
            yield "out = None"
        else:
            kernel, hooks = event.kernel, (None, None, None)  # calls.py asks whether something looks on
            start = *event.grid, STREAM, kernel.function, kernel.packed_metadata, *hooks, *event.args
            function, parameters = started_by(kernel.run, start)
            yield f"{self._name(function)}({', '.join(map(self._text, parameters))})"

    def _layout(self, allocation: Allocation) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shape and strides to allocate: a tensor's own or, if it is used as one view of all of it and no
        otherwise, those of the view."""
        views = {source.view for source in self.sources if source.slot == allocation.slot}
        if len(views) == 1 and (view := next(iter(views))) is not None:
            shape, strides, offset = view
            length = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
            if offset == 0 and length == math.prod(shape) == math.prod(allocation.shape):
                self.reshaped.add(allocation.slot)
                return shape, strides
        return allocation.shape, allocation.strides

    def _address(self, slot: int) -> Iterator[str]:
        if slot in self.addressed:
            yield f"a{slot} = t{slot}.data_ptr()"

    def _text(self, value: Any) -> str:
        """Returns an argument or a result as it is written."""
        if isinstance(value, TensorSource):
            slot, view = value
            if view is None or slot in self.reshaped:
                return f"t{slot}"
            shape, strides, offset = view
            start = f", t{slot}.storage_offset() + {offset}" if offset else ""  # its own, by default
            return f"t{slot}.as_strided({shape}, {strides}{start})"
        if isinstance(value, TensorSources):
            return f"[{', '.join(map(self._text, value))}]"
        if isinstance(value, Address):
            return f"a{value.slot} + {value.offset}" if value.offset else f"a{value.slot}"
        if value is STREAM:
            return "stream"
        if isinstance(value, CounterAddress):
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
    return () if isinstance(event, Allocation) else event.args


def _leaves(value: Any) -> Iterator[Any]:
    """Yields what a nesting of lists and tuples holds; a TensorSource and an Address are no nesting."""
    if isinstance(value, (list, tuple)) and not isinstance(value, (TensorSource, Address)):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


def _slots(event: Event) -> set[int]:
    new = {event.slot} if isinstance(event, Allocation) else set()
    new |= {slot for _, slot in event.results} if isinstance(event, TorchCall) else set()
    return new | {leaf.slot for leaf in _leaves(_arguments(event)) if isinstance(leaf, (TensorSource, Address))}
