"""A mixture of experts: the router, and the gated MLPs of several experts over the rows that it sends them.

alone           a layer of experts on one process without gradients
cost            what its kernels move and compute
cpu             GEMMs of experts on a CPU
grouped         GEMMs of experts over rows sorted by expert: ops, autograd
low_rank        adapters beside the weights of experts
products        an expert's products on a CPU, by the number of its rows
records         how experts are chosen; rows sorted by expert
reference       GEMMs of experts in plain torch
router          which experts a row goes to, and with which weights: reference, autograd
triton_grouped  Triton: GEMMs of experts
triton_router   Triton: the router, forward and backward
"""

from .grouped import expert_mlps
from .records import Routing
from .router import route

__all__ = ["Routing", "expert_mlps", "route"]
