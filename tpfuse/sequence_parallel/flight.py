"""Row tiles on their way between ranks while GEMMs run: crossings.exchange, piece by piece.

A tile of m rows travels in pieces of m/2, m/4, ... rows.  Incoming rows start with the largest piece: it lands while
this rank's own rows are multiplied, and each next piece while the previous one is, so that little work remains after
the smallest has landed.  Outgoing rows have the reverse order: the first leaves early.  Every rank posts the same
messages in the same order, the send to rank r + s together with the receive from rank r - s: no circular wait, on a
stream or off it.
"""

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from ..parallel import resolve
from ..ranks import gloo
from ..ranks.failure import named

# The least rows of a piece.  On a CPU a step over 1 Gbit/s takes 2 to 3 % more in pieces of 64, as bf16 GEMMs pack W
# each time, and no less in pieces of 512 (bench.overlap).
LEAST_ROWS = 256


def pieces(rows: int) -> list[slice]:
    """Cuts rows into halves of what remains, in multiples of LEAST_ROWS; larger pieces come first."""
    cut, start = [], 0
    while rows - start >= 2 * LEAST_ROWS:
        half = -(-(rows - start) // (2 * LEAST_ROWS)) * LEAST_ROWS
        cut.append(slice(start, start + half))
        start += half
    return [*cut, slice(start, rows)] if start < rows else cut


def in_pairs(x: Tensor) -> bool:
    """Returns True if a receive must be posted with its send: NCCL runs messages of one stream in order, and receives
    posted alone would deadlock."""
    return not x.is_cpu


_WAY_BACK: "WeakKeyDictionary[dist.ProcessGroup, Any]" = WeakKeyDictionary()


def way_back(group: dist.ProcessGroup) -> Any:
    """Returns a second set of gloo connections, for rows to lower ranks, so that each connection carries rows one way.

    With rows both ways gloo's thread and this one compete for the connection, and the thread spins in epoll_wait on a
    core that multiplies (seen with perf).
    """
    if group not in _WAY_BACK:
        _WAY_BACK[group] = gloo.connect(group)
    return _WAY_BACK[group]


class Flight:
    """An exchange of tiles in flight, x [R, m, D] -> received [R, m, D], tile r to and from rank r; a gather if x is
    one shard with stride 0.

    ``cut``: a tile's pieces in the order in which they will be posted.  The caller fills this rank's own tile of
    ``received``, or with ``copy_own`` post_all does.  x may lack its own tile: it is then [R - 1, m, D], in the order
    of ``after``.  x may be written until its rows are posted, and not afterwards.  Flights are made in the order in
    which their rows will leave, best all before the first are posted: a request for rows queues behind those that come.
    """

    def __init__(
        self, label: str, x: Tensor, received: Tensor, group_name: str, cut: list[slice], copy_own: bool = False
    ):
        self.label, self.group, self.cut, self.copy_own = label, resolve(group_name), cut, copy_own
        self.rank, self.size = self.group.rank(), self.group.size()
        self.x, self.received = x if x[0].is_contiguous() else x.contiguous(), received
        self.after = [(self.rank + s) % self.size for s in range(1, self.size)]
        # tile before[i] comes when after[i] is posted
        self.before = [(self.rank - s) % self.size for s in range(1, self.size)]
        self._leaving: list[gloo.Handle] = []
        self._coming: dict[tuple[int, int], list[gloo.Handle]] = {}
        if not in_pairs(received):
            with named(f"{label}: reaching all ranks", self.group):
                self._down = way_back(self.group)
            # gloo asks for each message, and a request posted later queues behind this rank's own rows: links then
            # work one way at a time
            for rows in cut:
                for source in self.before:
                    group = self.group if source < self.rank else self._down
                    with named(f"{label}: asking rank {source} for rows", self.group):
                        self._coming[source, rows.start] = [gloo.receive(received[source, rows], group, source)]

    def outgoing(self, to: int, rows: slice) -> Tensor:
        """Returns the memory of these rows of tile ``to``."""
        return self.x[to if len(self.x) == self.size else (to - self.rank - 1) % self.size, rows]

    def post(self, to: int, rows: slice) -> None:
        """Starts to send these rows of tile ``to``, and to receive the rows that are paired with them."""
        with named(f"{self.label}: sending rows to rank {to}", self.group):
            if in_pairs(self.received):
                self._post_pairs([to], rows)
                return
            group = self.group if self.rank < to else self._down
            self._leaving.append(gloo.send(self.outgoing(to, rows), group, to))

    def _post_pairs(self, peers: list[int], rows: slice) -> None:
        """Posts each peer's send and the paired receive in one batch, for NCCL one launch.

        All sources share the batch's handles; the first to be waited for empties them.
        """
        messages = []
        for to in peers:
            source = (2 * self.rank - to) % self.size
            messages.append(dist.P2POp(dist.isend, self.outgoing(to, rows), group=self.group, group_peer=to))
            messages.append(dist.P2POp(dist.irecv, self.received[source, rows], group=self.group, group_peer=source))
        handles: list[gloo.Handle] = [*dist.batch_isend_irecv(messages)]
        for to in peers:
            self._coming[(2 * self.rank - to) % self.size, rows.start] = handles

    def post_all(self) -> "Flight":
        """Starts to send and receive all rows; returns the flight."""
        for rows in self.cut:
            if in_pairs(self.received):
                with named(f"{self.label}: sending rows to all ranks", self.group):
                    self._post_pairs(self.after, rows)
            else:
                for to in self.after:
                    self.post(to, rows)
        if self.copy_own:
            self.received[self.rank] = self.x[self.rank]
        return self

    def arrived(self, source: int, rows: slice) -> Tensor:
        """Waits for these rows of the tile from ``source``, and returns them."""
        with named(f"{self.label}: waiting for rows from rank {source}", self.group):
            handles = self._coming.pop((source, rows.start))
            while handles:
                handles.pop(0).wait()
        return self.received[source, rows]

    def arriving(self, tile: Tensor) -> Iterator[tuple[Tensor, int, slice]]:
        """Yields rows, their tile and place in it: this rank's ``tile``, then each peer's rows as they land."""
        yield tile, self.rank, slice(0, len(tile))
        for rows in self.cut:
            for source in self.before:
                yield self.arrived(source, rows), source, rows

    def finish(self) -> Tensor:
        """Waits for all sends and receives, after which x may be written or freed; returns ``received``."""
        for source, start in list(self._coming):
            self.arrived(source, slice(start, None))
        with named(f"{self.label}: waiting until rows have left", self.group):
            for handle in self._leaving:
                handle.wait()
        self._leaving.clear()
        return self.received
