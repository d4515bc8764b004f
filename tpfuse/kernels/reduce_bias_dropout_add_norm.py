"""The one kernel between two GEMMs: sum over ranks, bias, dropout, residual and norm, any of them left out.

    z  = sum_r parts_r + bias          h' = residual + dropout(z)          n' = norm(h')
    d  = sum_r dn_r                    dh = norm_backward(d) + dh'         (post-norm: dh = norm_backward(d + dh'))
    dparts = mask dh / (1 - p)         dbias = sum_rows dparts             dresidual = dh

Shapes: parts [R, m, D] (stride 0 allowed), bias [D], residual [m, D] -> h', n' [m, D], mean, rstd [m]; dn parts [R, m, D] unsummed,
dh' [m, D].  Row i of the shard is position (first_row + i) // batch of sample first_sample + (first_row + i) % batch, which is
what the mask is a function of (_philox.py).  Sums are fp32 in rank order; h' has the residual's dtype (parts' without one), n' has
parts' dtype; the statistics are of h' as rounded and stored, so that an n' made again from them is bitwise the first.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._fused_norm import fwd_cost, fwd_launch
from ._fused_norm_bwd import bwd_cost, bwd_launch
from ._op import acc_dtype, autocast, check, op, row_blocks, sum_parts
from ._philox import check_rng, keep_rows, scale, threshold
from .norm import Remake, check_vectors, make_remake, normalize, normalize_backward

# ---- reference ----


def dropout_rows(z: Tensor, rng: Tensor, p: float, site: int, first_row: int, batch: int, residual: Tensor | None = None) -> Tensor:
    """residual + mask z / (1 - p) in z's dtype, for z [m, D]."""
    mask = keep_rows(rng, *z.shape, p, site, first_row, batch, z.dtype)
    if residual is None:
        return mask.mul_(z).mul_(scale(p))
    return torch.addcmul(residual.to(z.dtype), z, mask, value=scale(p))


def reduce_bias_dropout_add_norm_fwd_ref(
    parts: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    rng: Tensor | None,
    p: float,
    site: int,
    first_row: int,
    batch: int,
    eps: float,
    rms: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> h', n', mean, rstd; the last three empty without gamma."""
    z = sum_parts(parts)
    if bias is not None:
        z += bias
    if rng is not None:
        z = dropout_rows(z, rng, p, site, first_row, batch, residual)
    elif residual is not None:
        z += residual
    h = z.to(parts.dtype if residual is None else residual.dtype)
    if gamma is None:
        return h, h.new_empty(0), h.new_empty(0), h.new_empty(0)
    n, mean, rstd = normalize(h, gamma, beta, eps, rms)
    return h, n.to(parts.dtype), mean, rstd


def reduce_bias_dropout_add_norm_bwd_ref(
    dn: Tensor | None,
    dh: Tensor | None,
    h: Tensor | None,
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
    has_bias: bool,
    has_beta: bool,
    residual_dtype: torch.dtype | None,
    parts_dtype: torch.dtype,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """-> dparts [m, D], dresidual [m, D], dbias, dgamma, dbeta [D]; empty where there was none.  h, mean, rstd, gamma: with a norm.

    ``out`` [m, D] (a send buffer; rows may lie apart) takes dparts, which then comes back empty: no op may return what it was given.
    """
    d = dh.to(acc_dtype(dh), copy=True) if dn is None else sum_parts(dn)
    dgamma, dbeta = d.new_empty(0), d.new_empty(0)
    if gamma is not None and (dn is not None or post_norm):
        if post_norm and dn is not None and dh is not None:
            d += dh
        d, dgamma, dbeta = normalize_backward(d, h, mean, rstd, gamma, has_beta, rms)
        if dn is not None and dh is not None and not post_norm:
            d += dh
    elif dn is not None and dh is not None:
        d += dh
    dresidual = d.new_empty(0) if residual_dtype is None else d.to(residual_dtype, copy=True)
    if rng is not None:
        d = dropout_rows(d, rng, p, site, first_row, batch)
    dparts = d.to(parts_dtype) if out is None else d.new_empty(0, dtype=parts_dtype)
    if out is not None:
        out.copy_(d)
    return dparts, dresidual, d.sum(0) if has_bias else d.new_empty(0), dgamma, dbeta


# ---- CPU: the reference on blocks of rows, whose temporaries then stay in the cache ----


def _fwd_cpu(parts, bias, residual, gamma, beta, rng, p, site, first_row, *rest):
    def block(i, j):
        own = parts[:, i:j], bias, None if residual is None else residual[i:j], gamma, beta
        return reduce_bias_dropout_add_norm_fwd_ref(*own, rng, p, site, first_row + i, *rest)

    blocks = [block(i, j) for i, j in row_blocks(*parts.shape[1:])]
    return blocks[0] if len(blocks) == 1 else tuple(torch.cat(outputs) for outputs in zip(*blocks, strict=True))


def _bwd_cpu(dn, dh, h, mean, rstd, gamma, rng, p, site, first_row, *rest):
    *rest, out = rest if len(rest) == 8 else (*rest, None)  # the dispatcher leaves a default out

    def block(i, j):
        some = [t if t is None or len(t) == 0 else t[i:j] for t in (dh, h, mean, rstd)]
        own = None if dn is None else dn[:, i:j], *some
        return reduce_bias_dropout_add_norm_bwd_ref(*own, gamma, rng, p, site, first_row + i, *rest, None if out is None else out[i:j])

    blocks = [block(i, j) for i, j in row_blocks(*(dh if dn is None else dn).shape[-2:])]
    if len(blocks) == 1:
        return blocks[0]
    rows, vectors = zip(*((b[:2], b[2:]) for b in blocks), strict=True)
    return *(torch.cat(t) for t in zip(*rows, strict=True)), *(torch.stack(t).sum(0) for t in zip(*vectors, strict=True))


def _fwd_fake(parts, bias, residual, gamma, beta, rng, p, site, first_row, batch, eps, rms):
    m, D = parts.shape[1:]
    h = parts.new_empty(m, D, dtype=parts.dtype if residual is None else residual.dtype)
    if gamma is None:
        return h, h.new_empty(0), h.new_empty(0), h.new_empty(0)
    mean, rstd = h.new_empty(0 if rms else m, dtype=acc_dtype(h)), h.new_empty(m, dtype=acc_dtype(h))
    return h, parts.new_empty(m, D), mean, rstd


def _bwd_fake(
    dn, dh, h, mean, rstd, gamma, rng, p, site, first_row, batch, rms, post_norm, has_bias, has_beta, residual_dtype, parts_dtype, out=None
):
    m, D = (dh if dn is None else dn).shape[-2:]
    like = dh if dn is None else dn
    acc = acc_dtype(like)
    normed = gamma is not None and (dn is not None or post_norm)
    dresidual = like.new_empty(0, dtype=acc) if residual_dtype is None else like.new_empty(m, D, dtype=residual_dtype)
    dgamma = gamma.new_empty(D) if normed else like.new_empty(0, dtype=acc)
    dbeta = dgamma.new_empty(D if has_beta else 0) if normed else like.new_empty(0, dtype=acc)
    dparts = like.new_empty((m, D) if out is None else 0, dtype=parts_dtype)
    return dparts, dresidual, like.new_empty(D if has_bias else 0, dtype=acc), dgamma, dbeta


reduce_bias_dropout_add_norm_fwd = op(reduce_bias_dropout_add_norm_fwd_ref, launch=fwd_launch, cpu=_fwd_cpu, fake=_fwd_fake, cost=fwd_cost)
reduce_bias_dropout_add_norm_bwd = op(
    reduce_bias_dropout_add_norm_bwd_ref, launch=bwd_launch, cpu=_bwd_cpu, fake=_bwd_fake, cost=bwd_cost, mutates=("out",)
)


# ---- autograd ----


class _ReduceBiasDropoutAddNorm(torch.autograd.Function):
    """-> h', n'.expand(R, m, D), mean, rstd, empty;  post-norm  y, y.expand(R, m, D), mean, rstd, h' (not differentiable).

    n' is returned expanded, so that autograd carries the R unsummed gradients of it into the one backward kernel, and dparts
    goes back expanded, so that the exchange behind it is an all-gather.
    """

    @staticmethod
    def forward(ctx, parts, bias, residual, gamma, beta, rng, p, site, first_row, batch, eps, rms, post_norm, ranks):
        coordinates = p, site, first_row, batch
        h, n, mean, rstd = reduce_bias_dropout_add_norm_fwd(parts, bias, residual, gamma, beta, rng, *coordinates, eps, rms)
        if gamma is None:
            ctx.save_for_backward(None, None, None, None, rng)
        else:
            ctx.save_for_backward(h, mean, rstd, gamma, rng)
        residual_dtype = None if residual is None else residual.dtype
        ctx.args = *coordinates, rms, post_norm, bias is not None, beta is not None, residual_dtype, parts.dtype
        ctx.ranks = parts.shape[0]
        ctx.set_materialize_grads(False)
        out, n = (n, n) if post_norm else (h, h if gamma is None else n)
        inner = h if post_norm else h.new_empty(0)
        ctx.mark_non_differentiable(mean, rstd, inner)
        return out, n.expand(ranks, -1, -1), mean, rstd, inner

    @staticmethod
    @once_differentiable
    def backward(ctx, dh, dn, *_):
        if dh is None and dn is None:
            return (None,) * 14
        dh = None if dh is None else dh.contiguous()
        dparts, dresidual, dbias, dgamma, dbeta = reduce_bias_dropout_add_norm_bwd(dn, dh, *ctx.saved_tensors, *ctx.args)
        if ctx.args[-2] is None:  # not told from its size: with no rows it is empty too
            dresidual = None
        dbias, dgamma, dbeta = (v if v.numel() else None for v in (dbias, dgamma, dbeta))
        return dparts.expand(ctx.ranks, -1, -1), dbias, dresidual, dgamma, dbeta, *[None] * 9


# ---- public ----


def reduce_bias_dropout_add_norm(
    parts: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    *,
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
    """h' = residual + dropout(sum_r parts_r + bias), n' = norm(h'), in one pass.

    parts [R, m, D] (or [m, D]); bias, weight, norm_bias [D] in any floating dtype; residual [m, D]; rng int64 [3] where p > 0.
    Returns (h' [m, D], n' expanded to [ranks, m, D] with stride 0, how to make n' again); post-norm returns n' in h's place.
    Without ``weight`` there is no norm: n is h' and the third is None.  Under autocast parts and residual are cast.
    ValueError for shapes that do not fit, p outside [0, 1), or p > 0 without rng.
    """
    name = "reduce_bias_dropout_add_norm"
    parts = parts[None] if parts.dim() == 2 else parts
    check(parts.dim() == 3, f"{name}: parts must be [R, m, D] or [m, D], got {tuple(parts.shape)}")
    m, D = parts.shape[1:]
    check_vectors(name, D, bias=bias, weight=weight, norm_bias=norm_bias)
    check(
        residual is None or residual.shape == (m, D), f"{name}: residual must have shape {(m, D)}, got {getattr(residual, 'shape', None)}"
    )
    check(weight is not None or (norm_bias is None and not post_norm), f"{name}: norm_bias and post_norm need weight")
    rng = active_rng(name, p, rng)
    parts, residual = autocast(parts, residual)
    out, n, mean, rstd, inner = _ReduceBiasDropoutAddNorm.apply(
        parts, bias, residual, weight, norm_bias, rng, p, site, first_row, batch, eps, rms, post_norm, ranks
    )
    if weight is None:
        return out, n, None
    return out, n, make_remake(inner if post_norm else out, mean, rstd, weight, norm_bias, eps, rms, n.dtype)


def active_rng(name: str, p: float, rng: Tensor | None) -> Tensor | None:
    """rng where p drops anything, None otherwise."""
    if threshold(p) == 0:
        return None
    check_rng(name, rng)
    return rng
