"""The steps of the overlapped ops: rows gathered or sent piece by piece under a GEMM, and the cost of such an op."""

from typing import Any

from torch import Tensor

from ...kernels.gemm.activation import width
from ...kernels.gemm.op import activation_fwd, multiply_into, row_of_z
from ...kernels.runtime.op import Cost, least, new_vector
from ..flight import Flight, pieces
from ..records import LinearWeights


def gather_in_background(label: str, n: Tensor, group_name: str) -> Flight:
    """Returns a gather of all of n, not yet posted.  It is needed late, so each peer's rows come in one piece."""
    cut = [slice(0, n.shape[1])] if n.shape[1] else []
    return Flight(label, n, n.new_empty(n.shape), group_name, cut=cut, copy_own=True)


def outgoing(label: str, rows: int, w: Tensor, size: int, group_name: str) -> Flight:
    """Returns an exchange for the ``rows`` rows of x w', not yet posted; a rank's own rows are not sent."""
    sent, parts = (w.new_empty(tiles, rows // size, len(w)) for tiles in (size - 1, size))
    return Flight(label, sent, parts, group_name, cut=pieces(rows // size)[::-1])


def multiply_and_send(flight: Flight, x: Tensor, w: Tensor) -> Flight:
    """Computes x w' [M, D], sends each peer its rows, and writes this rank's own, multiplied last, in their place."""
    x = x.unflatten(0, (flight.size, len(x) // flight.size))
    for rows in flight.cut:
        for to in flight.after:
            multiply_into(x[to, rows], w, None, flight.outgoing(to, rows))
            flight.post(to, rows)
    multiply_into(x[flight.rank], w, None, flight.received[flight.rank])
    return flight


def gather_and_multiply(label: str, n: Tensor, linear: LinearWeights, group_name: str) -> tuple[Tensor, Tensor]:
    """Returns y and z (empty for "none") of all rows; each peer's rows are multiplied as they land."""
    w, b, activation = linear
    cut, z = pieces(n.shape[1]), n.new_empty(*n.shape[:2], *row_of_z(n, len(w), activation))
    y = z if activation == "none" else n.new_empty(*n.shape[:2], len(w) // width(activation))
    flight = Flight(label, n, n.new_empty(n.shape), group_name, cut=cut).post_all()
    for x, tile, rows in flight.arriving(n[flight.rank]):
        multiply_into(x, w, b, z[tile, rows])
        if z is not y:
            activation_fwd.write((y[tile, rows],), z[tile, rows], activation)
    flight.finish()
    return y.flatten(0, 1), n.new_empty(0) if z is y else z.flatten(0, 1)


def present(gradient: Tensor | None, sums: Tensor | None = None) -> Tensor:
    """Returns a gradient as an op returns it: for None an empty vector, in the accumulator dtype of ``sums``."""
    if gradient is not None:
        return gradient
    assert sums is not None  # a weight's gradient is there
    return new_vector(sums, 0, None)


# ---- for fakes and costs ----


def row_count(x: Tensor) -> int:
    """M of [R, m, D]"""
    return x.shape[0] * x.shape[1]


def message_cost(
    args: tuple[Any, ...], outputs: tuple[Any, ...], *, tiles: Tensor, messages: int, products: int
) -> Cost:
    """Returns the cost of one pass over inputs and outputs, of ``messages`` gathers or exchanges of ``tiles``
    [R, m, D], each sent to R - 1 peers, and of ``products`` multiplications (M N K a GEMM)."""
    sent = messages * (tiles.shape[0] - 1) * tiles[0].numel() * tiles.element_size()
    return least(args, outputs)._replace(flops=2 * products, sent=sent)
