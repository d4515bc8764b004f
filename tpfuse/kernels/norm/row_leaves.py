"""Gradients of vectors and tables as sums by leaves of the rows: the same bits however the rows are split."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..lookup.op import embedding_bwd
from ..runtime.leaves import tree
from ..runtime.philox import Mask
from .records import Saved, Wanted, incoming


class BackwardRows(NamedTuple):
    """The arguments of backward that have rows."""

    dn: Tensor | None
    dh: Tensor | None
    saved: Saved
    mask: Mask
    out: Tensor | None

    def rows(self, start: int, stop: int) -> "BackwardRows":
        """Returns those of the rows from ``start`` to ``stop``."""
        dn, dh, saved, mask, out = self
        cut = lambda t: None if t is None else t[..., start:stop, :]
        h, mean, rstd = (t if t is None or len(t) == 0 else t[start:stop] for t in (saved.h, saved.mean, saved.rstd))
        part = saved._replace(h=h, mean=mean, rstd=rstd)
        return BackwardRows(cut(dn), cut(dh), part, mask.from_row(start), out=cut(out))


def by_leaves(bwd: Callable[..., tuple[Tensor, ...]], rows: BackwardRows, order: str, wanted: Wanted) -> Any:
    """Runs a backward on each leaf of the rows, and adds the gradients of vectors as a binary tree."""
    m, one = incoming(rows.dn, rows.dh).shape[-2], wanted._replace(leaves=1)
    step = m // wanted.leaves
    leaves = [rows.rows(i, i + step) for i in range(0, m, step)] if m else [rows]
    gradients = [bwd(t.dn, t.dh, t.saved, t.mask, order=order, wanted=one, out=t.out) for t in leaves]
    dparts, dresidual, *vectors = zip(*gradients, strict=True)
    return torch.cat(dparts), torch.cat(dresidual), *map(tree, vectors)


def table_bwd(dparts: Tensor, index: Tensor, table: tuple[int, torch.dtype], leaves: int) -> Tensor:
    """Returns the gradient of a table of so many rows, of a dtype: dparts [m, D] added at ``index`` [m]."""
    n = len(dparts) // max(leaves, 1)
    pieces = zip(dparts.split(n), index.split(n), strict=True) if leaves > 1 and n else [(dparts, index)]
    return tree(embedding_bwd(d, i, 0, *table) for d, i in pieces)
