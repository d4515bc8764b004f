"""K-FAC over split weights, and in the bubbles of a pipeline.

bubbles    its work as pieces for the bubbles of a pipeline
curvature  the two Kronecker factors of one weight's curvature
optimizer  KFAC
"""

from .optimizer import KFAC

__all__ = ["KFAC"]
