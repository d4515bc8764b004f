"""The parts below a model's blocks: rows of tokens, positions and token types, their dropout and their norm.

One kernel behind the lookup's exchange; where a hook of torch waits for one of the modules, each of them by its call.
"""

from typing import NamedTuple

from torch import Tensor

from ..kernels.norm import embed_finish
from ..kernels.runtime.philox import FirstRow
from ..layers.embedding import VocabParallelEmbedding
from ..layers.hooks import served
from ..layers.module import local, on_rows, replicated
from ..layers.norm import LayerNorm
from ..layers.wiring import Normed
from ..parallel import TensorParallel
from ..sequence_parallel.crossings import expanded
from .head import ReplicatedTable


class Lookup(NamedTuple):
    """A replicated table and the row of it that each of this rank's rows has, int64 [m]."""

    table: ReplicatedTable
    rows: Tensor


class EmbeddingDropout(NamedTuple):
    """Dropout on the embedding's rows: its probability, rng, and the place of this rank's rows."""

    p: float
    rng: Tensor | None
    first_row: FirstRow
    batch: int


def embed(
    tokens: VocabParallelEmbedding,
    norm: LayerNorm | None,
    x: Tensor,
    drop: EmbeddingDropout,
    *,
    positions: Lookup | None = None,
    types: Lookup | None = None,
    post_norm: bool = False,
    recompute: bool = False,
) -> tuple[Tensor, Normed]:
    """x: ids [M], or the rows [m, D] of tokens themselves -> h [m, D], and n of the first block: without a norm h.

    ``recompute``: n comes with how to recompute it.
    """
    tp, lookups = tokens.tp, [lookup for lookup in (positions, types) if lookup is not None]
    modules = tokens, *(() if norm is None else (norm,)), *(lookup.table for lookup in lookups)
    rows = x.to(next(tokens.parameters()).dtype) if x.dim() == 2 else None
    if any(map(served, modules)):
        return _by_parts(tokens(x) if rows is None else rows, norm, lookups, drop, tp=tp, post_norm=post_norm)
    weight = bias = None
    if norm is not None:
        weight, bias = replicated(tp, norm.weight, norm.bias)
    h, n, recipe = embed_finish(
        tokens.parts(x) if rows is None else rows[None],
        position_weight=None if positions is None else on_rows(local(positions.table.weight), tp),
        positions=None if positions is None else positions.rows,
        type_weight=None if types is None else on_rows(local(types.table.weight), tp),
        types=None if types is None else types.rows,
        weight=weight, norm_bias=bias, eps=1e-5 if norm is None else norm.eps,
        norm="layer" if norm is None else norm.kind,
        p=drop.p, rng=drop.rng, first_row=drop.first_row, batch=drop.batch,
        post_norm=post_norm, ranks=tp.row_shards, recompute=recompute, leaves=tp.row_leaves,
    )  # fmt: skip
    return h, Normed(n, recipe)


def _by_parts(
    x: Tensor, norm: LayerNorm | None, lookups: list[Lookup], drop: EmbeddingDropout, *, tp: TensorParallel,
    post_norm: bool,
) -> tuple[Tensor, Normed]:  # fmt: skip
    for table, rows in lookups:
        x = x + table(rows)
    x = norm(x) if norm is not None and post_norm else x
    h = embed_finish(x[None], p=drop.p, rng=drop.rng, first_row=drop.first_row, batch=drop.batch)[0]
    n = h if norm is None or post_norm else norm(h)
    return h, Normed(expanded("embed", n, tp))
