"""What a function of tensors did, done again without its Python.

A :class:`Tape` is made of what was recorded, and repeats it on other tensors of the same shapes: it allocates, calls
torch, and starts compiled kernels with addresses.  What was made is freed after its last use, so that a replay holds no
more memory than the function did.
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .recorder import Address, Asked, Made, Place, Places, Recorder, Started, Unrepeatable

SHORT: dict[Any, Callable[..., Any]] = {  # the same op, by a shorter way in
    torch.ops.aten.mm.default: torch.mm,
    torch.ops.aten.addmm.default: torch.addmm,
    torch.ops.aten.clone.default: torch.clone,
}

Offsets = tuple[tuple[int, int], ...]  # (index among the values, bytes from the start of a slot's tensor)
Step = Callable[[list[Any], list[Any], int], None]  # of addresses and constants, of tensors, on a stream


class Tape(NamedTuple):
    """What is done in each replay, in order.

    ``values`` are the addresses of the slots' tensors, then those at an offset from one, then kernels' constants;
    addresses stand there as 0 and are filled in as they become known.
    """

    values: list[Any]
    blank: list[None]  # one for each slot beyond the arguments
    offsets: tuple[tuple[int, int, int], ...]  # (index, argument, offset): addresses known from the start
    steps: tuple[Step, ...]
    outputs: tuple[Place | None, ...]
    single: bool  # the function returns one tensor, not a tuple

    def replay(self, tensors: list[Tensor], addresses: list[int], stream: int) -> Any:
        """Returns what the function would return for ``tensors``, which lie at ``addresses``."""
        values = self.values.copy()
        values[: len(addresses)] = addresses
        for index, given, offset in self.offsets:
            values[index] = addresses[given] + offset
        slots: list[Any] = [*tensors, *self.blank]
        for step in self.steps:
            step(values, slots, stream)
        if self.single:
            (place,) = self.outputs
            return None if place is None else place.find(slots)
        return tuple([None if place is None else place.find(slots) for place in self.outputs])


def tape(recorded: Recorder, result: Any) -> Tape | None:
    """Returns the tape of what gave ``result``, a tensor or a tuple of tensors and Nones; None where none can be."""
    single = isinstance(result, Tensor)
    try:
        outputs = tuple(None if t is None else recorded.place(t) for t in ((result,) if single else result))
    except Unrepeatable:
        return None
    if recorded.broken or not recorded.events:
        return None
    return _Writer(recorded, outputs).tape(single)


class _Writer:
    """Makes a tape's steps of what was recorded."""

    def __init__(self, recorded: Recorder, outputs: tuple[Place | None, ...]):
        self.recorded, self.outputs = recorded, outputs
        self.count = len(recorded.slots)
        arguments = [a for e in recorded.events if isinstance(e, Started) for a in _leaves(e.args)[0]]
        distinct = dict.fromkeys(a for a in arguments if isinstance(a, Address) and a.offset)
        self.derived = {a: self.count + i for i, a in enumerate(distinct)}
        self.constants: list[Any] = []

    def _offsets(self, slot: int) -> Offsets:
        return tuple((index, a.offset) for a, index in self.derived.items() if a.slot == slot)

    def _place(self, leaf: Any) -> int:
        """Returns where a kernel's argument stands among the values."""
        if isinstance(leaf, Address):
            return self.derived[leaf] if leaf.offset else leaf.slot
        self.constants.append(leaf)
        return self.count + len(self.derived) + len(self.constants) - 1

    def _step(self, event: Made | Asked | Started) -> Step:
        if isinstance(event, Made):
            return _allocate(event, self._offsets(event.slot))
        if isinstance(event, Asked):
            return _ask(event, tuple((i, slot, self._offsets(slot)) for i, slot in event.made))
        flat, where = _leaves(event.args)
        return _start(event.kernel[event.grid], operator.itemgetter(*map(self._place, flat)), where)

    def tape(self, single: bool) -> Tape:
        last = {slot: i for i, event in enumerate(self.recorded.events) for slot in _slots(event)}
        kept = {place.slot for place in self.outputs if place is not None}
        given = len(self.recorded.given)
        used = kept.union(*(_slots(event) for event in self.recorded.events if not isinstance(event, Made)))
        steps: list[Step] = []
        for i, event in enumerate(self.recorded.events):
            if isinstance(event, Made) and event.slot not in used:  # as an op's result that nobody looks at
                continue
            steps.append(self._step(event))
            if ended := tuple(s for s in _slots(event) if last[s] == i and s >= given and s not in kept):
                steps.append(_free(ended))
        offsets = tuple((index, slot, offset) for slot in range(given) for index, offset in self._offsets(slot))
        values = [0] * (self.count + len(self.derived)) + self.constants
        blank = [None] * (self.count - given)
        return Tape(values, blank, offsets, steps=tuple(steps), outputs=self.outputs, single=single)


def _slots(event: Made | Asked | Started) -> set[int]:
    if isinstance(event, Made):
        return {event.slot}
    if isinstance(event, Asked):
        places = [a for a in event.args if isinstance(a, Place)]
        places += [place for a in event.args if isinstance(a, Places) for place in a]
        return {place.slot for place in places} | {slot for _, slot in event.made}
    return {a.slot for a in _leaves(event.args)[0] if isinstance(a, Address)}


def _leaves(args: tuple[Any, ...]) -> tuple[list[Any], tuple[int | slice, ...]]:
    """Returns a kernel's arguments with records spelled out, and where each is: an index, or a record's slice."""
    flat: list[Any] = []
    where: list[int | slice] = []
    for arg in args:
        if type(arg) is tuple and any(isinstance(part, Address) for part in arg):
            where.append(slice(len(flat), len(flat) + len(arg)))
            flat += arg
        else:
            where.append(len(flat))
            flat.append(arg)
    return flat, tuple(where)


# ---- steps ----


_FOUND = {Place, Places}


def _allocate(made: Made, offsets: Offsets) -> Step:
    slot, like = made
    empty_like, contiguous = torch.empty_like, torch.contiguous_format

    def allocate(values: list[Any], slots: list[Any], stream: int) -> None:
        t = slots[slot] = empty_like(like, memory_format=contiguous)
        address = values[slot] = t.data_ptr()
        for index, offset in offsets:
            values[index] = address + offset

    return allocate


def _ask(asked: Asked, made: tuple[tuple[int, int, Offsets], ...]) -> Step:
    function, args, options = SHORT.get(asked.function, asked.function), asked.args, asked.options

    def ask(values: list[Any], slots: list[Any], stream: int) -> None:
        out = function(*[a.find(slots) if type(a) in _FOUND else a for a in args], **options)
        for i, slot, offsets in made:
            t = slots[slot] = out if isinstance(out, Tensor) else out[i]
            address = values[slot] = t.data_ptr()
            for index, offset in offsets:
                values[index] = address + offset

    return ask


def _start(start: Callable[..., Any], gather: Callable[..., Any], where: tuple[int | slice, ...]) -> Step:
    def run(values: list[Any], slots: list[Any], stream: int) -> None:
        flat = gather(values)
        start(*[flat[part] for part in where], stream=stream)

    return run


def _free(ended: tuple[int, ...]) -> Step:
    def free(values: list[Any], slots: list[Any], stream: int) -> None:
        for slot in ended:
            slots[slot] = None

    return free
