"""Sparse gradients over the data-parallel axis.

algorithm  sparse_sum: thresholds, regions, the k largest sums
entries    a few entries of a long vector, chosen the same way every time
hook       OkTopk and ok_topk_hook, for DistributedDataParallel
messages   uneven messages between replicas, destinations rotated, bytes counted
"""

from .algorithm import TopkState
from .hook import OkTopk, Unit, ok_topk_hook, unit_kind

__all__ = ["OkTopk", "TopkState", "Unit", "ok_topk_hook", "unit_kind"]
