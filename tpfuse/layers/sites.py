"""Dropout sites: the number that each mask of a model has, by which masks of one step and position differ.

Site 0 is the embedding's; a layer has three, a cross-attention one of another range.  The numbers are part of the
format of masks and do not change.
"""

from typing import Final

CLASSIFIER = 65534  # what a classification head reads; 65535 is sampling
POOLER = 65533  # what the linear layer below one reads
_OF_LAYER: Final = {"probabilities": 1, "attention": 2, "mlp": 3}


def site(layer: int, name: str) -> int:
    """Returns the site of attention's "probabilities" in layer ``layer``, counted from 0, or of what its branch
    "attention" or "mlp" gives."""
    return 3 * layer + _OF_LAYER[name]


def cross_site(layer: int) -> int:
    """Returns the site of the cross-attention number ``layer``, which is no other layer's."""
    return 32768 + layer
