"""Linear layer with a fused activation, and the three GEMMs that a parallel layer is built of.

    z = x W' + b          y = act(z)
    dz = dy act'(z)       dx = dz W        dW = dz' x        db = sum_rows dz

Shapes: x [M, K], W [N, K], b [N], z, y [M, N].  Activations: "none" and those of activation.py.  A gated one, such as
"swiglu", is act(gate) up of z = (gate, up, gate, up, ..), W [2N, K] being [N, 2, K] seen flat: z [M, 2N], y [M, N].
On a CPU a gated z is kept as [M, 2, N], gate and up apart, as torch's loops are vectorised on columns that lie
together; two GEMMs store it.  Ops that read a z take either, by its dimensions, and dz is [M, 2N].
GEMMs accumulate in fp32; outputs have x's dtype, dW and db that which is asked for.  The activation is taken of z as
rounded and stored, and recomputed from z in the same pass as its derivative.

Two arguments are for the same bits at every split (runtime/leaves.py).  ``leaf``, the width of a leaf of the dimension
that is contracted, makes the sum a binary tree over its leaves, each node rounded to x's dtype; there are a power of
two, of which the last may be narrower, and 0 stands for one leaf at every split.  On a GPU 0, and ``fixed``, which is 0
for ops that contract no split dimension, fix the size of a tile, and so the order of every sum, whatever M and N are.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..runtime import matmul
from ..runtime.errors import check_rows
from ..runtime.function import Function, once_differentiable
from ..runtime.leaves import tree
from ..runtime.main_grad import mains, wanted
from ..runtime.op import ELEMENTWISE, GEMM, acc_dtype, as_rows, autocast, dtype_of, has_numbers, in_dtype, launched, op
from ..runtime.tiles import check_alike, check_tiles_device, in_tiles
from . import cost
from .activation import ACTIVATIONS, GATED, PLAIN, width
from .runs import gradient_of, value_of
from .triton_activation import activation_bwd_cost, activation_bwd_launch, activation_fwd_launch, bias_grad_launch
from .triton_gemm import linear_dgrad_act_launch, linear_dgrad_launch, linear_fwd_launch, linear_wgrad_launch

# ---- reference ----


SUMMED = 64  # rows that are widened at a time, however many columns: an element's order of summation is then the same


def column_sum(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """[M, N] -> [N], summed in fp32 and rounded to ``dtype``; empty if that is None."""
    acc = acc_dtype(x)
    if dtype is None:
        return x.new_empty(0, dtype=acc)
    if dtype == x.dtype:
        return x.sum(0)  # adds in fp32, too, and needs no copy of x in fp32
    if not x.is_cpu or not has_numbers(x):
        return in_dtype(x.sum(0, dtype=acc), dtype)
    total = x.new_zeros(x.shape[1], dtype=acc)
    for rows in x.split(SUMMED):
        total += rows.sum(0, dtype=acc)
    return in_dtype(total, dtype)


def row_of_z(x: Tensor, columns: int, activation: str) -> tuple[int, ...]:
    """Returns the shape of a row of z as ops keep it, for x and a weight of so many rows."""
    return (2, columns // 2) if activation in GATED and not launched(x) else (columns,)


@torch.no_grad()  # an exported graph calls ops with gradients on, and places of products take none
def multiply_into(x: Tensor, w: Tensor, b: Tensor | None, z: Tensor) -> None:
    """Writes x w' + b, of w [N, K], into z [M, N], or [M, 2, N / 2] of rows of gate and up in turns."""
    b = None if b is None else in_dtype(b, x.dtype)
    if z.dim() == 2:
        matmul.mm(x, w.t(), b, place=z)
        return
    for half in range(2):
        matmul.mm(x, w[half::2].t(), None if b is None else b[half::2], place=z[:, half])


def in_pairs(z: Tensor) -> Tensor:
    """[M, 2N] or [M, 2, N] -> [M, 2N]"""
    return z.mT.flatten(1) if z.dim() == 3 else z


def _gate_up(z: Tensor) -> tuple[Tensor, Tensor]:
    """[M, 2N] or [M, 2, N] -> [M, N], [M, N], in fp32"""
    gate, up = in_pairs(z).to(acc_dtype(z)).unflatten(1, (-1, 2)).unbind(2)
    return gate, up


def activation_fwd_ref(z: Tensor, activation: str) -> Tensor:
    """[M, N] -> [M, N];  gated, [M, 2N] or [M, 2, N] -> [M, N]"""
    if activation not in GATED:
        return ACTIVATIONS[activation].forward(z)
    gate, up = _gate_up(z)
    return (ACTIVATIONS[GATED[activation]].forward(gate) * up).to(z.dtype)


def _dz_ref(dy: Tensor, z: Tensor, activation: str) -> Tensor:
    if activation not in GATED:
        return ACTIVATIONS[activation].backward(dy, z)
    (gate, up), act = _gate_up(z), ACTIVATIONS[GATED[activation]]
    dgate, dup = act.backward(dy * up, gate), dy * act.forward(gate)
    return torch.stack((dgate, dup), 2).flatten(1).to(z.dtype)


def activation_bwd_ref(
    dy: Tensor, z: Tensor, activation: str, rebuild: bool, bias: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    """-> dz [M, N], gated [M, 2N]; db, its columns' sums, in the dtype ``bias`` (empty if None); act(z) (empty unless
    ``rebuild``)."""
    dz = _dz_ref(dy, z, activation)
    return dz, column_sum(dz, bias), activation_fwd_ref(z, activation) if rebuild else z.new_empty(0)


def linear_fwd_ref(
    x: Tensor, w: Tensor, b: Tensor | None, activation: str, leaf: int | None = None
) -> tuple[Tensor, Tensor]:
    """-> y, z (empty for "none")."""
    b = None if b is None else in_dtype(b, x.dtype)
    if leaf:
        z = tree(
            matmul.linear(x_v.contiguous(), w_v.contiguous()) for x_v, w_v in zip(x.split(leaf, 1), w.split(leaf, 1))
        )
        z = z if b is None else z + b
    else:
        z = matmul.linear(x, w, b)
    return (z, z.new_empty(0)) if activation == "none" else (activation_fwd(z, activation), z)


def linear_dgrad_ref(dy: Tensor, w: Tensor, leaf: int | None = None) -> Tensor:
    """dy [M, N], w [N, K] -> dx [M, K]"""
    if not leaf:
        return matmul.mm(dy, w)
    return tree(matmul.mm(dy_v.contiguous(), w_v) for dy_v, w_v in zip(dy.split(leaf, 1), w.split(leaf)))


def linear_dgrad_act_ref(
    dy: Tensor, w: Tensor, z: Tensor, activation: str, rebuild: bool, bias: torch.dtype | None, fixed: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Through W and then through the activation before it: dy [M, N], w [N, K], z [M, K] (gated [M, 2K] or [M, 2, K])
    -> dz [M, K] (gated [M, 2K]), db its columns' sums in the dtype ``bias`` or empty, act(z) [M, K] or empty."""
    return activation_bwd(matmul.mm(dy, w), z, activation, rebuild=rebuild, bias=bias)


def linear_wgrad_ref(
    dy: Tensor, x: Tensor, dtype: torch.dtype, bias: torch.dtype | None, fixed: bool = False
) -> tuple[Tensor, Tensor]:
    """dy [M, N], x [M, K] -> dW [N, K] in ``dtype``, db [N] in the dtype ``bias`` (empty if None)."""
    return in_dtype(matmul.mm(dy.t(), x), dtype), column_sum(dy, bias)


ROWS = 512  # that a CPU widens at a time: few enough to be small beside the activations, enough for a GEMM


def linear_wgrad_add_ref(dy: Tensor, x: Tensor, out: Tensor, bias: torch.dtype | None, fixed: bool = False) -> Tensor:
    """Adds dW = dy' x [N, K] to ``out`` in its dtype, which is fp32 (fp64 for fp64) -> db as of linear_wgrad.

    The GEMM adds, and nothing is rounded in between.  Where torch has none from 16 bits to fp32 (it has on CUDA), dy
    and x are widened a few rows at a time.  ``fixed`` on a GPU: dW is made first, by linear_wgrad.
    """
    if fixed and not dy.is_cpu:
        dw, db = linear_wgrad(dy, x, out.dtype, bias, fixed=True)
        out.add_(dw)
        return db
    if dy.dtype == out.dtype:
        out.addmm_(dy.t(), x)
    elif dy.device.type == "meta" or (dy.is_cuda and not torch.version.hip):
        torch.addmm(out, dy.t(), x, out_dtype=out.dtype, out=out)
    else:
        for dy_rows, x_rows in zip(dy.split(ROWS), x.split(ROWS)):
            out.addmm_(dy_rows.to(out.dtype).t(), x_rows.to(out.dtype))
    return column_sum(dy, bias)


def bias_grad_ref(dy: Tensor, dtype: torch.dtype) -> Tensor:
    """dy [M, N] -> db [N] in ``dtype``, with the same bits whatever N is on a GPU."""
    return column_sum(dy, dtype)


# ---- CPU ----


def _linear_fwd_cpu(
    x: Tensor, w: Tensor, b: Tensor | None, activation: str, leaf: int | None = None
) -> tuple[Tensor, Tensor]:
    row = row_of_z(x, len(w), activation)
    if leaf or len(row) == 1:
        return linear_fwd_ref(x, w, b, activation, leaf=leaf)
    z = x.new_empty(len(x), *row)
    multiply_into(x, w, b, z)
    return value_of(z, activation), z


def _linear_fwd_fake(
    x: Tensor, w: Tensor, b: Tensor | None, activation: str, leaf: int | None = None
) -> tuple[Tensor, Tensor]:
    (rows, _), (columns, _) = x.shape, w.shape  # len() of a symbolic size would make it a number
    row = (columns,) if leaf else row_of_z(x, columns, activation)
    z = x.new_empty(0) if activation == "none" else x.new_empty(rows, *row)
    return x.new_empty(rows, columns // width(activation)), z


def _activation_bwd_cpu(
    dy: Tensor,
    z: Tensor,
    activation: str,
    rebuild: bool,
    bias: torch.dtype | None,
    dz: Tensor | None = None,
    y: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    dz, y = gradient_of(dy, z, activation, rebuild=rebuild, dz=dz, y=y)
    return dz, column_sum(dz, bias), y


def _linear_dgrad_act_cpu(
    dy: Tensor,
    w: Tensor,
    z: Tensor,
    activation: str,
    rebuild: bool,
    bias: torch.dtype | None,
    fixed: bool = False,
    *places: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    dz, y = (*places, None, None)[:2]
    return _activation_bwd_cpu(matmul.mm(dy, w), z, activation, rebuild, bias=bias, dz=dz, y=y)


def _check_fwd(x: Tensor, w: Tensor, b: Tensor | None, activation: str, leaf: int | None = None) -> None:
    check_linear("linear", x, w, b, activation=activation)


activation_fwd = op(activation_fwd_ref, kind=ELEMENTWISE, launch=activation_fwd_launch, cpu=value_of, replay=True)
activation_bwd = op(
    activation_bwd_ref,
    kind=ELEMENTWISE,
    launch=activation_bwd_launch,
    cpu=_activation_bwd_cpu,
    replay=True,
    cost=activation_bwd_cost,
)
linear_fwd = op(
    linear_fwd_ref,
    kind=GEMM,
    launch=linear_fwd_launch,
    cpu=_linear_fwd_cpu,
    fake=_linear_fwd_fake,
    check=_check_fwd,
    replay=True,
    cost=cost.linear_fwd_cost,
)
linear_dgrad = op(linear_dgrad_ref, kind=GEMM, launch=linear_dgrad_launch, replay=True, cost=cost.linear_dgrad_cost)
linear_dgrad_act = op(
    linear_dgrad_act_ref,
    kind=GEMM,
    launch=linear_dgrad_act_launch,
    cpu=_linear_dgrad_act_cpu,
    replay=True,
    cost=cost.linear_dgrad_act_cost,
)
linear_wgrad = op(linear_wgrad_ref, kind=GEMM, launch=linear_wgrad_launch, replay=True, cost=cost.linear_wgrad_cost)
linear_wgrad_add = op(
    linear_wgrad_add_ref,
    kind=GEMM,
    fake=lambda dy, x, out, bias, fixed=False: column_sum(dy, bias),
    mutates=("out",),
    cost=cost.linear_wgrad_add_cost,
)
bias_grad = op(bias_grad_ref, kind=ELEMENTWISE, launch=bias_grad_launch, replay=True, cost=cost.bias_grad_cost)


# ---- in tiles of rows ----


def check_tiles(
    x: Tensor, w: Tensor, b: Tensor | None, activation: str, *, tile: int, forward: Callable[..., Any] | None = None
) -> None:
    """Raises an error where linear_fwd, or ``forward``, which computes it by leaves, is not built for x in tiles of so
    many rows, or does not treat rows alike."""
    check_tiles_device("linear", x)
    multiply, form = (linear_fwd, "") if forward is None else (forward, " by leaves")

    def alike(rows: Tensor, weight: Tensor) -> Tensor:
        bias = None if b is None else weight[:, 0].to(b.dtype) * 2.0**-14  # about what rounding leaves of the sums
        product: Tensor = multiply(rows, weight, bias, activation)[0]
        return product

    check_alike(f"linear{form} with {activation}{' and a bias' * (b is not None)}", alike, tile, w)


def linear_fwd_tiles(
    x: Tensor, w: Tensor, b: Tensor | None, activation: str, *, tile: int, leaf: int | None = None
) -> tuple[Tensor, ...]:
    """Returns linear_fwd's y and z by tiles of so many rows; at once, with ``leaf``, where ``tile`` is 0."""
    if tile:
        check_tiles(x, w, b, activation, tile=tile)
    return in_tiles(lambda rows: linear_fwd(rows, w, b, activation, leaf=leaf), x, tile)


# ---- autograd ----


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, activation: str, tile: int, fixed: bool) -> Tensor:
        y, z = linear_fwd_tiles(x, w, b, activation, tile=tile, leaf=0 if fixed else None)
        ctx.save_for_backward(x, w, None if activation == "none" else z)
        ctx.activation, ctx.bias, ctx.mains, ctx.fixed = activation, dtype_of(b), mains(w), fixed
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, w, z = ctx.saved_tensors
        needs_input, weight, bias, *_ = ctx.needs_input_grad
        dy, dtype, db, dw = dy.contiguous(), ctx.bias if bias else None, None, None
        if z is not None:
            dy, db, _ = activation_bwd(dy, z, ctx.activation, rebuild=False, bias=dtype)
        bias_dtype = dtype if z is None else None  # of the bias gradient, where it is not made yet
        main = wanted(ctx.mains)
        if main is not None:
            db_rest = main.add(lambda total: linear_wgrad_add(dy, x, total, bias_dtype, fixed=ctx.fixed))
        elif weight:
            dw, db_rest = linear_wgrad(dy, x, w.dtype, bias_dtype, fixed=ctx.fixed)
        else:
            db_rest = column_sum(dy, bias_dtype)
        dx = linear_dgrad(dy, w, 0 if ctx.fixed else None) if needs_input else None
        return dx, dw, None if dtype is None else db_rest if z is None else db, None, None, None


# ---- public ----


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    *,
    tile: int = 0,
    fixed: bool = False,
) -> Tensor:
    """Returns act(x W' + b).  x [..., K], weight [N, K], bias [N] -> [..., N] in x's dtype (or autocast's).

    ``activation``: "none", a name in kernels.gemm.activation.ACTIVATIONS, as "gelu" (erf), "gelu_tanh" and "relu", or
    the gated form of one, as "swiglu" and "geglu", with weight [2N, K] and bias [2N], rows of gate and up in turns
    (a [N, 2, K] seen flat).  ``tile``, unless 0, is the number of rows in each GEMM of forward: a row then has the same
    bits whatever rows are beside it.  ``fixed``: a GPU's GEMMs are Triton's, in tiles of one size, so that the order of
    their sums is not a library's choice.  ValueError for another activation and for shapes or dtypes that do not agree.
    """
    x, weight, bias = autocast(x, weight, bias)
    y: Tensor = _Linear.apply(as_rows("linear", x), weight, bias, activation, tile, fixed)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], len(weight) // width(activation))


def check_linear(name: str, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> None:
    """Raises the ValueError of the public function ``name`` for arguments that linear cannot take."""
    check_rows(name, x)
    shape, columns = weight.shape, x.shape[-1]
    if activation not in PLAIN and activation not in GATED:
        raise ValueError(f"{name}: activation must be one of {', '.join((*PLAIN, *GATED))}, got {activation!r}")
    if len(shape) != 2 or shape[1] != columns:
        raise ValueError(f"{name}: weight must be [N, {columns}], got {tuple(shape)}")
    rows = shape[0]
    if rows % width(activation):
        raise ValueError(f"{name}: {activation} takes pairs of rows of weight, gate and up in turns, got {rows} rows")
    if bias is not None and bias.shape != (rows,):
        raise ValueError(f"{name}: bias must be [{rows}], got {bias.shape}")
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise ValueError(f"{name}: x and weight must have one dtype outside autocast, got {x.dtype} and {weight.dtype}")
