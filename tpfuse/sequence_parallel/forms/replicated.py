"""The form without sequence parallelism: its one hidden message is the sum of dx, which travels under the wgrads.

Every rank holds all rows, so nothing is gathered; the sum of a row-parallel layer's output has no GEMM to hide under
and is the plain form's.  So is backward if the first weight is frozen (of an MLP: either): little could be hidden.
"""

from torch import Tensor

from ...parallel import TensorParallel
from ..overlap.reduce import Group, Second, linear_reduce_bwd, linear_reduce_bwd_by
from ..records import MLP, MLPSaved, SavedInput, WantedGrads, WeightGrad
from . import plain
from .plain import gather_linear_fwd, gather_mlp_exchange_fwd, linear_exchange_bwd, linear_exchange_fwd

__all__ = [
    "gather_linear_bwd",
    "gather_linear_fwd",
    "gather_mlp_exchange_bwd",
    "gather_mlp_exchange_fwd",
    "linear_exchange_bwd",
    "linear_exchange_fwd",
]


def gather_linear_bwd(
    dy: Tensor, w: Tensor, *, n: SavedInput, grads: WantedGrads, tp: TensorParallel
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if not (grads.weight and grads.n):
        return plain.gather_linear_bwd(dy, w, n=n, grads=grads, tp=tp)
    work = WeightGrad(dy, n.rows(), w.dtype, grads.bias)
    dn, dw, db, _ = _backward(w, work, Second(), grads, tp=tp)
    return dn[None], dw, None if grads.bias is None else db


def gather_mlp_exchange_bwd(
    dp: Tensor, mlp: MLP, *, saved: MLPSaved, grads: WantedGrads, tp: TensorParallel
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    if not (grads.weight and grads.out_weight):
        return plain.gather_mlp_exchange_bwd(dp, mlp, saved=saved, grads=grads, tp=tp)
    dy = dp.flatten(0, 1)
    dz, db1, a = plain.dgrad_through_activation(dy, mlp, saved, grads)
    work = WeightGrad(dz, saved.n.rows(), mlp.w1.dtype, None)
    dn, dw1, _, dw2 = _backward(mlp.w1, work, Second(dy, a), grads, tp=tp)
    return dn[None], dw1, None if grads.bias is None else db1, dw2


def _backward(
    w: Tensor, work: WeightGrad, second: Second, grads: WantedGrads, tp: TensorParallel
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    if grads.at_once:
        return linear_reduce_bwd(w, work, second, Group.of(tp))
    return linear_reduce_bwd_by(grads.run, w, work, second, group=Group.of(tp))
