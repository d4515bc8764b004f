"""Messages between replicas whose sizes differ: counts known beforehand, values beside their indices.

Every rank sends to the next, then to the one after it, and so on round: in no round do two ranks send to the same
(Li & Hoefler 2022, arXiv:2201.07598, section 3.1.2).
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .entries import Entries


class Replicas:
    """The ranks that share a gradient, and the bytes that this one has sent them.

    ``sent``: bytes of all messages, of which ``entries`` those of values and indices.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.sent = self.entries = 0

    def gather(self, mine: Tensor) -> Tensor:
        """Returns ``mine`` [n] of every rank, [ranks, n], the same n on all."""
        self.sent += (self.size - 1) * mine.numel() * mine.element_size()
        return torch.stack(self._all_gather(mine))

    def add_up(self, mine: Tensor) -> Tensor:
        """Returns the sum of ``mine`` [n], of integers, over all ranks."""
        return self.gather(mine).sum(0)

    def average_(self, mine: Tensor) -> None:
        """Averages ``mine`` [n] in place over all ranks; counted as a ring sends it."""
        self.sent += 2 * (self.size - 1) * mine.numel() * mine.element_size() // self.size
        dist.all_reduce(mine.div_(self.size), group=self.group)

    def exchange(self, parts: Sequence[Entries], counts: Sequence[int]) -> list[Entries]:
        """Sends ``parts[r]`` to rank r and returns what every rank sent here, in rank order; ``counts[r]``: how many
        entries rank r sends."""
        received = list(parts)
        for i in range(1, self.size):
            to, source = (self.rank + i) % self.size, (self.rank - i) % self.size
            received[source] = self._swap(parts[to], to, source, counts[source])
        return received

    def concatenate(self, mine: Entries, counts: Sequence[int]) -> Entries:
        """Returns the entries of all ranks, one after another; each goes round from rank to rank."""
        parts, right, left = [mine] * self.size, (self.rank + 1) % self.size, (self.rank - 1) % self.size
        for i in range(self.size - 1):
            passed, new = (self.rank - i) % self.size, (self.rank - i - 1) % self.size
            parts[new] = self._swap(parts[passed], right, left, counts[new])
        return Entries.joined(parts)

    def _swap(self, mine: Entries, to: int, source: int, count: int) -> Entries:
        message, indices = _packed(mine), 4 * count
        received = message.new_empty(indices + count * mine.value.element_size())
        self._send_and_receive(message, to, received, source)
        self.sent += message.numel()
        self.entries += message.numel()
        value = received[indices:].clone().view(mine.value.dtype)  # aligned, where indices are an odd number
        return Entries(received[:indices].view(torch.int32).long(), value)

    def _all_gather(self, mine: Tensor) -> list[Tensor]:
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(rows, mine, group=self.group)
        return rows

    def _send_and_receive(self, message: Tensor, to: int, received: Tensor, source: int) -> None:
        works = [
            dist.P2POp(op, x, group=self.group, group_peer=peer)
            for op, x, peer in ((dist.isend, message, to), (dist.irecv, received, source))
            if x.numel()
        ]
        for work in dist.batch_isend_irecv(works) if works else ():
            work.wait()


def _packed(entries: Entries) -> Tensor:
    """Returns indices of 4 bytes, then values, as bytes."""
    parts = entries.index.int(), entries.value.contiguous()
    return torch.cat([part.view(torch.uint8) for part in parts])
