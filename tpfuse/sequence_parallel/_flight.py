"""Row tiles on their way between ranks while GEMMs run: the exchange of ``plain``, piece by piece.

A tile of m rows travels in pieces of m/2, m/4, ... rows.  Where rows come in, the large piece leads: it lands while this rank's own rows
are multiplied, each next one while its forerunner is, and what is left to do after the last has landed is small.  Where rows go out the
order is reversed: the first leaves early.  Every rank posts the same messages in the same order, the one to the rank s further on with that
from the rank s before: nothing waits in a circle, on a stream or off it.
"""

from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..collectives import named, resolve

# Of a piece.  On a CPU a step over 1 Gbit/s takes 2 to 3 % more in pieces of 64, as bf16 GEMMs pack W each time, and no less of 512
# (bench.overlap).
LEAST_ROWS = 256


def pieces(rows: int) -> list[slice]:
    """Halves of what is left, in multiples of LEAST_ROWS, the larger half first."""
    cut, start = [], 0
    while rows - start >= 2 * LEAST_ROWS:
        half = -(-(rows - start) // (2 * LEAST_ROWS)) * LEAST_ROWS
        cut.append(slice(start, start + half))
        start += half
    return [*cut, slice(start, rows)] if start < rows else cut


def in_pairs(x: Tensor) -> bool:
    """Whether a receive is posted with its send: NCCL runs messages of one stream in order, and lone receives would wait in a circle."""
    return not x.is_cpu


_WAY_BACK: "WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]" = WeakKeyDictionary()


def way_back(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The same ranks again, for rows to lower ranks, so that each of gloo's connections carries rows one way only.  Where they go both ways
    its thread and this one want the same connection, and the thread spins in epoll_wait for it, on a core that multiplies (perf)."""
    if group not in _WAY_BACK:
        backend = group._get_backend(torch.device("cpu"))
        ranks = dist.get_process_group_ranks(group)
        _WAY_BACK[group] = dist.new_group(ranks, backend.options._timeout, "gloo", use_local_synchronization=True)
    return _WAY_BACK[group]


class Flight:
    """An exchange of tiles, x [R, m, D] -> into [R, m, D], tile r to and from rank r; a gather where x is one shard with stride 0.

    ``cut`` are a tile's pieces in the order in which they will be posted.  ``into``'s own tile is the caller's to fill, or with ``own``
    post_all's; x may lack its own: then [R - 1, m, D] in the order of ``after``.  x may be written until its rows are posted, and is not to
    be after.  Flights are made in the order in which their rows will leave, and best all before the first are posted: to ask for rows while
    others come is to wait for a turn.
    """

    def __init__(self, what: str, x: Tensor, into: Tensor, group_name: str, cut: list[slice], own: bool = False):
        self.what, self.group, self.cut, self.own = what, resolve(group_name), cut, own
        self.rank, self.size = self.group.rank(), self.group.size()
        self.x, self.into = x if x[0].is_contiguous() else x.contiguous(), into
        self.after = [(self.rank + s) % self.size for s in range(1, self.size)]
        self.before = [(self.rank - s) % self.size for s in range(1, self.size)]  # tile before[i] comes when after[i] is posted
        self._leaving: list[dist.Work] = []
        self._coming: dict[tuple[int, int], list[dist.Work]] = {}
        if not in_pairs(into):
            with named(f"{what}: reaching all ranks", self.group):
                self._down = way_back(self.group)
            # gloo asks for each message, and a request posted later queues behind this rank's own rows: links then work one way at a time
            for rows in cut:
                for source in self.before:
                    group = self.group if source < self.rank else self._down
                    with named(f"{what}: asking rank {source} for rows", self.group):
                        self._coming[source, rows.start] = [dist.irecv(into[source, rows], group=group, group_src=source)]

    def outgoing(self, to: int, rows: slice) -> Tensor:
        return self.x[to if len(self.x) == self.size else (to - self.rank - 1) % self.size, rows]

    def post(self, to: int, rows: slice) -> None:
        """Starts: these rows of tile ``to`` leave, and those of the tile from as far on the other side come."""
        source = (2 * self.rank - to) % self.size
        with named(f"{self.what}: sending rows to rank {to}", self.group):
            if not in_pairs(self.into):
                self._leaving.append(dist.isend(self.outgoing(to, rows), group=self.group if self.rank < to else self._down, group_dst=to))
                return
            send = dist.P2POp(dist.isend, self.outgoing(to, rows), group=self.group, group_peer=to)
            receive = dist.P2POp(dist.irecv, self.into[source, rows], group=self.group, group_peer=source)
            self._coming[source, rows.start] = dist.batch_isend_irecv([send, receive])

    def post_all(self) -> "Flight":
        for rows in self.cut:
            for to in self.after:
                self.post(to, rows)
        if self.own:
            self.into[self.rank] = self.x[self.rank]
        return self

    def arrived(self, source: int, rows: slice) -> Tensor:
        """These rows of the tile from ``source``, once they are here."""
        with named(f"{self.what}: waiting for rows from rank {source}", self.group):
            for handle in self._coming.pop((source, rows.start)):
                handle.wait()
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
