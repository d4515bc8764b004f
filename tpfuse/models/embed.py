"""The parts below a model's blocks: rows of tokens, positions and token types, their dropout and their norm.

One kernel behind the lookup's exchange; where a hook of torch waits for one of the modules, each of them by its call.
"""

from typing import Any, NamedTuple

from torch import Tensor

from ..kernels.norm import embed_finish
from ..layers.block import Normed
from ..layers.embedding import VocabParallelEmbedding
from ..layers.hooks import served
from ..layers.module import local, on_rows, replicated
from ..layers.norm import LayerNorm
from ..parallel import TensorParallel
from ..sequence_parallel.crossings import expanded
from .head import Table


class Lookup(NamedTuple):
    """A replicated table and the row of it that each of this rank's rows has, int64 [m]."""

    table: Table
    rows: Tensor


def embed(
    tokens: VocabParallelEmbedding,
    norm: LayerNorm | None,
    *,
    ids: Tensor | None = None,
    rows: Tensor | None = None,
    positions: Lookup | None = None,
    types: Lookup | None = None,
    post_norm: bool = False,
    recompute: bool = False,
    **drop: Any,
) -> tuple[Tensor, Normed]:
    """ids [M], or the ``rows`` [m, D] of tokens themselves -> h [m, D], and n of the first block: without a norm h.

    ``recompute``: n comes with how to recompute it.  ``drop``: p, rng, first_row and batch of dropout.
    """
    lookups = {key: x for key, x in dict(position=positions, type=types).items() if x is not None}
    if rows is not None:
        rows = rows.to(tokens.weight.dtype)
    parts_of = tokens, *(() if norm is None else (norm,)), *(x.table for x in lookups.values())
    if any(map(served, parts_of)):
        x, tables = tokens(ids) if rows is None else rows, list(lookups.values())
        return _by_parts(x, norm, tables, tp=tokens.tp, post_norm=post_norm, **drop)
    if rows is not None:
        parts = rows[None]
    else:
        assert ids is not None  # one of them is given
        parts = tokens.parts(ids)
    given: dict[str, Any] = {}
    for key, (table, index) in lookups.items():
        given |= {f"{key}_weight": on_rows(local(table.weight), tokens.tp), f"{key}s": index}
    if norm is not None:
        weight, bias = replicated(tokens.tp, norm.weight, norm.bias)
        given |= dict(weight=weight, norm_bias=bias, eps=norm.eps, norm=norm.kind)
    given |= dict(post_norm=post_norm, ranks=tokens.tp.row_shards, recompute=recompute)
    h, n, how = embed_finish(parts, **given, **drop)
    return h, Normed(n, how)


def _by_parts(
    x: Tensor, norm: LayerNorm | None, lookups: list[Lookup], *, tp: TensorParallel, post_norm: bool, **drop: Any
) -> tuple[Tensor, Normed]:
    for table, rows in lookups:
        x = x + table(rows)
    x = norm(x) if norm is not None and post_norm else x
    h = embed_finish(x[None], **drop)[0]
    n = h if norm is None or post_norm else norm(h)
    return h, Normed(expanded("embed", n, tp))
