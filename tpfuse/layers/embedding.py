"""Embedding with the vocabulary split over the ranks, as torch.chunk splits it; any vocabulary size, no padding.

ids [M], the same on every rank  ->  masked local lookup [M, D]  ->  exchange  ->  parts [R, m, D]
"""

from torch import Tensor

from ..kernels.cross_entropy import check_ids
from ..kernels.embedding import embedding
from ..kernels.reduce_bias_dropout_add_norm import reduce_bias_dropout_add_norm
from ..parallel import TensorParallel
from ..sequence_parallel import leave_parts
from ._module import ParallelModule, local


class VocabParallelEmbedding(ParallelModule):
    """torch.nn.Embedding with its rows split: ids [M] (or [S, B]; any id below 0 gives a zero row) -> this rank's rows [m, D]."""

    def __init__(self, num_embeddings: int, embedding_dim: int, *, tp: TensorParallel | None = None, init_std: float = 0.02, **factory):
        super().__init__(tp)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.first, _ = self.tp.chunk(num_embeddings, "VocabParallelEmbedding: num_embeddings")
        self.add_parameter("weight", (num_embeddings, embedding_dim), 0, init_std, **factory)
        self.initialize_alone()

    def parts(self, ids: Tensor) -> Tensor:
        """-> parts [R, m, D], to be summed over R"""
        return leave_parts(embedding(local(self.weight), ids.reshape(-1), first=self.first), self.tp)

    def forward(self, ids: Tensor) -> Tensor:
        check_ids("VocabParallelEmbedding: ids", ids.clamp(min=0), self.num_embeddings)
        return reduce_bias_dropout_add_norm(self.parts(ids))[0]
