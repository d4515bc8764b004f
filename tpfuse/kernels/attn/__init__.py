"""Attention on the fused qkv, and of a chunk of queries over all keys.

config           launch parameters, and which form a kernel takes
cpu              blocked implementation for CPUs
decode           Triton: one new token against a cache
op               equations, autograd, attention()
options          its arguments as one record
reference        the definition in plain torch
tiles            on CPUs, in tiles of fixed shapes: a query has the same bits in training and behind a cache
torch_cpu        torch's flash attention on a CPU, of plain calls
torch_forward    torch's flash attention as forward, where it computes what is asked for
triton_backward  Triton: dk and dv in two forms, then dq
triton_forward   Triton: forward in two forms, and q and k rotated ahead
triton_records   what launchers hand to kernels, as records
triton_tiles     Triton: what sees what, tiles of scores, rotation, the dropout mask
"""

from .op import attend_queries, attention

__all__ = ["attend_queries", "attention"]
