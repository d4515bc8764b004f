"""The wholes of tensors that torch's tools are given."""

import weakref
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from ...layers.module import local
from ...layers.shards import SplitParameter, living, wholes

_remembered: "weakref.WeakKeyDictionary[nn.Module, dict[Tensor, SplitParameter]]" = weakref.WeakKeyDictionary()


def split_parameters() -> dict[Tensor, SplitParameter]:
    """Returns the living parameters of which ranks hold different slices."""
    remembered = [item for parameters in _remembered.values() for item in parameters.items()]
    is_split = lambda spec, tp: spec.dim is not None and tp.size > 1 and tp.group_name is not None
    return {p: placement for p, placement in (*remembered, *wholes().items()) if is_split(*placement)}


def keep() -> None:
    """Remembers what is known now, as long as its layers live.

    A layer under FSDP2 shows other parameters between forward and backward than those that an optimizer holds.  The
    layers are held weakly and not the parameters: torch swaps no tensor that has a weak reference.
    """
    for module in living():
        _remembered.setdefault(module, {}).update(wholes([module]))


def any_split() -> bool:
    """Returns whether a living parameter is split.  A graph asks when it is made."""
    return bool(split_parameters())


# torch.compiler.assume_constant_result does no more, but imports the compiler for it, with every import of ours.
any_split._dynamo_marked_constant = True  # type: ignore[attr-defined]


def wholes_of(tensors: Sequence[Tensor], in_leaves: bool = False) -> list[SplitParameter | None]:
    """Returns of each tensor (a parameter, its gradient, or a view of either) the whole that it is a slice of.

    ``in_leaves``: also of one rank's parameters that have leaves (``TensorParallel(bitwise=V)``), all of which it has.
    """
    parameters = split_parameters()
    if in_leaves:
        parameters |= {p: whole for p, whole in wholes().items() if whole.spec.dim is not None and whole.tp.bitwise}
    by_memory = _by_memory(parameters)
    return [by_memory.get(_memory(x)) for x in tensors]


def _by_memory(parameters: Mapping[Tensor, SplitParameter]) -> dict[tuple[int, int], SplitParameter]:
    placements = {}
    for p, placement in parameters.items():
        placements[_memory(p)] = placement
        if p.grad is not None:
            placements[_memory(p.grad)] = placement
    return placements


def _memory(x: Tensor) -> tuple[int, int]:
    """Identifies a tensor's elements, and an empty tensor or one without memory by itself."""
    elements = local(x)
    try:
        return elements.data_ptr() or id(x), elements.numel()
    except RuntimeError:  # a fake tensor
        return id(x), elements.numel()
