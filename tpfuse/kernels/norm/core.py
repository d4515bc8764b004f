"""The fused norm: one op pair, of which every public function in verbs.py is a part.

    forward     z = sum_r parts_r + bias + position_weight[positions] + type_weight[types]
                h = residual + dropout(z)        n = norm(h)
    backward    d = sum_r dn_r                   dx = norm_backward(d) + dh
                dresidual = dx                   dparts = dropout(dx)           dbias = sum_rows dparts

What is not there is omitted.  ``order`` says what comes when, and which of the two goes on as h:

    "pre"    as above; h goes on, beside n
    "post"   n goes on as h:                  dx = norm_backward(d + dh)
    "drop"   n = dropout(norm(h)) goes on:    dx = norm_backward(dropout(d + dh)),  dparts = dx
    "alone"  as "pre", of one part to which nothing is added: h is that part, and is not written again

Shapes: parts [R, m, D] (stride 0 allowed), bias, gamma, beta [D], residual [m, D], positions and types [m] -> h, n [m,
D], mean, rstd [m]; dn parts [R, m, D], unsummed, dh [m, D].  Sums over ranks are taken in rank order in fp32 (fp64 for
fp64), and so are statistics; h has the residual's dtype (parts' without one), n has parts' dtype, dgamma and dbeta have
gamma's, dbias has the one that is asked for.  The statistics are of h as rounded and stored, so that an n recomputed
from them is bitwise the first.  With ``leaves`` sums over ranks and rows are binary trees, and the gradient of what
goes on as h is rounded to its dtype before anything is made of it.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ..runtime.function import Function, once_differentiable
from ..runtime.leaves import check_leaves
from ..runtime.op import (
    ELEMENTWISE,
    NORM,
    Op,
    acc_dtype,
    copied,
    dtype_of,
    in_dtype,
    new_vector,
    op,
    row_blocks,
    sum_parts,
)
from ..runtime.philox import FirstRow, Mask, keep_rows, scale
from .kinds import KINDS, normalize, normalize_backward
from .records import ALONE, DROP, POST, PRE, Add, NormVectors, Recompute, Saved, Wanted, incoming
from .row_leaves import BackwardRows, by_leaves, table_bwd
from .triton_backward import bwd_cost, bwd_launch
from .triton_forward import apply_launch, fwd_cost, fwd_launch, reduce_launch

# ---- reference ----


def drop(z: Tensor, mask: Mask, residual: Tensor | None = None) -> Tensor:
    """Returns residual + mask z / (1 - p) in z's dtype, for z [m, D]."""
    rows, columns = z.shape
    keeps = keep_rows(mask, rows, columns, z.dtype)
    if residual is None:
        return keeps.mul_(z).mul_(scale(mask.p))
    return torch.addcmul(residual.to(z.dtype), z, keeps, value=scale(mask.p))


def fused_norm_fwd_ref(
    parts: Tensor, add: Add, norm: NormVectors, mask: Mask, order: str, leaves: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> h (empty for "alone"), n, mean, rstd; the last three empty without gamma.

    ``leaves``: unless 0, the parts are summed as a binary tree.
    """
    if order == ALONE:
        n, mean, rstd = normalize(parts[0], norm)
        return parts.new_empty(0), in_dtype(n, parts.dtype), mean, rstd
    dropped = mask.rng is not None and order != DROP
    tables = (add.position_weight, add.positions), (add.type_weight, add.types)
    addends = [add.bias, *(None if table is None else table[index] for table, index in tables)]
    addends += [] if dropped else [add.residual]
    z = sum_parts(parts, *(x for x in addends if x is not None), as_tree=leaves > 0)
    if dropped:
        z = drop(z, mask, add.residual)
    h = in_dtype(z, parts.dtype if add.residual is None else add.residual.dtype)
    if norm.gamma is None:
        return h, h.new_empty(0), h.new_empty(0), h.new_empty(0)
    n, mean, rstd = normalize(h, norm)
    if mask.rng is not None and order == DROP:
        n = drop(n, mask)
    return h, in_dtype(n, parts.dtype), mean, rstd


def _rounded(d: Tensor, dtype: torch.dtype, wanted: Wanted) -> Tensor:
    """With leaves, rounds the gradient of h as it is rounded where h comes from another stage of a pipeline."""
    return d.to(dtype).to(d.dtype) if wanted.leaves else d


def fused_norm_bwd_ref(
    dn: Tensor | None,
    dh: Tensor | None,
    saved: Saved,
    mask: Mask,
    order: str,
    wanted: Wanted,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """-> dparts [m, D], dresidual [m, D], dbias, dgamma, dbeta [D]; empty where there was none.

    ``out`` [m, D] (a send buffer; rows may lie apart) takes dparts, which then comes back empty: no op may return
    what it was given.
    """
    if wanted.leaves > 1:
        return by_leaves(fused_norm_bwd_ref, BackwardRows(dn, dh, saved, mask, out=out), order, wanted)
    inside = order in (POST, DROP)  # dh, too, comes through the norm
    gradient = incoming(dn, dh)
    if dn is None:
        d = copied(gradient, acc_dtype(gradient))
    elif saved.gamma is not None and not inside and len(dn) == 1 and dn.dtype == acc_dtype(dn):
        d = dn[0]  # is only read
    else:
        d = sum_parts(dn, as_tree=wanted.leaves > 0)
    dgamma, dbeta = d.new_empty(0), d.new_empty(0)
    if dn is not None and dh is not None and inside:
        d = _rounded(d.add_(dh), dh.dtype, wanted)
    if mask.rng is not None and order == DROP:
        d = drop(d, mask)
    if saved.gamma is not None and (dn is not None or inside):
        d, dgamma, dbeta = normalize_backward(d, saved, wanted.beta)
    if dn is not None and dh is not None and not inside:
        d += dh
    if wanted.residual is not None and not inside:
        d = _rounded(d, wanted.residual, wanted)
    dresidual = d.new_empty(0) if wanted.residual is None else copied(d, wanted.residual)
    if mask.rng is not None and order != DROP:
        d = drop(d, mask)
    dparts = in_dtype(d, wanted.parts) if out is None else d.new_empty(0, dtype=wanted.parts)
    if out is not None:
        out.copy_(d)
    dbias = d.new_empty(0) if wanted.bias is None else in_dtype(d.sum(0), wanted.bias)
    return dparts, dresidual, dbias, dgamma, dbeta


def norm_apply_ref(recipe: Recompute) -> Tensor:
    """Returns n recomputed from what backward has saved, bitwise the first one."""
    return normalize(recipe.h, NormVectors(recipe.gamma, recipe.beta, recipe.eps, recipe.kind))[0].to(recipe.dtype)


# ---- CPU: the reference on blocks of rows, whose temporaries then stay in the cache ----


def fwd_cpu(parts: Tensor, add: Add, norm: NormVectors, mask: Mask, order: str, leaves: int = 0) -> tuple[Tensor, ...]:
    blocks = list(row_blocks(*parts.shape[1:]))
    if len(blocks) == 1:
        return fused_norm_fwd_ref(parts, add, norm, mask, order=order, leaves=leaves)

    outputs = _fwd_fake(parts, add, norm, mask, order=order, leaves=leaves)
    for i, j in blocks:
        positions, types, residual = (None if t is None else t[i:j] for t in (add.positions, add.types, add.residual))
        part = add._replace(positions=positions, types=types, residual=residual)
        rows = fused_norm_fwd_ref(parts[:, i:j], part, norm, mask.from_row(i), order=order, leaves=leaves)
        _put(outputs, rows, i, j)
    return outputs


def _put(outputs: Sequence[Tensor], rows: Sequence[Tensor], start: int, stop: int) -> None:
    """Writes a block of rows while it is in the cache; what is empty has none."""
    for output, block in zip(outputs, rows, strict=True):
        output[start:stop] = block


def bwd_cpu(
    dn: Tensor | None,
    dh: Tensor | None,
    saved: Saved,
    mask: Mask,
    order: str,
    wanted: Wanted,
    out: Tensor | None = None,
) -> tuple[Tensor, ...]:
    if wanted.leaves > 1:
        return by_leaves(bwd_cpu, BackwardRows(dn, dh, saved, mask, out=out), order, wanted)
    blocks = list(row_blocks(*incoming(dn, dh).shape[-2:]))
    if len(blocks) == 1:
        return fused_norm_bwd_ref(dn, dh, saved, mask, order=order, wanted=wanted, out=out)
    acc_wanted = wanted if wanted.bias is None else wanted._replace(bias=acc_dtype(incoming(dn, dh)))

    outputs, sums = _bwd_fake(dn, dh, saved, mask, order=order, wanted=wanted, out=out)[:2], []
    for i, j in blocks:
        t = BackwardRows(dn, dh, saved, mask, out=out).rows(i, j)
        results = fused_norm_bwd_ref(t.dn, t.dh, t.saved, t.mask, order=order, wanted=acc_wanted, out=t.out)
        _put(outputs, results[:2], i, j)
        sums.append(results[2:])
    dbias, dgamma, dbeta = (torch.stack(v).sum(0) for v in zip(*sums, strict=True))
    return *outputs, dbias.to(wanted.bias or dbias.dtype), dgamma, dbeta


# ---- shapes alone ----


def _fwd_fake(
    parts: Tensor, add: Add, norm: NormVectors, mask: Mask, order: str, leaves: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    m, D = parts.shape[1:]
    dtype = parts.dtype if add.residual is None else add.residual.dtype
    h = parts.new_empty(0) if order == ALONE else parts.new_empty(m, D, dtype=dtype)
    if norm.gamma is None:
        return h, h.new_empty(0), h.new_empty(0), h.new_empty(0)
    rstd = h.new_empty(m, dtype=acc_dtype(h))
    return h, parts.new_empty(m, D), rstd.new_empty(m if KINDS[norm.kind].centred else 0), rstd


def _bwd_fake(
    dn: Tensor | None,
    dh: Tensor | None,
    saved: Saved,
    mask: Mask,
    order: str,
    wanted: Wanted,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    gradient, gamma = incoming(dn, dh), saved.gamma
    acc, (m, D) = acc_dtype(gradient), gradient.shape[-2:]
    dparts = gradient.new_empty((m, D) if out is None else 0, dtype=wanted.parts)
    rows, dtype = (0, acc) if wanted.residual is None else ((m, D), wanted.residual)
    normed = dn is not None or order in (POST, DROP)
    dgamma = gradient.new_empty(0, dtype=acc) if gamma is None or not normed else gamma.new_empty(D)
    dbeta = dgamma.new_empty(D if gamma is not None and normed and wanted.beta else 0)
    return dparts, gradient.new_empty(rows, dtype=dtype), new_vector(gradient, D, wanted.bias), dgamma, dbeta


norm_apply = op(norm_apply_ref, kind=NORM, launch=apply_launch, replay=True)


# ---- the sum over ranks alone ----


def reduce_parts_ref(parts: Tensor) -> Tensor:
    """[R, ...] -> [...] in parts' dtype"""
    return sum_parts(parts).to(parts.dtype)


reduce_parts = op(reduce_parts_ref, kind=ELEMENTWISE, launch=reduce_launch, replay=True)


# ---- the op pairs ----


class NormOps(NamedTuple):
    """An op and its backward, under the name that the ledger prints."""

    name: str
    fwd: Op
    bwd: Op


# Raises ValueError for what the public functions do not take.
Check = Callable[[Tensor, Add, NormVectors, Mask, str, int], None]


def norm_ops(name: str, check: Check, blocked: bool = False) -> NormOps:
    """Registers NAME_fwd and NAME_bwd; ``blocked``: on CPU in blocks of rows."""
    fwd = Op(
        f"{name}_fwd", fused_norm_fwd_ref, fwd_launch, kind=NORM, cpu=fwd_cpu if blocked else None, fake=_fwd_fake,
        check=check, replay=True, cost=fwd_cost,
    )  # fmt: skip
    bwd = Op(
        f"{name}_bwd", fused_norm_bwd_ref, bwd_launch, kind=NORM, cpu=bwd_cpu if blocked else None, fake=_bwd_fake,
        replay=True, mutates=("out",), cost=bwd_cost,
    )  # fmt: skip
    return NormOps(name, fwd, bwd)


# ---- autograd ----


class Weights(NamedTuple):
    """The tensors that a fused norm differentiates beside the parts; see Add and NormVectors."""

    bias: Tensor | None = None
    position_weight: Tensor | None = None
    type_weight: Tensor | None = None
    residual: Tensor | None = None
    gamma: Tensor | None = None
    beta: Tensor | None = None


class NormOptions(NamedTuple):
    """The arguments of a fused norm that it does not differentiate; the first TENSORS fields are tensors."""

    rng: Tensor | None = None
    positions: Tensor | None = None
    types: Tensor | None = None
    p: float = 0.0
    site: int = 0
    first_row: FirstRow = 0
    batch: int = 1
    eps: float = 0.0
    kind: str = "layer"
    order: str = PRE
    ranks: int = 1  # that n is expanded to
    recompute: bool = False  # return a Recompute beside n
    leaves: int = 0  # blocks of these rows in a sum over all rows that has the same bits at every split; 0: no such sum

    def mask(self, name: str) -> Mask:
        """Returns the mask of ``name``'s dropout (:meth:`Mask.of`)."""
        return Mask.of(name, self.rng, self.p, site=self.site, first_row=self.first_row, batch=self.batch)


TENSORS: Final = 3
NOTHING: Final = Add()


class _FusedNorm(Function):
    """-> the next h, n.expand(ranks, m, D), and a Recompute for n, whose tensors autograd does not see.

    n is returned expanded, so that autograd carries its unsummed gradients into the one backward kernel, and dparts
    goes back expanded, so that the exchange behind it is an all-gather.
    """

    @staticmethod
    def forward(ctx: Any, ops: NormOps, options: NormOptions, parts: Tensor, *weights: Any) -> tuple[Any, ...]:
        """``weights`` are the fields of Weights."""
        bias, position_weight, type_weight, residual, gamma, beta = weights
        order, ranks, add = options.order, options.ranks, NOTHING
        if order != ALONE:
            add = Add(bias, position_weight, options.positions, type_weight, types=options.types, residual=residual)
        norm, mask = NormVectors(gamma, beta, options.eps, options.kind), options.mask(ops.name)
        h, n, mean, rstd = ops.fwd(parts, add, norm, mask, order, options.leaves)
        if order == ALONE:
            h = parts[0]
        dtypes = Wanted(dtype_of(bias), beta is not None, dtype_of(residual), parts.dtype, leaves=options.leaves)
        tables = None
        if position_weight is not None or type_weight is not None:
            tables = tuple(None if w is None else (len(w), w.dtype) for w in (position_weight, type_weight))
        ctx.args = ops, options[TENSORS:], dtypes, len(parts), tables
        ctx.set_materialize_grads(False)
        if gamma is None:
            ctx.save_for_backward(None, None, None, None, *options[:TENSORS])
            return h, h.expand(ranks, -1, -1), None
        ctx.save_for_backward(h, mean, rstd, gamma, *options[:TENSORS])
        stream = h.view_as(h) if order == ALONE else n if order in (POST, DROP) else h
        if not options.recompute or order == DROP:
            return stream, n.expand(ranks, -1, -1), None
        copies = gamma.clone(), None if beta is None else beta.clone()
        recompute = Recompute(h.detach(), mean, rstd, *copies, eps=norm.eps, kind=norm.kind, dtype=n.dtype)
        return stream, n.expand(ranks, -1, -1), recompute

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor | None, dn: Tensor | None, _: None) -> tuple[Any, ...]:
        ops, constants, wanted, R, tables = ctx.args
        h, mean, rstd, gamma, *tensors = ctx.saved_tensors
        options = NormOptions(*tensors, *constants)
        order = options.order
        if dn is None and (dh is None or order == ALONE):
            return None, None, None if dh is None else dh.expand(R, -1, -1), *Weights()
        dh, saved = None if dh is None else dh.contiguous(), Saved(h, mean, rstd, gamma, kind=options.kind)
        dparts, dresidual, dbias, dgamma, dbeta = ops.bwd(dn, dh, saved, options.mask(ops.name), order, wanted)
        dtables: Any = (None, None)
        if tables is not None:
            dtables = [
                None if table is None else table_bwd(dparts, index, table, wanted.leaves)
                for table, index in zip(tables, tensors[1:], strict=True)
            ]
        normed = gamma is not None and (dn is not None or order in (POST, DROP))
        return (
            None,
            None,
            dparts.expand(R, -1, -1),
            None if wanted.bias is None else dbias,
            *dtables,
            None if wanted.residual is None else dresidual,
            dgamma if normed else None,
            dbeta if normed and wanted.beta else None,
        )


def fused_norm(
    ops: NormOps, parts: Tensor, weights: Weights, options: NormOptions
) -> tuple[Tensor, Tensor, Recompute | None]:
    """Runs a fused norm with gradients.  parts [R, m, D] -> the next h [m, D], n [ranks, m, D] with stride 0 (h without
    a norm), and the record that recomputes n (None unless ``options.recompute``, without a norm, and where n has been
    dropped out).  ValueError for rows that are not divisible by ``options.leaves``."""
    check_leaves(ops.name, parts, options.leaves)
    h, n, recompute = _FusedNorm.apply(ops, options, parts, *weights)
    if recompute is not None and options.order not in (POST, DROP) and torch.compiler.is_compiling():
        # A graph would return h and the record's alias of it as one tensor, whose gradient autograd then takes for that
        # of the alias: inductor drops a detach().
        recompute = Recompute(h, *recompute[1:])
    return h, n, recompute
