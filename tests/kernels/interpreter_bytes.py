"""Counts what a kernel moves while Triton's interpreter runs it: the distinct bytes that each launch loads and stores.

An element that a launch reads again comes from a cache, one that a later launch reads comes from memory: so an
address counts once a launch.  That is what an op declares as its cost (tpfuse/kernels/runtime/op.py).
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import numpy as np
from triton.runtime import interpreter

from tpfuse.kernels.runtime import launch as _launch
from tpfuse.kernels.runtime.op import Op


@dataclass
class Moved:
    read: int = 0
    written: int = 0
    loads: int = 0  # bytes, counted every time
    stores: int = 0


class _Recorder:
    """Stands in for the interpreter's native loads and stores."""

    def __init__(self, native):
        self.native, self.moved, self.addresses = native, Moved(), {"load": [], "store": []}

    def __getattr__(self, name):
        return getattr(self.native, name)

    def _note(self, kind, pointers, mask, itemsize):
        at = np.broadcast_to(pointers, np.broadcast_shapes(pointers.shape, mask.shape))[
            np.broadcast_to(mask, pointers.shape)
        ]
        self.addresses[kind].append((at, itemsize))

    def load(self, pointers, mask, other, dtype):
        self._note("load", pointers, mask, np.dtype(dtype).itemsize)
        return self.native.load(pointers, mask, other, dtype)

    def store(self, pointers, value, mask):
        self._note("store", pointers, mask, value.dtype.itemsize)
        return self.native.store(pointers, value, mask)

    def end_launch(self):
        totals = []
        for seen in self.addresses.values():
            sizes = {size for _, size in seen}
            distinct = sum(size * len(np.unique(np.concatenate([at for at, s in seen if s == size]))) for size in sizes)
            totals.append((distinct, sum(at.size * size for at, size in seen)))
            seen.clear()
        (read, loads), (written, stores) = totals
        self.moved.read, self.moved.written = self.moved.read + read, self.moved.written + written
        self.moved.loads, self.moved.stores = self.moved.loads + loads, self.moved.stores + stores


@contextlib.contextmanager
def count_bytes() -> Iterator[Moved]:
    """``with count_bytes() as moved: launcher(...)``"""
    recorder, start = _Recorder(interpreter._interpreter), _launch._start

    def counted(*args, **call):
        start(*args, **call)
        recorder.end_launch()

    with mock.patch.object(interpreter, "_interpreter", recorder), mock.patch.object(_launch, "_start", counted):
        yield recorder.moved


def assert_declared(op: Op, args: tuple) -> Moved:
    """The op declares exactly what its launcher moves."""
    with count_bytes() as moved:
        outputs = op.launch(*args)
    cost = op.cost(args, outputs)
    assert (moved.read, moved.written) == (cost.read, cost.written), f"{op.name}: moved {moved}, declared {cost}"
    return moved
