"""The form under sequence parallelism: messages travel while GEMMs run.  Each function is one opaque op of
:mod:`..overlap`, so that compiled graphs hold no handle.

If a weight is frozen its backward is the plain form's: without a wgrad little could be hidden.
"""

from torch import Tensor

from ...kernels.attn.op import attention_bwd
from ...kernels.attn.options import Options
from ...parallel import TensorParallel
from ..overlap import attention as attention_ops
from ..overlap import linear as linear_ops
from ..overlap import mlp as mlp_ops
from ..records import MLP, AttentionSaved, LinearWeights, MLPSaved, Projections, SavedInput, WantedGrads, WeightGrad
from . import plain


def _name(tp: TensorParallel) -> str:
    return tp.group_name or ""  # several ranks have a name


def gather_linear_fwd(n: Tensor, linear: LinearWeights, tp: TensorParallel) -> tuple[Tensor, Tensor]:
    return linear_ops.gather_linear_fwd(n, linear, tp.group_name)


def gather_linear_bwd(
    dy: Tensor, w: Tensor, *, n: SavedInput, grads: WantedGrads, tp: TensorParallel
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if not (grads.weight and grads.n):
        return plain.gather_linear_bwd(dy, w, n=n, grads=grads, tp=tp)
    work = WeightGrad(dy, n.expanded(), w.dtype, grads.bias)
    if not grads.at_once:
        return linear_ops.gather_linear_bwd_by(grads.run, w, work, _name(tp))
    dn, dw, db = linear_ops.gather_linear_bwd(w, work, tp.group_name)
    return dn, dw, None if grads.bias is None else db


def linear_exchange_fwd(x: Tensor, w: Tensor, tp: TensorParallel) -> Tensor:
    return linear_ops.linear_exchange_fwd(x, w, tp.size, tp.group_name)


def linear_exchange_bwd(
    dp: Tensor, w: Tensor, *, x: Tensor, grads: WantedGrads, tp: TensorParallel
) -> tuple[Tensor, Tensor | None]:
    if not grads.out_weight:
        return plain.linear_exchange_bwd(dp, w, x=x, grads=grads, tp=tp)
    if not grads.at_once:
        return linear_ops.linear_exchange_bwd_by(grads.run, dp, x, w, group_name=_name(tp))
    return linear_ops.linear_exchange_bwd(dp, x, w, tp.group_name)


def gather_mlp_exchange_fwd(
    n: Tensor, mlp: MLP, *, keep: bool, tp: TensorParallel
) -> tuple[Tensor, Tensor, Tensor | None]:
    parts, z, a = mlp_ops.gather_mlp_exchange_fwd(n, mlp, keep, tp.group_name)
    return parts, z, a if keep else None


def gather_mlp_exchange_bwd(
    dp: Tensor, mlp: MLP, *, saved: MLPSaved, grads: WantedGrads, tp: TensorParallel
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    if not (grads.weight and grads.out_weight):
        return plain.gather_mlp_exchange_bwd(dp, mlp, saved=saved, grads=grads, tp=tp)
    inputs = mlp_ops.MLPBackward(dp, saved.n.expanded(), saved.z, saved.a, bias=grads.bias)
    if grads.at_once:
        gradients = mlp_ops.gather_mlp_exchange_bwd(inputs, mlp, tp.group_name)
    else:
        gradients = mlp_ops.gather_mlp_exchange_bwd_by(grads.run, inputs, mlp, _name(tp))
    dn, dw1, db1, dw2 = gradients
    return dn, dw1, None if grads.bias is None else db1, dw2


# ---- attention between its projections: this form alone has it as one op ----


def gather_attention_exchange_fwd(
    n: Tensor, weights: Projections, options: Options, tp: TensorParallel
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns parts, qkv, o and lse."""
    return attention_ops.gather_attention_exchange_fwd(n, weights, options, tp.group_name)


def gather_attention_exchange_bwd(
    dp: Tensor, weights: Projections, *, saved: AttentionSaved, grads: WantedGrads, tp: TensorParallel
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Returns dn, unsummed, dw, db and dw_out."""
    n, qkv, o, lse, options = saved
    if grads.weight and grads.out_weight:
        inputs = attention_ops.AttentionBackward(dp, n.expanded(), qkv, o=o, lse=lse, bias=grads.bias)
        if grads.at_once:
            gradients = attention_ops.gather_attention_exchange_bwd(inputs, weights, options, tp.group_name)
        else:
            separate = attention_ops.gather_attention_exchange_bwd_by
            gradients = separate(grads.run, inputs, weights, options, group_name=_name(tp))
        dn, dw, db, dw_out = gradients
        return dn, dw, None if grads.bias is None else db, dw_out
    do, dw_out = plain.linear_exchange_bwd(dp, weights.w_out, x=o, grads=grads, tp=tp)
    dqkv = attention_bwd(do, qkv, o, lse, options=options).flatten(1)
    return *plain.gather_linear_bwd(dqkv, weights.w, n=n, grads=grads, tp=tp), dw_out
