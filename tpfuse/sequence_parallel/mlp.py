"""gather_linear, activation and linear_exchange as one op: the activation's derivative and the bias gradient are
computed in the epilogue of the second layer's dgrad.

    rank r of R      n, parts [R, m, D]      W1 [F / R, D], b1 [F / R] (gated: 2 F / R)      W2 [D, F / R]
    forward          z = gather(n) W1' + b1;  a = act(z);  scatter(a W2')
    dgrad            dz = gather(dp) W2 act'(z);  scatter(dz W1)
    wgrad            dW2 = gather(dp)' a;  dW1 = dz' gather(n);  db1 = sum_rows dz

Saved: n's shard, z and a; with ``recompute`` z alone, and n and a are made again.
"""

from typing import Any

import torch
from torch import Tensor

from ..kernels.gemm.activation import width
from ..kernels.gemm.op import check_linear
from ..kernels.norm import Recompute
from ..kernels.runtime.captures import captures
from ..kernels.runtime.deferred import Later, deferred
from ..kernels.runtime.errors import check
from ..kernels.runtime.function import Function, once_differentiable
from ..kernels.runtime.main_grad import mains
from ..kernels.runtime.op import autocast, dtype_of
from ..parallel import TensorParallel
from .choice import choose
from .crossings import expanded
from .forms import Form
from .records import MLP, MLPSaved, SavedInput, WantedGrads, handed_over, restore, save


class GatherMLPExchange(Function):
    @staticmethod
    def forward(
        ctx: Any,
        n: Tensor,
        w1: Tensor,
        b1: Tensor | None,
        w2: Tensor,
        options: tuple[str, bool, Later | None],
        tp: TensorParallel,
        recompute: Recompute | None,
        form: Form,
    ) -> Tensor:
        """``options``: the activation, True to save its output, and the deferral of weight gradients."""
        activation, keep, deferral = options
        mlp = MLP(w1, b1, w2, activation)
        parts, z, a = form.gather_mlp_exchange_fwd(n, mlp, keep=keep, tp=tp)
        save(ctx, (w1, w2, z, a), SavedInput.of(n, recompute, tp))
        ctx.args, ctx.mains, ctx.deferral = (activation, dtype_of(b1), tp, form), mains(w1, w2), deferral
        ctx.captures = captures(w1, w2)
        return parts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dp: Tensor) -> tuple[Tensor | None, ...]:
        (w1, w2, z, a), n = restore(ctx)
        activation, dtype, tp, form = ctx.args
        mlp = MLP(w1, None, w2, activation)
        grads = WantedGrads.of(ctx, ("weight", "bias", "out_weight"), dtype)
        dn, dw1, db1, dw2 = form.gather_mlp_exchange_bwd(dp, mlp, saved=MLPSaved(n, z, a), grads=grads, tp=tp)
        return dn, dw1, handed_over(ctx.deferral, db1), dw2, *[None] * 4


def gather_mlp_exchange(
    x: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    *,
    activation: str,
    tp: TensorParallel,
    recompute: Recompute | None = None,
    keep: bool | None = None,
) -> Tensor:
    """gather_linear, activation and linear_exchange as one op, whose backward computes the activation's in the epilogue
    of a GEMM.

    x as in gather_linear, fc1_weight [F, D], fc1_bias [F], fc2_weight [D, F], F this rank's -> parts [R, m, D].
    ``activation`` as in kernels.linear, but not "none"; with "swiglu", "geglu" or "geglu_tanh" fc1_weight is [2F, D],
    an [F, 2, D] flattened, and fc1_bias [2F].  With ``recompute`` neither x nor the activation's output is saved, only
    its input; ``keep`` overrides this for the output.
    """
    check_linear("gather_mlp_exchange", x, fc1_weight, fc1_bias, activation=activation)
    check(activation != "none", "gather_mlp_exchange: activation must not be none")
    shape = fc1_weight.shape[1], fc1_weight.shape[0] // width(activation)
    check(fc2_weight.shape == shape, f"gather_mlp_exchange: fc2_weight must be {shape}, got {tuple(fc2_weight.shape)}")
    dtypes = fc1_weight.dtype, fc2_weight.dtype
    check(
        dtypes[0] == dtypes[1] or torch.is_autocast_enabled(x.device.type),
        f"gather_mlp_exchange: weights must have one dtype outside autocast, got {dtypes[0]} and {dtypes[1]}",
    )
    x, fc1_weight, fc1_bias, fc2_weight = autocast(x, fc1_weight, fc1_bias, fc2_weight)
    x = expanded("gather_mlp_exchange", x, tp)
    form = choose("gather_mlp_exchange", x, fc1_weight, tp=tp)
    deferral, *weights = deferred(x, fc1_weight, fc1_bias, fc2_weight)
    options = activation, recompute is None if keep is None else keep, deferral
    return GatherMLPExchange.apply(x, *weights, options, tp, recompute, form)
