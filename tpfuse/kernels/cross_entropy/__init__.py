"""Cross-entropy of logits, and of a linear layer whose logits are never stored."""

from .linear import linear_cross_entropy
from .op import cross_entropy

__all__ = ["cross_entropy", "linear_cross_entropy"]
