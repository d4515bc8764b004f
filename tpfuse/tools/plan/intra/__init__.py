"""How the ops of a transformer block are laid out on a mesh of ranks: the layouts, their costs, and the fastest.

command             python -m tpfuse layouts
conversions         what a change of layout costs: steps, and the cheapest sequences of them
coordinate_descent  coordinate descent
graph               the ops: flops, bytes, parameters, whose output each reads
milp                integer programming
problem             nodes with strategies, edges, a limit: what both searches solve
result              what was found, in words, and what else it could have been
signatures          which layouts an op of a kind can have on one axis
space               a block's layouts and their costs as a problem
"""

from .conversions import Mesh
from .coordinate_descent import descent
from .graph import stack
from .milp import exact, least_memory
from .result import Result, explain
from .space import Rates, Space

__all__ = ["Mesh", "Rates", "Result", "Space", "descent", "exact", "explain", "least_memory", "stack"]
