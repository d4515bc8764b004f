"""Layouts of the ops of a transformer block on a mesh of ranks, their costs, and searches for the fastest.

command             python -m tpfuse layouts
conversions         costs of a change of layout: steps, and the cheapest sequences of them
coordinate_descent  coordinate descent
graph               the ops: flops, bytes, parameters, inputs
milp                integer programming
problem             the problem that both searches solve: nodes with strategies, edges, a limit
result              reports of a solution, and of its alternatives
signatures          the layouts that an op of a kind can have on one axis
space               a block's layouts and their costs as a problem
"""

from .conversions import Mesh
from .coordinate_descent import descent
from .graph import stack
from .milp import exact, least_memory
from .result import Result, explain
from .space import Rates, Space

__all__ = ["Mesh", "Rates", "Result", "Space", "descent", "exact", "explain", "least_memory", "stack"]
