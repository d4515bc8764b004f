"""The records that cross-entropy's ops take: the numbers of a loss, and what each row brings."""

from typing import NamedTuple

from torch import Tensor

IGNORE = -100


class Loss(NamedTuple):
    """The constants of the loss, and the slice of the vocabulary that this rank holds."""

    vocab_size: int  # of the whole vocabulary, which smoothing counts
    first_token: int = 0  # the global id of this slice's first column
    ignore_index: int = IGNORE  # rows with this label count nothing
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def leaves(self, columns: int, leaf: int | None) -> "list[tuple[slice, Loss]]":
        """Returns the slices of ``leaf`` columns each (None: one of all) of this slice of the vocabulary, with their
        losses."""
        if leaf is None:
            return [(slice(None), self)]
        starts = range(0, columns, leaf)
        return [(slice(i, min(i + leaf, columns)), self._replace(first_token=self.first_token + i)) for i in starts]


class Rows(NamedTuple):
    """Each row's inputs of the backward pass, [M]."""

    labels: Tensor  # int64, global ids
    lse: Tensor  # log of the sum over the whole vocabulary of exp(logit)
    dloss: Tensor  # gradient of the row's loss


class Linear(NamedTuple):
    """A linear layer whose output are the logits."""

    x: Tensor  # [M, D]
    w: Tensor  # [V/R, D]
    b: Tensor | None  # [V/R]

    def of(self, tokens: slice) -> "Linear":
        """Returns the layer of these tokens alone."""
        return Linear(self.x, self.w[tokens], None if self.b is None else self.b[tokens])
