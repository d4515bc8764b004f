"""What the tensors that torch's tools are given are slices of."""

import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ...layers.module import ParallelModule, Whole, living, local, wholes

_kept: "weakref.WeakKeyDictionary[ParallelModule, dict[Tensor, Whole]]" = weakref.WeakKeyDictionary()


def split_parameters() -> dict[Tensor, Whole]:
    """Returns the living parameters of which ranks hold different slices."""
    kept = [item for known in _kept.values() for item in known.items()]
    return {p: whole for p, whole in (*kept, *wholes().items()) if _is_split(whole)}


def keep() -> None:
    """Remembers what is known now, as long as its layers live.

    A layer under FSDP2 shows other parameters between forward and backward than those that an optimizer holds.  The
    layers are held weakly and not the parameters: torch swaps no tensor that has a weak reference.
    """
    for module in living():
        _kept.setdefault(module, {}).update(wholes([module]))


def _is_split(whole: Whole) -> bool:
    return whole.spec.dim is not None and whole.tp.size > 1 and whole.tp.group_name is not None


def _any_split() -> bool:
    return bool(split_parameters())


any_split: Callable[[], bool] = torch.compiler.assume_constant_result(_any_split)  # a graph asks when it is made


def wholes_of(tensors: Sequence[Tensor]) -> list[Whole | None]:
    """Returns for each tensor what it is a slice of: a parameter, its gradient, or a view of either."""
    known = _by_memory(split_parameters())
    return [known.get(_memory(x)) for x in tensors]


def _by_memory(parameters: Mapping[Tensor, Whole]) -> dict[tuple[int, int], Whole]:
    found = {}
    for p, whole in parameters.items():
        found[_memory(p)] = whole
        if p.grad is not None:
            found[_memory(p.grad)] = whole
    return found


def _memory(x: Tensor) -> tuple[int, int]:
    """Identifies a tensor's elements, and an empty tensor or one without memory by itself."""
    here = local(x)
    try:
        return here.data_ptr() or id(x), here.numel()
    except RuntimeError:  # a fake tensor
        return id(x), here.numel()
