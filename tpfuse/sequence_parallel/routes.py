"""The way of rows to the ranks that have their experts, and of results back: no row is dropped.

    counts       E numbers of rows by expert, R of rows by rank
    there        a row once for each rank that has one or more of its experts, by row; for each of these experts its
                 weight, and where its row stands among those sent, by (expert, row)
    experts      read each of their rows where it arrived, by (source, row): by their number among all rows
    back         a result for each of a row's experts, by (expert, row), into parts [k, m, D]

On one rank nothing is sent or copied, and the host learns no number of rows.  On more it waits for the counts; every
one of the exchanges is uneven, and a rank without rows takes part in them.  Of 128 experts, 8 of them for a row, a row
goes to 1.99 of 2 ranks, 3.63 of 4 and 5.34 of 8, not 8 times.  Results are not added before they go back: the sum of k
would depend on which experts share a rank.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..collectives import all_gather, exchange_rows
from ..kernels.experts.grouped import rows_of_gradient
from ..kernels.experts.records import ExpertOrder, ExpertRows, Routed
from ..parallel import TensorParallel
from .assumed import assumed_traffic
from .records import Traffic


class RowExchange(NamedTuple):
    """What one rank sends to each rank and receives from each, and where it stands."""

    rows: Traffic  # a row once for each rank
    results: Traffic  # one for each of a row's experts
    distinct: Tensor  # int64 [rows sent], this rank's rows by (rank, row)
    first: Tensor  # int64 [results received], of each place of this rank's experts the row among those that arrive
    arrived: ExpertRows  # the place by (expert, source, row) of what arrives by (source, expert, row)

    @classmethod
    def of(cls, order: ExpertOrder, routed: Routed, tp: TensorParallel) -> tuple["RowExchange", Tensor]:
        """Compares the ranks' counts, after which the host knows its own; on meta tensors they are assumed.  Returns
        the weights of the places of this rank's experts too."""
        (logits, weights, chosen), R = routed, tp.size
        (m, k), experts, device = chosen.shape, logits.shape[1], chosen.device
        each = experts // R
        visits = (chosen.long() // each * m + torch.arange(m, device=device)[:, None]).flatten()[order.numbers]
        visited = torch.zeros(R * m, dtype=torch.bool, device=device)  # [R, m]: the rank has experts of the row
        visited[visits] = True
        counts = torch.cat([order.offsets.diff(), visited.view(R, m).sum(1)])
        by_expert, by_rank = all_gather(counts, R, tp.group_name).split([experts, R], 1)  # of each source
        if counts.is_meta:
            rows, results = assumed_traffic(m, k, experts, tp)
        else:
            by_pair = by_expert.unflatten(1, (R, each)).sum(2)  # [source, destination], as by_rank
            counts = torch.stack([t for pair in (by_rank, by_pair) for t in (pair[tp.rank], pair[:, tp.rank])])
            four = counts.tolist()
            rows, results = Traffic(*four[:2]), Traffic(*four[2:])
        here, total = by_expert[:, tp.rank * each :][:, :each], sum(results.received)
        kinds = torch.arange(each, device=device).repeat(R).repeat_interleave(here.flatten(), output_size=total)
        arrived = ExpertOrder.of(kinds, each)
        # The i-th visit of all is where their number becomes i + 1.
        distinct = torch.searchsorted(visited.cumsum(0), torch.arange(1, sum(rows.sent) + 1, device=device)) % max(m, 1)

        word = torch.int64 if weights.dtype == torch.float64 else torch.int32
        within = (visited.view(R, m).cumsum(1) - 1).flatten()[visits].to(word)
        numbers = torch.stack([weights.flatten()[order.numbers].view(word), within], 1)
        numbers = exchange_rows(numbers, *results, tp.group_name)
        starts = by_rank[:, tp.rank].cumsum(0) - by_rank[:, tp.rank]
        first = starts.repeat_interleave(here.sum(1), output_size=total) + numbers[:, 1]
        exchange = cls(rows, results, distinct, first[arrived.numbers], ExpertRows(*arrived))
        return exchange, numbers[:, 0][arrived.numbers].view(weights.dtype)


class Routes(NamedTuple):
    """The way of valid rows of [m, D] to their k experts each, and of the results to parts [k, m, D]."""

    order: ExpertOrder
    k: int
    m: int
    tp: TensorParallel
    exchange: RowExchange | None

    @classmethod
    def of(cls, routed: Routed, m: int, tp: TensorParallel) -> tuple["Routes", Tensor]:
        """Returns the weights of the rows of this rank's experts too, in their order."""
        logits, weights, chosen = routed
        order, exchange = ExpertOrder.of(chosen, logits.shape[1]), None
        if tp.size == 1:
            here = weights.flatten().index_select(0, order.numbers)
        else:
            exchange, here = RowExchange.of(order, routed, tp)
        return cls(order, chosen.shape[1], m, tp, exchange), here

    def saved(self) -> tuple[tuple[Tensor, ...], tuple[Traffic, Traffic] | None]:
        """Returns tensors and numbers for :meth:`of_saved`."""
        if self.exchange is None:
            return tuple(self.order), None
        rows, results, distinct, first, arrived = self.exchange
        assert arrived.row_index is not None
        return (*self.order, distinct, first, arrived.row_index, arrived.offsets), (rows, results)

    @classmethod
    def of_saved(
        cls, tensors: list[Tensor], traffic: tuple[Traffic, Traffic] | None, k: int, m: int, tp: TensorParallel
    ) -> "Routes":
        numbers, offsets, *exchanged = tensors
        exchange = None
        if traffic is not None:
            distinct, first, *arrived = exchanged
            exchange = RowExchange(*traffic, distinct, first, ExpertRows(*arrived))
        return cls(ExpertOrder(numbers, offsets), k, m, tp, exchange)

    def rows_here(self) -> ExpertRows:
        """Returns where this rank's experts find their rows in what :meth:`there` brings."""
        if self.exchange is None:
            return self.order.rows(self.k)
        return ExpertRows(self.exchange.first, self.exchange.arrived.offsets)

    def there(self, x: Tensor) -> tuple[Tensor, ExpertRows]:
        """Brings rows of x [m, D] to their experts' ranks: the tensor, and where they stand in it."""
        if self.exchange is not None:
            x = exchange_rows(x.index_select(0, self.exchange.distinct), *self.exchange.rows, self.tp.group_name)
        return x, self.rows_here()

    def gradients_there(self, dparts: Tensor) -> tuple[Tensor, ExpertRows]:
        """Brings gradients of parts [k, m, D] to their experts' ranks, as rows where they are the same for all k."""
        dy, rows = rows_of_gradient(dparts, self.order)
        if self.exchange is None:
            return dy, rows
        if dparts.stride(0) == 0:
            return self.there(dy)
        assert rows.row_index is not None
        return self._sent(dy.index_select(0, rows.row_index)), self.exchange.arrived

    def destinations(self) -> tuple[ExpertRows, int]:
        """Returns where experts put their results, and how many rows that tensor has: it is parts, or goes back."""
        if self.exchange is None:
            return self.order.places(self.k, self.m), self.k * self.m
        return self.exchange.arrived, sum(self.exchange.results.received)

    def back(self, y: Tensor, slots: int) -> Tensor:
        """Returns the results that experts put at their destinations as [slots, m, D]: of the k first slots, of which
        those of rows that are not valid are 0, and room for others."""
        D = y.shape[1]
        if self.exchange is None:
            return y.view(slots, self.m, D)
        padded = len(self.order.numbers) < self.k * self.m
        parts = y.new_zeros(slots * self.m, D) if padded else y.new_empty(slots * self.m, D)
        index = self.order.places(self.k, self.m).row_index
        assert index is not None
        return parts.index_copy_(0, index, self._returned(y)).view(slots, self.m, D)

    def numbers_back(self, x: Tensor) -> Tensor:
        """Brings a number for each place of this rank's experts back to [valid, k]."""
        if self.exchange is not None:
            index = self.exchange.arrived.row_index
            assert index is not None
            x = self._returned(torch.empty_like(x).index_copy_(0, index, x))
        return torch.empty_like(x).index_copy_(0, self.order.numbers, x).view(-1, self.k)

    def _sent(self, x: Tensor) -> Tensor:
        assert self.exchange is not None
        return exchange_rows(x, *self.exchange.results, self.tp.group_name)

    def _returned(self, x: Tensor) -> Tensor:
        assert self.exchange is not None
        sent, received = self.exchange.results
        return exchange_rows(x, received, sent, self.tp.group_name)
