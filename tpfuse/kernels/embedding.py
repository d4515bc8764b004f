"""Embedding: the lookup in a slice of the vocabulary, and the kernel that finishes what the exchange brings.

    lookup  y_i = W[id_i - first] where the id lies in this slice, else 0                       dW[v] = sum of dy_i with id_i = v
    finish  x = sum_r parts_r + Wp[position] + Wt[type]
            GPT:  h = dropout(x), n = norm(h)             BERT (post-norm):  u = norm(x), h = n = dropout(u)
    back    d = sum_r dn_r;  GPT: dx = dropout'(norm_backward(d) + dh);  BERT: dx = norm_backward(dropout'(d + dh));  dparts = dx

Shapes: W [V/R, D], ids [M], parts [R, m, D], Wp [P, D], Wt [T, D], positions and types [m] -> h, n [m, D].  Sums are fp32 in rank order.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import _embed_finish, _lookup
from ._op import acc_dtype, autocast, check, op, sum_parts
from .norm import Remake, check_vectors, make_remake, normalize, normalize_backward
from .reduce_bias_dropout_add_norm import active_rng, dropout_rows

# ---- reference ----


def embedding_fwd_ref(weight: Tensor, ids: Tensor, first: int) -> Tensor:
    inside = (ids >= first) & (ids < first + len(weight))
    return weight[torch.where(inside, ids - first, 0)].mul_(inside[..., None])


def embedding_bwd_ref(dy: Tensor, ids: Tensor, first: int, rows: int, dtype: torch.dtype) -> Tensor:
    """-> dW [rows, D] in ``dtype``; sums in fp32, by a sort rather than atomics."""
    inside = (ids >= first) & (ids < first + rows)
    local = torch.where(inside, ids - first, rows)  # one row more takes what is not ours
    dw = torch.ops.aten.embedding_dense_backward(dy.to(acc_dtype(dy)), local, rows + 1, -1, False)
    return dw[:rows].to(dtype, copy=True)


def embed_finish_fwd_ref(
    parts: Tensor,
    position_weight: Tensor | None,
    positions: Tensor | None,
    type_weight: Tensor | None,
    types: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    rng: Tensor | None,
    p: float,
    site: int,
    first_row: int,
    batch: int,
    eps: float,
    rms: bool,
    post_norm: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> the norm's input (h, or x for post-norm), n, mean, rstd; the last three empty without gamma."""
    x = sum_parts(parts)
    if position_weight is not None:
        x += position_weight[positions]
    if type_weight is not None:
        x += type_weight[types]
    if rng is not None and not post_norm:
        x = dropout_rows(x, rng, p, site, first_row, batch)
    x = x.to(parts.dtype)
    if gamma is None:
        return x, x.new_empty(0), x.new_empty(0), x.new_empty(0)
    n, mean, rstd = normalize(x, gamma, beta, eps, rms)
    if rng is not None and post_norm:
        n = dropout_rows(n, rng, p, site, first_row, batch)
    return x, n.to(parts.dtype), mean, rstd


def embed_finish_bwd_ref(
    dn: Tensor | None,
    dh: Tensor | None,
    x: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    gamma: Tensor | None,
    rng: Tensor | None,
    p: float,
    site: int,
    first_row: int,
    batch: int,
    rms: bool,
    post_norm: bool,
    has_beta: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> dx [m, D] in ``dtype``, dgamma, dbeta (empty where there was none)."""
    d = dh.to(acc_dtype(dh), copy=True) if dn is None else sum_parts(dn)
    dgamma, dbeta = d.new_empty(0), d.new_empty(0)
    if post_norm and dn is not None and dh is not None:
        d += dh
    if post_norm and rng is not None:
        d = dropout_rows(d, rng, p, site, first_row, batch)
    if gamma is not None and (dn is not None or post_norm):
        d, dgamma, dbeta = normalize_backward(d, x, mean, rstd, gamma, has_beta, rms)
    if not post_norm and dn is not None and dh is not None:
        d += dh
    if not post_norm and rng is not None:
        d = dropout_rows(d, rng, p, site, first_row, batch)
    return d.to(dtype), dgamma, dbeta


def _fwd_fake(parts, position_weight, positions, type_weight, types, gamma, beta, rng, p, site, first_row, batch, eps, rms, post_norm):
    m, D = parts.shape[1:]
    x = parts.new_empty(m, D)
    if gamma is None:
        return x, x.new_empty(0), x.new_empty(0), x.new_empty(0)
    stat = x.new_empty(m, dtype=acc_dtype(x))
    return x, torch.empty_like(x), stat.new_empty(0) if rms else stat, torch.empty_like(stat)


def _bwd_fake(dn, dh, x, mean, rstd, gamma, rng, p, site, first_row, batch, rms, post_norm, has_beta, dtype):
    like = dh if dn is None else dn
    normed = gamma is not None and (dn is not None or post_norm)
    dgamma = torch.empty_like(gamma) if normed else like.new_empty(0, dtype=acc_dtype(like))
    dbeta = dgamma.new_empty(dgamma.shape) if has_beta and normed else dgamma.new_empty(0)
    return like.new_empty(like.shape[-2:], dtype=dtype), dgamma, dbeta


embedding_fwd = op(embedding_fwd_ref, launch=_lookup.fwd_launch, cost=_lookup.fwd_cost)
embedding_bwd = op(embedding_bwd_ref, launch=_lookup.bwd_launch, cost=_lookup.bwd_cost)
embed_finish_fwd = op(embed_finish_fwd_ref, launch=_embed_finish.fwd_launch, fake=_fwd_fake, cost=_embed_finish.fwd_cost)
embed_finish_bwd = op(embed_finish_bwd_ref, launch=_embed_finish.bwd_launch, fake=_bwd_fake, cost=_embed_finish.bwd_cost)


# ---- autograd ----


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, ids, first):
        ctx.save_for_backward(ids)
        ctx.args = first, len(weight), weight.dtype
        return embedding_fwd(weight, ids, first)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return embedding_bwd(dy.contiguous(), *ctx.saved_tensors, *ctx.args), None, None


class _EmbedFinish(torch.autograd.Function):
    """-> h, n.expand(R, m, D), mean, rstd;  post-norm  y, y.expand(R, m, D), mean, rstd."""

    @staticmethod
    def forward(ctx, parts, position_weight, positions, type_weight, types, gamma, beta, rng, *args):
        *coordinates, eps, rms, post_norm, ranks = args
        x, n, mean, rstd = embed_finish_fwd(
            parts, position_weight, positions, type_weight, types, gamma, beta, rng, *coordinates, eps, rms, post_norm
        )
        normed = (x, mean, rstd, gamma) if gamma is not None else (None,) * 4
        ctx.save_for_backward(*normed, rng, positions, types)
        ctx.args = *coordinates, rms, post_norm, beta is not None, parts.dtype
        ctx.tables = [None if w is None else (len(w), w.dtype) for w in (position_weight, type_weight)]
        ctx.ranks = parts.shape[0]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(mean, rstd)
        n = x if gamma is None else n
        return n if post_norm else x, n.expand(ranks, -1, -1), mean, rstd

    @staticmethod
    @once_differentiable
    def backward(ctx, dh, dn, *_):
        if dh is None and dn is None:
            return (None,) * 16
        *saved, positions, types = ctx.saved_tensors
        dx, dgamma, dbeta = embed_finish_bwd(dn, None if dh is None else dh.contiguous(), *saved, *ctx.args)
        tables = [None if t is None else embedding_bwd(dx, i, 0, *t) for t, i in zip(ctx.tables, (positions, types), strict=True)]
        norms = [v if v.numel() else None for v in (dgamma, dbeta)]
        return dx.expand(ctx.ranks, -1, -1), tables[0], None, tables[1], None, *norms, *[None] * 9


# ---- public ----


def embedding(weight: Tensor, ids: Tensor, *, first: int = 0) -> Tensor:
    """Rows of a slice of a table.  weight [V/R, D] holds global ids first to first + V/R; ids [...] int64 -> [..., D], 0 for other ids."""
    return _Embedding.apply(*autocast(weight), ids, first)


def embed_finish(
    parts: Tensor,
    *,
    position_weight: Tensor | None = None,
    positions: Tensor | None = None,
    type_weight: Tensor | None = None,
    types: Tensor | None = None,
    weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    p: float = 0.0,
    rng: Tensor | None = None,
    site: int = 0,
    first_row: int = 0,
    batch: int = 1,
    eps: float = 1e-5,
    rms: bool = False,
    post_norm: bool = False,
    ranks: int = 1,
) -> tuple[Tensor, Tensor, Remake | None]:
    """Rank sum + position + token type, then dropout -> h, norm -> n; post-norm: norm, then dropout -> h = n.

    parts [R, m, D]; position_weight [P, D] with positions [m] int64, type_weight [T, D] with types [m]; weight, norm_bias [D].
    Returns (h [m, D], n expanded to [ranks, m, D] with stride 0, how to make n again: None for post-norm or no norm).
    ValueError for shapes that do not fit, p outside [0, 1), or p > 0 without rng.
    """
    check(parts.dim() == 3, f"embed_finish: parts must be [R, m, D], got {tuple(parts.shape)}")
    m, D = parts.shape[1:]
    check_vectors("embed_finish", D, weight=weight, norm_bias=norm_bias)
    check(weight is not None or (norm_bias is None and not post_norm), "embed_finish: norm_bias and post_norm need weight")
    for name, table, index in (("position", position_weight, positions), ("type", type_weight, types)):
        check((table is None) == (index is None), f"embed_finish: {name}_weight and {name}s go together, got one of them")
        check(index is None or index.shape == (m,), f"embed_finish: {name}s must be [{m}], got {getattr(index, 'shape', None)}")
        check(
            table is None or table.shape[1:] == (D,), f"embed_finish: {name}_weight must be [_, {D}], got {getattr(table, 'shape', None)}"
        )
    rng = active_rng("embed_finish", p, rng)
    (parts,) = autocast(parts)
    h, n, mean, rstd = _EmbedFinish.apply(
        parts, position_weight, positions, type_weight, types, weight, norm_bias, rng, p, site, first_row, batch, eps, rms, post_norm, ranks
    )
    remake = None if weight is None or post_norm else make_remake(h, mean, rstd, weight, norm_bias, eps, rms, n.dtype)
    return h, n, remake
