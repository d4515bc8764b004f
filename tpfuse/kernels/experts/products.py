"""Products of one expert's rows with its weight on a CPU, each by the way that is fastest for so many rows."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..runtime import matmul

Product = Callable[[Tensor, Tensor, Tensor], None]  # of an expert's rows and its weight, into a place
ALIGNED = 64  # bytes of a cache line, at which torch starts its tensors
FEW = 16  # rows up to which one product with gate and up in turns is mostly faster than two


def begins_a_line(x: Tensor) -> Tensor:
    """Returns x, copied unless it is contiguous and begins a cache line: elsewhere a library may add otherwise."""
    lies_so = x.is_contiguous() and x.data_ptr() % ALIGNED == 0
    return x if lies_so else x.clone(memory_format=torch.contiguous_format)


def times_transposed(x: Tensor, w: Tensor, place: Tensor) -> None:
    """Writes x w' [r, N] to ``place``, of x [r, K] and w [N, K]."""
    if x.shape[0] == 1:
        matmul.row(x, w, place=place)
    else:
        matmul.mm(x, w.t(), place=place)


def halves(x: Tensor, w: Tensor, place: Tensor) -> None:
    """Writes x w' to ``place`` [r, 2, F], gate and up, of x [r, D] and w [2F, D], whose rows are gate's and up's in
    turns."""
    if x.shape[0] <= FEW:
        z = x.new_empty(x.shape[0], w.shape[0])
        times_transposed(x, w, z)
        place.copy_(z.unflatten(1, (-1, 2)).mT)
        return
    for half in range(2):
        matmul.mm(x, w[half::2].t(), place=place[:, half])
