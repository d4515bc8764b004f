"""Attention in tiles of fixed shapes (``TensorParallel(batch_invariant=T)``): a query's output has the same bits in
training, in a prompt and behind a cache.

    tile i of T queries, block j of 64 keys       s = scale q k',  -inf where a query does not see a key
    top' = max(top, max s)      p = exp(s - top')      c = exp(top - top')
    total = c total + sum p     o = c o + dropout(p) v          at last    o / total,  lse = top + log(total)

Every product is one GEMM [Q T, E] x [E, 64] or [Q T, 64] x [64, E] of one head of keys, whatever the prompt, the batch
and the cache are.  Keys are counted from the first that may be seen, of each sample and document on its own, so that
padding before or between them moves no block.  To a query that sees nothing of a block it does nothing: there c is 1
and p is 0; so blocks that no query of a tile sees are left out.  Sums are fp32 (fp64 for fp64), and only o is rounded.

Backward is the CPU implementation's, which takes softmax anew.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..runtime.errors import check
from ..runtime.op import acc_dtype
from ..runtime.philox import scale
from ..runtime.tiles import check_alike
from .cpu import documents
from .options import INF, Options, QueryChunk, query_positions
from .reference import by_head, keep_mask, operands, rotate_both

KEYS = 64  # of a block
_ABSENT = 1 << 40  # the column of a key that nobody sees


class Keys(NamedTuple):
    """Keys, rotated, and values [B, G, L, E], and the column of each [B or 1, L]: its place in the sequence."""

    k: Tensor
    v: Tensor
    columns: Tensor

    @classmethod
    def of(cls, k: Tensor, v: Tensor, mask: Tensor | None, start: int = 0) -> "Keys":
        """Returns keys whose columns begin at ``start``; those that ``mask`` [B, L] lets be seen come first."""
        columns = torch.arange(start, start + k.shape[2], device=k.device)[None]
        if mask is None:
            return cls(k, v, columns)
        order = torch.sort((~mask).int(), dim=1, stable=True).indices
        columns = torch.where(mask, columns, _ABSENT).gather(1, order)
        index = order[:, None, :, None].expand_as(k)
        return cls(k.gather(2, index), v.gather(2, index), columns)

    def blocks(self) -> "list[Keys]":
        """Returns blocks of 64 keys in the dtype of sums, the last filled up."""
        acc, short = acc_dtype(self.k), -self.columns.shape[1] % KEYS
        k, v = (F.pad(t.to(acc), (0, 0, 0, short)).split(KEYS, 2) for t in self[:2])
        columns = F.pad(self.columns, (0, short), value=_ABSENT).split(KEYS, 1)
        return [Keys(a.contiguous(), b.contiguous(), c) for a, b, c in zip(k, v, columns, strict=True)]

    def visible(self, queries: Tensor, options: Options) -> Tensor:
        """Returns bool [B or 1, .., L]: whether the queries at columns [..] see them."""
        distance = queries[..., None] - self.columns.view(len(self.columns), *[1] * queries.dim(), -1)
        if options.causal:
            return distance >= 0 if options.window is None else (distance >= 0) & (distance < options.window)
        return distance > -_ABSENT // 2 if options.window is None else distance.abs() < options.window


def attend_tiles(
    q: Tensor, keys: Keys, options: Options, *, start: int, keep: Callable[[Tensor, Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """q [B, G, Q, n, E], rotated, at the columns from ``start`` on -> o like q, lse [B, G, Q, n].

    ``keep``, where there is dropout, takes columns of queries [N, T] and of keys [B or 1, 64], and returns the
    probabilities' factors [N, B, G, Q, T, 64].
    """
    (B, G, Q, n, E), (tile, acc) = q.shape, (options.tile, acc_dtype(q))
    _check_products(Q * tile, E, dtype=acc)
    count = -(-n // tile)
    unit = options.scale if options.softcap is None else options.scale / options.softcap
    queries = F.pad(q.to(acc) * unit, (0, 0, 0, count * tile - n)).unflatten(3, (count, tile))
    queries = queries.permute(3, 0, 1, 2, 4, 5).reshape(count, B * G, Q * tile, E)
    columns = torch.arange(start, start + count * tile, device=q.device).view(count, tile)
    top = queries.new_full((count, B * G, Q * tile, 1), torch.finfo(acc).min)
    total, o = torch.zeros_like(top), torch.zeros_like(queries)
    for block in keys.blocks():
        visible = block.visible(columns, options)  # [B or 1, count, T, 64]
        active = visible.any(0).flatten(1).any(1).nonzero()
        if not len(active):
            continue
        tiles = slice(int(active[0]), int(active[-1]) + 1)
        s = _products(queries[tiles], block.k.flatten(0, 1).transpose(1, 2))
        if options.softcap is not None:
            s = s.tanh_().mul_(options.softcap)
        by_head_of = s.view(-1, B, G, Q, tile, KEYS)
        by_head_of.masked_fill_(~visible[:, tiles].transpose(0, 1)[:, :, None, None], -INF)
        new = torch.maximum(top[tiles], s.amax(-1, keepdim=True))
        shrink, p = torch.exp(top[tiles] - new), s.sub_(new).exp_()
        total[tiles] = total[tiles].mul_(shrink).add_(p.sum(-1, keepdim=True))
        if keep is not None:
            by_head_of.mul_(keep(columns[tiles], block.columns))
        o[tiles] = o[tiles].mul_(shrink).add_(_products(p, block.v.flatten(0, 1)))
        top[tiles] = new
    nothing = total == 0
    o = (o / total).masked_fill_(nothing, 0).add_(0.0)  # no -0: a block that does nothing adds 0
    lse = (top + total.log()).masked_fill_(nothing, INF)
    o, lse = (t.view(count, B, G, Q, tile, -1).permute(1, 2, 3, 0, 4, 5).flatten(3, 4)[:, :, :, :n] for t in (o, lse))
    return o.to(q.dtype), lse[..., 0]


def _products(a: Tensor, b: Tensor) -> Tensor:
    """a [count, N, rows, K] and b [N, K, C] -> [count, N, rows, C], a GEMM each."""
    product = a.new_empty(*a.shape[:3], b.shape[2])
    bs = b.unbind(0)
    for a_tile, out_tile in zip(a.unbind(0), product.unbind(0), strict=True):
        for x, w, y in zip(a_tile.unbind(0), bs, out_tile.unbind(0), strict=True):
            torch.mm(x, w, out=y)
    return product


def _check_products(rows: int, E: int, dtype: torch.dtype) -> None:
    check_alike("attention's scores", lambda x, k: torch.mm(x, k.t()), rows, torch.empty(KEYS, E, dtype=dtype))
    check_alike("attention", lambda x, v: torch.mm(x, v.t().contiguous()), rows, torch.empty(E, KEYS, dtype=dtype))


# ---- the op's forward ----


def fwd_tiles(x: Tensor, options: Options, chunk: QueryChunk | None = None) -> tuple[Tensor, Tensor]:
    """attention_fwd, or with a chunk attention_of_queries_fwd, on a CPU, in tiles of ``options.tile`` queries."""
    check(options.bias is None, "attention: an additive bias is not built for batch_invariant")
    (q, k, v), places = operands(x, options, chunk), query_positions(options, chunk)
    q, k = rotate_both(q, k, options, places)
    batch, G, Q, n, E = q.shape
    keep = None if options.rng is None else _Keep(options, G, Q, acc_dtype(x))
    output = x.new_zeros(len(x), G * Q * E)
    lse = x.new_full((batch, G * Q, n), INF, dtype=acc_dtype(x))
    o_by_head, lse_by_head = by_head(output, batch, n, (G, Q)), lse.unflatten(1, (G, Q))
    for start, stop in documents(options):
        begin, end = max(start, places.start), min(stop, places.stop)
        if begin >= end:
            continue
        keys_of, rows = slice(start, stop), slice(begin - places.start, end - places.start)
        mask = None if options.key_mask is None else options.key_mask[:, keys_of]
        keys = Keys.of(k[:, :, 0, keys_of], v[:, :, 0, keys_of], mask, start)
        o, sums = attend_tiles(q[:, :, :, rows], keys, options, start=begin, keep=keep)
        o_by_head[:, :, :, rows], lse_by_head[:, :, :, rows] = o, sums
    return output, lse


class _Keep:
    """Called with the columns of queries [N, T] and of keys [B or 1, 64], returns 0 or 1 / (1 - p) for each
    probability [N, B, G, Q, T, 64]: the masks of attention's other implementations."""

    def __init__(self, options: Options, groups: int, heads_per_group: int, dtype: torch.dtype):
        self.options, self.shape, self.dtype = options, (groups, heads_per_group), dtype

    def __call__(self, queries: Tensor, keys: Tensor) -> Tensor:
        options, (N, T) = self.options, queries.shape
        samples, start = torch.arange(options.batch), min(int(keys.min()), options.seq)
        span = range(start, int(keys.masked_fill(keys == _ABSENT, start).max()) + 1)
        G, Q = self.shape
        rows = queries.flatten().clamp(max=options.seq - 1)  # those that fill a tile up have none
        mask = keep_mask(options, rows, samples, heads=G * Q, keys=span, dtype=self.dtype)
        index = (keys - start).clamp(0, len(span) - 1)[:, None, None].expand(options.batch, *mask.shape[1:3], -1)
        mask = mask.gather(3, index).mul_(scale(options.p))
        return mask.view(options.batch, G, Q, N, T, KEYS).permute(3, 0, 1, 2, 4, 5)
