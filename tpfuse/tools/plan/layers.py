"""Layers to stages: the cut whose slowest stage is fastest, by dynamic programming over the blocks from the first on.

A pipeline of m micro-batches takes about sum t + (m - 1) max t, t the seconds of its stages; the sum is the model's
whatever the cut, so that the slowest stage decides (Zheng et al. 2022, Alpa, arXiv:2201.12023, equation 2).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def cut(costs: Sequence[Array]) -> tuple[int, ...] | None:
    """Returns how many blocks each stage has, none empty; None where no cut is finite.

    ``costs[s]`` [L + 1, L + 1]: at [i, j] the seconds of stage s with the blocks i to j (excluded), infinite where it
    may not have them.  The stages before any are cut so too; of equal cuts the one whose last stages are longer: the
    first keep more micro-batches.
    """
    last = len(costs[0]) - 1
    empty = np.tril(np.full((last + 1, last + 1), np.inf))
    best, begins = costs[0][0] + empty[0], []
    for cost in costs[1:]:
        slowest = np.maximum(best[:, None], cost + empty)
        begins.append(slowest.argmin(0))
        best = slowest.min(0)
    if not np.isfinite(best[last]):
        return None
    sizes, end = [], last
    for begin in reversed(begins):
        sizes.append(end - int(begin[end]))
        end -= sizes[-1]
    return (end, *reversed(sizes))
