"""Is a shape fast on this card?  Every op against plain torch, torch.compile and, where installed, Liger Kernel.

definition   what an op's file holds: Bench
ops          one file an op
count        what a call moves, computes and launches
measure      time and memory of calls that take turns
roofline     the card's copy bandwidth and matrix rate
run          one op at one shape: a row of figures for every mode and provider
output       rows as a table, CSV and JSON
plots        pictures
command      python -m tpfuse bench
"""

from .definition import Bench, Random, acc

__all__ = ["Bench", "Random", "acc"]
