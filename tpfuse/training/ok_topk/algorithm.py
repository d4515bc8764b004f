"""Ok-Topk: the sum over replicas of what is large in each, of as few words as can be (Li & Hoefler 2022,
arXiv:2201.07598, algorithm 1).

Each of P ranks chooses about k of its n entries; rank j adds up those of region j, chooses what is large in the sums,
and all gather it.  With 2 words an entry, a rank sends about 2 k (P - 1) / P words for the sums and as many for the
result, where gathering every rank's choice would take 2 k (P - 1).

Thresholds are kept from step to step, and estimated exactly every ``exact_every`` steps, or where they choose fewer
than 4/5 k or more than 5/4 k entries: then by that step's own values, so that no step sends more (the paper scales such
a threshold for the step after).  Every choice and sum is made in an order that no message's arrival changes, so that
all ranks have the same result, the same every time.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .entries import Entries, above, largest
from .messages import Replicas

FEWEST, MOST = 0.8, 1.25  # of k, that a threshold of an earlier step may choose
_UNEVEN = 4  # how many times the mean a rank may hold of the result before it gives some away
_BITS = 4  # of a magnitude, that a round of the search for the k-th largest settles


class Dials(NamedTuple):
    """``density``: k / n.  ``exact_every``, ``borders_every``: steps from one estimate to the next."""

    density: float
    exact_every: int
    borders_every: int


class TopkState(NamedTuple):
    """State from one step to the next: thresholds, and where regions begin.

    ``local``, ``sums``: the thresholds of a rank's entries and of the sums.  ``borders``: rank j adds up the entries
    from borders[j] to borders[j + 1].
    """

    step: int = 0
    local: float | None = None
    sums: float | None = None
    borders: tuple[int, ...] = ()


class Summed(NamedTuple):
    """``total``: the chosen entries of the sum over ranks.  ``contributed``: indices of this rank's entries that are in
    it."""

    total: Entries
    contributed: Tensor
    state: TopkState


def sparse_sum(x: Tensor, state: TopkState, dials: Dials, replicas: Replicas) -> Summed:
    """Returns the large entries of the sum of ``x`` [n] over the ranks, each of which calls it."""
    k = max(1, round(dials.density * len(x)))
    exact = state.step % dials.exact_every == 0
    chosen_here, threshold = _choose(x, k, None if exact else state.local)
    borders = state.borders
    if state.step % dials.borders_every == 0 or len(borders) != replicas.size + 1:
        borders = _borders(chosen_here, len(x), replicas)
    region = _add_up(chosen_here, borders, replicas)
    stored = 0.0 if k == len(x) else None if exact else state.sums  # of all, nothing is left out
    chosen, counts, of_sums = _chosen(region, k, stored, replicas)
    total = replicas.concatenate(*_balanced(chosen, counts, replicas))
    marked = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    marked[total.index] = True
    return Summed(
        total, chosen_here.index[marked[chosen_here.index]], TopkState(state.step + 1, threshold, of_sums, borders)
    )


def _fits(count: int, k: int, threshold: float) -> bool:
    """Returns whether a threshold chooses about k entries, or where there are fewer all."""
    return count <= MOST * k and (count >= FEWEST * k or threshold == 0)


def _choose(x: Tensor, k: int, threshold: float | None) -> tuple[Entries, float]:
    if threshold is not None:
        entries, count = above(x, threshold, int(MOST * k))
        if _fits(count, k, threshold):
            return entries, threshold
    return largest(x, k)


def _borders(entries: Entries, n: int, replicas: Replicas) -> tuple[int, ...]:
    """Returns borders between which every rank has about as many entries: the means of each rank's own quantiles."""
    size, count = replicas.size, len(entries)
    quantiles = [entries.index[j * count // size] if count else torch.tensor(j * n // size) for j in range(1, size)]
    inner = torch.stack(quantiles).to(entries.index) if quantiles else entries.index[:0]
    return (0, *(replicas.add_up(inner) // size).tolist(), n)


def _add_up(chosen: Entries, borders: tuple[int, ...], replicas: Replicas) -> Entries:
    """Returns this rank's region of the sum: the entries that any rank has chosen, added up in rank order."""
    begins = torch.searchsorted(chosen.index, torch.tensor(borders, device=chosen.index.device)).tolist()
    parts = [chosen[begins[j] : begins[j + 1]] for j in range(replicas.size)]
    counts = replicas.gather(torch.tensor([len(part) for part in parts], device=chosen.index.device))
    received = replicas.exchange(parts, counts[:, replicas.rank].tolist())
    begin, end = borders[replicas.rank : replicas.rank + 2]
    sums = chosen.value.new_zeros(end - begin)
    for entries in received:
        sums[entries.index - begin] += entries.value  # no index comes twice in one rank's
    touched = torch.unique(torch.cat([entries.index for entries in received]))
    return Entries(touched, sums[touched - begin])


def _chosen(region: Entries, k: int, threshold: float | None, replicas: Replicas) -> tuple[Entries, list[int], float]:
    """Returns what is large in this rank's region of the sums, how many entries every rank has there, and the
    threshold."""
    if threshold is not None:
        entries = region[(region.value.abs() >= threshold) & (region.value != 0)]
        counts = replicas.gather(torch.tensor([len(entries)], device=region.index.device))[:, 0].tolist()
        if _fits(sum(counts), k, threshold):
            return entries, counts, threshold
    threshold = _kth_largest(region.value.abs(), k, replicas)
    magnitude = region.value.abs()
    over, equal = magnitude > threshold, (magnitude == threshold) & (magnitude > 0)
    counts_of = replicas.gather(torch.stack([over.sum(), equal.sum()]))
    spare = k - int(counts_of[:, 0].sum())  # of the equal ones, the first
    taken = (spare - (counts_of[:, 1].cumsum(0) - counts_of[:, 1])).clamp(min=0).minimum(counts_of[:, 1])
    entries = region[over | (equal & (equal.cumsum(0) <= taken[replicas.rank]))]
    return entries, (counts_of[:, 0] + taken).tolist(), threshold


def _kth_largest(magnitude: Tensor, k: int, replicas: Replicas) -> float:
    """Returns the k-th largest of all ranks' magnitudes, 0 where there are fewer.

    Magnitudes are in the order of their bits as integers, of which each round settles some: it counts how many there
    are with each value of them.
    """
    kind = {4: torch.int32, 8: torch.int64}[magnitude.element_size()]
    bits, prefix, left = magnitude.view(kind).long(), 0, k
    for shift in reversed(range(0, 8 * magnitude.element_size(), _BITS)):
        counts = replicas.add_up(torch.bincount((bits >> shift) & (2**_BITS - 1), minlength=2**_BITS))
        digit, remaining = 2**_BITS - 1, left
        while digit and int(counts[digit]) < remaining:
            remaining -= int(counts[digit])
            digit -= 1
        if digit == 0 and int(counts[0]) < remaining:
            return 0.0
        prefix, left = prefix | digit << shift, remaining
        bits = bits[(bits >> shift) & (2**_BITS - 1) == digit]
    return float(torch.tensor(prefix).to(kind).view(magnitude.dtype))


def _balanced(mine: Entries, counts: list[int], replicas: Replicas) -> tuple[Entries, list[int]]:
    """Returns entries and counts of which no rank has many times the mean: else equal parts, one after another."""
    total, size = sum(counts), replicas.size
    if max(counts) * size <= _UNEVEN * total:
        return mine, counts
    ends = [j * total // size for j in range(size + 1)]
    begins = [sum(counts[:r]) for r in range(size + 1)]

    def overlap(r: int, j: int) -> tuple[int, int]:
        """Returns which of rank r's entries are of part j."""
        begin = max(begins[r], ends[j])
        return begin - begins[r], max(begin, min(begins[r + 1], ends[j + 1])) - begins[r]

    sent = [mine[slice(*overlap(replicas.rank, j))] for j in range(size)]
    widths = [end - begin for begin, end in (overlap(r, replicas.rank) for r in range(size))]
    received = replicas.exchange(sent, widths)
    return Entries.joined(received), [ends[j + 1] - ends[j] for j in range(size)]
