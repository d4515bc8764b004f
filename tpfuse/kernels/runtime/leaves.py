"""Sums over what is split, as one binary tree of leaves that do not depend on the number of ranks.

    T(a) = a        T(a_0 .. a_(2n-1)) = round(T(a_0 .. a_(n-1)) + T(a_n .. a_(2n-1)))

A dimension that is split over R ranks has V leaves, V a power of two and a multiple of R.  A rank computes its V / R
leaves by calls of shapes in which R does not occur, and adds them to a node of the tree; nodes travel, and the kernel
that receives them adds the upper levels.  Every node is rounded to the dtype of the leaves, so that a rank's sum is
such a node, and a sum over ranks has the same bits at every R.  What is not of ranks, the outputs of k experts, may be
any number: the left subtree has the largest power of two of them that leaves some for the right.

A GPU's kernel adds a tile in the order in which the compiler lays it out over threads.  So with leaves a kernel's
launch parameters, strides and alignments follow from what is not split, and so does that order.
"""

from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from .errors import check

T = TypeVar("T", Tensor, Tensor | None, tuple[Any, ...])
_LOAD = 16  # bytes, that a thread loads at once


def tree(leaves: Iterable[Tensor]) -> Tensor:
    """Returns the sum of tensors as a binary tree, each node in their dtype; of one, itself.  ValueError for none."""
    nodes = list(leaves)
    if not nodes:
        raise ValueError("tree: there must be a leaf at least, got none")
    while len(nodes) > 1:
        pairs = zip(nodes[::2], nodes[1::2], strict=False)
        nodes = [a + b for a, b in pairs] + nodes[-1:] * (len(nodes) % 2)
    return nodes[0]


class TreeSum:
    """The sum that :func:`tree` gives, of tensors that come one by one and may be written to.

    Of leaves in order it holds one node a level, log2 n of them, as the digits of a binary number hold a count.
    """

    def __init__(self) -> None:
        self.count = 0
        self._nodes: dict[tuple[int, int], Tensor] = {}  # by level, and by place in it

    def add(self, leaf: Tensor, index: int | None = None) -> None:
        """Adds leaf number ``index``; None for the next, of leaves that come in order."""
        level, place = 0, self.count if index is None else index
        while (sibling := self._nodes.pop((level, place ^ 1), None)) is not None:
            leaf = sibling.add_(leaf)  # the same bits from the left and from the right
            level, place = level + 1, place // 2
        self._nodes[level, place] = leaf
        self.count += 1

    def total(self) -> Tensor:
        """Returns the sum; ValueError unless the number of leaves is a power of two."""
        if len(self._nodes) != 1:
            raise ValueError(f"TreeSum: the number of leaves must be a power of two, got {self.count}")
        (node,) = self._nodes.values()
        return node


def tree_of_new(leaves: Iterable[Tensor]) -> Tensor:
    """Returns :func:`tree` of tensors that nobody else holds, which are added into one another."""
    total = TreeSum()
    for leaf in leaves:
        total.add(leaf)
    return total.total()


def cut(name: str, x: Tensor, dim: int, leaves: int) -> tuple[Tensor, ...]:
    """Returns x in so many equal contiguous pieces along ``dim``; ValueError, in the name of an op, if it has none.

    Contiguous, because elementwise loops of torch round otherwise on strided tensors (GELU and SiLU on a CPU).
    """
    n = x.shape[dim]
    if n % leaves:
        raise ValueError(f"{name}: {n} elements of dimension {dim} are not divisible by {leaves} leaves")
    return tuple(piece.contiguous() for piece in x.split(n // leaves, dim))


def split_columns(x: Tensor, leaf: int) -> tuple[Tensor, ...]:
    """Returns x [M, N] in contiguous leaves of so many columns, the last perhaps of fewer."""
    return tuple(piece.contiguous() for piece in x.split(leaf, 1))


def placed(x: T) -> T:
    """Returns a tensor, or a record or list of them, of dense rows from a multiple of 16 bytes on: copied, if need be.

    Of [R, m, D] each [m, D] has dense rows.
    """
    if isinstance(x, tuple):
        fields = map(placed, x)
        return x._make(fields) if hasattr(x, "_make") else tuple(fields)
    if not isinstance(x, Tensor):
        return x
    dense = x[0].is_contiguous() if x.dim() == 3 else x.is_contiguous()
    return x if dense and x.data_ptr() % _LOAD == 0 else x.clone(memory_format=torch.contiguous_format)


def check_leaves(name: str, rows: Tensor, leaves: int) -> None:
    """Raises the ValueError of an op whose ``rows`` [.., m, D] have no such leaves, or are of fp64 on a GPU."""
    if leaves:
        check_device(name, rows)
        if rows.shape[-2] % leaves:
            raise ValueError(f"{name}: {rows.shape[-2]} rows are not divisible by {leaves} leaves; pad them")


def check_device(name: str, x: Tensor) -> None:
    """Raises the ValueError of an op that has no kernels for x: those of GPUs are not for fp64."""
    double = x.is_cuda and x.dtype == torch.float64
    check(not double, f"{name}: bitwise sums of fp64 are not built for GPUs, got a tensor on {x.device}")
