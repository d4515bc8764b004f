"""The public functions of the fused norm: each is a call of core.py with something omitted."""

from typing import Any

import torch
from torch import Tensor

from ..losses.op import check_ids
from ..runtime.errors import check, check_floating
from ..runtime.function import Function, once_differentiable
from ..runtime.op import ELEMENTWISE, acc_dtype, as_rows, autocast, op
from ..runtime.philox import FirstRow, Mask
from .alone import NORM
from .core import NormOptions, Weights, drop, fused_norm, norm_ops
from .kinds import check_kind
from .records import ALONE, DROP, POST, PRE, Add, NormVectors, Recompute, check_vectors
from .triton_forward import drop_launch


def _check_norm(name: str, norm: NormVectors, post_norm: bool) -> None:
    check_kind(name, norm.kind, norm.eps)
    if norm.gamma is None and (norm.beta is not None or post_norm):
        raise ValueError(f"{name}: norm_bias and post_norm need weight")


# ---- the norm that enters a block ----


def norm_in(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor | None,
    *,
    eps: float,
    norm: str = "layer",
    ranks: int = 1,
    recompute: bool = False,
    leaves: int = 0,
) -> tuple[Tensor, Tensor, Recompute | None]:
    """The norm that enters a block.  x [m, D] -> h = x, n.expand(ranks, m, D), and the record that recomputes n (None
    without ``recompute``).

    ``norm`` is one of KINDS; the residual stream h goes on, and the gradients of n come back from ``ranks`` peers
    unsummed.  ``leaves``: see :func:`reduce_bias_dropout_add_norm`.
    """
    (x,) = autocast(x)
    weights = Weights(gamma=gamma, beta=beta)
    options = NormOptions(eps=eps, kind=norm, order=ALONE, ranks=ranks, recompute=recompute, leaves=leaves)
    return fused_norm(NORM, x[None], weights, options)


# ---- between two GEMMs ----


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
    first_row: FirstRow = 0,
    batch: int = 1,
    eps: float = 1e-5,
    norm: str = "layer",
    post_norm: bool = False,
    ranks: int = 1,
    recompute: bool = False,
    leaves: int = 0,
) -> tuple[Tensor, Tensor, Recompute | None]:
    """h' = residual + dropout(sum_r parts_r + bias), n' = norm(h'), in one pass.

    parts [R, m, D] (or [m, D]); bias, weight, norm_bias [D] in any floating dtype; residual [m, D]; rng int64 [3] of
    :func:`make_rng` where p > 0; ``norm`` one of KINDS.  Returns (h' [m, D], n' expanded to [ranks, m, D] with stride
    0, how to recompute n': None unless ``recompute`` asks for it, which copies weight and norm_bias); post-norm returns
    n' in h's place.  Without ``weight`` there is no norm: n' is h' and the third is None.  h' has the residual's dtype
    (parts' without one), n' has parts'.  ``leaves``, unless 0, makes sums over ranks and rows binary trees, the same
    bits at every split: so many leaves of the rows are here (:attr:`tpfuse.TensorParallel.row_leaves`).  Under autocast
    parts and residual are cast.  ValueError for shapes that do not match, an unknown norm, p outside [0, 1), p > 0
    without rng or with a site or batch that :func:`dropout` refuses, or rows that are not divisible by ``leaves``.
    """
    parts, residual = autocast(parts[None] if parts.dim() == 2 else parts, residual)
    weights = Weights(bias, residual=residual, gamma=weight, beta=norm_bias)
    options = NormOptions(
        rng if p else None, p=p, site=site, first_row=first_row, batch=batch,
        eps=eps, kind=norm, order=POST if post_norm else PRE, ranks=ranks, recompute=recompute,
        leaves=leaves,
    )  # fmt: skip
    return fused_norm(REDUCE_BIAS_DROPOUT_ADD_NORM, parts, weights, options)


def _check_reduce(parts: Tensor, add: Add, norm: NormVectors, mask: Mask, order: str, leaves: int = 0) -> None:
    name = "reduce_bias_dropout_add_norm"
    if parts.dim() != 3 or not parts.shape[0]:
        raise ValueError(f"{name}: parts must be [R, m, D] with R at least 1, or [m, D], got {tuple(parts.shape)}")
    check_floating(name, "parts", parts)
    m, D = parts.shape[1:]
    check_vectors(name, D, bias=add.bias, weight=norm.gamma, norm_bias=norm.beta)
    _check_norm(name, norm, order == POST)
    if add.residual is not None and add.residual.shape != (m, D):
        raise ValueError(f"{name}: residual must have shape {(m, D)}, got {add.residual.shape}")


REDUCE_BIAS_DROPOUT_ADD_NORM = norm_ops("reduce_bias_dropout_add_norm", _check_reduce, blocked=True)


# ---- behind an embedding's lookup ----


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
    first_row: FirstRow = 0,
    batch: int = 1,
    eps: float = 1e-5,
    norm: str = "layer",
    post_norm: bool = False,
    ranks: int = 1,
    recompute: bool = False,
    leaves: int = 0,
) -> tuple[Tensor, Tensor, Recompute | None]:
    """Rank sum + position + token type, then dropout -> h, norm -> n; post-norm: norm, then dropout -> h = n.

    parts [R, m, D]; position_weight [P, D] with positions [m] int64, type_weight [T, D] with types [m]; weight,
    norm_bias [D]; ``norm`` one of KINDS.  Returns (h [m, D], n expanded to [ranks, m, D] with stride 0, how to
    recompute n: None unless ``recompute`` asks for it, for post-norm and for no norm).  ValueError for shapes that do
    not match, an unknown norm, p outside [0, 1), p > 0 without rng or, on a CPU, a position or type that its table does
    not have.
    """
    (parts,) = autocast(parts)
    weights = Weights(position_weight=position_weight, type_weight=type_weight, gamma=weight, beta=norm_bias)
    options = NormOptions(
        rng if p else None, positions, types, p=p, site=site, first_row=first_row, batch=batch,
        eps=eps, kind=norm, order=DROP if post_norm else PRE, ranks=ranks, recompute=recompute,
        leaves=leaves,
    )  # fmt: skip
    return fused_norm(EMBED_FINISH, parts, weights, options)


def _check_embed(parts: Tensor, add: Add, norm: NormVectors, mask: Mask, order: str, leaves: int = 0) -> None:
    name = "embed_finish"
    if parts.dim() != 3 or not parts.shape[0]:
        raise ValueError(f"{name}: parts must be [R, m, D] with R at least 1, got {tuple(parts.shape)}")
    check_floating(name, "parts", parts)
    m, D = parts.shape[1:]
    check_vectors(name, D, weight=norm.gamma, norm_bias=norm.beta)
    _check_norm(name, norm, order == DROP)
    for label, table, index in (("position", add.position_weight, add.positions), ("type", add.type_weight, add.types)):
        check((table is None) == (index is None), f"{name}: {label}_weight and {label}s go together, got one of them")
        if index is not None and (index.shape != (m,) or index.dtype != torch.int64):
            raise ValueError(f"{name}: {label}s must be int64 [{m}], got {index.dtype} {tuple(index.shape)}")
        if table is not None and table.shape[1:] != (D,):
            raise ValueError(f"{name}: {label}_weight must be [_, {D}], got {tuple(table.shape)}")
        if table is not None and index is not None:
            check_ids(f"{name}: {label}s", index, table.shape[0])


EMBED_FINISH = norm_ops("embed_finish", _check_embed)


# ---- dropout alone ----


def dropout_fwd_ref(x: Tensor, mask: Mask) -> Tensor:
    """x [m, D] -> mask x / (1 - p)"""
    return drop(x.to(acc_dtype(x)), mask).to(x.dtype)


dropout_fwd = op(
    dropout_fwd_ref,
    kind=ELEMENTWISE,
    launch=lambda x, mask: drop_launch(x[None], mask),
    replay=True,
    fake=lambda x, _: x.new_empty(x.shape),
)


class _Dropout(Function):
    """Its own adjoint: dx = mask dy / (1 - p), so that nothing is saved but rng."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rng: Tensor, *numbers: Any) -> Tensor:
        ctx.save_for_backward(rng)
        ctx.numbers = numbers
        return dropout_fwd(x, Mask(rng, *numbers))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (rng,) = ctx.saved_tensors
        return dropout_fwd(dy.contiguous(), Mask(rng, *ctx.numbers)), *[None] * len(Mask._fields)


def dropout(x: Tensor, p: float, *, rng: Tensor, site: int = 0, first_row: FirstRow = 0, batch: int = 1) -> Tensor:
    """Dropout (Srivastava et al. 2014) whose mask is a function of (seed, step, site) and the element's global place.

    x [..., D] is flattened to rows, of which row i is position (first_row + i) // batch of sample first_sample +
    (first_row + i) % batch.  ``rng`` int64 [3] = (seed, step, first_sample), of :func:`make_rng`; there is no default.
    Returns x's shape and dtype; p = 0 returns x itself.  ValueError for p outside [0, 1) and, where it drops anything,
    for a site outside 0 to 65534 and a batch below 1.
    """
    rows = as_rows("dropout", x)
    mask = Mask.of("dropout", rng, p, site=site, first_row=first_row, batch=batch)
    if mask.rng is None:
        return x
    (rows,) = autocast(rows)
    return _Dropout.apply(rows, *mask).view(x.shape)
