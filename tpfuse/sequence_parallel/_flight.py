"""Row tiles on their way between ranks while GEMMs run: the exchange of ``plain``, piece by piece.

A tile of m rows travels in pieces of m/2, m/4, ... rows.  Where rows come in, the large piece leads: it lands while this rank's own rows
are multiplied, each next one while its forerunner is, and what is left to do after the last has landed is small.  Where rows go out the
order is reversed: the first leaves early.  Every rank posts the same messages in the same order, each a pair (send to the rank s further
on, receive from the rank s before): nothing waits in a circle, on a stream or off it.
"""

import torch.distributed as dist
from torch import Tensor

from ..collectives import named, resolve

LEAST_ROWS = 64  # of a piece.  GEMMs of 64 rows are 8 % slower than one of 2048 on a CPU; halving to there, 1.5 % in all


def pieces(rows: int) -> list[slice]:
    """Halves of what is left, in multiples of LEAST_ROWS, the larger half first."""
    cut, start = [], 0
    while rows - start >= 2 * LEAST_ROWS:
        half = -(-(rows - start) // (2 * LEAST_ROWS)) * LEAST_ROWS
        cut.append(slice(start, start + half))
        start += half
    return [*cut, slice(start, rows)] if start < rows else cut


class Flight:
    """An exchange of tiles, x [R, m, D] -> into [R, m, D], tile r to and from rank r; a gather where x is one shard with stride 0.

    ``into``'s own tile is the caller's to fill.  x may be written until its rows are posted, and is not to be after.
    """

    def __init__(self, what: str, x: Tensor, into: Tensor, group_name: str):
        self.what, self.group = what, resolve(group_name)
        self.rank, self.size = self.group.rank(), self.group.size()
        self.x, self.into = x if x[0].is_contiguous() else x.contiguous(), into
        self.after = [(self.rank + s) % self.size for s in range(1, self.size)]
        self.before = [(self.rank - s) % self.size for s in range(1, self.size)]  # tile before[i] comes when after[i] is posted
        self._handles: dict[tuple[int, int], list[dist.Work]] = {}

    def post(self, to: int, rows: slice) -> None:
        """Starts: these rows of tile ``to`` leave, and those of the tile from as far on the other side come."""
        source = (2 * self.rank - to) % self.size
        send = dist.P2POp(dist.isend, self.x[to, rows], group=self.group, group_peer=to)
        receive = dist.P2POp(dist.irecv, self.into[source, rows], group=self.group, group_peer=source)
        with named(f"{self.what}: sending rows to rank {to} and asking rank {source} for its", self.group):
            self._handles[source, rows.start] = dist.batch_isend_irecv([send, receive])

    def post_all(self, cut: list[slice]) -> "Flight":
        for rows in cut:
            for to in self.after:
                self.post(to, rows)
        return self

    def arrived(self, source: int, rows: slice) -> Tensor:
        """These rows of the tile from ``source``, once they are here."""
        handles = self._handles[source, rows.start]  # gloo: [send, receive]; NCCL: [both]
        self._wait(handles.pop(), f"waiting for rows from rank {source}")
        return self.into[source, rows]

    def finish(self) -> Tensor:
        """Waits for all that was posted, sends too: after this x may be written or freed."""
        for (source, _), handles in self._handles.items():
            for handle in handles:
                self._wait(handle, f"exchanging rows with rank {source} and its opposite")
        self._handles.clear()
        return self.into

    def _wait(self, handle: dist.Work, doing: str) -> None:
        """Once a handle: gloo would wait for another message the second time."""
        with named(f"{self.what}: {doing}", self.group):
            handle.wait()
