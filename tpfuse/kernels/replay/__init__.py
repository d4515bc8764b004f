"""Calls that start kernels, recorded once and done again without their Python.

calls     a call's kind, and the replay of one whose kind is known
recorder  the events of a call: allocations, ops of torch, kernels started
tape      a Python function, written from recorded events, that repeats them on other tensors
"""

from .calls import UNKNOWN, Composed, Replayed, eager, on_cpu, read
from .recorder import active_recorder

REPLAY = True  # False: every launcher runs every time

__all__ = ["REPLAY", "UNKNOWN", "Composed", "Replayed", "active_recorder", "eager", "on_cpu", "read"]
