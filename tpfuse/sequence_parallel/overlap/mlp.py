"""gather_mlp_exchange as opaque ops: rows land, pass both GEMMs and leave, piece by piece.

Half of this rank's own rows are multiplied while the first of others' land, the rest while the last leave.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.gemm.op import activation_fwd, linear_dgrad_act, multiply_into, row_of_z
from ...kernels.runtime import matmul
from ...kernels.runtime.op import GEMM, Cost, acc_dtype, new_vector, op
from ..flight import Flight, pieces
from ..records import MLP, Run, WeightGrad, run
from .steps import gather_in_background, message_cost, present, row_count


class MLPBackward(NamedTuple):
    """The tensors of backward: parts' gradient, n, z and act(z) of forward; and the dtype of db1, None without it.
    Without ``a`` the activation is computed again."""

    dp: Tensor  # [R, m, D]
    n: Tensor  # [R, m, D]
    z: Tensor  # [M, F], gated on a CPU [M, 2, F / 2]
    a: Tensor | None  # [M, F]
    bias: torch.dtype | None


def _through(incoming: Flight, leaving: Flight, multiply: Callable[[Tensor, int, slice, Tensor], None]) -> None:
    """Calls ``multiply(x, tile, rows, result)`` for all rows in a fixed order; peers' results leave when computed."""
    mine, results, cut = incoming.rank, leaving.received[leaving.rank], incoming.cut
    head, tail = (cut[0], slice(cut[0].stop, cut[-1].stop)) if cut else (slice(0), slice(0))
    multiply(incoming.x[mine, head], mine, head, results[head])
    for rows in cut:
        for source in incoming.before:
            multiply(incoming.arrived(source, rows), source, rows, leaving.outgoing(source, rows))
            leaving.post(source, rows)
    multiply(incoming.x[mine, tail], mine, tail, results[tail])


def gather_mlp_exchange_fwd_ref(n: Tensor, mlp: MLP, keep: bool, group_name: str) -> tuple[Tensor, Tensor, Tensor]:
    """-> parts [R, m, D], z of all rows, act(z) (empty unless ``keep``)."""
    w1, b1, w2, activation = mlp
    cut, z = pieces(n.shape[1]), n.new_empty(*n.shape[:2], *row_of_z(n, len(w1), activation))
    a = n.new_empty(*n.shape[:2], w2.shape[1]) if keep else n.new_empty(0)
    incoming = Flight("gather_mlp_exchange forward (n)", n, n.new_empty(n.shape), group_name, cut=cut)
    parts = torch.empty_like(incoming.received)
    # results leave from where rows have landed
    leaving = Flight("gather_mlp_exchange forward (parts)", incoming.received, parts, group_name, cut=cut)
    incoming.post_all()

    def multiply(x: Tensor, tile: int, rows: slice, result: Tensor) -> None:
        multiply_into(x, w1, b1, z[tile, rows])
        places = (a[tile, rows] if keep else w2.new_empty(len(x), w2.shape[1]),)
        multiply_into(activation_fwd.write(places, z[tile, rows], activation), w2, None, result)

    _through(incoming, leaving, multiply)
    incoming.finish()
    return leaving.finish(), z.flatten(0, 1), a.flatten(0, 1) if keep else a


def gather_mlp_exchange_bwd_ref(
    inputs: MLPBackward, mlp: MLP, group_name: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> dn [R, m, D] unsummed, dw1, db1 (empty unless asked for), dw2."""
    dn, dw1, db1, dw2 = gather_mlp_exchange_bwd_by(run, inputs, mlp, group_name)
    return dn, present(dw1), db1, present(dw2)


def gather_mlp_exchange_bwd_by(
    run: Run, inputs: MLPBackward, mlp: MLP, group_name: str
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Computes ``gather_mlp_exchange_bwd``; the gradients of the weights are handed to ``run``."""
    (dp, n, z, a, bias), (w1, _, w2, activation) = inputs, mlp
    cut, dy, dn, sent = pieces(dp.shape[1]), dp.new_empty(dp.shape), n.new_empty(n.shape), n.new_empty(n[1:].shape)
    incoming = Flight("gather_mlp_exchange backward (dp)", dp, dy, group_name, cut=cut, copy_own=True)
    rows_of_n = gather_in_background("gather_mlp_exchange backward (n)", n, group_name)
    leaving = Flight("gather_mlp_exchange backward (dn)", sent, dn, group_name, cut=cut)
    incoming.post_all()
    rows_of_n.post_all()
    z = z.unflatten(0, n.shape[:2])
    acc = None if bias is None else acc_dtype(z)
    dz, db1 = z.new_empty(*n.shape[:2], len(w1)), new_vector(z, len(w1), acc).zero_()
    act = z.new_empty(*n.shape[:2], w2.shape[1]) if a is None else a.unflatten(0, n.shape[:2])

    def multiply(dy: Tensor, tile: int, rows: slice, result: Tensor) -> None:
        places = (dz[tile, rows], act[tile, rows]) if a is None else (dz[tile, rows],)
        rows_of_z = z[tile, rows]
        args = dy, w2, rows_of_z, activation, a is None, acc
        sums = linear_dgrad_act.write(places, *args, fixed=False)
        db1.add_(sums[1])
        matmul.mm(dz[tile, rows], w1, place=result)

    _through(incoming, leaving, multiply)
    dz = dz.flatten(0, 1)
    dw2, _ = run("out_weight", WeightGrad(incoming.finish().flatten(0, 1), act.flatten(0, 1), w2.dtype, None))
    dw1, _ = run("weight", WeightGrad(dz, rows_of_n.finish().flatten(0, 1), w1.dtype, None))
    return leaving.finish(), dw1, db1.to(bias or db1.dtype), dw2


def _fwd_fake(n: Tensor, mlp: MLP, keep: bool, group_name: str) -> tuple[Tensor, Tensor, Tensor]:
    z = n.new_empty(row_count(n), *row_of_z(n, len(mlp.w1), mlp.activation))
    return n.new_empty(n.shape), z, n.new_empty(z.shape[0], mlp.w2.shape[1]) if keep else n.new_empty(0)


def _bwd_fake(inputs: MLPBackward, mlp: MLP, group_name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n, z, w1, w2 = inputs.n, inputs.z, mlp.w1, mlp.w2
    return n.new_empty(n.shape), w1.new_empty(w1.shape), new_vector(z, len(w1), inputs.bias), w2.new_empty(w2.shape)


def _fwd_cost(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> Cost:
    n, mlp, _, _ = args
    products = row_count(n) * (mlp.w1.numel() + mlp.w2.numel())
    return message_cost(args, outputs, tiles=n, messages=2, products=products)


def _bwd_cost(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> Cost:
    (dp, *_), mlp, _ = args
    products = 2 * row_count(dp) * (mlp.w1.numel() + mlp.w2.numel())
    return message_cost(args, outputs, tiles=dp, messages=3, products=products)


gather_mlp_exchange_fwd = op(gather_mlp_exchange_fwd_ref, kind=GEMM, fake=_fwd_fake, cost=_fwd_cost)
gather_mlp_exchange_bwd = op(gather_mlp_exchange_bwd_ref, kind=GEMM, fake=_bwd_fake, cost=_bwd_cost)
