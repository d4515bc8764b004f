"""Tools around the library: ledger, planner, doctor, benchmarks, explain, watch, parity.  Nothing else imports them.

accuracy   errors that rounding explains
bench/     kernels alone, at any shape: python -m tpfuse bench
bits/      bits over layouts of the ranks, and the first op whose differ: python -m tpfuse bits
command    the command line of python -m tpfuse: what commands have in common, without torch
doctor/    what an installation is, what runs where, whether it works: tpfuse.doctor()
explain    which path each layer's messages take, and why
html       pages in one file, which ask nothing of the network
ledger/    bytes, flops, memory and time: measured and predicted
nearest    proposes a name for one that is not there
options    options of several commands whose choices are the library's tables
parity     a model at one rank and at several, tensor by tensor
pipeline/  pictures and a page of schedules, and python -m tpfuse pipeline
plan/      what a split of a model over machines would take
watch      finds the first op whose output is not finite
"""
