"""A norm alone: the fused norm with all else omitted, and so with fewer arguments to hand on."""

from typing import Any

from torch import Tensor

from ..runtime.function import Function, once_differentiable
from ..runtime.op import Composed, as_rows, autocast
from ..runtime.philox import NO_MASK
from .core import NOTHING, verb
from .kinds import check_kind
from .records import ALONE, Norm, Saved, Wanted, check_vectors

NORM = verb("norm")


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """LayerNorm (Ba et al. 2016) over the last dimension.  x [..., D], weight and bias [D] -> [..., D] in x's dtype
    (under autocast: in its dtype).  ValueError for vectors of another shape."""
    return _last_dimension("layer_norm", x, weight, bias, eps=eps, kind="layer")


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, *, kind: str = "rms") -> Tensor:
    """RMSNorm (Zhang & Sennrich 2019) over the last dimension.  x [..., D], weight [D] -> [..., D] in x's dtype (under
    autocast: in its dtype).  ValueError for a weight of another shape or a kind that is not in KINDS."""
    return _last_dimension("rms_norm", x, weight, None, eps=eps, kind=kind)


def _last_dimension(name: str, x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, kind: str) -> Tensor:
    (rows,) = autocast(as_rows(x))
    n: Tensor = _NormAlone.apply(name, rows, weight, bias, eps, kind)
    return n if x.dim() == 2 else n.view(x.shape)


class _NormAlone(Function):
    """x [m, D] -> n [m, D]"""

    @staticmethod
    def forward(ctx: Any, name: str, x: Tensor, *norm: Any) -> Tensor:
        """``norm`` holds the fields of a Norm."""
        n, mean, rstd = _forward(name, x, *norm)
        gamma, beta, _, kind = norm
        ctx.save_for_backward(x, mean, rstd, gamma)
        ctx.args = kind, beta is not None
        return n

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dn: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_backward(dn, *ctx.saved_tensors, *ctx.args), None, None


@Composed
def _forward(
    name: str, x: Tensor, gamma: Tensor, beta: Tensor | None, eps: float, kind: str
) -> tuple[Tensor, Tensor, Tensor]:
    """-> n, mean, rstd; the checks are part of what is recorded, so that a call which is replayed has passed them."""
    check_vectors(name, x.shape[1], weight=gamma, bias=beta)
    check_kind(name, kind, eps)
    _, n, mean, rstd = NORM.fwd(x[None], NOTHING, Norm(gamma, beta, eps, kind), NO_MASK, order=ALONE)
    return n, mean, rstd


@Composed
def _backward(
    dn: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, gamma: Tensor, kind: str, beta: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """-> dx, dgamma, dbeta"""
    saved, wanted = Saved(x, mean, rstd, gamma, kind=kind), Wanted(None, beta, None, x.dtype)
    dx, _, _, dgamma, dbeta = NORM.bwd(dn[None], None, saved, NO_MASK, order=ALONE, wanted=wanted)
    return dx, dgamma, dbeta if beta else None
