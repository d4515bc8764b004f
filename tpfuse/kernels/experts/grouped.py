"""The gated MLPs of several experts, over rows that are sorted by expert.

    z = x W1_e'        a = act(z)         part = g (a W2_e')                                g: the weight of a row
    da = dpart W2_e    dg = sum(da a)     dz = g da act'(z)
    dx = dz W1_e       dW1_e = dz' x      dW2_e = dpart' (g a)

Shapes: x, dx, part, dpart rows [D], g a number, W1 [E, 2F, D] being [E, F, 2, D] seen flat, rows of gate and up in
turns, W2 [E, D, F]; z [n, 2F] (on a CPU [n, 2, F], as in gemm/op.py), a [n, F] sorted.  Nothing is permuted in memory:
up, dact and wgrad read rows by index, down and dx store each where it belongs (ScatterMoE, Tan et al. 2024,
arXiv:2403.08245).  The parts of a row, k of them, are not summed here; the kernel that adds them to the residual stream
does it.  Their values a W2_e' are never kept, since dg needs no more than da and a (SonicMoE, Guo et al. 2025,
arXiv:2512.14080).

GEMMs accumulate in fp32, and results are rounded once, but z, of which the activation is taken as rounded and stored.
No expert drops a row, and one without rows has a gradient of 0.

On a CPU every product has all rows of one expert, in memory of its own: its bits are the same on however many ranks
the experts are.
"""

from typing import Any

import torch
from torch import Tensor

from ..gemm.activation import ACTIVATIONS, GATED
from ..gemm.op import row_of_z
from ..norm.core import reduce_parts
from ..runtime.errors import check, check_floating
from ..runtime.function import Function, once_differentiable
from ..runtime.main_grad import Main, mains
from ..runtime.op import GEMM, acc_dtype, autocast, op
from ..runtime.rules import described
from . import cost, cpu, reference, triton_grouped
from .records import ExpertOrder, ExpertRows, Sides

# ---- ops ----


def _up_fake(x: Tensor, rows: ExpertRows, w1: Tensor, activation: str, tile: int = 0) -> tuple[Tensor, Tensor]:
    n, N = (x if rows.row_index is None else rows.row_index).shape[0], w1.shape[1]
    return x.new_empty(n, *row_of_z(x, N, activation)), x.new_empty(n, N // 2)


def _dact_fake(
    dy: Tensor, rows: ExpertRows, w2: Tensor, z: Tensor, weights: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    n, F = z.shape[0], w2.shape[2]
    return z.new_empty(n, 2 * F), z.new_empty(n, F), z.new_empty(n, dtype=acc_dtype(z))


experts_up = op(
    reference.experts_up_ref,
    kind=GEMM,
    cpu=cpu.experts_up_cpu,
    launch=triton_grouped.experts_up_launch,
    fake=_up_fake,
    cost=cost.experts_up_cost,
)
experts_down = op(
    reference.experts_down_ref,
    kind=GEMM,
    cpu=cpu.experts_down_cpu,
    launch=triton_grouped.experts_down_launch,
    fake=lambda a, rows, w2, weights, count, tile=0, room=0: a.new_empty(count + room, w2.shape[1]),
    cost=cost.experts_down_cost,
)
experts_dact = op(
    reference.experts_dact_ref,
    kind=GEMM,
    cpu=cpu.experts_dact_cpu,
    launch=triton_grouped.experts_dact_launch,
    fake=_dact_fake,
    cost=cost.experts_dact_cost,
)
experts_dx = op(
    reference.experts_dx_ref,
    kind=GEMM,
    cpu=cpu.experts_dx_cpu,
    launch=triton_grouped.experts_dx_launch,
    fake=lambda dz, rows, w1, count, room: dz.new_empty(count + room, w1.shape[2]),
    cost=cost.experts_dx_cost,
)
experts_wgrad = op(
    reference.experts_wgrad_ref,
    kind=GEMM,
    cpu=cpu.experts_wgrad_cpu,
    launch=triton_grouped.experts_wgrad_launch,
    fake=lambda sides, dtype: sides.dy.new_empty(
        len(sides.offsets) - 1, sides.dy.shape[1], sides.x.shape[1], dtype=dtype
    ),
    cost=cost.experts_wgrad_cost,
)
experts_wgrad_add = op(
    reference.experts_wgrad_add_ref,
    kind=GEMM,
    launch=triton_grouped.experts_wgrad_add_launch,
    fake=lambda sides, total: None,
    mutates=("total",),
    cost=cost.experts_wgrad_add_cost,
)


# ---- autograd ----


def rows_of_gradient(dparts: Tensor, order: ExpertOrder) -> tuple[Tensor, ExpertRows]:
    """Returns the gradient of parts [k, m, D] as a tensor [.., D], and where each place's row stands in it.

    The gradient of their sum is the same for all k, which stride 0 tells: one of them is read.
    """
    k, m, _ = dparts.shape
    if dparts.stride(0) == 0:
        return dparts[0], order.rows(k)
    return dparts.flatten(0, 1), order.places(k, m)


class _ExpertMLPs(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, chosen: Tensor, w1: Tensor, w2: Tensor, activation: str
    ) -> Tensor:
        (m, k), (E, D, _) = chosen.shape, w2.shape
        order = ExpertOrder.of(chosen, E)
        g = weights.flatten().to(acc_dtype(x)).index_select(0, order.numbers)
        z, a = experts_up(x, order.rows(k), w1, activation)
        parts = experts_down(a, order.places(k, m), w2, g, count=k * m)
        ctx.save_for_backward(x, w1, w2, g, z, *order)
        ctx.activation, ctx.mains, ctx.dtype = activation, mains(w1, w2), weights.dtype
        return parts.view(k, m, D)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dparts: Tensor) -> tuple[Tensor | None, ...]:
        x, w1, w2, g, z, *order = ctx.saved_tensors
        order, (k, m, D) = ExpertOrder(*order), dparts.shape
        dy, rows = rows_of_gradient(dparts, order)
        dz, ga, dg = experts_dact(dy, rows, w2, z, weights=g, activation=ctx.activation)
        dx = experts_dx(dz, order.places(k, m), w1, k * m, room=0).view(k, m, D)
        dweights = torch.empty_like(dg).index_copy_(0, order.numbers, dg).view(m, k).to(ctx.dtype)
        (_, _, _, need1, need2, _), (main1, main2) = ctx.needs_input_grad, ctx.mains or (None, None)
        dw1 = _weight_grad(Sides(dz, x, order.offsets, x_index=order.rows(k).row_index), w1, need1, main1)
        dw2 = _weight_grad(Sides(dy, ga, order.offsets, dy_index=rows.row_index), w2, need2, main2)
        return reduce_parts(dx), dweights, None, dw1, dw2, None


def _weight_grad(sides: Sides, w: Tensor, needed: bool, main: Main | None) -> Tensor | None:
    """Returns the gradient of w, where it is to be returned; adds it where it has a sum in fp32."""
    if main is not None and main.wanted:
        main.add(lambda total: experts_wgrad_add(sides, total))
    elif needed:
        return experts_wgrad(sides, w.dtype)
    return None


# ---- public ----


def expert_mlps(
    x: Tensor, weights: Tensor, chosen: Tensor, fc1: Tensor, fc2: Tensor, *, activation: str = "silu"
) -> Tensor:
    """Returns weights[i, j] fc2_e (act(gate) up), with (gate, up) = fc1_e x_i, of the expert e = chosen[i, j].

    x [M, D], weights and chosen [M, k] as from :func:`route`, fc1 [E, F, 2, D] with gate and up side by side, fc2 [E,
    D, F] -> parts [k, M, D] in x's dtype (or autocast's), one for each of the k experts of a row, to be summed: by
    ``reduce_bias_dropout_add_norm``, or by ``sum(0)``.  ``activation`` is the gate's, as in swiglu.  Every number in
    chosen must be one of an expert, 0 to E - 1, which is not checked.  ValueError for shapes or dtypes that do not
    agree, and for an activation without a gated form.
    """
    check_experts("expert_mlps", x, weights, chosen, fc1=fc1, fc2=fc2, activation=activation)
    x, fc1, fc2 = autocast(x, fc1, fc2)
    gated = ACTIVATIONS[activation].gated
    return _ExpertMLPs.apply(x.contiguous(), weights, chosen, fc1.flatten(1, 2), fc2, gated)


def check_experts(
    name: str, x: Tensor, weights: Tensor, chosen: Tensor, *, fc1: Tensor, fc2: Tensor, activation: str
) -> None:
    """Raises the ValueError of the public function ``name`` for arguments that experts cannot take."""
    gates = GATED.values()
    check(activation in gates, f"{name}: activation must be one of {', '.join(gates)}, got {activation!r}")
    check(x.dim() == 2, f"{name}: x must be [M, D], got {described(x)}")
    check_floating(name, "x", x)
    (M, D), shape = x.shape, tuple(fc1.shape)
    check(len(shape) == 4 and shape[2:] == (2, D), f"{name}: fc1 must be [E, F, 2, {D}], got {described(fc1)}")
    E, F = shape[:2]
    check(fc2.shape == (E, D, F), f"{name}: fc2 must be [{E}, {D}, {F}], got {described(fc2)}")
    for label, t in (("weights", weights), ("chosen", chosen)):
        check(t.dim() == 2 and len(t) == M, f"{name}: {label} must be [{M}, k], got {described(t)}")
    check(weights.shape == chosen.shape, f"{name}: weights and chosen must be alike, got {described(weights)}")
    integral = chosen.dtype in (torch.int32, torch.int64)
    check(integral, f"{name}: chosen must be int32 or int64, got {described(chosen)}")
    alike = x.dtype == fc1.dtype == fc2.dtype or torch.is_autocast_enabled(x.device.type)
    check(
        alike, f"{name}: x, fc1 and fc2 must have one dtype outside autocast, got {x.dtype}, {fc1.dtype}, {fc2.dtype}"
    )
