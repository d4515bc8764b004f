"""Tensors that optimizers step on in the place of others, whose memory they share: whole matrices of weights."""

import weakref
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

_originals = WeakIdKeyDictionary()  # stand-in -> a reference to its original


def stand_in(tensor: nn.Parameter, original: nn.Parameter) -> None:
    """Makes ``tensor`` known as what an optimizer steps on in the place of ``original``."""
    _originals[tensor] = weakref.ref(original)


def original_of(tensor: nn.Parameter) -> nn.Parameter | None:
    """Returns what ``tensor`` stands for, as long as that lives; None for any other tensor."""
    reference: Any = _originals.get(tensor)
    return None if reference is None else reference()
