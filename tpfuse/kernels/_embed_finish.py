"""The Triton side of embed_finish: the kernels of the fused norm with rows of tables, gathered by index, in the bias's place.

Post-norm drops out after the norm; backward then starts with it.
"""

from torch import Tensor

from . import _fused_norm, _fused_norm_bwd
from ._fused_norm import coordinates, forward, outputs
from ._fused_norm_bwd import backward, given, norm_gradients
from ._op import Cost


def fwd_launch(
    parts, position_weight, positions, type_weight, types, gamma, beta, rng, p, site, first_row, batch, eps, rms, post_norm
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The launcher of embed_finish_fwd."""
    _, m, D = parts.shape
    tables = [None if t is None else t.contiguous() for t in (position_weight, positions, type_weight, types)]
    x, (n, mean, rstd) = parts.new_empty(m, D), outputs(parts, m, D, parts.dtype, gamma is not None, rms)
    filled = dict(h=x, n=n, mean=mean, rstd=rstd)
    forward(parts, gamma, beta, rng, coordinates(p, site, first_row, batch), eps, rms, tables=tables, drop_n=post_norm, **filled)
    return x, n, mean, rstd


def fwd_cost(args: tuple, outputs: tuple) -> Cost:
    """Indices are as different as they can be."""
    parts, position_weight, positions, type_weight, types, *rest = args
    gathered = [None if w is None else w[: parts.shape[1]] for w in (position_weight, type_weight)]
    return _fused_norm.fwd_cost((parts, *gathered, positions, types, *rest), outputs)


def order_of(rng: Tensor | None, post_norm: bool) -> str:
    return "pre" if not post_norm else "post" if rng is None else "drop"


def bwd_launch(
    dn, dh, x, mean, rstd, gamma, rng, p, site, first_row, batch, rms, post_norm, has_beta, dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The launcher of embed_finish_bwd."""
    like = dh if dn is None else dn
    gamma = None if dn is None and not post_norm else gamma  # nothing comes through the norm
    dx, (dgamma, dbeta) = like.new_empty(like.shape[-2:], dtype=dtype), norm_gradients(gamma, has_beta)
    where, order = coordinates(p, site, first_row, batch), order_of(rng, post_norm)
    backward(dn, dh, x, mean, rstd, gamma, rng, where, rms, order, dparts=dx, dgamma=dgamma, dbeta=dbeta)
    return dx, *given(like.new_empty if gamma is None else gamma.new_empty, dgamma, dbeta)


def bwd_cost(args: tuple, outputs: tuple) -> Cost:
    dn, dh, *saved, gamma, rng = args[:7]
    post_norm, has_beta, _ = args[12:]
    gamma = None if dn is None and not post_norm else gamma
    vectors = 0 if gamma is None else 1 + has_beta
    return _fused_norm_bwd.cost(dn, dh, saved, gamma, rng, order_of(rng, post_norm), outputs, vectors)
