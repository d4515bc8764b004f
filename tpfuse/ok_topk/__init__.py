"""Sparse gradients over the data-parallel axis."""

from .algorithm import State
from .hook import OkTopk, Unit, ok_topk_hook

__all__ = ["OkTopk", "State", "Unit", "ok_topk_hook"]
