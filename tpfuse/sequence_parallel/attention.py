"""Attention between its two projections: gather_linear, attention and linear_exchange, as one op if their messages
overlap.

The plain form is the three ops: as one Function it would hold q, k, v and the output while the gradient of n is made.
"""

from typing import Any

from torch import Tensor

from ..kernels.attn.options import TENSORS, Options, check_options
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
from .column_linear import run_gather_linear
from .context import attend_pieces
from .crossings import expanded
from .forms import overlapped
from .records import AttentionSaved, LinearWeights, Projections, SavedInput, WantedGrads, handed_over, restore, save
from .row_linear import run_linear_exchange


class _GatherAttentionExchange(Function):
    @staticmethod
    def forward(
        ctx: Any,
        n: Tensor,
        w: Tensor,
        b: Tensor | None,
        w_out: Tensor,
        extra: tuple[tuple[int, int], Later | None],
        options: Options,
        tp: TensorParallel,
        recompute: Recompute | None,
    ) -> Tensor:
        """``extra``: heads a group and their width, and the deferral of weight gradients."""
        heads, deferral = extra
        weights = Projections(w, b, w_out, *heads)
        parts, *tensors = overlapped.gather_attention_exchange_fwd(n, weights, options, tp)
        save(ctx, (w, w_out, *tensors, *options[:TENSORS]), SavedInput.of(n, recompute, tp))
        ctx.args, ctx.mains, ctx.deferral = (heads, options[TENSORS:], dtype_of(b), tp), mains(w, w_out), deferral
        ctx.captures = captures(w, w_out)
        return parts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dp: Tensor) -> tuple[Tensor | None, ...]:
        (w, w_out, qkv, o, lse, *tensors), n = restore(ctx)
        heads, constants, dtype, tp = ctx.args
        weights = Projections(w, None, w_out, *heads)
        grads = WantedGrads.of(ctx, ("weight", "bias", "out_weight"), dtype)
        saved = AttentionSaved(n, qkv, o, lse, options=Options(*tensors, *constants))
        dn, dw, db, dw_out = overlapped.gather_attention_exchange_bwd(dp, weights, saved=saved, grads=grads, tp=tp)
        return dn, dw, handed_over(ctx.deferral, db), dw_out, *[None] * 4


def gather_attention_exchange(
    x: Tensor,
    qkv_weight: Tensor,
    qkv_bias: Tensor | None,
    out_weight: Tensor,
    *,
    heads: tuple[int, int],
    options: Options,
    tp: TensorParallel,
    recompute: Recompute | None = None,
) -> Tensor:
    """gather_linear, attention and linear_exchange: as one op if their messages overlap.

    x as in gather_linear, qkv_weight [G (Q + 2) E, D] and its bias with (Q + 2, E) = ``heads``, out_weight [D, G Q E],
    G this rank's -> parts [R, m, D].  ``options`` are those of kernels.attn.op.attend.  ValueError for shapes or
    dtypes that do not fit.
    """
    name, (slots, E) = "gather_attention_exchange", heads
    check_linear(name, x, qkv_weight, qkv_bias, activation="none")
    K = slots * E
    check(
        slots > 2 and len(qkv_weight) % K == 0,
        f"{name}: qkv_weight must have a multiple of {K} rows, got {len(qkv_weight)}",
    )
    shape = qkv_weight.shape[1], len(qkv_weight) // slots * (slots - 2)
    check(out_weight.shape == shape, f"{name}: out_weight must be {shape}, got {tuple(out_weight.shape)}")
    x, qkv_weight, qkv_bias, out_weight = autocast(x, qkv_weight, qkv_bias, out_weight)
    x = expanded(name, x, tp)
    if tp.sequence_parallel and tp.bitwise is None and tp.cp is None:
        form = choose(name, x, qkv_weight, tp=tp, columns=len(qkv_weight) + out_weight.shape[1])
    else:
        form = choose("gather_linear", x, qkv_weight, tp=tp)
    if form is overlapped and tp.cp is None:
        qkv_shape = x.shape[0] * x.shape[1], len(qkv_weight) // K, *heads
        check_options(qkv_shape, options)
        deferral, *weights = deferred(x, qkv_weight, qkv_bias, out_weight)
        return _GatherAttentionExchange.apply(x, *weights, (heads, deferral), options, tp, recompute)
    qkv = run_gather_linear(x, LinearWeights(qkv_weight, qkv_bias, "none"), tp=tp, recompute=recompute, form=form)
    o = attend_pieces(qkv.unflatten(1, (-1, *heads)), options, tp)
    return run_linear_exchange(o, out_weight, tp, form)
