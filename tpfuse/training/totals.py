"""The buffers of a MainGrad: of each parameter the sum of its gradients and the fp32 weight, side by side."""

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..collectives import all_reduce
from ..kernels.runtime.main_grad import PLACES
from ..parallel import TensorParallel

T = TypeVar("T")
Holder = tuple["weakref.ref[nn.Module]", str]  # the module that holds a parameter, and its name there
PIECE = 1 << 24  # elements of a message of ``reduce``
ALIGNED = 64  # elements: where a gradient begins in its buffer


class ReduceState:
    """Shared by the slots of one MainGrad: whether its gradients are reduced."""

    reduced = False


class GradSlot:
    """A parameter's sum of gradients, and the weight that the optimizer steps on."""

    def __init__(self, p: nn.Parameter, name: str, total: Tensor, state: ReduceState, held: Holder):
        self.name, self.total, self.state, self._held = name, total, state, held
        self.shares = p.dtype == total.dtype
        value = p.detach() if self.shares else p.detach().to(total.dtype)
        self.main = nn.Parameter(value)
        self.version = p._version
        self.clean = True  # the total is zeros
        self.module: nn.Module | None = None  # that holds the weight

    @property
    def parameter(self) -> nn.Parameter | None:
        """The parameter, where its module still holds it."""
        owner, name = self._held[0](), self._held[1]
        p = None if owner is None else owner._parameters.get(name)
        return p if p is not None and PLACES.get(p) is self else None

    def __reduce__(self) -> tuple[Any, ...]:
        return set, ()  # of a parameter in a file: no place; torch.load(weights_only=True) takes a set

    @property
    def reduced(self) -> bool:
        return self.main.grad is not None and self.state.reduced

    def check_open(self) -> None:
        """RuntimeError between reduce() and zero()."""
        if self.reduced:
            raise RuntimeError(
                f"MainGrad: backward() after reduce() would add to the gradient of {self.name} that is to be stepped"
                " on; call main.zero() first, or optimizer.zero_grad() with set_to_none=True: zeros are a gradient too"
            )

    def add(self, write: Callable[[Tensor], T]) -> T:
        """Returns ``write(total)``.  RuntimeError between reduce() and zero()."""
        self.check_open()
        if self.main.grad is None:
            if not self.clean:
                self.total.zero_()
            self.clean, self.main.grad, self.state.reduced = False, self.total, False
        return write(self.total)

    def hook(self, p: Tensor) -> None:
        """Adds what autograd has left in p.grad, for whatever does not add by itself."""
        gradient, p.grad = p.grad, None
        if gradient is not None:
            self.add(lambda total: total.add_(gradient))

    def check(self) -> None:
        """RuntimeError if the gradient lacks its reduction."""
        if self.main.grad is not None and not self.state.reduced:
            raise RuntimeError(
                f"MainGrad: the gradient of {self.name} was not reduced; call main.reduce() after the last backward()"
                " of a step, without data parallelism too"
            )

    @torch.no_grad()
    def refresh(self) -> None:
        """Takes over what was written to the parameter since it was last rounded from the weight: a file that was
        loaded, an average.  Elements that were not changed keep their fp32 value."""
        p = self.parameter
        if p is None or self.shares or p._version == self.version:
            return
        self.main.copy_(torch.where(self.main.to(p.dtype) == p, self.main, p.to(self.main.dtype)))
        self.version = p._version

    @torch.no_grad()
    def store(self) -> None:
        """Rounds the weight into the parameter."""
        p = self.parameter
        if p is not None and not self.shares:
            p.copy_(self.main)
            self.version = p._version


class Buffer:
    """The sums of one device and dtype, side by side, and behind them a number for each that says it is there.

    ``complete``: those of experts that are divided among the replicas, which are of all replicas as they are made.
    """

    def __init__(self, parameters: list[nn.Parameter], dtype: torch.dtype, complete: bool):
        self.complete = complete
        sizes = [-(-p.numel() // ALIGNED) * ALIGNED for p in parameters]
        self.all = parameters[0].new_zeros(sum(sizes) + len(sizes), dtype=dtype, requires_grad=False)
        *parts, self.present = self.all.split([*sizes, len(sizes)])
        self.totals = [part[: p.numel()].view(p.shape) for part, p in zip(parts, parameters, strict=True)]
        self.places: list[GradSlot] = []

    def reduce(self, ranks: TensorParallel, divisor: int) -> None:
        """Sums over the ranks, in rank order, piece by piece, and divides.  A gradient that no rank has stays None."""
        missing = [place for place in self.places if place.main.grad is None]
        for place in missing:
            place.add(lambda total: total)
        self.present.fill_(1.0)
        lacking = {id(place) for place in missing}
        for i, place in enumerate(self.places):
            if id(place) in lacking:
                self.present[i] = 0.0
        for piece in self.all.split(PIECE):
            piece.copy_(all_reduce(piece, ranks) / divisor)
        for place, present in zip(self.places, self.present.tolist(), strict=True):
            if not present:
                place.main.grad = None
