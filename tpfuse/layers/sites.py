"""Dropout sites: the number that each mask of a model has, by which masks of one step and position differ.

Site 0 is the embedding's; a layer has three, a cross-attention one of another range.  The numbers are part of the
format of masks and do not change.
"""

from typing import NamedTuple

CLASSIFIER = 65534  # what a classification head reads; 65535 is sampling
POOLER = 65533  # what the linear layer below one reads


class Sites(NamedTuple):
    probabilities: int  # on the attention probabilities
    after: dict[str, int]  # on what a branch of the block gives, by the branch's name


def sites(layer: int) -> Sites:
    """Returns the sites of layer ``layer``, counted from 0."""
    return Sites(3 * layer + 1, {"attention": 3 * layer + 2, "mlp": 3 * layer + 3})


def cross_site(layer: int) -> int:
    """Returns the site of the cross-attention number ``layer``, which no :class:`Sites` holds."""
    return 32768 + layer
