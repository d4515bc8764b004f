"""A weight pruned to some percent of its vectors, in int8, times int8; torch multiplies the same integers as a dense
matrix of the dtype.  w [M, K], x [K, N], vectors of V rows."""

import torch
from torch import Tensor

from ....kernels import SparseInt
from ....kernels.sparse.cost import DeviceRates, break_even
from ....kernels.sparse.format import Vectors
from ....kernels.sparse.op import sparse_matmul_op
from ..definition import DTYPES, Bench, Random, Shape
from ..roofline import Card

H100 = Card("an H100's data sheet", 3350, dict(bf16=989))


def inputs(random: Random, M: int, N: int, K: int, V: int, percent: int) -> tuple[Tensor, ...]:
    numbers = lambda *shape: random.ids(255, *shape) - 127
    chosen = (random.ids(100, -(-M // V), K) < percent).repeat_interleave(V, 0)[:M]
    w, x = SparseInt.from_dense(numbers(M, K) * chosen, block=V), numbers(K, N).to(torch.int8)
    return w.dense().to(random.dtype), x.to(random.dtype), x, *w.vectors[:3]


def tpfuse(dense: Tensor, x: Tensor, numbers: Tensor, values: Tensor, column_index: Tensor, offsets: Tensor) -> Tensor:
    return sparse_matmul_op(Vectors(values, column_index, offsets, rows=len(dense), bits=8), numbers)


def dense(dense: Tensor, x: Tensor, *vectors: Tensor) -> Tensor:
    return dense @ x


def remark(card: Card | None, dtype: str, shape: Shape) -> str:
    """Says up to which density it pays, by the roofline; of an H100 and bf16 for a CPU, which has no such product."""
    M, N, K, V, _ = shape
    card, dtype = (H100, "bf16") if card is None else (card, dtype)
    rates = lambda faster: DeviceRates(card.copy_gbs, faster * card.copy_gbs, card.matrix_tflops[dtype])
    at = [f"{break_even((M, N, K), rates(n), block=V, element=DTYPES[dtype].itemsize):.1%}" for n in (1, 2, 4)]
    return (
        f"sparse {M}x{N}x{K}, vectors of {V}, {dtype}: by the roofline of {card.name} it pays up to a density of"
        f" {at[0]} where rows of x come from memory each time, {at[1]} or {at[2]} from a cache 2 or 4 times as fast"
    )


BENCH = Bench(
    name="sparse",
    axes=("M", "N", "K", "V", "percent"),
    shapes=tuple((4096, 4096, 1024, *kind) for kind in ((8, 2), (8, 5), (8, 10), (8, 20), (64, 20), (64, 50))),
    cpu_shapes=tuple((2048, 256, 2048, 8, percent) for percent in (2, 5, 10, 20, 50)),
    inputs=inputs,
    providers=dict(tpfuse=tpfuse, torch=dense),
    remark=remark,
    modes=("fwd",),
)
