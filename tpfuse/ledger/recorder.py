"""The ledger: every op that runs under it, with the bytes it moves, the least it could move, and its flops.

    with Ledger() as ledger:
        model(ids, labels=ids).loss.backward()
    print(ledger)

Meta tensors will do: then nothing is allocated and nothing computed.  What it sees is one rank's.  tpfuse's ops declare their own
costs beside their kernels; other ops are counted as in :mod:`.aten`.  What runs inside backward is called backward, a recomputed
forward too.
"""

import time
import weakref
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..kernels._op import NAMESPACE, OPS, least
from . import aten
from .text import quantity, table

FORWARD, BACKWARD = PHASES = "forward", "backward"
_OURS = {  # by the beginning of an op's name; what is not here is elementwise
    "linear_cross": aten.GEMM,
    "linear": aten.GEMM,
    "gather": aten.GEMM,
    "attention": aten.ATTENTION,
    "norm": aten.NORM,
    "reduce_bias_dropout_add_norm": aten.NORM,
    "embed_finish": aten.NORM,
    "all_gather": aten.COMMUNICATION,
    "all_to_all": aten.COMMUNICATION,
}


class Entry(NamedTuple):
    """One call.  ``read`` and ``written`` bytes of this rank's memory, ``least`` the lower bound on their sum, ``wire`` bytes sent to
    other ranks; ``inputs`` and ``outputs`` (storage number, bytes), the same number wherever the same storage is seen; ``drops``: one of
    tpfuse's ops with a dropout mask to make; ``scores`` of attention."""

    op: str
    kind: str
    phase: str
    read: int
    written: int
    least: int
    flops: int
    wire: int = 0
    seconds: float = 0.0
    inputs: tuple[tuple[int, int], ...] = ()
    outputs: tuple[tuple[int, int], ...] = ()
    drops: bool = False
    scores: int = 0

    @property
    def moved(self) -> int:
        return self.read + self.written


class Row(NamedTuple):
    """Some entries in sum."""

    calls: int = 0
    read: int = 0
    written: int = 0
    least: int = 0
    flops: int = 0
    wire: int = 0
    seconds: float = 0.0

    @property
    def moved(self) -> int:
        return self.read + self.written


def add_up(entries: Iterable[Entry]) -> Row:
    entries = list(entries)
    return Row(len(entries), *(sum(getattr(e, field) for e in entries) for field in Row._fields[1:]))


class Ledger(TorchDispatchMode):
    """Records while it is on (``with Ledger() as ledger``); ``timed=True`` measures each op's seconds too (real tensors only).

    ``entries`` in order; ``peak`` the most bytes alive at once of what was made while it was on, ``live`` those alive now.
    """

    def __init__(self, *, timed: bool = False):
        super().__init__()
        self.entries: list[Entry] = []
        self.timed, self.live, self.peak = timed, 0, 0
        self._storages: dict[int, tuple[int, weakref.ref]] = {}  # by address of the Python object, which lives as long as the storage
        self._count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        began = self._clock(args)
        outputs = func(*args, **kwargs)
        seconds = self._clock(args) - began if self.timed else 0.0
        ours = func.namespace == NAMESPACE
        if ours:
            op = OPS[func._opname]
            cost, bound = op.cost(args, outputs), least(args, (outputs,) if isinstance(outputs, Tensor) else tuple(outputs))
            name, kind = op.name, next((k for start, k in _OURS.items() if op.name.startswith(start)), aten.ELEMENTWISE)
        else:
            cost = bound = aten.cost(func, args, kwargs, outputs)
            name = func._schema.name.split("::")[1]
            kind = aten.kind(name, func.namespace)
        came, went = self._seen(tree_leaves((args, kwargs)), made=False), self._seen(tree_leaves(outputs), made=True)
        if cost.read or cost.written:
            phase = BACKWARD if torch._C._current_graph_task_id() >= 0 else FORWARD
            wire = _wire(name, args) if kind == aten.COMMUNICATION else cost.sent
            drops = ours and any(a.name == "rng" and value is not None for a, value in zip(func._schema.arguments, args))
            numbers = *cost[:2], bound.read + bound.written, cost.flops, wire, seconds
            self.entries.append(Entry(name, kind, phase, *numbers, came, went, drops, cost.scores))
        return outputs

    def _clock(self, args: tuple) -> float:
        if not self.timed:
            return 0.0
        if any(isinstance(a, Tensor) and a.is_cuda for a in args):
            torch.cuda.synchronize()
        return time.perf_counter()

    def _seen(self, leaves: list, made: bool) -> tuple[tuple[int, int], ...]:
        """The tensors' storages by number; new ones that an op has made are alive until they are freed."""
        found = {}
        for t in leaves:
            if not isinstance(t, Tensor) or t.layout != torch.strided:
                continue
            storage = t.untyped_storage()
            key, size = id(storage), storage.nbytes()
            if key not in self._storages:
                self._count += 1
                self._storages[key] = self._count, weakref.ref(storage, lambda _, key=key, size=size * made: self._freed(key, size))
                self.live += size * made
                self.peak = max(self.peak, self.live)
            found[self._storages[key][0]] = t.element_size() * t.numel()
        return tuple(found.items())

    def _freed(self, key: int, size: int) -> None:
        del self._storages[key]
        self.live -= size

    # ---- what it says ----

    def total(self, **which: str) -> Row:
        """In sum; ``total(kind="GEMM", phase="forward")`` of those only."""
        return add_up(e for e in self.entries if all(getattr(e, key) == value for key, value in which.items()))

    def by(self, *keys: str) -> dict[tuple[str, ...], Row]:
        """Sums by any of op, kind and phase, in order of appearance."""
        groups: dict[tuple[str, ...], list[Entry]] = {}
        for e in self.entries:
            groups.setdefault(tuple(getattr(e, key) for key in keys), []).append(e)
        return {key: add_up(entries) for key, entries in groups.items()}

    def __str__(self) -> str:
        rows = [
            (kind, phase, row.calls, *(quantity(n, "B") for n in (row.read, row.written, row.least, row.wire)), quantity(row.flops, "flop"))
            for (kind, phase), row in sorted(self.by("kind", "phase").items(), key=lambda item: aten.KINDS.index(item[0][0]))
        ]
        all_of = self.total()
        bytes_of = (quantity(n, "B") for n in (all_of.read, all_of.written, all_of.least, all_of.wire))
        rows.append(("total", "", all_of.calls, *bytes_of, quantity(all_of.flops, "flop")))
        return table(("kind", "", "calls", "read", "written", "at least", "sent", "computed"), rows)


def _wire(name: str, args: tuple) -> int:
    """Bytes that this rank sends: its shard to each peer, or a part of what it has to each; of other collectives, what goes in."""
    size = lambda t: t.element_size() * t.numel()  # noqa: E731
    if name in ("all_gather", "all_gather_copies"):
        return size(args[0]) * (args[1] - 1)
    if name == "all_to_all":
        return size(args[0]) * (len(args[0]) - 1) // max(len(args[0]), 1)
    return sum(size(t) for t in tree_leaves(args) if isinstance(t, Tensor))


def mue(least: float, moved: float, seconds: float, bandwidth: float) -> float:
    """Memory usage efficiency, % (Ivanov et al. 2020, arXiv:2007.00072): (Q / D) (B / B^) 100.

    Q = ``least`` bytes that must move, D = ``moved`` bytes that do, B = D / ``seconds`` the bandwidth reached, B^ = ``bandwidth``, bytes
    a second at best.
    """
    return 100 * (least / moved) * (moved / seconds / bandwidth)
