"""The public address of :mod:`tpfuse.training.packing`."""

from .training.packing import Balance, PackedBatch, balance, document_cost, pack, packed_batch

__all__ = ["Balance", "PackedBatch", "balance", "document_cost", "pack", "packed_batch"]
