"""A block on one rank as one autograd node: the ops of block.py one after another, without a Function for each.

On one rank nothing is exchanged, and what a block costs the host beside its kernels is Python: seven Functions, each
with checks and records of its own, around a launcher for each op.  Forward and backward are functions of tensors here,
recorded and replayed whole.  Values and gradients are bitwise those of the ops called one by one, and so are the bytes
saved; they are freed together, when the block's backward has ended.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.attn.op import attention_bwd, attention_fwd
from ..kernels.attn.options import TENSORS, Options
from ..kernels.norm.alone import NORM
from ..kernels.norm.records import ALONE, POST, PRE, Add, Norm, Wanted
from ..kernels.norm.records import Saved as NormSaved
from ..kernels.norm.verbs import REDUCE_BIAS_DROPOUT_ADD_NORM
from ..kernels.runtime.function import Function, once_differentiable
from ..kernels.runtime.main_grad import Main, mains
from ..kernels.runtime.op import Composed, dtype_of
from ..kernels.runtime.philox import NO_MASK, Mask
from ..parallel import TensorParallel
from ..sequence_parallel.forms import plain
from ..sequence_parallel.records import MLP, Linear, MLPSaved, Needs, Saved, adding


class Parameters(NamedTuple):
    """A block's, as its layers hold them; None where there is none."""

    in_weight: Tensor | None
    in_bias: Tensor | None
    qkv_weight: Tensor  # [G, Q + 2, E, D]
    qkv_bias: Tensor | None
    out_weight: Tensor
    out_bias: Tensor | None
    norm_weight: Tensor
    norm_bias: Tensor | None
    fc1_weight: Tensor  # [F, D], gated [F, 2, D]
    fc1_bias: Tensor | None
    fc2_weight: Tensor
    fc2_bias: Tensor | None
    last_weight: Tensor | None
    last_bias: Tensor | None


class Constants(NamedTuple):
    activation: str
    kind: str  # of its norms
    eps_in: float  # of the norm that enters
    eps: float  # of the others
    post_norm: bool
    attention_mask: Mask  # of dropout after attention
    mlp_mask: Mask


class Layer(NamedTuple):
    """What a block is made of, but for its rows."""

    constants: Constants
    options: Options  # of attention, checked
    parameters: Parameters


class Totals(NamedTuple):
    """Where weights' gradients are added, [N, K]; None where they are returned."""

    qkv: Tensor | None = None
    out: Tensor | None = None
    fc1: Tensor | None = None
    fc2: Tensor | None = None


class Asked(NamedTuple):
    """What backward is asked for."""

    parameters: Any  # a Parameters of flags
    residual: torch.dtype  # of the gradient of h
    in_stack: bool


Stats = tuple[Tensor | None, Tensor | None, Tensor | None]


class Kept(NamedTuple):
    """What forward leaves to backward beside the parameters; ``n`` [1, m, D] enters attention, ``n1`` the MLP.

    A norm leaves its input and its statistics: that which enters (None where there is none), attention's, the last.
    """

    n: Tensor
    qkv: Tensor
    o: Tensor
    lse: Tensor
    n1: Tensor
    z: Tensor
    a: Tensor | None
    in_stats: Stats
    stats: Stats
    last_stats: Stats


NO_STATS: Stats = (None, None, None)
NO_TOTALS = Totals()
PARAMETERS, FLAT = len(Parameters._fields), len(Kept._fields) - 3
FUSED = REDUCE_BIAS_DROPOUT_ADD_NORM
ONE = TensorParallel()  # rank


def _linear(w: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """w [.., K], b [..] -> [N, K], [N]"""
    return w.reshape(-1, w.shape[-1]), None if b is None else b.reshape(-1)


def _shaped(gradient: Tensor | None, like: Tensor | None) -> Tensor | None:
    """Returns the gradient of a parameter in its shape; ops give empty ones for what is not there."""
    if gradient is None or like is None or gradient.numel() == 0:
        return None
    return gradient if gradient.dim() == like.dim() else gradient.view(like.shape)


@Composed
def _forward(h: Tensor, n: Tensor | None, layer: Layer) -> tuple[Any, ...]:
    """h [m, D], n [1, m, D] (None but in a stack) -> h, n of the next, and the fields of Kept, spelled out."""
    c, options, p = layer
    order, in_stats = POST if c.post_norm else PRE, NO_STATS
    if p.in_weight is not None:
        norm = Norm(p.in_weight, p.in_bias, c.eps_in, c.kind)
        _, rows, mean, rstd = NORM.fwd(h[None], Add(), norm, NO_MASK, order=ALONE)
        n, in_stats = rows[None], (h, mean, rstd)
    elif n is None:
        n = h[None]
    qkv, _ = plain.gather_linear_fwd(n, Linear(*_linear(p.qkv_weight, p.qkv_bias), "none"), ONE)
    qkv = qkv.view(len(qkv), *p.qkv_weight.shape[:-1])
    o, lse = attention_fwd(qkv, options)
    parts = plain.linear_exchange_fwd(o, p.out_weight, ONE)
    add, norm = Add(p.out_bias, residual=h), Norm(p.norm_weight, p.norm_bias, c.eps, c.kind)
    h1, rows, *stats = FUSED.fwd(parts, add, norm, c.attention_mask, order=order)
    n1, stream = rows[None], rows if c.post_norm else h1
    mlp = MLP(*_linear(p.fc1_weight, p.fc1_bias), p.fc2_weight, c.activation)
    parts, z, a = plain.gather_mlp_exchange_fwd(n1, mlp, keep=True, tp=ONE)
    add, norm = Add(p.fc2_bias, residual=stream), Norm(p.last_weight, p.last_bias, c.eps, c.kind)
    h2, rows, *last_stats = FUSED.fwd(parts, add, norm, c.mlp_mask, order=order)
    last = NO_STATS if p.last_weight is None else (h2, *last_stats)
    on, then = (rows, rows[None]) if c.post_norm else (h2, None if p.last_weight is None else rows[None])
    return on, then, n, qkv, o, lse, n1, z, a, *in_stats, h1, *stats, *last


@Composed
def _backward(
    gradients: tuple[Tensor | None, Tensor | None], layer: Layer, kept: Kept, asking: tuple[Asked, Totals]
) -> tuple[Tensor | None, ...]:
    """Gradients of what _forward returned first -> those of h, n and the parameters."""
    (dh, dn), (c, options, p), (asked, totals) = gradients, layer, asking
    order, dtype, needed = POST if c.post_norm else PRE, kept.n.dtype, asked.parameters

    wanted = Wanted(dtype_of(p.fc2_bias), p.last_bias is not None, asked.residual, dtype)
    state = NormSaved(*kept.last_stats, p.last_weight, kind=c.kind)
    dh = None if dh is None else dh.contiguous()
    dp, dh, dfc2_bias, dlast, dlast_bias = FUSED.bwd(dn, dh, state, c.mlp_mask, order=order, wanted=wanted)

    w1, _ = _linear(p.fc1_weight, None)
    mlp, n1 = MLP(w1, None, p.fc2_weight, c.activation), MLPSaved(Saved(kept.n1, ONE), kept.z, kept.a)
    needs = Needs(needed.fc1_weight, dtype_of(p.fc1_bias) if needed.fc1_bias else None, needed.fc2_weight)
    needs = _adding(needs, totals.fc1, totals.fc2)
    dn, dw1, db1, dw2 = plain.gather_mlp_exchange_bwd(dp[None], mlp, saved=n1, needs=needs, tp=ONE)

    wanted = Wanted(dtype_of(p.out_bias), p.norm_bias is not None, asked.residual, dtype)
    state = NormSaved(*kept.stats, p.norm_weight, kind=c.kind)
    dp, dh, dout_bias, dnorm, dnorm_bias = FUSED.bwd(dn, dh, state, c.attention_mask, order=order, wanted=wanted)

    needs = Needs(needed.qkv_weight, dtype_of(p.qkv_bias) if needed.qkv_bias else None, needed.out_weight)
    needs = _adding(needs, totals.qkv, totals.out)
    do, dout = plain.linear_exchange_bwd(dp[None], p.out_weight, x=kept.o, needs=needs, tp=ONE)
    dqkv = attention_bwd(do, kept.qkv, kept.o, kept.lse, options=options).flatten(1)
    w, n = _linear(p.qkv_weight, None)[0], Saved(kept.n, ONE)
    dn, dw, db = plain.gather_linear_bwd(dqkv, w, n=n, needs=needs, tp=ONE)

    din = din_bias = None
    if p.in_weight is not None:
        wanted = Wanted(None, p.in_bias is not None, None, dtype)
        state = NormSaved(*kept.in_stats, p.in_weight, kind=c.kind)
        dh, _, _, din, din_bias = NORM.bwd(dn, dh, state, NO_MASK, order=ALONE, wanted=wanted)
        dn = None
    elif not asked.in_stack:
        dh, dn = dh + dn[0], None
    made = (
        din, din_bias, dw, db, dout, dout_bias, dnorm, dnorm_bias, dw1, db1, dw2, dfc2_bias, dlast, dlast_bias
    )  # fmt: skip
    return dh, dn, *[_shaped(g, like) for g, like in zip(made, p)]


def _totals(asked: Asked, found: tuple[Main | None, ...]) -> tuple[Asked, Totals]:
    """Returns what is left to be asked for, and the totals that gradients are added to."""
    wanted = [main is None or main.wanted for main in found]
    names = [f"{name}_weight" for name in Totals._fields]
    p = asked.parameters
    p = p._replace(**{name: getattr(p, name) and reached for name, reached in zip(names, wanted, strict=True)})
    totals = [
        main.add(lambda total: total.flatten(0, -2)) if main is not None and getattr(p, name) else None
        for name, main in zip(names, found, strict=True)
    ]
    return asked._replace(parameters=p), Totals(*totals)


def _adding(needs: Needs, weight: Tensor | None, out_weight: Tensor | None) -> Needs:
    """Returns needs whose gradients are added to these totals, where there are any."""
    if weight is None and out_weight is None:
        return needs
    into = lambda total: None if total is None else lambda write: write(total)
    return needs._replace(run=adding(into(weight), into(out_weight)))


class _Block(Function):
    """h [m, D], n [1, m, D] (None but in a stack) -> h [m, D], and in a stack n [1, m, D]."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, n: Tensor | None, layer: Layer, *parameters: Any) -> Any:
        constants, options, _ = layer
        on, then, *kept = _forward(h, n, layer)
        ctx.save_for_backward(*parameters, *options[:TENSORS], *kept)
        ctx.args = constants, options[TENSORS:], h.dtype, n is not None
        p = layer.parameters
        ctx.mains = mains(p.qkv_weight, p.out_weight, p.fc1_weight, p.fc2_weight)
        ctx.set_materialize_grads(False)
        return on if n is None else (on, then)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor | None, dn: Tensor | None = None) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad
        if dh is None and dn is None:
            return (None,) * len(needed)
        (constants, numbers, residual, in_stack), saved = ctx.args, ctx.saved_tensors
        p, saved = Parameters(*saved[:PARAMETERS]), saved[PARAMETERS:]
        options, saved = Options(*saved[:TENSORS], *numbers), saved[TENSORS:]
        stats: tuple[Any, ...] = saved[FLAT : FLAT + 3], saved[FLAT + 3 : FLAT + 6], saved[FLAT + 6 :]
        layer, kept = Layer(constants, options, p), Kept(*saved[:FLAT], *stats)
        asked = Asked(Parameters(*needed[3:]), residual, in_stack)
        totals = NO_TOTALS
        if ctx.mains is not None:
            asked, totals = _totals(asked, ctx.mains)
        dh, dn, *gradients = _backward((dh, dn), layer, kept, (asked, totals))
        return dh, dn, None, *gradients


def block(h: Tensor, n: Tensor | None, layer: Layer) -> Any:
    """Runs a block with gradients: h [m, D] and, in a stack, n [1, m, D] -> the same of the next."""
    return _Block.apply(h, n, layer, *layer.parameters)
