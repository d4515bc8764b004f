"""The two crossings between row shards and GEMMs, and the ops built on them: definition, TP = 1 path and fallback of every overlap.

A reduce-scatter is an exchange plus a sum; an all-gather is a broadcast plus an exchange.  So there is one collective, ``exchange``
(an all-to-all of row tiles, its own adjoint); sum and broadcast belong to the kernels that touch the rows anyway.  Between two GEMMs
every tensor is [R, m, D]:  parts to be summed, or one shard expanded to all peers with stride 0, whose exchange is an all-gather.

                  sequence parallel                     without (the same rows everywhere)           adjoint
    enter         [R, m, D] --exchange--> [M, D]        [1, M, D] --view--> [M, D]                   leave
    leave         [M, D] --exchange--> [R, m, D]        [M, D] --all-reduce--> [1, M, D]             enter

    op                    forward                                    dgrad                            wgrad
    gather_linear         enter(n) W' + b                            leave(dy W)                      dy' enter(n)
    linear_exchange       leave(x W')                                enter(dp) W                      enter(dp)' x
    gather_mlp_exchange   leave(act(enter(n) W1' + b1) W2')          dz = enter(dp) W2 act'(z);       enter(dp)' act(z),
                                                                     leave(dz W1)                     dz' enter(n)

Only shards are saved: n (or, given ``remake``, what makes it again), never what was gathered.  A frozen weight has no wgrad, and nothing is
gathered for it.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..collectives import all_gather, all_reduce, all_to_all
from ..kernels._fused_norm import reduce_launch
from ..kernels._op import autocast, check, op, sum_parts
from ..kernels.linear import activation_bwd, check_linear, column_sum, linear_dgrad, linear_dgrad_act, linear_fwd, linear_wgrad, width
from ..kernels.norm import Remake, norm_apply
from ..parallel import TensorParallel
from . import overlap
from ._choice import pairwise

# ---- the crossings ----


def exchange_parts(x: Tensor, tp: TensorParallel) -> Tensor:
    """[R, m, D] -> [R, m, D]; an all-gather where x is one shard expanded with stride 0."""
    if tp.size == 1:
        return x
    return all_gather(x[0], tp.size, tp.group_name) if x.stride(0) == 0 else all_to_all(x, tp.group_name)


def enter(x: Tensor, tp: TensorParallel) -> Tensor:
    return (exchange_parts(x, tp) if tp.sequence_parallel else x).flatten(0, 1)


def leave(x: Tensor, tp: TensorParallel) -> Tensor:
    if tp.sequence_parallel:
        return exchange_parts(x.view(tp.size, -1, x.shape[-1]), tp)
    return all_reduce(x, tp)[None]


def _saved(n: Tensor, remake: Remake | None) -> tuple:
    """What stands for n until backward: its one shard, or the tensors that make it again."""
    return (n[:1],) if remake is None else (remake.h, remake.mean, remake.rstd, remake.gamma, remake.beta)


def _restored(saved: tuple, constants: tuple | None, tp: TensorParallel) -> Tensor:
    n = saved[0] if constants is None else norm_apply(*saved, *constants)[None]
    return n.expand(tp.row_shards, -1, -1)


def reduce_parts_ref(parts: Tensor) -> Tensor:
    """[R, m, D] -> [m, D]"""
    return sum_parts(parts).to(parts.dtype)


reduce_parts = op(reduce_parts_ref, launch=reduce_launch)


# ---- autograd ----


class _Expand(torch.autograd.Function):
    """[m, D] -> [R, m, D] with stride 0; the R gradients are added in fp32 in rank order, which autograd's own sum would not do."""

    @staticmethod
    def forward(ctx, x, ranks):
        return x.expand(ranks, -1, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return reduce_parts(dy), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp):
        ctx.tp = tp
        return leave(x, tp)

    @staticmethod
    @once_differentiable
    def backward(ctx, dp):
        return enter(dp, ctx.tp), None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp):
        ctx.tp = tp
        return x.view_as(x) if tp.size == 1 else exchange_parts(x, tp)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return exchange_parts(dy, ctx.tp), None


class _GatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, n, w, b, activation, tp, remake, overlapped):
        if overlapped and tp.sequence_parallel:
            y, z = overlap.gather_linear_fwd(n, w, b, activation, tp.group_name)
        else:
            y, z = linear_fwd(enter(n, tp), w, b, activation)
        saved = _saved(n, remake)
        ctx.save_for_backward(w, None if activation == "none" else z, *saved)
        ctx.args = activation, tp, None if remake is None else remake[5:], b is not None, overlapped
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        w, z, *saved = ctx.saved_tensors
        activation, tp, constants, has_bias, overlapped = ctx.args
        dy, db = dy.contiguous(), None
        if z is not None:
            dy, db, _ = activation_bwd(dy, z, activation, False)
        sum_bias, db_plain = has_bias and db is None, None
        overlapped = overlapped and ctx.needs_input_grad[1]  # without a wgrad there is little to hide behind
        if overlapped and tp.sequence_parallel:
            n = _restored(tuple(saved), constants, tp)
            dn, dw, db_plain = overlap.gather_linear_bwd(dy, w, n, sum_bias, tp.group_name)
        elif overlapped:
            n = enter(_restored(tuple(saved), constants, tp), tp)
            dn, dw, db_plain, _ = overlap.linear_reduce_bwd(dy, w, n, sum_bias, None, None, tp.size, tp.group_name)
            dn = dn[None]
        else:
            dn, dw = leave(linear_dgrad(dy, w), tp), None
            if ctx.needs_input_grad[1]:
                dw, db_plain = linear_wgrad(dy, enter(_restored(tuple(saved), constants, tp), tp), w.dtype, sum_bias)
            elif ctx.needs_input_grad[2] and sum_bias:
                db_plain = column_sum(dy)
        db = (db_plain if db is None else db) if has_bias else None
        return dn, dw, db, None, None, None, None


class _LinearExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, tp, overlapped):
        ctx.save_for_backward(x, w)
        ctx.args = tp, overlapped and tp.sequence_parallel
        if overlapped and tp.sequence_parallel:
            return overlap.linear_exchange_fwd(x, w, tp.size, tp.group_name)
        return leave(linear_fwd(x, w, None, "none")[0], tp)

    @staticmethod
    @once_differentiable
    def backward(ctx, dp):
        x, w = ctx.saved_tensors
        tp, overlapped = ctx.args
        if overlapped and ctx.needs_input_grad[1]:
            return *overlap.linear_exchange_bwd(dp, x, w, tp.group_name), None, None
        dy = enter(dp, tp)
        return linear_dgrad(dy, w), linear_wgrad(dy, x, w.dtype, False)[0] if ctx.needs_input_grad[1] else None, None, None


class _GatherMLPExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, n, w1, b1, w2, activation, tp, remake, overlapped):
        if overlapped and tp.sequence_parallel:
            parts, z, a = overlap.gather_mlp_exchange_fwd(n, w1, b1, w2, activation, remake is None, tp.group_name)
        else:
            a, z = linear_fwd(enter(n, tp), w1, b1, activation)
            parts = leave(linear_fwd(a, w2, None, "none")[0], tp)
        ctx.save_for_backward(w1, w2, z, None if remake is not None else a, *_saved(n, remake))
        ctx.args = activation, tp, None if remake is None else remake[5:], b1 is not None, overlapped
        return parts

    @staticmethod
    @once_differentiable
    def backward(ctx, dp):
        w1, w2, z, a, *saved = ctx.saved_tensors
        activation, tp, constants, has_bias, overlapped = ctx.args
        wants1, wants2 = ctx.needs_input_grad[1], ctx.needs_input_grad[3]
        overlapped = overlapped and wants1 and wants2
        if overlapped and tp.sequence_parallel:
            n = _restored(tuple(saved), constants, tp)
            dn, dw1, db1, dw2 = overlap.gather_mlp_exchange_bwd(dp, n, w1, w2, z, a, activation, tp.group_name)
            return dn, dw1, db1 if has_bias else None, dw2, None, None, None, None
        dy = enter(dp, tp)
        dz, db1, rebuilt = linear_dgrad_act(dy, w2, z, activation, a is None and wants2)
        a = rebuilt if a is None else a
        if overlapped:
            n = enter(_restored(tuple(saved), constants, tp), tp)
            dn, dw1, _, dw2 = overlap.linear_reduce_bwd(dz, w1, n, False, dy, a, tp.size, tp.group_name)
            return dn[None], dw1, db1 if has_bias else None, dw2, None, None, None, None
        dn, dw1, dw2 = leave(linear_dgrad(dz, w1), tp), None, None
        if wants2:
            dw2, _ = linear_wgrad(dy, a, w2.dtype, False)
        if wants1:
            dw1, _ = linear_wgrad(dz, enter(_restored(tuple(saved), constants, tp), tp), w1.dtype, False)
        return dn, dw1, db1 if has_bias else None, dw2, None, None, None, None


# ---- public ----


def exchange(x: Tensor, tp: TensorParallel) -> Tensor:
    """An all-to-all of row tiles: x [R, m, D] -> [R, m, D], tile r to and from rank r.  Its own adjoint; ValueError for another R."""
    check(x.dim() == 3 and x.shape[0] == tp.size, f"exchange: x must be [{tp.size}, m, D], got {tuple(x.shape)}")
    return _Exchange.apply(x, tp)


def leave_parts(x: Tensor, tp: TensorParallel) -> Tensor:
    """Partial sums of all rows, x [M, D], to parts [R, m, D] of this rank's rows (without sequence parallelism their sum [1, M, D])."""
    check(len(x) % tp.row_shards == 0, f"leave_parts: M={len(x)} rows are not divisible by tensor-parallel size {tp.row_shards}; pad them")
    return _Leave.apply(x, tp)


def gather_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    tp: TensorParallel,
    activation: str = "none",
    remake: Remake | None = None,
    columns: int | None = None,
) -> Tensor:
    """Column-parallel linear: gathers the rows, and multiplies by this rank's slice of the weight.

    x [m, D] or one shard expanded to [R, m, D] (without sequence parallelism [M, D] or [1, M, D]), weight [N, D], bias [N], N this
    rank's -> [M, N] ([M, N / 2] gated) in x's dtype (under autocast: in its dtype).  The gradient of an expanded x comes back as R
    unsummed parts.  ``remake`` is saved in place of x, which is made again in backward.  ``columns``: the most that any rank has, where N
    is not the same on all (whether messages overlap is decided by it).  ValueError for shapes or dtypes that do not fit.
    """
    check_linear("gather_linear", x, weight, bias, activation)
    x, weight, bias = autocast(x, weight, bias)
    x = _expanded("gather_linear", x, tp)
    return _GatherLinear.apply(x, weight, bias, activation, tp, remake, pairwise("gather_linear", x, weight, tp, columns))


def linear_exchange(x: Tensor, weight: Tensor, *, tp: TensorParallel) -> Tensor:
    """Row-parallel linear without its sum: x [M, K], weight [D, K], K this rank's -> parts [R, m, D], to be summed over R.

    Without sequence parallelism the sum is taken here, and [1, M, D] comes back.  M must be divisible by R.
    """
    check_linear("linear_exchange", x, weight, None, "none")
    check(
        x.dim() == 2 and len(x) % tp.row_shards == 0,
        f"linear_exchange: x must be [M, K], M divisible by {tp.row_shards}, got {tuple(x.shape)}",
    )
    x, weight = autocast(x, weight)
    return _LinearExchange.apply(x.contiguous(), weight, tp, pairwise("linear_exchange", x, weight, tp))


def gather_mlp_exchange(
    x: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    *,
    activation: str,
    tp: TensorParallel,
    remake: Remake | None = None,
) -> Tensor:
    """gather_linear, activation and linear_exchange as one op, whose backward runs the activation's in the epilogue of a GEMM.

    x as in gather_linear, fc1_weight [F, D], fc1_bias [F], fc2_weight [D, F], F this rank's -> parts [R, m, D].  ``activation`` as in
    kernels.linear, but not "none"; with "swiglu", "geglu" or "geglu_tanh" fc1_weight is [2F, D], a [F, 2, D] seen flat, and fc1_bias [2F].
    With ``remake`` neither x nor the activation is saved, only the pre-activation.
    """
    check_linear("gather_mlp_exchange", x, fc1_weight, fc1_bias, activation)
    check(activation != "none", "gather_mlp_exchange: activation must not be none")
    shape = fc1_weight.shape[1], fc1_weight.shape[0] // width(activation)
    check(fc2_weight.shape == shape, f"gather_mlp_exchange: fc2_weight must be {shape}, got {tuple(fc2_weight.shape)}")
    same = fc2_weight.dtype == fc1_weight.dtype or torch.is_autocast_enabled(x.device.type)
    check(same, f"gather_mlp_exchange: weights must have one dtype outside autocast, got {fc1_weight.dtype} and {fc2_weight.dtype}")
    x, fc1_weight, fc1_bias, fc2_weight = autocast(x, fc1_weight, fc1_bias, fc2_weight)
    x = _expanded("gather_mlp_exchange", x, tp)
    overlapped = pairwise("gather_mlp_exchange", x, fc1_weight, tp)
    return _GatherMLPExchange.apply(x, fc1_weight, fc1_bias, fc2_weight, activation, tp, remake, overlapped)


def _expanded(name: str, x: Tensor, tp: TensorParallel) -> Tensor:
    if x.dim() == 2:
        return _Expand.apply(x.contiguous(), tp.row_shards)
    fits = x.dim() == 3 and x.shape[0] == tp.row_shards
    check(fits, f"{name}: x must be [m, D] or [{tp.row_shards}, m, D], got {tuple(x.shape)}")
    return x
