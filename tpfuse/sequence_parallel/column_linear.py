"""Column-parallel linear: this rank's rows are gathered, and multiplied by this rank's slice of the weight.

    rank r of R      n [R, m, D]        W [N / R, D], b [N / R]        y [M, N / R]
    forward          z = gather(n) W' + b;  y = act(z)
    dgrad            dz = dy act'(z);  scatter(dz W), R parts that the kernel before sums
    wgrad            dW = dz' gather(n);  db = sum_rows dz

Saved: n's shard (or how to make it again), W, and z if there is an activation.
"""

from typing import Any

from torch import Tensor

from ..kernels.gemm.op import activation_bwd, check_linear
from ..kernels.norm import Recompute
from ..kernels.runtime.captures import captures
from ..kernels.runtime.deferred import Later, deferred
from ..kernels.runtime.function import Function, once_differentiable
from ..kernels.runtime.main_grad import mains
from ..kernels.runtime.op import autocast, dtype_of
from ..parallel import TensorParallel
from .choice import choose
from .crossings import expanded
from .forms import Form
from .records import LinearWeights, SavedInput, WantedGrads, handed_over, restore, save


class GatherLinear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        n: Tensor,
        w: Tensor,
        b: Tensor | None,
        activation: str,
        tp: TensorParallel,
        recompute: Recompute | None,
        form: Form,
        deferral: Later | None,
    ) -> Tensor:
        y, z = form.gather_linear_fwd(n, LinearWeights(w, b, activation), tp)
        save(ctx, (w, None if activation == "none" else z), SavedInput.of(n, recompute, tp))
        ctx.args, ctx.mains, ctx.deferral = (activation, dtype_of(b), tp, form), mains(w, None), deferral
        ctx.captures = captures(w, None)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (w, z), n = restore(ctx)
        activation, dtype, tp, form = ctx.args
        grads, dy = WantedGrads.of(ctx, ("weight", "bias"), dtype), dy.contiguous()
        grads = grads._replace(n=ctx.needs_input_grad[0])
        if z is None:
            dn, dw, db = form.gather_linear_bwd(dy, w, n=n, grads=grads, tp=tp)
        else:
            dy, db, _ = activation_bwd(dy, z, activation, rebuild=False, bias=grads.bias)
            dn, dw, _ = form.gather_linear_bwd(dy, w, n=n, grads=grads._replace(bias=None), tp=tp)
            db = None if grads.bias is None else db
        return dn, dw, handed_over(ctx.deferral, db), *[None] * 5


def gather_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    tp: TensorParallel,
    activation: str = "none",
    recompute: Recompute | None = None,
    columns: int | None = None,
) -> Tensor:
    """Column-parallel linear: gathers the rows, and multiplies by this rank's slice of the weight.

    x [m, D] or one shard expanded to [R, m, D] (without sequence parallelism [M, D] or [1, M, D]), weight [N, D],
    bias [N], N this rank's -> [M, N] ([M, N / 2] gated) in x's dtype (under autocast: in its dtype).  The gradient of
    an expanded x comes back as R unsummed parts.  ``recompute`` is saved in place of x, which backward makes again.
    ``columns``: the most that any rank has, if N is not the same on all (it decides whether messages overlap).
    ValueError for shapes or dtypes that do not fit.
    """
    check_linear("gather_linear", x, weight, bias, activation=activation)
    x, weight, bias = autocast(x, weight, bias)
    x = expanded("gather_linear", x, tp)
    form = choose("gather_linear", x, weight, tp=tp, columns=columns)
    return run_gather_linear(x, LinearWeights(weight, bias, activation), tp=tp, recompute=recompute, form=form)


def run_gather_linear(
    x: Tensor, linear: LinearWeights, *, tp: TensorParallel, recompute: Recompute | None, form: Form
) -> Tensor:
    """gather_linear of arguments that have been checked: x [R, m, D] with stride 0."""
    deferral, w, b, _ = deferred(x, linear.w, linear.b)
    return GatherLinear.apply(x, w, b, linear.activation, tp, recompute, form, deferral)
