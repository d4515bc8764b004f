"""Gradients of weights added in fp32, for :class:`tpfuse.MainGrad`.

An op that multiplies by a weight looks the weight up here in forward.  For a parameter that has a place for its
gradient, the GEMM of backward adds to that place and the op returns no gradient.  A weight that is a view of a
parameter, or its copy under autocast, stands for the parameter; one that is made of parameters in another way goes
through :func:`derived`.  Any other tensor is not found, and its gradient takes autograd's way.

Compiled graphs find nothing: their gradients come through autograd.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from .captures import mark_cast

T = TypeVar("T")


class GradientSlot(Protocol):
    """The total to which a parameter's gradient is added."""

    @property
    def reduced(self) -> bool:
        """Returns whether the total has been reduced, so that nothing may be added."""

    def check_open(self) -> None:
        """RuntimeError where the total has been reduced."""

    def add(self, write: Callable[[Tensor], T]) -> T:
        """Returns ``write(total)``, which adds to the total so far, fp32 (fp64) in the parameter's shape, in place."""


class Main(NamedTuple):
    """A weight's place: the gradient is added in the weight's ``shape``; ``node`` is autograd's of the parameter."""

    place: GradientSlot
    shape: torch.Size
    node: Any

    @property
    def wanted(self) -> bool:
        """Returns whether this backward pass is to reach the parameter, which ``inputs=`` and ``torch.autograd.grad``
        may exclude.  RuntimeError if it is to return the parameter's gradient."""
        try:
            return bool(torch._C._will_engine_execute_node(self.node))
        except RuntimeError as error:
            raise RuntimeError(
                "tpfuse.MainGrad: the gradient of a weight is added to its main_grad, so that torch.autograd.grad has"
                " none to return; call backward()"
            ) from error

    def add(self, write: Callable[[Tensor], T]) -> T:
        """Returns ``write(total)`` for the total in the weight's shape."""
        return self.place.add(lambda total: write(total.view(self.shape)))


def wanted(mains_of_weights: tuple[Main | None, ...] | None) -> Main | None:
    """Returns the place of the one weight that was looked up; None if there is none or this pass is not to reach it,
    and the gradient, which autograd then drops, is made as without one."""
    main = None if mains_of_weights is None else mains_of_weights[0]
    return main if main is not None and main.wanted else None


class _Places:
    """parameter -> GradientSlot.  Each is an attribute of its parameter, which torch then swaps (it swaps no tensor
    that has a weak reference) and which takes the slot with it when it goes."""

    _NAME = "_tpfuse_place"

    def __init__(self) -> None:
        self._living: weakref.WeakSet[Any] = weakref.WeakSet()  # of places

    def get(self, p: Tensor) -> Any:
        return getattr(p, self._NAME, None) or None  # of an unpickled parameter it is an empty set

    def __getitem__(self, p: Tensor) -> Any:
        return getattr(p, self._NAME)

    def __setitem__(self, p: Tensor, place: GradientSlot) -> None:
        setattr(p, self._NAME, place)
        self._living.add(place)

    def __contains__(self, p: Tensor) -> bool:
        return self.get(p) is not None

    def __len__(self) -> int:
        return len(self._living)


PLACES = _Places()
_STANDS_FOR = "_tpfuse_stands_for"  # attribute of a tensor that is no view: (its leaf, None for itself; its place)


def mains(*weights: Tensor | None) -> tuple[Main | None, ...] | None:
    """Returns the place of each weight, None for one that has none; None in all if no parameter has one.

    ValueError inside a forward of DistributedDataParallel, which would wait for gradients that never come.
    """
    if torch.compiler.is_compiling() or not PLACES:
        return None
    mains_of_weights = tuple(None if w is None else _main(w) for w in weights)
    return None if mains_of_weights.count(None) == len(mains_of_weights) else mains_of_weights


def _main(w: Tensor) -> Main | None:
    leaf, place = _stands_for(w)
    if place is None or not leaf.requires_grad:
        return None
    if getattr(DistributedDataParallel, "_active_ddp_module", None) is not None:
        raise ValueError(DDP)
    return Main(place, w.shape, torch.autograd.graph.get_gradient_edge(leaf).node)


def refuse(parameters: Iterable[Tensor], error: str) -> None:
    """Raises ValueError(error) if one of the parameters has a main_grad."""
    if PLACES and any(p in PLACES for p in parameters):
        raise ValueError(error)


def main_grads(parameters: Iterable[Tensor]) -> list[GradientSlot]:
    """Returns the places of those parameters that have one."""
    return [place for p in parameters if (place := PLACES.get(p)) is not None] if PLACES else []


DDP = (
    "tpfuse.MainGrad: the model is under DistributedDataParallel, whose sums would miss the gradients in main_grad;"
    " leave DistributedDataParallel off and give MainGrad the data-parallel group: MainGrad(model, mesh['dp'])"
)


def _stands_for(w: Tensor) -> tuple[Tensor, GradientSlot | None]:
    """Returns the leaf whose gradient is all of w's, element by element, and its place."""
    base: Tensor = w if w._base is None else w._base
    leaf, place = base, PLACES.get(base)
    if place is None:
        marked: tuple[Tensor | None, GradientSlot | None] = getattr(base, _STANDS_FOR, (None, None))
        leaf, place = base if marked[0] is None else marked[0], marked[1]
    covers = w is base or (w.numel() == base.numel() and w.is_contiguous() and base.is_contiguous())
    return leaf, place if covers else None


def cast(w: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns ``w.to(dtype)``, which stands for the same parameter."""
    result = w.to(dtype)
    if torch.compiler.is_compiling() or result is w:
        return result
    mark_cast(result, w)
    if PLACES:
        leaf, place = _stands_for(w)
        if place is not None:
            setattr(result, _STANDS_FOR, (leaf, place))
    return result


class _Derived:
    """The place of a weight that is a linear function of parameters: its gradient in fp32 goes back through it."""

    def __init__(self, make: Callable[..., Tensor], parameters: tuple[Tensor, ...], shape: torch.Size):
        self.make, self.parameters, self.shape = make, parameters, shape

    def add(self, write: Callable[[Tensor], T]) -> T:
        p = self.parameters
        dtype = torch.promote_types(p[0].dtype, torch.float32)
        total = p[0].new_zeros(self.shape, dtype=dtype)
        result = write(total)
        with torch.enable_grad():
            widened = [q.detach().to(dtype).requires_grad_(q.requires_grad) for q in p]
            weight = self.make(*widened)
        leaves = [(q, w) for q, w in zip(p, widened, strict=True) if q.requires_grad]
        gradients = torch.autograd.grad(weight, [w for _, w in leaves], total)
        for (q, _), gradient in zip(leaves, gradients, strict=True):
            PLACES[q].add(lambda t, g=gradient: t.add_(g))
        return result


def derived(make: Callable[..., Tensor], *parameters: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Returns ``make(*parameters)`` in ``dtype``, for a linear ``make``.

    If the parameters have places, the gradient of what is returned goes back through ``make`` in fp32, computed again
    for it, and the gradients of the parameters are added there.
    """
    marked = not torch.compiler.is_compiling() and PLACES and torch.is_grad_enabled()
    leaves = [p for p in parameters if p.requires_grad] if marked else []
    if not leaves or any(p not in PLACES for p in leaves):
        weight = make(*parameters)
        return weight if dtype is None else weight.to(dtype)
    with torch.no_grad():
        weight = make(*parameters)
        weight = (weight if dtype is None else weight.to(dtype)).detach().requires_grad_()
    setattr(weight, _STANDS_FOR, (None, place := _Derived(make, parameters, weight.shape)))

    def through_autograd(gradient: Tensor | None) -> None:
        if gradient is not None:  # else the op has added it
            place.add(lambda total: total.add_(gradient))

    weight.register_hook(through_autograd)
    return weight
