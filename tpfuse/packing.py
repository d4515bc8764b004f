"""Packed documents: rows with little padding, shared out to replicas.  The code is ``tpfuse/training/packing.py``."""

from .training.packing import Balance, PackedBatch, balance, document_cost, pack, packed_batch

__all__ = ["Balance", "PackedBatch", "balance", "document_cost", "pack", "packed_batch"]
