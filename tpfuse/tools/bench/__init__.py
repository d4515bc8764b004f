"""Is a shape fast on this card?  Every op against plain torch, torch.compile and, where installed, Liger Kernel.

command     python -m tpfuse bench
count       what a call moves, computes and launches
definition  Bench: what an op's file holds; tpfuse's own files, and a user's
measure     time and memory of calls that take turns; the last-level cache
ops/        one file an op: what is timed, and against what
output      rows as a table, CSV and JSON
plots       the roofline, and speed over size
roofline    copy bandwidth and matrix rate, measured and by data sheet
run         one op at one shape: errors, times, rates and what they are a share of
"""

from .definition import Bench, Random, acc

__all__ = ["Bench", "Random", "acc"]
