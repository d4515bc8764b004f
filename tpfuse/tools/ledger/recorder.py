"""The ledger: every op that runs under it, with the bytes it moves, the least it could move, and its flops.

    with Ledger() as ledger:
        model(ids, labels=ids).loss.backward()
    print(ledger)

Meta tensors will do: then nothing is allocated and nothing computed.  It sees one rank's ops.  tpfuse's ops declare
their own costs beside their kernels; other ops are counted as in :mod:`.aten`.  Ops inside backward are called
backward, those of a recomputed forward too.  An op of a block belongs to the stretch that the block said had begun, in
backward to the one in which its node was made; a sum of two gradients to the stretch whose gradient came second.
"""

import bisect
import functools
import time
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...kernels.runtime.op import NAMESPACE, OPS, least
from ...layers.wiring import WATCHERS
from ...parallel import resolve
from . import aten
from .text import quantity, table

FORWARD, BACKWARD = PHASES = "forward", "backward"

TILE = 128  # rows and columns of a result that a multiprocessor makes at once, of most GEMM kernels


class Entry(NamedTuple):
    """One call.

    ``read`` and ``written`` are bytes of this rank's memory, ``least`` the lower bound on their sum, ``wire`` bytes
    sent to other ranks.  ``inputs`` and ``outputs`` are (storage number, bytes), the same number wherever the same
    storage is seen.  ``drops``: the call makes a dropout mask.  ``scores``: those that attention makes.  ``ranks``:
    how many a gather or an exchange of rows is among; 0: not known, the tensor-parallel ones.  ``group``: the name of
    a collective's process group.  ``tiles``: of TILE x TILE elements in a GEMM's result; 0: not known.  ``stretch``: of
    a block, as its wiring names them; "" outside of blocks.
    """

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
    ranks: int = 0
    group: str = ""
    tiles: int = 0
    stretch: str = ""

    @property
    def moved(self) -> int:
        return self.read + self.written


class Row(NamedTuple):
    """A sum of entries."""

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
    return Row(len(entries), **{field: sum(getattr(e, field) for e in entries) for field in Row._fields[1:]})


class _Stretches:
    """The stretch of a block that runs now.  Nodes of autograd are numbered in the order in which they are made, so a
    node's number says in which stretch that was."""

    def __init__(self) -> None:
        self._starts, self._names = [0], [""]  # the number of the first node of each stretch, and its name
        self._backward = self._previous = ""  # what a backward pass said that begins; the stretch of the op before

    def begin(self, stretch: str) -> None:
        node = torch._C._current_autograd_node()
        if node is not None and not torch.is_grad_enabled():
            self._backward = stretch
        else:
            self._starts.append(torch.autograd._get_sequence_nr())
            self._names.append(stretch)

    @property
    def current(self) -> str:
        if torch._C._current_graph_task_id() < 0:
            return self._names[-1]
        node = torch._C._current_autograd_node()
        if self._backward or node is None:
            return self._backward or self._previous
        stretch = self._names[bisect.bisect_right(self._starts, node._sequence_nr()) - 1]
        self._previous = stretch or self._previous
        return self._previous


class Ledger(TorchDispatchMode):
    """Records every op while it is on: ``with Ledger() as ledger``.

    ``timed=True`` measures each op's seconds too (real tensors only).  ``entries`` are in order.  ``live``: the bytes
    alive now, of tensors made while it was on; ``peak``: the most alive at once.
    """

    def __init__(self, *, timed: bool = False):
        super().__init__()
        self.entries: list[Entry] = []
        self.timed, self.live, self.peak = timed, 0, 0
        # by address of the Python object, which lives as long as the storage
        self._storages: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        self._count = 0
        self._stretches = _Stretches()

    def __enter__(self) -> "Ledger":
        WATCHERS.append(self._stretches.begin)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        WATCHERS.remove(self._stretches.begin)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        began = self._clock(args)
        outputs = func(*args, **kwargs)
        seconds = self._clock(args) - began if self.timed else 0.0
        ours = func.namespace == NAMESPACE
        if ours:
            op = OPS[func._opname]
            cost = op.cost(op.pack(args), outputs)
            bound = least(args, (outputs,) if isinstance(outputs, Tensor) else tuple(outputs))
            name, kind = op.name, op.kind
        else:
            cost = bound = aten.cost(func, args, kwargs, outputs)
            name = func._schema.name.split("::")[1]
            kind = aten.kind(name, func.namespace)
        inputs = self._numbered(tree_leaves((args, kwargs)), new=False)
        results = self._numbered(tree_leaves(outputs), new=True)
        if cost.read or cost.written:
            phase = BACKWARD if torch._C._current_graph_task_id() >= 0 else FORWARD
            wire = _wire(name, args) if kind == aten.COMMUNICATION else cost.sent
            named = zip(func._schema.arguments, args)
            drops = ours and any(a.name.split("_")[-1] == "rng" and value is not None for a, value in named)
            entry = Entry(
                name,
                kind,
                phase,
                read=cost.read,
                written=cost.written,
                least=bound.read + bound.written,
                flops=cost.flops,
                wire=wire,
                seconds=seconds,
                inputs=inputs,
                outputs=results,
                drops=drops,
                scores=cost.scores,
                ranks=_ranks(name, args),
                group=next((a for a in reversed(args) if isinstance(a, str)), "") if wire else "",
                tiles=_tiles(cost.flops, args, outputs) if kind == aten.GEMM else 0,
                stretch=self._stretches.current,
            )
            self.entries.append(entry)
        return outputs

    def _clock(self, args: tuple[Any, ...]) -> float:
        if not self.timed:
            return 0.0
        if any(isinstance(a, Tensor) and a.is_cuda for a in args):
            torch.cuda.synchronize()
        return time.perf_counter()

    def _numbered(self, leaves: list[Any], new: bool) -> tuple[tuple[int, int], ...]:
        """Returns the tensors' storages by number; new ones that an op has made are alive until they are freed."""
        sizes = {}
        for t in leaves:
            if not isinstance(t, Tensor) or t.layout != torch.strided:
                continue
            storage = t.untyped_storage()
            key, size = id(storage), storage.nbytes()
            if key not in self._storages:
                self._count += 1
                freed = functools.partial(self._freed, key, size * new)
                self._storages[key] = self._count, weakref.ref(storage, freed)
                self.live += size * new
                self.peak = max(self.peak, self.live)
            sizes[self._storages[key][0]] = t.nbytes
        return tuple(sizes.items())

    def _freed(self, key: int, size: int, _: object) -> None:
        del self._storages[key]
        self.live -= size

    # ---- sums ----

    def total(self, **values: str) -> Row:
        """Returns the sum of all entries, or with ``kind="GEMM", phase="forward"`` of those only."""
        return add_up(e for e in self.entries if all(getattr(e, key) == value for key, value in values.items()))

    def sums(self, *keys: str) -> dict[tuple[str, ...], Row]:
        """Returns sums by any of op, kind and phase, in order of appearance."""
        groups: dict[tuple[str, ...], list[Entry]] = {}
        for e in self.entries:
            groups.setdefault(tuple(getattr(e, key) for key in keys), []).append(e)
        return {key: add_up(entries) for key, entries in groups.items()}

    def __str__(self) -> str:
        sums = sorted(self.sums("kind", "phase").items(), key=lambda item: aten.KINDS.index(item[0][0]))
        rows: list[tuple[object, ...]] = []
        for names, row in [*sums, (("total", ""), self.total())]:
            sizes = (quantity(n, "B") for n in (row.read, row.written, row.least, row.wire))
            rows.append((*names, row.calls, *sizes, quantity(row.flops, "flop")))
        return table(("kind", "", "calls", "read", "written", "at least", "sent", "computed"), rows)


def _wire(name: str, args: tuple[Any, ...]) -> int:
    """Returns the bytes that this rank sends: its shard to each peer, a part of what it has to each, or so many of its
    rows.

    Other collectives count their inputs.
    """
    if name in ("all_gather", "all_gather_copies"):
        return int(args[0].nbytes * (args[1] - 1))
    if name == "exchange_rows":
        x, sent, _, group_name = args
        return x.nbytes // max(len(x), 1) * (sum(sent) - sent[resolve(group_name).rank()])
    if name.startswith("recv"):
        return 0
    if name == "all_to_all":
        return args[0].nbytes * (len(args[0]) - 1) // max(len(args[0]), 1)
    return sum(t.nbytes for t in tree_leaves(args) if isinstance(t, Tensor))


def _ranks(name: str, args: tuple[Any, ...]) -> int:
    """Returns the number of ranks that a call's rows come from or go to; 0 for other calls."""
    if name == "all_gather":
        return int(args[1])
    return len(args[1]) if name == "exchange_rows" else 0


def _tiles(flops: int, args: tuple[Any, ...], outputs: object) -> int:
    """Returns the tiles of the output that is a product [.., M, N]: its elements, times twice the K of an operand, are
    the flops.  0 where there is none, as where the call makes other things of its products."""
    operands = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
    lengths = {n for t in operands for n in t.shape}
    batched = all(t.dim() == 3 for t in operands)
    for y in tree_leaves(outputs):
        if isinstance(y, Tensor) and y.dim() > 1 and y.numel() and flops % (2 * y.numel()) == 0:
            if flops // (2 * y.numel()) in lengths:
                count, columns = len(y) if batched else 1, y.shape[-1]
                return count * tiles(y.numel() // (count * columns), columns)
    return 0


def tiles(rows: int, columns: int) -> int:
    """Returns the tiles of a matrix."""
    return -(-rows // TILE) * -(-columns // TILE)


def mue(least: float, moved: float, seconds: float, bandwidth: float) -> float:
    """Returns memory usage efficiency in % (Ivanov et al. 2020, arXiv:2007.00072): (Q / D) (B / B^) 100.

    Q = ``least`` bytes that must move, D = ``moved`` bytes that do, B = D / ``seconds`` the bandwidth reached, B^ =
    ``bandwidth``, bytes a second at best.
    """
    return 100 * (least / moved) * (moved / seconds / bandwidth)
