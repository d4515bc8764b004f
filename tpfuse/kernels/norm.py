"""LayerNorm (Ba et al. 2016, arXiv:1607.06450) and RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467).

    layer   x_hat = (x - mean) rstd,  rstd = (var + eps)^(-1/2)      rms   x_hat = x rstd,  rstd = (mean(x^2) + eps)^(-1/2)
    y = x_hat gamma + beta
    g = sum_r dy_r gamma        dx = rstd (g - mean(g) - x_hat mean(g x_hat)) + dh      (rms: without mean(g))
    dgamma = sum_rows dy x_hat  dbeta = sum_rows dy

Shapes: x [m, D]; dy parts [R, m, D], unsummed, added in rank order; dh [m, D], the gradient that passes the norm by;
gamma, beta [D]; mean, rstd [m].  Statistics and sums are fp32 (fp64 for fp64), y and dx have x's dtype, dgamma and dbeta gamma's.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._fused_norm import apply_launch, norm_launch
from ._fused_norm_bwd import norm_bwd_cost, norm_bwd_launch
from ._op import acc_dtype, autocast, check, op, sum_parts

aten = torch.ops.aten


# ---- reference ----


def normalize(x: Tensor, gamma: Tensor, beta: Tensor | None, eps: float, rms: bool) -> tuple[Tensor, Tensor, Tensor]:
    """-> y [m, D] in fp32, mean [m] (empty for rms), rstd [m]."""
    acc = acc_dtype(x)
    xf, gamma = x.to(acc), gamma.to(acc)
    if rms:
        rstd = torch.rsqrt(xf.square().mean(-1) + eps)
        y = xf * rstd[:, None] * gamma
        return y if beta is None else y + beta.to(acc), rstd.new_empty(0), rstd
    y, mean, rstd = aten.native_layer_norm(xf, [x.shape[1]], gamma, None if beta is None else beta.to(acc), eps)
    return y, mean.view(-1), rstd.view(-1)


def normalize_backward(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, gamma: Tensor, has_beta: bool, rms: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dy [m, D] in fp32 -> dx in fp32, dgamma, dbeta (empty without beta)."""
    acc = acc_dtype(x)
    xf, g = x.to(acc), gamma.to(acc)
    if rms:
        x_hat, dyg = xf * rstd[:, None], dy * g
        dx = rstd[:, None] * (dyg - x_hat * (dyg * x_hat).mean(-1, keepdim=True))
        dgamma, dbeta = (dy * x_hat).sum(0), dy.sum(0) if has_beta else None
    else:
        beta = g if has_beta else None  # its values are not read
        stats = mean[:, None], rstd[:, None]
        dx, dgamma, dbeta = aten.native_layer_norm_backward(dy, xf, [x.shape[1]], *stats, g, beta, [True, True, has_beta])
    return dx, dgamma.to(gamma.dtype), dbeta.to(gamma.dtype) if has_beta else gamma.new_empty(0)


def norm_fwd_ref(x: Tensor, gamma: Tensor, beta: Tensor | None, eps: float, rms: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    y, mean, rstd = normalize(x, gamma, beta, eps, rms)
    return y.to(dtype), mean, rstd


def norm_apply_ref(
    x: Tensor, mean: Tensor, rstd: Tensor, gamma: Tensor, beta: Tensor | None, eps: float, rms: bool, dtype: torch.dtype
) -> Tensor:
    """y made again from what backward has saved, bitwise the first one."""
    return normalize(x, gamma, beta, eps, rms)[0].to(dtype)


def norm_bwd_ref(
    dy: Tensor, dh: Tensor | None, x: Tensor, mean: Tensor, rstd: Tensor, gamma: Tensor, has_beta: bool, rms: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dgamma, dbeta = normalize_backward(sum_parts(dy), x, mean, rstd, gamma, has_beta, rms)
    if dh is not None:
        dx += dh
    return dx.to(x.dtype), dgamma, dbeta


norm_fwd = op(norm_fwd_ref, launch=norm_launch)
norm_apply = op(norm_apply_ref, launch=apply_launch)
norm_bwd = op(norm_bwd_ref, launch=norm_bwd_launch, cost=norm_bwd_cost)


# ---- autograd ----


class Remake(NamedTuple):
    """How to make n again in backward: saved instead of n, never differentiated.  gamma and beta are [D]-sized copies (FSDP may
    have freed the parameters by then)."""

    h: Tensor
    mean: Tensor
    rstd: Tensor
    gamma: Tensor
    beta: Tensor | None
    eps: float
    rms: bool
    dtype: torch.dtype


class _Norm(torch.autograd.Function):
    """x -> (x, y.expand(R, m, D)): the residual stream goes on, and y goes to R peers whose gradients come back unsummed."""

    @staticmethod
    def forward(ctx, x, gamma, beta, eps, rms, ranks):
        y, mean, rstd = norm_fwd(x, gamma, beta, eps, rms, x.dtype)
        ctx.save_for_backward(x, mean, rstd, gamma)
        ctx.args = beta is not None, rms
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(mean, rstd)
        return x.view_as(x), y.expand(ranks, -1, -1), mean, rstd

    @staticmethod
    @once_differentiable
    def backward(ctx, dh, dy, _mean, _rstd):
        if dy is None:
            return dh, None, None, None, None, None
        dx, dgamma, dbeta = norm_bwd(dy, None if dh is None else dh.contiguous(), *ctx.saved_tensors, *ctx.args)
        return dx, dgamma, dbeta if ctx.args[0] else None, None, None, None


# ---- public ----


def norm_in(
    x: Tensor, gamma: Tensor, beta: Tensor | None, *, eps: float, rms: bool = False, ranks: int = 1
) -> tuple[Tensor, Tensor, Remake]:
    """The norm that enters a block.  x [m, D] -> h = x, n.expand(ranks, m, D), and how to make n again."""
    (x,) = autocast(x)
    h, n, mean, rstd = _Norm.apply(x, gamma, beta, eps, rms, ranks)
    return h, n, make_remake(h, mean, rstd, gamma, beta, eps, rms, n.dtype)


def make_remake(h, mean, rstd, gamma, beta, eps, rms, dtype) -> Remake:
    gamma, beta = (None if v is None else v.detach().clone() for v in (gamma, beta))
    return Remake(h.detach(), mean, rstd, gamma, beta, eps, rms, dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """LayerNorm over the last dimension.  x [..., D], weight and bias [D] -> [..., D] in x's dtype (under autocast: in its dtype)."""
    return _public("layer_norm", x, weight, bias, eps, False)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """RMSNorm over the last dimension.  x [..., D], weight [D] -> [..., D] in x's dtype (under autocast: in its dtype)."""
    return _public("rms_norm", x, weight, None, eps, True)


def _public(name: str, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, rms: bool) -> Tensor:
    check_vectors(name, x.shape[-1], weight=weight, bias=bias)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return norm_in(rows, weight, bias, eps=eps, rms=rms)[1].view(x.shape)


def check_vectors(name: str, width: int, **vectors: Tensor | None) -> None:
    for key, v in vectors.items():
        check(v is None or v.shape == (width,), f"{name}: {key} must have shape ({width},), got {None if v is None else tuple(v.shape)}")
