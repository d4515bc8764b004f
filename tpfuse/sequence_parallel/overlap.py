"""The overlapped forms of what ``plain`` defines: messages travel while GEMMs run, forward and backward.

    op                    forward                                        backward
    gather_linear         own rows' GEMM, each peer's as it lands        n is gathered under dgrad, dn leaves under dgrad and wgrad
    linear_exchange       peers' rows' GEMMs leave, own rows' last       dp lands under dgrad, then wgrad
    gather_mlp_exchange   rows land, pass both GEMMs and leave           dp lands, passes both dgrads and leaves; n is gathered meanwhile;
                                                                         both wgrads
    without sequence parallelism                                         the sum of dx travels under the wgrads

gather_attention_exchange has a file of its own.  Each is one opaque op, so that compiled graphs hold no handle.  Messages land in place and
GEMMs and activations write their rows in place; the order of GEMMs and messages is a function of rank and shapes alone, never of what
arrives first: two runs agree bitwise.  Where a GEMM's and an activation's tiles agree (on a CPU: pieces of 16 rows and more) values and
gradients are bitwise those of ``plain``, but for the MLP's bias gradient, which is added piece by piece.

Shapes as in ``plain``: n, dp, dn [R, m, D], n and dp with any stride over R; dy, y [M, N]; w, w1 [N, D], w2 [D, N]; of a gated activation
w1 is [2 N, D].
"""

import torch
import torch.distributed as dist
from torch import Tensor

from ..collectives import named, resolve, start_all_gather
from ..kernels._op import Cost, acc_dtype, least, op, sum_parts
from ..kernels.linear import activation_fwd, column_sum, linear_dgrad, linear_dgrad_act, linear_wgrad, width
from ._flight import Flight, pieces


def _gemm(x: Tensor, w: Tensor, b: Tensor | None, out: Tensor) -> None:
    """x W' + b into its place."""
    if b is None:
        torch.mm(x, w.t(), out=out)
    else:
        torch.addmm(b.to(x.dtype), x, w.t(), out=out)


def _regather(what: str, n: Tensor, group_name: str) -> Flight:
    """All of n, wanted only later: in one piece a peer."""
    return Flight(what, n, n.new_empty(n.shape), group_name, [slice(0, n.shape[1])] if n.shape[1] else [], own=True)


def _leaving(what: str, rows: int, w: Tensor, size: int, group_name: str) -> Flight:
    """For x W' of ``rows`` rows, of which a rank's own need no place to leave from."""
    out, parts = (w.new_empty(tiles, rows // size, len(w)) for tiles in (size - 1, size))
    return Flight(what, out, parts, group_name, pieces(rows // size)[::-1])


def _leave(flight: Flight, x: Tensor, w: Tensor) -> Flight:
    """x W' [M, D], each peer's rows on their way; this rank's own, multiplied last, in their place."""
    x = x.unflatten(0, (flight.size, len(x) // flight.size))
    for rows in flight.cut:
        for to in flight.after:
            _gemm(x[to, rows], w, None, flight.outgoing(to, rows))
            flight.post(to, rows)
    _gemm(x[flight.rank], w, None, flight.into[flight.rank])
    return flight


# ---- gather_linear ----


def _enter(what: str, n: Tensor, w: Tensor, b: Tensor | None, activation: str, group_name: str) -> tuple[Tensor, Tensor]:
    cut, z = pieces(n.shape[1]), n.new_empty(*n.shape[:2], len(w))
    y = z if activation == "none" else n.new_empty(*n.shape[:2], len(w) // width(activation))
    flight = Flight(what, n, n.new_empty(n.shape), group_name, cut).post_all()

    def multiply(x: Tensor, tile: int, rows: slice) -> None:
        _gemm(x, w, b, z[tile, rows])
        if z is not y:
            activation_fwd.into((y[tile, rows],), z[tile, rows], activation)

    multiply(n[flight.rank], flight.rank, slice(None))
    for rows in cut:
        for source in flight.before:
            multiply(flight.arrived(source, rows), source, rows)
    flight.finish()
    return y.flatten(0, 1), n.new_empty(0) if z is y else z.flatten(0, 1)


def gather_linear_fwd_ref(n: Tensor, w: Tensor, b: Tensor | None, activation: str, group_name: str) -> tuple[Tensor, Tensor]:
    """-> y, z (empty for "none")."""
    return _enter("gather_linear forward", n, w, b, activation, group_name)


def gather_linear_bwd_ref(dy: Tensor, w: Tensor, n: Tensor, has_bias: bool, group_name: str) -> tuple[Tensor, Tensor, Tensor]:
    """-> dn [R, m, D] unsummed, dw, db fp32 (empty without a bias)."""
    rows_of_n = _regather("gather_linear backward (n)", n, group_name)
    flight = _leaving("gather_linear backward (dn)", len(dy), w.t(), n.shape[0], group_name)
    rows_of_n.post_all()
    _leave(flight, dy, w.t())
    dw, db = linear_wgrad(dy, rows_of_n.finish().flatten(0, 1), w.dtype, has_bias)
    return flight.finish(), dw, db


# ---- linear_exchange ----


def linear_exchange_fwd_ref(x: Tensor, w: Tensor, size: int, group_name: str) -> Tensor:
    """x [M, K], w [D, K] -> parts [R, m, D]"""
    return _leave(_leaving("linear_exchange forward", len(x), w, size, group_name), x, w).finish()


def linear_exchange_bwd_ref(dp: Tensor, x: Tensor, w: Tensor, group_name: str) -> tuple[Tensor, Tensor]:
    """-> dx [M, K], dw"""
    cut, dy, dx = pieces(dp.shape[1]), dp.new_empty(dp.shape), dp.new_empty(*dp.shape[:2], w.shape[1])
    flight = Flight("linear_exchange backward", dp, dy, group_name, cut, own=True).post_all()
    torch.mm(dy[flight.rank], w, out=dx[flight.rank])
    for rows in cut:
        for source in flight.before:
            torch.mm(flight.arrived(source, rows), w, out=dx[source, rows])
    dw, _ = linear_wgrad(flight.finish().flatten(0, 1), x, w.dtype, False)
    return dx.flatten(0, 1), dw


# ---- gather_mlp_exchange: half of this rank's own rows are multiplied while the first of others' land, the rest while the last leave ----


def _through(enter: Flight, leave: Flight, multiply) -> None:
    """``multiply(x, tile, rows, out)`` of every row, in a fixed order; peers' results leave as they are made."""
    own, out, cut = enter.rank, leave.into[leave.rank], enter.cut
    first, rest = (cut[0], slice(cut[0].stop, cut[-1].stop)) if cut else (slice(0), slice(0))
    multiply(enter.x[own, first], own, first, out[first])
    for rows in cut:
        for source in enter.before:
            multiply(enter.arrived(source, rows), source, rows, leave.outgoing(source, rows))
            leave.post(source, rows)
    multiply(enter.x[own, rest], own, rest, out[rest])


def gather_mlp_exchange_fwd_ref(
    n: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, activation: str, keep: bool, group_name: str
) -> tuple[Tensor, Tensor, Tensor]:
    """-> parts [R, m, D], z [M, F], act(z) (empty unless ``keep``)."""
    cut, z = pieces(n.shape[1]), n.new_empty(*n.shape[:2], len(w1))
    a = n.new_empty(*n.shape[:2], w2.shape[1]) if keep else n.new_empty(0)
    enter = Flight("gather_mlp_exchange forward (n)", n, n.new_empty(n.shape), group_name, cut)
    parts = torch.empty_like(enter.into)
    leave = Flight("gather_mlp_exchange forward (parts)", enter.into, parts, group_name, cut)  # results leave from where rows have landed
    enter.post_all()

    def multiply(x: Tensor, tile: int, rows: slice, out: Tensor) -> None:
        _gemm(x, w1, b1, z[tile, rows])
        places = (a[tile, rows] if keep else w2.new_empty(len(x), w2.shape[1]),)
        _gemm(activation_fwd.into(places, z[tile, rows], activation), w2, None, out)

    _through(enter, leave, multiply)
    enter.finish()
    return leave.finish(), z.flatten(0, 1), a.flatten(0, 1) if keep else a


def gather_mlp_exchange_bwd_ref(
    dp: Tensor, n: Tensor, w1: Tensor, w2: Tensor, z: Tensor, a: Tensor | None, activation: str, group_name: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> dn [R, m, D] unsummed, dw1, db1 fp32, dw2.  Without ``a`` the activation is made again."""
    cut, dy, dn, out = pieces(dp.shape[1]), dp.new_empty(dp.shape), n.new_empty(n.shape), n.new_empty(n[1:].shape)
    enter = Flight("gather_mlp_exchange backward (dp)", dp, dy, group_name, cut, own=True)
    rows_of_n = _regather("gather_mlp_exchange backward (n)", n, group_name)
    leave = Flight("gather_mlp_exchange backward (dn)", out, dn, group_name, cut)
    enter.post_all()
    rows_of_n.post_all()
    z = z.unflatten(0, n.shape[:2])
    dz, db1 = torch.empty_like(z), z.new_zeros(z.shape[-1], dtype=acc_dtype(z))
    rebuilt = z.new_empty(*n.shape[:2], w2.shape[1]) if a is None else None

    def multiply(dy: Tensor, tile: int, rows: slice, out: Tensor) -> None:
        places = (dz[tile, rows],) if rebuilt is None else (dz[tile, rows], rebuilt[tile, rows])
        db1.add_(linear_dgrad_act.into(places, dy, w2, z[tile, rows], activation, a is None)[1])
        torch.mm(dz[tile, rows], w1, out=out)

    _through(enter, leave, multiply)
    dz = dz.flatten(0, 1)
    dw2, _ = linear_wgrad(enter.finish().flatten(0, 1), rebuilt.flatten(0, 1) if a is None else a, w2.dtype, False)
    dw1, _ = linear_wgrad(dz, rows_of_n.finish().flatten(0, 1), w1.dtype, False)
    return leave.finish(), dw1, db1, dw2


# ---- without sequence parallelism ----


def linear_reduce_bwd_ref(
    dy: Tensor, w: Tensor, x: Tensor, has_bias: bool, dy2: Tensor | None, x2: Tensor | None, size: int, group_name: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx = sum over ranks of dy W, dw = dy' x, db fp32 (empty without a bias), and, where given, dw2 = dy2' x2.

    The sum's two messages, an exchange of parts and a gather of their sums, travel each under a half of the wgrads.
    """
    what = f"{'gather_linear' if dy2 is None else 'gather_mlp_exchange'} backward (the sum of dx)"
    group, dx = resolve(group_name), linear_dgrad(dy, w)
    flat = torch.nn.functional.pad(dx.view(-1), (0, -dx.numel() % size)).view(size, -1)
    parts, total, dw = torch.empty_like(flat), torch.empty_like(flat), dy.new_empty(dy.shape[1], x.shape[1])
    with named(what, group):
        exchange = dist.all_to_all_single(parts, flat, group=group, async_op=True)
    half = 0 if dy2 is not None else dy.shape[1] // 2
    dw2 = dy.new_empty(0) if dy2 is None else linear_wgrad(dy2, x2, w.dtype, False)[0]
    torch.mm(dy[:, :half].t(), x, out=dw[:half])
    with named(what, group):
        exchange.wait()
        mine = sum_parts(parts).to(dx.dtype)
        gather = start_all_gather(total, mine, group)
    torch.mm(dy[:, half:].t(), x, out=dw[half:])
    db = column_sum(dy) if has_bias else dy.new_empty(0, dtype=acc_dtype(dy))
    with named(what, group):
        for handle in gather:
            handle.wait()
    return total.view(-1)[: dx.numel()].view(dx.shape), dw.to(w.dtype), db, dw2


# ---- ops: the fakes say shapes alone ----


def _empty_bias(like: Tensor, n: int, has_bias: bool) -> Tensor:
    return like.new_empty(n if has_bias else 0, dtype=acc_dtype(like))


def _gather_linear_fwd_fake(n, w, b, activation, group_name):
    rows = n.shape[0] * n.shape[1]
    return n.new_empty(rows, len(w) // width(activation)), n.new_empty(0) if activation == "none" else n.new_empty(rows, len(w))


def _gather_linear_bwd_fake(dy, w, n, has_bias, group_name):
    return n.new_empty(n.shape), w.new_empty(w.shape), _empty_bias(dy, len(w), has_bias)


def _linear_exchange_fwd_fake(x, w, size, group_name):
    return x.new_empty(size, len(x) // size, len(w))


def _linear_exchange_bwd_fake(dp, x, w, group_name):
    return x.new_empty(x.shape), w.new_empty(w.shape)


def _gather_mlp_exchange_fwd_fake(n, w1, b1, w2, activation, keep, group_name):
    z = n.new_empty(n.shape[0] * n.shape[1], len(w1))
    return n.new_empty(n.shape), z, n.new_empty(len(z), w2.shape[1]) if keep else n.new_empty(0)


def _gather_mlp_exchange_bwd_fake(dp, n, w1, w2, z, a, activation, group_name):
    return n.new_empty(n.shape), w1.new_empty(w1.shape), _empty_bias(z, len(w1), True), w2.new_empty(w2.shape)


def _linear_reduce_bwd_fake(dy, w, x, has_bias, dy2, x2, size, group_name):
    dw2 = dy.new_empty(0) if dy2 is None else w.new_empty(dy2.shape[1], x2.shape[1])
    return dy.new_empty(len(dy), w.shape[1]), w.new_empty(w.shape), _empty_bias(dy, len(w), has_bias), dw2


# ---- costs: bytes as in one pass over inputs and outputs, and what is sent to R - 1 peers a gather or an exchange ----


def _cost(tiles: int, gemms):
    """``tiles``: the input that is [R, m, D]; ``gemms(args)`` -> (gathers and exchanges, multiplications M N K)."""

    def cost(args: tuple, outputs: tuple) -> Cost:
        x, (times, products) = args[tiles], gemms(args)
        return least(args, outputs)._replace(flops=2 * products, sent=times * (x.shape[0] - 1) * x[0].numel() * x.element_size())

    return cost


def _rows(x: Tensor) -> int:
    """M of [R, m, D]"""
    return x.shape[0] * x.shape[1]


def _linear_exchange_fwd_cost(args: tuple, outputs: tuple) -> Cost:
    x, w, size, _ = args
    sent = (size - 1) * outputs[0][0].numel() * x.element_size()
    return least(args, outputs)._replace(flops=2 * len(x) * w.numel(), sent=sent)


def _linear_reduce_cost(args: tuple, outputs: tuple) -> Cost:
    dy, w, x, _, dy2, x2, size, _ = args
    products = len(dy) * w.numel() * 2 + (0 if dy2 is None else len(dy2) * dy2.shape[1] * x2.shape[1])
    return least(args, outputs)._replace(flops=2 * products, sent=2 * (size - 1) * -(-outputs[0].numel() // size) * dy.element_size())


gather_linear_fwd = op(gather_linear_fwd_ref, fake=_gather_linear_fwd_fake, cost=_cost(0, lambda a: (1, _rows(a[0]) * a[1].numel())))
gather_linear_bwd = op(gather_linear_bwd_ref, fake=_gather_linear_bwd_fake, cost=_cost(2, lambda a: (2, 2 * _rows(a[2]) * a[1].numel())))
linear_exchange_fwd = op(linear_exchange_fwd_ref, fake=_linear_exchange_fwd_fake, cost=_linear_exchange_fwd_cost)
linear_exchange_bwd = op(
    linear_exchange_bwd_ref, fake=_linear_exchange_bwd_fake, cost=_cost(0, lambda a: (1, 2 * _rows(a[0]) * a[2].numel()))
)
gather_mlp_exchange_fwd = op(
    gather_mlp_exchange_fwd_ref,
    fake=_gather_mlp_exchange_fwd_fake,
    cost=_cost(0, lambda a: (2, _rows(a[0]) * (a[1].numel() + a[3].numel()))),
)
gather_mlp_exchange_bwd = op(
    gather_mlp_exchange_bwd_ref,
    fake=_gather_mlp_exchange_bwd_fake,
    cost=_cost(0, lambda a: (3, 2 * _rows(a[0]) * (a[2].numel() + a[3].numel()))),
)
linear_reduce_bwd = op(linear_reduce_bwd_ref, fake=_linear_reduce_bwd_fake, cost=_linear_reduce_cost)
