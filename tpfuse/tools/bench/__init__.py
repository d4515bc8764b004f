"""Kernels alone, at any shape: every op against plain torch, torch.compile and, where installed, Liger Kernel.

command     python -m tpfuse bench
count       bytes, flops and kernels of a call
definition  Bench: a benchmark of an op; tpfuse's own files, and a user's
measure     time and memory of calls that take turns; the last-level cache
ops/        one file an op: its inputs and implementations
output      rows as a table, CSV and JSON
plots       the roofline, and speed over size
roofline    copy bandwidth and matrix rate, measured
run         one op at one shape: errors, times, rates and shares of the roofline
"""

from .definition import Bench, Random, acc

__all__ = ["Bench", "Random", "acc"]
