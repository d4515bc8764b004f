"""Tensors that optimizers step on in the place of others, whose memory they share: whole matrices of weights."""

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

_originals = WeakIdKeyDictionary()  # stand-in -> original, by no weak reference: torch swaps no parameter that has one


def stand_in(tensor: nn.Parameter, original: nn.Parameter) -> None:
    """Makes ``tensor`` known as what an optimizer steps on in the place of ``original``."""
    _originals[tensor] = original


def original_of(tensor: nn.Parameter) -> nn.Parameter:
    """Returns what ``tensor`` stands for: itself, if for no other."""
    original: nn.Parameter = _originals.get(tensor, tensor)
    return original
