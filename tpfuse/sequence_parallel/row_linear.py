"""Row-parallel linear without its sum: each rank multiplies its slice of the columns, and sends every peer its rows.

rank r of R      x [M, K / R]        W [D, K / R]        parts [R, m, D]
forward          scatter(x W')
dgrad            gather(dp) W
wgrad            dW = gather(dp)' x
"""

from typing import Any

from torch import Tensor

from ..kernels.gemm.op import check_linear
from ..kernels.runtime.captures import captures
from ..kernels.runtime.deferred import Later, deferred
from ..kernels.runtime.errors import check
from ..kernels.runtime.function import Function, once_differentiable
from ..kernels.runtime.main_grad import mains
from ..kernels.runtime.op import autocast
from ..parallel import TensorParallel
from .choice import choose
from .forms import Form
from .records import WantedGrads


class LinearExchange(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, tp: TensorParallel, form: Form, deferral: Later | None) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.args, ctx.mains, ctx.deferral = (tp, form), mains(None, w), deferral
        ctx.captures = captures(None, w)
        return form.linear_exchange_fwd(x, w, tp)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dp: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        tp, form = ctx.args
        grads = WantedGrads.of(ctx, ("out_weight",))
        dx, dw = form.linear_exchange_bwd(dp, w, x=x, grads=grads, tp=tp)
        return dx, dw, None, None, None


def linear_exchange(x: Tensor, weight: Tensor, *, tp: TensorParallel) -> Tensor:
    """Row-parallel linear without its sum: x [M, K], weight [D, K], K this rank's -> parts [R, m, D], to be summed over
    R.

    Without sequence parallelism the sum is taken here, and [1, M, D] comes back.  M must be divisible by R.
    """
    check_linear("linear_exchange", x, weight, None, activation="none")
    check(
        x.dim() == 2 and x.shape[0] % tp.row_shards == 0,
        f"linear_exchange: x must be [M, K], M divisible by {tp.row_shards}, got {tuple(x.shape)}",
    )
    x, weight = autocast(x, weight)
    return run_linear_exchange(x.contiguous(), weight, tp, choose("linear_exchange", x, weight, tp=tp))


def run_linear_exchange(x: Tensor, weight: Tensor, tp: TensorParallel, form: Form) -> Tensor:
    """linear_exchange of arguments that have been checked."""
    deferral, _, _, w = deferred(x, None, None, weight)
    return LinearExchange.apply(x, w, tp, form, deferral)
