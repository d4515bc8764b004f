"""gather_linear and linear_exchange as opaque ops whose messages travel under their GEMMs."""

from typing import Any

from torch import Tensor

from ...kernels.gemm.activation import width
from ...kernels.gemm.op import row_of_z
from ...kernels.runtime import matmul
from ...kernels.runtime.op import GEMM, Cost, new_vector, op
from ..flight import Flight, pieces
from ..records import LinearWeights, Run, WeightGrad, run
from . import steps

# ---- gather_linear ----


def gather_linear_fwd_ref(n: Tensor, linear: LinearWeights, group_name: str) -> tuple[Tensor, Tensor]:
    """-> y, z (empty for "none")."""
    return steps.gather_and_multiply("gather_linear forward", n, linear, group_name)


def gather_linear_bwd_ref(w: Tensor, work: WeightGrad, group_name: str) -> tuple[Tensor, Tensor, Tensor]:
    """``work.x`` is n [R, m, D], yet to be gathered -> dn [R, m, D] unsummed, dw, db (empty without a bias)."""
    dn, dw, db = gather_linear_bwd_by(run, w, work, group_name)
    return dn, steps.present(dw), steps.present(db, work.dy)


def gather_linear_bwd_by(
    run: Run, w: Tensor, work: WeightGrad, group_name: str
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Computes ``gather_linear_bwd``; the weight's gradient is handed to ``run``."""
    dy, n, _, bias = work
    rows_of_n = steps.gather_in_background("gather_linear backward (n)", n, group_name)
    flight = steps.outgoing("gather_linear backward (dn)", len(dy), w.t(), n.shape[0], group_name=group_name)
    rows_of_n.post_all()
    steps.multiply_and_send(flight, dy, w.t())
    dw, db = run("weight", WeightGrad(dy, rows_of_n.finish().flatten(0, 1), w.dtype, bias))
    return flight.finish(), dw, db


def _gather_linear_fwd_fake(n: Tensor, linear: LinearWeights, group_name: str) -> tuple[Tensor, Tensor]:
    rows, w = steps.row_count(n), linear.w
    row = row_of_z(n, len(w), linear.activation)
    z = n.new_empty(0) if linear.activation == "none" else n.new_empty(rows, *row)
    return n.new_empty(rows, len(w) // width(linear.activation)), z


def _gather_linear_bwd_fake(w: Tensor, work: WeightGrad, group_name: str) -> tuple[Tensor, Tensor, Tensor]:
    return work.x.new_empty(work.x.shape), w.new_empty(w.shape), new_vector(work.dy, len(w), work.bias)


def _gather_linear_fwd_cost(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> Cost:
    n, linear, _ = args
    return steps.message_cost(args, outputs, tiles=n, messages=1, products=steps.row_count(n) * linear.w.numel())


def _gather_linear_bwd_cost(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> Cost:
    w, work, _ = args
    return steps.message_cost(args, outputs, tiles=work.x, messages=2, products=2 * steps.row_count(work.x) * w.numel())


gather_linear_fwd = op(gather_linear_fwd_ref, kind=GEMM, fake=_gather_linear_fwd_fake, cost=_gather_linear_fwd_cost)
gather_linear_bwd = op(gather_linear_bwd_ref, kind=GEMM, fake=_gather_linear_bwd_fake, cost=_gather_linear_bwd_cost)


# ---- linear_exchange ----


def linear_exchange_fwd_ref(x: Tensor, w: Tensor, size: int, group_name: str) -> Tensor:
    """x [M, K], w [D, K] -> parts [R, m, D]"""
    flight = steps.outgoing("linear_exchange forward", len(x), w, size, group_name=group_name)
    return steps.multiply_and_send(flight, x, w).finish()


def linear_exchange_bwd_ref(dp: Tensor, x: Tensor, w: Tensor, group_name: str) -> tuple[Tensor, Tensor]:
    """-> dx [M, K], dw"""
    dx, dw = linear_exchange_bwd_by(run, dp, x, w, group_name=group_name)
    return dx, steps.present(dw)


def linear_exchange_bwd_by(run: Run, dp: Tensor, x: Tensor, w: Tensor, group_name: str) -> tuple[Tensor, Tensor | None]:
    """Computes ``linear_exchange_bwd``; the weight's gradient is handed to ``run``."""
    cut, dy, dx = pieces(dp.shape[1]), dp.new_empty(dp.shape), dp.new_empty(*dp.shape[:2], w.shape[1])
    flight = Flight("linear_exchange backward", dp, dy, group_name, cut=cut, copy_own=True).post_all()
    for dy_rows, tile, rows in flight.arriving(dy[flight.rank]):
        matmul.mm(dy_rows, w, place=dx[tile, rows])
    dw, _ = run("out_weight", WeightGrad(flight.finish().flatten(0, 1), x, w.dtype, None))
    return dx.flatten(0, 1), dw


def _linear_exchange_fwd_fake(x: Tensor, w: Tensor, size: int, group_name: str) -> Tensor:
    return x.new_empty(size, x.shape[0] // size, len(w))


def _linear_exchange_bwd_fake(dp: Tensor, x: Tensor, w: Tensor, group_name: str) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), w.new_empty(w.shape)


def _linear_exchange_fwd_cost(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> Cost:
    x, w, _, _ = args
    return steps.message_cost(args, outputs, tiles=outputs[0], messages=1, products=len(x) * w.numel())


def _linear_exchange_bwd_cost(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> Cost:
    dp, _, w, _ = args
    return steps.message_cost(args, outputs, tiles=dp, messages=1, products=2 * steps.row_count(dp) * w.numel())


linear_exchange_fwd = op(
    linear_exchange_fwd_ref, kind=GEMM, fake=_linear_exchange_fwd_fake, cost=_linear_exchange_fwd_cost
)
linear_exchange_bwd = op(
    linear_exchange_bwd_ref, kind=GEMM, fake=_linear_exchange_bwd_fake, cost=_linear_exchange_bwd_cost
)
