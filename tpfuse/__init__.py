"""tpfuse: fused, tensor-parallel transformer layers that give the same answer however they are split."""

from ._version import __version__
from .parallel import TensorParallel

__all__ = ["TensorParallel", "__version__"]
