"""The kinds of norm: one table, which references, kernels, layers and the ledger read.

    layer      Ba et al. 2016 (arXiv:1607.06450)         x_hat = (x - mean) rstd,  rstd = (var(x) + eps)^(-1/2)
    rms        Zhang & Sennrich 2019 (arXiv:1910.07467)  x_hat = x rstd,           rstd = (mean(x^2) + eps)^(-1/2)
    gemma_rms  Gemma (arXiv:2403.08295)                  as rms, offset 1: gamma starts at 0

    y = x_hat (gamma + offset) + beta           g = d (gamma + offset)
    dx = rstd (g - mean(g) - x_hat mean(g x_hat)), without mean(g) where the norm is not centred
    dgamma = sum_rows d x_hat                   dbeta = sum_rows d

A norm of another kind is another entry, so long as it differs in nothing but the fields of :class:`Kind`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..runtime.op import acc_dtype, in_dtype
from ..runtime.rules import NOT_NEGATIVE, check_number
from .records import NormVectors, Saved

aten = torch.ops.aten


class Kind(NamedTuple):
    """The differences between norms; kernels take an entry as a constant."""

    centred: bool  # the mean is subtracted, and stored for backward
    offset: float = 0.0  # added to gamma, in fp32


KINDS = {
    "layer": Kind(centred=True),
    "rms": Kind(centred=False),
    "gemma_rms": Kind(centred=False, offset=1.0),
}


def check_kind(name: str, kind: str, eps: float = 0.0) -> None:
    """Raises the ValueError of ``name`` for a norm that is not in KINDS, and for an eps that none has."""
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"{name}: norm must be one of {', '.join(KINDS)}, got {kind!r}")
    check_number(f"{name}: eps", eps, NOT_NEGATIVE)


def _scale(gamma: Tensor, kind: Kind, acc: torch.dtype) -> Tensor:
    gamma = in_dtype(gamma, acc)
    return gamma + kind.offset if kind.offset else gamma


def normalize(x: Tensor, norm: NormVectors) -> tuple[Tensor, Tensor, Tensor]:
    """x [m, D] -> y [m, D] in fp32, mean [m] (empty where the norm is not centred), rstd [m]."""
    assert norm.gamma is not None
    acc, kind = acc_dtype(x), KINDS[norm.kind]
    xf, gamma = in_dtype(x, acc), _scale(norm.gamma, kind, acc)
    beta = None if norm.beta is None else in_dtype(norm.beta, acc)
    if kind.centred:
        y, mean, rstd = aten.native_layer_norm.default(xf, [x.shape[1]], gamma, beta, eps=norm.eps)
        return y, mean.view(-1), rstd.view(-1)
    rstd = torch.rsqrt(xf.square().mean(-1) + norm.eps)
    y = (xf * rstd[:, None]).mul_(gamma)
    return y if beta is None else y.add_(beta), rstd.new_empty(0), rstd


def normalize_backward(d: Tensor, saved: Saved, has_beta: bool) -> tuple[Tensor, Tensor, Tensor]:
    """d [m, D] in fp32 -> dx in fp32, dgamma, dbeta in gamma's dtype (dbeta empty without a beta)."""
    h, mean, stored_rstd, gamma, name = saved
    assert h is not None and mean is not None and stored_rstd is not None and gamma is not None
    kind, rstd = KINDS[name], stored_rstd[:, None]
    xf, g = in_dtype(h, d.dtype), _scale(gamma, kind, d.dtype)
    if kind.centred:
        beta = g if has_beta else None  # its values are not read
        wanted = [True, True, has_beta]
        dx, dgamma, dbeta = aten.native_layer_norm_backward.default(
            d, xf, [xf.shape[1]], mean[:, None], rstd=rstd, weight=g, bias=beta, output_mask=wanted
        )
    else:
        x_hat, dg = xf * rstd, d * g
        dgamma, dbeta = (d * x_hat).sum(0), d.sum(0) if has_beta else None
        mean = (dg * x_hat).mean(-1, keepdim=True)
        dx = dg.sub_(x_hat.mul_(mean)).mul_(rstd)
    dbeta = in_dtype(dbeta, gamma.dtype) if has_beta else gamma.new_empty(0)
    return dx, in_dtype(dgamma, gamma.dtype), dbeta
