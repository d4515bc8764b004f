"""Embedding with the vocabulary split over the ranks, as torch.chunk splits it; any vocabulary size, no padding.

ids [M], the same on every rank  ->  masked local lookup [M, D]  ->  exchange  ->  parts [R, m, D]
"""

import torch
from torch import Tensor, nn

from ..kernels.lookup.op import embedding
from ..kernels.losses.op import check_ids
from ..kernels.norm import reduce_bias_dropout_add_norm
from ..parallel import TensorParallel
from ..sequence_parallel import leave_parts
from .module import ParallelModule, on_pieces

_DTYPES = torch.float64, torch.float32, torch.bfloat16, torch.float16


class VocabParallelEmbedding(ParallelModule):
    """torch.nn.Embedding with its rows split over the ranks.

    ids int64 [M] or [S, B] -> this rank's rows [m, D]; an id below 0 gives a row of zeros.  ``scale`` multiplies the
    rows, rounded to their dtype.
    """

    repr_fields = "num_embeddings", "embedding_dim"
    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        tp: TensorParallel | None = None,
        scale: float | None = None,
        init_std: float = 0.02,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__(tp)
        self.num_embeddings, self.embedding_dim, self.scale = num_embeddings, embedding_dim, scale
        self._rounded = {} if scale is None else {d: torch.tensor(scale, dtype=d, device="cpu").item() for d in _DTYPES}
        self.first, _ = self.tp.chunk(num_embeddings, "VocabParallelEmbedding: num_embeddings")
        self.add_parameter("weight", (num_embeddings, embedding_dim), 0, init_std, dtype=dtype, device=device)
        self.initialize_alone()

    def parts(self, ids: Tensor) -> Tensor:
        """Returns parts [R, m, D], to be summed over R."""
        rows = embedding(on_pieces(self.shard("weight"), self.tp), ids.reshape(-1), first=self.first)
        return leave_parts(self.scaled(rows), self.tp)

    def scaled(self, rows: Tensor) -> Tensor:
        """Returns rows of the table times ``scale``."""
        if self.scale is None:
            return rows
        return rows * self._rounded[rows.dtype]

    def forward(self, ids: Tensor) -> Tensor:
        """Returns rows [m, D]; ValueError for an id beyond the vocabulary."""
        check_ids("VocabParallelEmbedding: ids", ids.clamp(min=0), self.num_embeddings)
        return reduce_bias_dropout_add_norm(self.parts(ids), leaves=self.tp.row_leaves)[0]
