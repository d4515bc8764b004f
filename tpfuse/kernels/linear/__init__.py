"""GEMMs with fused activations, and activations on their own."""

from .gated import swiglu
from .op import linear

__all__ = ["linear", "swiglu"]
