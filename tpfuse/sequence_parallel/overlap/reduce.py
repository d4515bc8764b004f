"""The sum of dx over the ranks under the wgrads, for the form without sequence parallelism."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...collectives import start_all_gather
from ...kernels.gemm.op import column_sum, linear_dgrad, linear_wgrad
from ...kernels.norm.core import reduce_parts
from ...kernels.runtime import matmul
from ...kernels.runtime.op import GEMM, Cost, least, new_vector, op
from ...parallel import TensorParallel, resolve
from ...ranks.failure import named
from ..records import Run, WeightGrad


class Second(NamedTuple):
    """The inputs of a second weight's gradient, dw2 = dy' x, to run under the messages; None without one."""

    dy: Tensor | None = None
    x: Tensor | None = None


class Group(NamedTuple):
    size: int
    name: str

    @staticmethod
    def of(tp: TensorParallel) -> "Group":
        return Group(tp.size, tp.group_name or "")  # several ranks have a name


def linear_reduce_bwd_ref(
    w: Tensor, work: WeightGrad, second: Second, group: Group
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> dx = sum over ranks of dy W, dw = dy' x, db (empty without a bias) and dw2 (empty without ``second``).

    The sum's two messages, an exchange of parts and a gather of their sums, each travel under a half of the wgrads.
    """
    dy, x, _, bias = work
    dw = dy.new_empty(dy.shape[1], x.shape[1])
    half, results = 0 if second.dy is not None else dy.shape[1] // 2, []

    def under_exchange() -> None:
        if second.dy is not None and second.x is not None:
            results.append(linear_wgrad(second.dy, second.x, w.dtype, None)[0])
        matmul.mm(dy[:, :half].t(), x, place=dw[:half])

    def under_gather() -> None:
        matmul.mm(dy[:, half:].t(), x, place=dw[half:])
        results.append(column_sum(dy, bias))

    dx = _sum_under(linear_dgrad(dy, w), (under_exchange, under_gather), _label(second), group)
    return dx, dw.to(w.dtype), results[-1], dy.new_empty(0) if len(results) == 1 else results[0]


def linear_reduce_bwd_by(
    run: Run, w: Tensor, work: WeightGrad, second: Second, group: Group
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Computes ``linear_reduce_bwd``; the gradients of the weights, each as one unit, are handed to ``run``."""
    results: list[tuple[Tensor | None, Tensor | None]] = []
    units = [lambda: results.append(run("weight", work))]
    if second.dy is not None and second.x is not None:
        second_work = WeightGrad(second.dy, second.x, w.dtype, None)
        units.insert(0, lambda: results.append(run("out_weight", second_work)))
    dx = _sum_under(linear_dgrad(work.dy, w), units, _label(second), group)
    return dx, *results[-1], None if len(results) == 1 else results[0][0]


def _label(second: Second) -> str:
    return f"{'gather_linear' if second.dy is None else 'gather_mlp_exchange'} backward (the sum of dx)"


def _sum_under(dx: Tensor, work: Sequence[Callable[[], None]], label: str, group: Group) -> Tensor:
    """Returns the sum of dx over the ranks; runs the first unit of ``work`` under the first message, all others under
    the second."""
    ranks = resolve(group.name)
    flat = torch.nn.functional.pad(dx.view(-1), (0, -dx.numel() % group.size)).view(group.size, -1)
    parts, total = torch.empty_like(flat), torch.empty_like(flat)
    with named(label, ranks):
        exchange = dist.all_to_all_single(parts, flat, group=ranks, async_op=True)
    work[0]()
    with named(label, ranks):
        exchange.wait()
        mine = reduce_parts(parts)
        gather = start_all_gather(total, mine, ranks)
    for unit in work[1:]:
        unit()
    with named(label, ranks):
        for handle in gather:
            handle.wait()
    return total.view(-1)[: dx.numel()].view(dx.shape)


def _fake(w: Tensor, work: WeightGrad, second: Second, group: Group) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dy = work.dy
    if second.dy is None or second.x is None:
        dw2 = dy.new_empty(0)
    else:
        dw2 = w.new_empty(second.dy.shape[1], second.x.shape[1])
    return dy.new_empty(dy.shape[0], w.shape[1]), w.new_empty(w.shape), new_vector(dy, len(w), work.bias), dw2


def _cost(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> Cost:
    w, work, second, group = args
    products = len(work.dy) * w.numel() * 2
    if second.dy is not None:
        products += len(second.dy) * second.dy.shape[1] * second.x.shape[1]
    sent = 2 * (group.size - 1) * -(-outputs[0].numel() // group.size) * work.dy.element_size()
    return least(args, outputs)._replace(flops=2 * products, sent=sent)


linear_reduce_bwd = op(linear_reduce_bwd_ref, kind=GEMM, fake=_fake, cost=_cost)
