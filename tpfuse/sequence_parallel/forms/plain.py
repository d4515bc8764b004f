"""The plain form: a message, then its GEMM.

    op                    forward                                  dgrad                          wgrad
    gather_linear         gather(n) W' + b                         scatter(dy W)                  dy' gather(n)
    linear_exchange       scatter(x W')                            gather(dp) W                   gather(dp)' x
    gather_mlp_exchange   scatter(act(gather(n) W1' + b1) W2')     dz = gather(dp) W2 act'(z);    gather(dp)' act(z),
                                                                   scatter(dz W1)                 dz' gather(n)

A frozen weight has no wgrad, and nothing is gathered for it.
"""

from torch import Tensor

from ...kernels.gemm.op import column_sum, linear_dgrad, linear_dgrad_act, linear_fwd
from ...parallel import TensorParallel
from ..crossings import gather_rows, scatter_rows
from ..records import MLP, GatheredWeightGrad, LinearWeights, MLPSaved, SavedInput, WantedGrads, WeightGrad


def gather_linear_fwd(n: Tensor, linear: LinearWeights, tp: TensorParallel) -> tuple[Tensor, Tensor]:
    return linear_fwd(gather_rows(n, tp), *linear)


def gather_linear_bwd(
    dy: Tensor, w: Tensor, *, n: SavedInput, grads: WantedGrads, tp: TensorParallel
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    dn = scatter_rows(linear_dgrad(dy, w), tp) if grads.n else None
    if grads.weight:
        return dn, *grads.run("weight", GatheredWeightGrad(dy, n, w.dtype, grads.bias))
    return dn, None, None if grads.bias is None else column_sum(dy, grads.bias)


def linear_exchange_fwd(x: Tensor, w: Tensor, tp: TensorParallel) -> Tensor:
    return scatter_rows(linear_fwd(x, w, None, "none")[0], tp)


def linear_exchange_bwd(
    dp: Tensor, w: Tensor, *, x: Tensor, grads: WantedGrads, tp: TensorParallel
) -> tuple[Tensor, Tensor | None]:
    dy = gather_rows(dp, tp)
    dx, dw = linear_dgrad(dy, w), None
    if grads.out_weight:
        dw, _ = grads.run("out_weight", WeightGrad(dy, x, w.dtype, None))
    return dx, dw


def gather_mlp_exchange_fwd(
    n: Tensor, mlp: MLP, *, keep: bool, tp: TensorParallel
) -> tuple[Tensor, Tensor, Tensor | None]:
    a, z = linear_fwd(gather_rows(n, tp), mlp.w1, mlp.b1, mlp.activation)
    return scatter_rows(linear_fwd(a, mlp.w2, None, "none")[0], tp), z, a if keep else None


def gather_mlp_exchange_bwd(
    dp: Tensor, mlp: MLP, *, saved: MLPSaved, grads: WantedGrads, tp: TensorParallel
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    dy = gather_rows(dp, tp)
    dz, db1, a = dgrad_through_activation(dy, mlp, saved, grads)
    dn, dw1, dw2 = scatter_rows(linear_dgrad(dz, mlp.w1), tp), None, None
    if grads.out_weight:
        dw2, _ = grads.run("out_weight", WeightGrad(dy, a, mlp.w2.dtype, None))
    if grads.weight:
        dw1, _ = grads.run("weight", GatheredWeightGrad(dz, saved.n, mlp.w1.dtype, None))
    return dn, dw1, None if grads.bias is None else db1, dw2


def dgrad_through_activation(
    dy: Tensor, mlp: MLP, saved: MLPSaved, grads: WantedGrads
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dz, db1 and act(z), the last as saved or recomputed (empty if w2's gradient does not ask for it)."""
    rebuild = saved.a is None and grads.out_weight
    dz, db1, rebuilt = linear_dgrad_act(dy, mlp.w2, saved.z, mlp.activation, rebuild=rebuild, bias=grads.bias)
    return dz, db1, rebuilt if saved.a is None else saved.a
