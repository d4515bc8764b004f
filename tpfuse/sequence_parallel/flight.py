"""Row tiles on their way between ranks while GEMMs run: crossings.exchange, piece by piece.

A tile of m rows travels in pieces of m/2, m/4, ... rows.  Incoming rows start with the largest piece: it lands while
this rank's own rows are multiplied, and each next piece while the one before it is, so that little remains to be done
after the last has landed.  Outgoing rows have the reverse order: the first leaves early.  Every rank posts the same
messages in the same order, the one to the rank s further on with that from the rank s before: nothing waits in a
circle, on a stream or off it.
"""

from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from ..collectives import named
from ..parallel import resolve
from ..ranks import gloo

# A piece has at least so many.  On a CPU a step over 1 Gbit/s takes 2 to 3 % more in pieces of 64, as bf16 GEMMs pack W
# each time, and no less in pieces of 512 (bench.overlap).
LEAST_ROWS = 256


def pieces(rows: int) -> list[slice]:
    """Cuts off half of the remaining rows, in multiples of LEAST_ROWS, again and again; larger pieces come first."""
    cut, start = [], 0
    while rows - start >= 2 * LEAST_ROWS:
        half = -(-(rows - start) // (2 * LEAST_ROWS)) * LEAST_ROWS
        cut.append(slice(start, start + half))
        start += half
    return [*cut, slice(start, rows)] if start < rows else cut


def in_pairs(x: Tensor) -> bool:
    """Whether a receive is posted with its send.  NCCL runs messages of one stream in order, and receives posted alone
    would wait in a circle."""
    return not x.is_cpu


_WAY_BACK: "WeakKeyDictionary[dist.ProcessGroup, Any]" = WeakKeyDictionary()


def way_back(group: dist.ProcessGroup) -> Any:
    """Returns connections of the same ranks, for rows to lower ranks, so that each of gloo's carries rows one way only.

    If they go both ways, gloo's thread and this one compete for the connection, and the thread spins in epoll_wait for
    it, on a core that multiplies (seen with perf).
    """
    if group not in _WAY_BACK:
        _WAY_BACK[group] = gloo.connect(group)
    return _WAY_BACK[group]


class Flight:
    """An exchange of tiles on its way, x [R, m, D] -> into [R, m, D], tile r to and from rank r; a gather if x is one
    shard with stride 0.

    ``cut`` are a tile's pieces in the order in which they will be posted.  The caller fills the own tile of ``into``,
    or with ``own`` post_all does.  x may lack its own tile: it is then [R - 1, m, D], in the order of ``after``.  x may
    be written until its rows are posted, and not afterwards.  Flights are made in the order in which their rows will
    leave, and best all before the first are posted: a request for rows made while others come waits behind them.
    """

    def __init__(self, what: str, x: Tensor, into: Tensor, group_name: str, cut: list[slice], own: bool = False):
        self.what, self.group, self.cut, self.own = what, resolve(group_name), cut, own
        self.rank, self.size = self.group.rank(), self.group.size()
        self.x, self.into = x if x[0].is_contiguous() else x.contiguous(), into
        self.after = [(self.rank + s) % self.size for s in range(1, self.size)]
        # tile before[i] comes when after[i] is posted
        self.before = [(self.rank - s) % self.size for s in range(1, self.size)]
        self._leaving: list[dist.Work] = []
        self._coming: dict[tuple[int, int], list[dist.Work]] = {}
        if not in_pairs(into):
            with named(f"{what}: reaching all ranks", self.group):
                self._down = way_back(self.group)
            # gloo asks for each message, and a request posted later queues behind this rank's own rows: links then
            # work one way at a time
            for rows in cut:
                for source in self.before:
                    by = self.group if source < self.rank else self._down
                    with named(f"{what}: asking rank {source} for rows", self.group):
                        self._coming[source, rows.start] = [gloo.receive(into[source, rows], by, source)]

    def outgoing(self, to: int, rows: slice) -> Tensor:
        return self.x[to if len(self.x) == self.size else (to - self.rank - 1) % self.size, rows]

    def post(self, to: int, rows: slice) -> None:
        """Starts to send these rows of tile ``to``, and to receive those of the tile from as far on the other side."""
        with named(f"{self.what}: sending rows to rank {to}", self.group):
            if in_pairs(self.into):
                self._post_pairs([to], rows)
                return
            by = self.group if self.rank < to else self._down
            self._leaving.append(gloo.send(self.outgoing(to, rows), by, to))

    def _post_pairs(self, peers: list[int], rows: slice) -> None:
        """Posts each peer's send and the receive that goes with it in one batch, for NCCL one launch.

        What it is waited for by is shared by its sources, and emptied by the first of them that is.
        """
        messages = []
        for to in peers:
            source = (2 * self.rank - to) % self.size
            messages.append(dist.P2POp(dist.isend, self.outgoing(to, rows), group=self.group, group_peer=to))
            messages.append(dist.P2POp(dist.irecv, self.into[source, rows], group=self.group, group_peer=source))
        handles = dist.batch_isend_irecv(messages)
        for to in peers:
            self._coming[(2 * self.rank - to) % self.size, rows.start] = handles

    def post_all(self) -> "Flight":
        for rows in self.cut:
            if in_pairs(self.into):
                with named(f"{self.what}: sending rows to all ranks", self.group):
                    self._post_pairs(self.after, rows)
            else:
                for to in self.after:
                    self.post(to, rows)
        if self.own:
            self.into[self.rank] = self.x[self.rank]
        return self

    def arrived(self, source: int, rows: slice) -> Tensor:
        """Waits for these rows of the tile from ``source``, and returns them."""
        with named(f"{self.what}: waiting for rows from rank {source}", self.group):
            handles = self._coming.pop((source, rows.start))
            while handles:
                handles.pop(0).wait()
        return self.into[source, rows]

    def finish(self) -> Tensor:
        """Waits for all that was posted, sends too: after this x may be written or freed."""
        for source, start in list(self._coming):
            self.arrived(source, slice(start, None))
        with named(f"{self.what}: waiting until rows have left", self.group):
            for handle in self._leaving:
                handle.wait()
        self._leaving.clear()
        return self.into
