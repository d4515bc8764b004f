"""The arguments of the fused norm, as records that its reference, CPU, Triton and autograd sides share."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

ALONE, PRE, POST, DROP = "alone", "pre", "post", "drop"  # see core.py


class Add(NamedTuple):
    """The terms added to the sum of the parts; None is omitted."""

    bias: Tensor | None = None  # [D]
    position_weight: Tensor | None = None  # [P, D]
    positions: Tensor | None = None  # int64 [m]: which of those rows
    type_weight: Tensor | None = None  # [T, D]
    types: Tensor | None = None  # int64 [m]
    residual: Tensor | None = None  # [m, D], after dropout


class NormVectors(NamedTuple):
    """The norm's parameters; without gamma there is no norm."""

    gamma: Tensor | None = None  # [D]
    beta: Tensor | None = None  # [D]
    eps: float = 0.0
    kind: str = "layer"  # one of KINDS


class Saved(NamedTuple):
    """The tensors that forward saves for the norm's backward; None without a norm."""

    h: Tensor | None  # [m, D], the norm's input
    mean: Tensor | None  # [m], empty where the norm is not centred
    rstd: Tensor | None  # [m]
    gamma: Tensor | None  # [D]
    kind: str


def incoming(dn: Tensor | None, dh: Tensor | None) -> Tensor:
    """Returns dn or, where n has no gradient, dh: backward is called with one of them at least."""
    gradient = dh if dn is None else dn
    assert gradient is not None
    return gradient


class Wanted(NamedTuple):
    """The gradients that backward makes, by their dtypes; dgamma and dbeta have gamma's.

    ``leaves``: unless 0, sums over ranks and over so many blocks of the rows are binary trees (runtime/leaves.py).
    """

    bias: torch.dtype | None
    beta: bool
    residual: torch.dtype | None
    parts: torch.dtype
    leaves: int = 0


class Recompute(NamedTuple):
    """The recipe by which backward recomputes n: saved instead of n, never differentiated.

    gamma and beta are [D]-sized copies, because FSDP may have freed the parameters by then.
    """

    h: Tensor
    mean: Tensor
    rstd: Tensor
    gamma: Tensor
    beta: Tensor | None
    eps: float
    kind: str
    dtype: torch.dtype

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Returns the fields that a Function saves; ``Recompute(*tensors, *constants)`` is the record again."""
        return self.h, self.mean, self.rstd, self.gamma, self.beta

    @property
    def constants(self) -> tuple[Any, ...]:
        return self.eps, self.kind, self.dtype

    def split(self, rows: int) -> list["Recompute"]:
        """Returns the recipes of so many rows of n each."""
        starts = range(0, len(self.h), rows)
        cut = lambda t, i: t if len(t) == 0 else t[i : i + rows]  # a kind without a mean has an empty one
        return [self._replace(h=self.h[i : i + rows], mean=cut(self.mean, i), rstd=cut(self.rstd, i)) for i in starts]


def check_vectors(name: str, D: int, **vectors: Tensor | None) -> None:
    for key, v in vectors.items():
        if v is not None and v.shape != (D,):  # a message made in advance would cost more than the check
            raise ValueError(f"{name}: {key} must have shape ({D},), got {tuple(v.shape)}")
