"""Rows that go to the experts that a test says, in place of those that a router would choose.

with routed(evenly): each expert has as many rows; with routed(to_the_first): one rank has them all.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor

from tpfuse.sequence_parallel import experts

Where = Callable[[Tensor, Tensor, int, int], Tensor]  # row [m, 1], slot [k], k, number of experts -> [m, k]


def evenly(row: Tensor, slot: Tensor, k: int, count: int) -> Tensor:
    """All choices of k experts in turn: ranks with as many experts have as many rows."""
    choices = torch.tensor(list(itertools.combinations(range(count), k)))
    return choices[row % len(choices), slot]


def to_the_first(row: Tensor, slot: Tensor, k: int, count: int) -> Tensor:
    """The k experts of smallest number."""
    return slot + 0 * row


@contextlib.contextmanager
def routed(where: Where) -> Iterator[None]:
    """Rows of this process's layers have the experts that ``where`` says, with the weights that the router gives."""
    right = experts.router_fwd

    def fixed(x, w, bias, routing):
        weights, chosen, logits = right(x, w, bias, routing)
        row, slot = torch.arange(len(x))[:, None], torch.arange(routing.k)
        return weights, where(row, slot, routing.k, len(w)).to(chosen.dtype), logits

    with mock.patch.object(experts, "router_fwd", fixed):
        yield
