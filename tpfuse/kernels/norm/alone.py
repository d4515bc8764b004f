"""A norm alone: the fused norm with all else omitted, and so with fewer arguments to hand on."""

from typing import Any

from torch import Tensor

from ..runtime.function import Function, once_differentiable
from ..runtime.leaves import check_leaves
from ..runtime.op import as_rows, autocast
from ..runtime.philox import NO_MASK, Mask
from .core import NOTHING, norm_ops
from .kinds import check_kind
from .records import ALONE, Add, NormVectors, Saved, Wanted, check_vectors


def _check_alone(parts: Tensor, add: Add, norm: NormVectors, mask: Mask, order: str, leaves: int = 0) -> None:
    name = "layer_norm" if norm.kind == "layer" else "rms_norm"
    check_vectors(name, parts.shape[-1], weight=norm.gamma, bias=norm.beta)
    check_kind(name, norm.kind, norm.eps)


NORM = norm_ops("norm", _check_alone)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5, *, leaves: int = 0) -> Tensor:
    """LayerNorm (Ba et al. 2016) over the last dimension.  x [..., D], weight and bias [D] -> [..., D] in x's dtype
    (under autocast: in its dtype).  ``leaves`` as in :func:`reduce_bias_dropout_add_norm`.  ValueError for vectors of
    another shape, and an x that is not floating."""
    (rows,) = autocast(as_rows("layer_norm", x))
    n: Tensor = _NormAlone.apply(rows, weight, bias, eps, "layer", leaves)
    return n if x.dim() == 2 else n.view(x.shape)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, *, kind: str = "rms", leaves: int = 0) -> Tensor:
    """RMSNorm (Zhang & Sennrich 2019) over the last dimension.  x [..., D], weight [D] -> [..., D] in x's dtype (under
    autocast: in its dtype).  ``leaves`` as in :func:`reduce_bias_dropout_add_norm`.  ValueError for a weight of another
    shape, a kind that is not in KINDS, and an x that is not floating."""
    (rows,) = autocast(as_rows("rms_norm", x))
    n: Tensor = _NormAlone.apply(rows, weight, None, eps, kind, leaves)
    return n if x.dim() == 2 else n.view(x.shape)


class _NormAlone(Function):
    """x [m, D] -> n [m, D]"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *arguments: Any) -> Tensor:
        """``arguments`` are the fields of a NormVectors, and the leaves of the rows."""
        *norm, leaves = arguments
        gamma, beta, _, kind = norm
        check_leaves("norm", x, leaves)
        _, n, mean, rstd = NORM.fwd(x.unsqueeze(0), NOTHING, NormVectors(*norm), NO_MASK, ALONE, leaves)
        ctx.save_for_backward(x, mean, rstd, gamma)
        ctx.args = kind, Wanted(None, beta is not None, None, x.dtype, leaves=leaves)
        return n

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dn: Tensor) -> tuple[Tensor | None, ...]:
        kind, wanted = ctx.args
        x, mean, rstd, gamma = ctx.saved_tensors
        saved = Saved(x, mean, rstd, gamma, kind=kind)
        dx, _, _, dgamma, dbeta = NORM.bwd(dn.unsqueeze(0), None, saved, NO_MASK, ALONE, wanted)
        return dx, dgamma, dbeta if wanted.beta else None, None, None, None
