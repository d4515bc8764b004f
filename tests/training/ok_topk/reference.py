"""Ok-Topk as a few lines over whole vectors of all ranks at once, by sorting: no messages, no regions."""

import numpy as np

FEWEST, MOST = 0.8, 1.25


def chosen(x, k, threshold):
    """-> (what is chosen, as a mask, and the threshold from now on)"""
    size = np.abs(x)
    if threshold is not None:
        mask = (size >= threshold) & (x != 0)
        if FEWEST * k <= mask.sum() <= MOST * k:
            return mask, threshold
    by_size = np.argsort(-size, kind="stable")  # of equal ones the first
    mask = np.zeros(len(x), dtype=bool)
    mask[by_size[:k]] = True
    return mask & (x != 0), 0.0 if k >= len(x) else float(size[by_size[k - 1]])


class Reference:
    """All ranks: their residuals, and thresholds."""

    def __init__(self, ranks, n, density, exact_every, dtype=np.float64):
        self.k, self.exact_every = max(1, round(density * n)), exact_every
        self.residuals = [np.zeros(n, dtype) for _ in range(ranks)]
        self.own, self.sums, self.step = [None] * ranks, None, 0

    def __call__(self, gradients):
        """-> the sum's chosen entries, zero elsewhere"""
        exact = self.step % self.exact_every == 0
        accumulated = [r + g for r, g in zip(self.residuals, gradients, strict=True)]
        masks, total = [], np.zeros_like(accumulated[0])
        for rank, x in enumerate(accumulated):
            mask, self.own[rank] = chosen(x, self.k, None if exact else self.own[rank])
            total += np.where(mask, x, 0)
            masks.append(mask)
        taken, self.sums = chosen(total, self.k, None if exact else self.sums)
        self.residuals = [np.where(mask & taken, 0, x) for mask, x in zip(masks, accumulated, strict=True)]
        self.step += 1
        return np.where(taken, total, 0)
