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
from them is bitwise the first.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ..lookup.op import embedding_bwd
from ..runtime.function import Function, once_differentiable
from ..runtime.op import ELEMENTWISE, NORM, Composed, Op, acc_dtype, dtype_of, new_vector, op, row_blocks, sum_parts
from ..runtime.philox import Mask, active_rng, keep_rows, scale
from .kinds import KINDS, check_kind, normalize, normalize_backward
from .records import ALONE, DROP, POST, PRE, Add, Norm, Recompute, Saved, Wanted, incoming
from .triton_backward import bwd_cost, bwd_launch
from .triton_forward import apply_launch, fwd_cost, fwd_launch, reduce_launch

# ---- reference ----


def drop(z: Tensor, mask: Mask, residual: Tensor | None = None) -> Tensor:
    """Returns residual + mask z / (1 - p) in z's dtype, for z [m, D]."""
    rows, columns = z.shape
    kept = keep_rows(mask, rows, columns, z.dtype)
    if residual is None:
        return kept.mul_(z).mul_(scale(mask.p))
    return torch.addcmul(residual.to(z.dtype), z, kept, value=scale(mask.p))


def fused_norm_fwd_ref(
    parts: Tensor, add: Add, norm: Norm, mask: Mask, order: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> h (empty for "alone"), n, mean, rstd; the last three empty without gamma."""
    if order == ALONE:
        n, mean, rstd = normalize(parts[0], norm)
        return parts.new_empty(0), n.to(parts.dtype), mean, rstd
    z = sum_parts(parts)
    if add.bias is not None:
        z += add.bias
    for table, index in ((add.position_weight, add.positions), (add.type_weight, add.types)):
        if table is not None:
            z += table[index]
    if mask.rng is not None and order != DROP:
        z = drop(z, mask, add.residual)
    elif add.residual is not None:
        z += add.residual
    h = z.to(parts.dtype if add.residual is None else add.residual.dtype)
    if norm.gamma is None:
        return h, h.new_empty(0), h.new_empty(0), h.new_empty(0)
    n, mean, rstd = normalize(h, norm)
    if mask.rng is not None and order == DROP:
        n = drop(n, mask)
    return h, n.to(parts.dtype), mean, rstd


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
    inside = order in (POST, DROP)  # dh, too, comes through the norm
    like = incoming(dn, dh)
    d = like.to(acc_dtype(like), copy=True) if dn is None else sum_parts(dn)
    dgamma, dbeta = d.new_empty(0), d.new_empty(0)
    if dn is not None and dh is not None and inside:
        d += dh
    if mask.rng is not None and order == DROP:
        d = drop(d, mask)
    if saved.gamma is not None and (dn is not None or inside):
        d, dgamma, dbeta = normalize_backward(d, saved, wanted.beta)
    if dn is not None and dh is not None and not inside:
        d += dh
    dresidual = d.new_empty(0) if wanted.residual is None else d.to(wanted.residual, copy=True)
    if mask.rng is not None and order != DROP:
        d = drop(d, mask)
    dparts = d.to(wanted.parts) if out is None else d.new_empty(0, dtype=wanted.parts)
    if out is not None:
        out.copy_(d)
    dbias = d.new_empty(0) if wanted.bias is None else d.sum(0).to(wanted.bias)
    return dparts, dresidual, dbias, dgamma, dbeta


def norm_apply_ref(recipe: Recompute) -> Tensor:
    """Returns n recomputed from what backward has saved, bitwise the first one."""
    return normalize(recipe.h, Norm(recipe.gamma, recipe.beta, recipe.eps, recipe.kind))[0].to(recipe.dtype)


# ---- CPU: the reference on blocks of rows, whose temporaries then stay in the cache ----


def fwd_cpu(parts: Tensor, add: Add, norm: Norm, mask: Mask, order: str) -> tuple[Tensor, ...]:
    blocks = list(row_blocks(*parts.shape[1:]))
    if len(blocks) == 1:
        return fused_norm_fwd_ref(parts, add, norm, mask, order=order)

    def block(i: int, j: int) -> tuple[Tensor, ...]:
        rows = mask._replace(first_row=mask.first_row + i)
        positions, types, residual = (None if t is None else t[i:j] for t in (add.positions, add.types, add.residual))
        own = add._replace(positions=positions, types=types, residual=residual)
        return fused_norm_fwd_ref(parts[:, i:j], own, norm, rows, order=order)

    return tuple(torch.cat(outputs) for outputs in zip(*(block(i, j) for i, j in blocks), strict=True))


def bwd_cpu(
    dn: Tensor | None,
    dh: Tensor | None,
    saved: Saved,
    mask: Mask,
    order: str,
    wanted: Wanted,
    out: Tensor | None = None,
) -> tuple[Tensor, ...]:
    blocks = list(row_blocks(*incoming(dn, dh).shape[-2:]))
    if len(blocks) == 1:
        return fused_norm_bwd_ref(dn, dh, saved, mask, order=order, wanted=wanted, out=out)
    whole = wanted if wanted.bias is None else wanted._replace(bias=acc_dtype(incoming(dn, dh)))

    def block(i: int, j: int) -> tuple[Tensor, ...]:
        cut = lambda t: None if t is None else t[..., i:j, :]
        h, mean, rstd = (t if t is None or len(t) == 0 else t[i:j] for t in (saved.h, saved.mean, saved.rstd))
        own = saved._replace(h=h, mean=mean, rstd=rstd)
        rows = mask._replace(first_row=mask.first_row + i)
        return fused_norm_bwd_ref(cut(dn), cut(dh), own, rows, order=order, wanted=whole, out=cut(out))

    dparts, dresidual, *vectors = zip(*(block(i, j) for i, j in blocks), strict=True)
    dbias, dgamma, dbeta = (torch.stack(v).sum(0) for v in vectors)
    return torch.cat(dparts), torch.cat(dresidual), dbias.to(wanted.bias or dbias.dtype), dgamma, dbeta


# ---- shapes alone ----


def _fwd_fake(parts: Tensor, add: Add, norm: Norm, mask: Mask, order: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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
    like, gamma = incoming(dn, dh), saved.gamma
    acc, (m, D) = acc_dtype(like), like.shape[-2:]
    dparts = like.new_empty((m, D) if out is None else 0, dtype=wanted.parts)
    rows, dtype = (0, acc) if wanted.residual is None else ((m, D), wanted.residual)
    normed = dn is not None or order in (POST, DROP)
    dgamma = like.new_empty(0, dtype=acc) if gamma is None or not normed else gamma.new_empty(D)
    dbeta = dgamma.new_empty(D if gamma is not None and normed and wanted.beta else 0)
    return dparts, like.new_empty(rows, dtype=dtype), new_vector(like, D, wanted.bias), dgamma, dbeta


norm_apply = op(norm_apply_ref, kind=NORM, launch=apply_launch)


# ---- the sum over ranks alone ----


def reduce_parts_ref(parts: Tensor) -> Tensor:
    """[R, ...] -> [...] in parts' dtype"""
    return sum_parts(parts).to(parts.dtype)


reduce_parts = op(reduce_parts_ref, kind=ELEMENTWISE, launch=reduce_launch)


class Verb(NamedTuple):
    """An op and its backward, under the name that the ledger prints; and what autograd calls instead, which is replayed
    whole."""

    fwd: Op
    bwd: Op
    forward: Composed
    backward: Composed


class Weights(NamedTuple):
    """What a fused norm differentiates beside the parts; see Add and Norm."""

    bias: Tensor | None = None
    position_weight: Tensor | None = None
    type_weight: Tensor | None = None
    residual: Tensor | None = None
    gamma: Tensor | None = None
    beta: Tensor | None = None


class Asked(NamedTuple):
    """What a fused norm is asked for, beside what it differentiates; the first TENSORS fields are tensors."""

    rng: Tensor | None = None
    positions: Tensor | None = None
    types: Tensor | None = None
    p: float = 0.0
    site: int = 0
    first_row: int = 0
    batch: int = 1
    eps: float = 0.0
    kind: str = "layer"
    order: str = PRE
    ranks: int = 1  # that n is expanded to
    recompute: bool = False  # whether it is to be told how to recompute n

    def mask(self, name: str) -> Mask:
        """Returns the mask of ``name``'s dropout; ValueError where it lacks an rng."""
        rng = active_rng(name, self.p, self.rng)
        return Mask(rng, self.p, self.site, first_row=self.first_row, batch=self.batch)


TENSORS: Final = 3
Check = Callable[[Tensor, Add, Norm, str], None]  # raises ValueError for what the verb does not take


def verb(name: str, check: Check | None = None, blocked: bool = False) -> Verb:
    """Registers NAME_fwd and NAME_bwd; ``blocked``: on CPU in blocks of rows."""
    forward: dict[str, Any] = dict(launch=fwd_launch, fake=_fwd_fake, cost=fwd_cost, cpu=fwd_cpu if blocked else None)
    backward: dict[str, Any] = dict(launch=bwd_launch, fake=_bwd_fake, cost=bwd_cost, cpu=bwd_cpu if blocked else None)
    fwd = Op(f"{name}_fwd", fused_norm_fwd_ref, **forward, kind=NORM)
    bwd = Op(f"{name}_bwd", fused_norm_bwd_ref, **backward, kind=NORM, mutates=("out",))

    def run(parts: Tensor, weights: Weights, asked: Asked) -> tuple[Any, ...]:
        """-> what goes on as h (None for "alone"), n [ranks, m, D]; h, mean and rstd for the State; copies of gamma and
        beta where n is to be recomputed; what backward makes, and the tables' (rows, dtype), if any.

        The checks are part of what is recorded, so that a call which is replayed has passed them.
        """
        bias, position_weight, type_weight, residual, gamma, beta = weights
        add = Add(bias, position_weight, asked.positions, type_weight, types=asked.types, residual=residual)
        norm, order = Norm(gamma, beta, asked.eps, asked.kind), asked.order
        check_kind(name, asked.kind, asked.eps)
        if check is not None:
            check(parts, add, norm, order)
        making = Wanted(dtype_of(bias), beta is not None, dtype_of(residual), parts.dtype), len(parts)
        tables = tuple(None if w is None else (len(w), w.dtype) for w in (position_weight, type_weight))
        last = making, tables if any(tables) else None
        h, n, mean, rstd = fwd(parts, add, norm, asked.mask(name), order=order)
        if gamma is None:
            return h, h.expand(asked.ranks, -1, -1), None, None, None, None, None, *last
        made = None if order == ALONE else h
        copies = [None if w is None or not asked.recompute or order == DROP else w.clone() for w in (gamma, beta)]
        return n if order in (POST, DROP) else made, n.expand(asked.ranks, -1, -1), made, mean, rstd, *copies, *last

    def back(gradients: Gradients, state: State, making: Making, asked: Asked) -> tuple[Tensor | None, ...]:
        """-> dparts [R, m, D], dbias, dresidual, dgamma, dbeta; None where there is none"""
        (dh, dn), gamma, order, (wanted, R) = gradients, state[3], asked.order, making
        dh, saved = None if dh is None else dh.contiguous(), Saved(*state, kind=asked.kind)
        dparts, dresidual, dbias, dgamma, dbeta = bwd(dn, dh, saved, asked.mask(name), order=order, wanted=wanted)
        normed = gamma is not None and (dn is not None or order in (POST, DROP))
        return (
            dparts.expand(R, -1, -1),
            None if wanted.bias is None else dbias,
            None if wanted.residual is None else dresidual,
            dgamma if normed else None,
            dbeta if normed and wanted.beta else None,
        )

    return Verb(fwd, bwd, Composed(run), Composed(back))


# ---- autograd ----

NOTHING = Add()
Gradients = tuple[Tensor | None, Tensor | None]  # of h and n
Making = tuple[Wanted, int]  # and the number of parts
State = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]  # h, mean, rstd, gamma; None without a norm
GAMMA: Final = Weights._fields.index("gamma")


class _FusedNorm(Function):
    """-> what goes on as h, n.expand(ranks, m, D), and how to recompute n, whose tensors autograd does not see.

    n is returned expanded, so that autograd carries the unsummed gradients of it into the one backward kernel, and
    dparts goes back expanded, so that the exchange behind it is an all-gather.
    """

    @staticmethod
    def forward(ctx: Any, ops: Verb, asked: Asked, parts: Tensor, *weights: Any) -> tuple[Any, ...]:
        """``weights`` are the fields of Weights."""
        on, n, h, mean, rstd, own_gamma, own_beta, making, tables = ops.forward(parts, weights, asked)
        if asked.order == ALONE:
            h = parts[0]
            on = h.view_as(h)
        ctx.save_for_backward(h, mean, rstd, weights[GAMMA], *asked[:TENSORS])
        ctx.args = ops, asked[TENSORS:], making, tables
        ctx.set_materialize_grads(False)
        if own_gamma is None:
            return on, n, None
        how: dict[str, Any] = dict(beta=own_beta, eps=asked.eps, kind=asked.kind, dtype=n.dtype)
        return on, n, Recompute(h.detach(), mean, rstd, own_gamma, **how)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor | None, dn: Tensor | None, _: None) -> tuple[Any, ...]:
        ops, constants, making, tables = ctx.args
        h, mean, rstd, gamma, *tensors = ctx.saved_tensors
        asked = Asked(*tensors, *constants)
        if dn is None and (dh is None or asked.order == ALONE):
            return None, None, None if dh is None else dh.expand(making[1], -1, -1), *Weights()
        dparts, dbias, *others = ops.backward((dh, dn), (h, mean, rstd, gamma), making, asked)
        if tables is None:
            return None, None, dparts, dbias, None, None, *others
        dtables = [
            None if table is None else embedding_bwd(dparts[0], index, 0, *table)
            for table, index in zip(tables, tensors[1:], strict=True)
        ]
        return None, None, dparts, dbias, *dtables, *others


def fused_norm(ops: Verb, parts: Tensor, weights: Weights, asked: Asked) -> tuple[Tensor, Tensor, Recompute | None]:
    """Runs a verb with gradients.  parts [R, m, D] -> what goes on as h [m, D], n [ranks, m, D] with stride 0 (h
    without a norm), and how to recompute n (None where it is not asked for, without a norm, and where n has been
    dropped out)."""
    on: tuple[Tensor, Tensor, Recompute | None] = _FusedNorm.apply(ops, asked, parts, *weights)
    return on
