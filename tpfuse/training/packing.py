"""Documents of unequal length: packed into rows that waste little, and shared out over replicas so that none waits.

    documents -> balance(costs, replicas): each replica's share -> pack(lengths, capacity): its rows
    -> packed_batch: a model's arguments

All are plain functions of their arguments, so every rank computes the same without a message, and a resumed run
computes it again.
"""

import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.runtime.errors import check
from ..kernels.runtime.rules import COUNT, check_number, described, quoted
from ..models.config.model import ModelConfig


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Returns the documents (their indices) of each row, by first-fit decreasing.

    The longest goes first, each into the first row that has room: at most 11/9 of the fewest rows possible, and one
    (Johnson 1973).  ValueError for a document longer than ``capacity``: the caller decides where to cut it, since what
    follows the cut no longer sees what precedes it.
    """
    check_number("pack: capacity", capacity, COUNT)
    lengths = _integers("pack: lengths", lengths)
    check(not lengths or min(lengths) >= 1, "pack: a document has no tokens")
    longest = max(lengths, default=0)
    check(longest <= capacity, f"pack: a document of {longest} tokens is longer than capacity={capacity}; cut it first")
    rows: list[list[int]] = []
    leaves = 1 << (max(len(lengths), 1) - 1).bit_length()
    room = [capacity] * (2 * leaves)  # a binary tree: the most room in a row beneath each node, rows being the leaves
    for document in _largest_first(lengths):
        node = 1
        while node < leaves:
            node = 2 * node + (room[2 * node] < lengths[document])  # left unless it has no room
        if node - leaves == len(rows):
            rows.append([])
        rows[node - leaves].append(document)
        room[node] -= lengths[document]
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return rows


class Balance(NamedTuple):
    """``shares[r]`` are the items of replica r, in rising order.

    An imbalance is the largest share's cost over the mean, 1 at best.
    """

    shares: list[list[int]]
    before: float  # the imbalance of round robin
    after: float


def balance(costs: Sequence[float], replicas: int) -> Balance:
    """Shares items out over replicas: the costliest first, each to the replica that has least so far.

    The largest share is at most 4/3 of the best possible (Graham 1969).  Where round robin happens to be better, it is
    taken.  ValueError where there are fewer items than replicas (every replica takes part in a step of gradients), or
    where a cost is not positive and finite.
    """
    check_number("balance: replicas", replicas, COUNT)
    check(
        len(costs) >= replicas, f"balance: {len(costs)} items are too few for {replicas} replicas, since each needs one"
    )
    wrong = [cost for cost in costs if not 0 < cost < math.inf]
    check(not wrong, f"balance: every cost must be positive and finite, got {wrong[:1]}")
    dealt = [list(range(r, len(costs), replicas)) for r in range(replicas)]
    shares: list[list[int]] = [[] for _ in range(replicas)]
    loads = [0.0] * replicas
    for item in _largest_first(costs):
        least = loads.index(min(loads))
        shares[least].append(item)
        loads[least] += costs[item]
    shares = [sorted(share) for share in shares]
    before, after = _imbalance(costs, dealt), _imbalance(costs, shares)
    return Balance(shares, before, after) if after < before else Balance(dealt, before, before)


def document_cost(length: int, config: ModelConfig) -> int:
    """Returns the multiplications and additions of a GPT's forward over one document of ``length`` tokens.

    They are a * length in the GEMMs, of experts those that a token has, and b * length^2 in attention (beyond a layer's
    window, b * window per token).
    """
    c = config
    projections = c.hidden_size * c.head_size * (2 * c.num_heads + 2 * c.kv_heads)
    mlps = c.hidden_size * sum(c.mlp_shape(layer).columns for layer in range(c.num_layers))
    weights = c.num_layers * projections + mlps + c.hidden_size * c.vocab_size
    pairs = sum(_pairs(length, window) for window in c.windows)
    return 2 * length * weights + 4 * pairs * c.num_heads * c.head_size


class PackedBatch(NamedTuple):
    """The arguments of a model: ``model(**batch._asdict())``.

    input_ids and labels are int64 [1, S], cu_seqlens int32 [N + 1], max_seqlen the length of the longest document.
    """

    input_ids: Tensor
    labels: Tensor
    cu_seqlens: Tensor
    max_seqlen: int


def packed_batch(documents: Sequence[Tensor | Sequence[int]]) -> PackedBatch:
    """Returns documents one after the other in one row.

    Labels are the tokens themselves; the model shifts them within each document.  ValueError for documents that are not
    sequences of integers.
    """
    check(len(documents) > 0, "packed_batch: there are no documents")
    tokens = [_tokens(document) for document in documents]
    lengths = [len(t) for t in tokens]
    check(min(lengths) >= 1, "packed_batch: a document has no tokens")
    ids = torch.cat(tokens)[None]
    bounds = torch.tensor([0, *lengths], device=ids.device).cumsum(0, dtype=torch.int32)
    return PackedBatch(ids, ids, bounds, max(lengths))


def _integers(name: str, values: Sequence[int]) -> list[int]:
    try:
        return [operator.index(value) for value in values]
    except TypeError:
        raise ValueError(f"{name} must be integers, got {quoted(values)}") from None


def _tokens(document: Tensor | Sequence[int]) -> Tensor:
    """Returns a document's ids, int64 [n]."""
    if not isinstance(document, Tensor):
        return torch.tensor(_integers("packed_batch: a document's tokens", document), dtype=torch.int64)
    integer = not (document.is_floating_point() or document.is_complex() or document.dtype == torch.bool)
    check(
        integer and document.dim() == 1,
        f"packed_batch: a document must be a list or a 1-d tensor of integers, got {described(document)}",
    )
    return document.long()


def _largest_first(sizes: Sequence[float]) -> list[int]:
    """Returns the indices by falling size; equal sizes stay in their order."""
    return sorted(range(len(sizes)), key=lambda i: -sizes[i])


def _imbalance(costs: Sequence[float], shares: list[list[int]]) -> float:
    loads = [sum(costs[i] for i in share) for share in shares]
    return max(loads) * len(loads) / sum(loads)


def _pairs(length: int, window: int | None) -> int:
    """Returns how many pairs there are of a query and a key that it sees."""
    full = length if window is None else min(length, window)
    return full * (full + 1) // 2 + (length - full) * full
