"""How the ops of a transformer block are laid out on a mesh of ranks: the layouts, their costs, and the fastest."""

from .conversions import Mesh
from .descent import descent
from .exact import exact, least_memory
from .graph import stack
from .result import Result, explain
from .space import Rates, Space

__all__ = ["Mesh", "Rates", "Result", "Space", "descent", "exact", "explain", "least_memory", "stack"]
