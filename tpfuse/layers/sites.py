"""Dropout sites: the number that each mask of a model has, by which masks of one step and position differ.

Site 0 is the embedding's; a layer has three.  The numbers are part of the format of masks and do not change.
"""

from typing import NamedTuple


class Sites(NamedTuple):
    """The sites of one layer."""

    probabilities: int  # on the attention probabilities
    after_attention: int
    after_mlp: int


def sites(layer: int) -> Sites:
    """Returns the sites of layer ``layer``, counted from 0."""
    return Sites(3 * layer + 1, 3 * layer + 2, 3 * layer + 3)
