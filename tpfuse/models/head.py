"""What the models put below and above their blocks: tables of replicated rows, and the head over a split vocabulary."""

from typing import Any

from torch import Tensor, nn

from ..kernels.cross_entropy.op import cross_entropy
from ..kernels.runtime.errors import check
from ..layers.block import Normed
from ..layers.module import ParallelModule, local, on_rows
from ..parallel import TensorParallel
from ..sequence_parallel import gather_linear, gather_linear_cross_entropy
from ..sequence_parallel.loss import gather_stats


class Table(ParallelModule):
    """Learned rows [P, D], replicated: positions, token types."""

    weight: nn.Parameter

    def __init__(self, count: int, width: int, tp: TensorParallel, init_std: float):
        super().__init__(tp)
        self.add_parameter("weight", (count, width), None, init_std)

    def forward(self, index: Tensor) -> Tensor:
        """index int64 [m] of this rank's rows -> [m, D]"""
        return nn.functional.embedding(index, on_rows(local(self.weight), self.tp))


class LMHead(ParallelModule):
    """logits = n W' (+ b), the vocabulary split over the ranks; W is its own, or the embedding's where it is tied."""

    weight: nn.Parameter  # where it is not tied
    bias: nn.Parameter | None

    def __init__(self, vocab_size: int, width: int, *, tp: TensorParallel, bias: bool, tied: bool, init_std: float):
        super().__init__(tp)
        self.vocab_size = vocab_size
        self.first, self.last = tp.chunk(vocab_size, "LMHead: vocab_size")
        self.columns = -(-vocab_size // tp.size)  # the last rank may have fewer
        if not tied:
            self.add_parameter("weight", (vocab_size, width), 0, init_std)
        if bias:
            self.add_parameter("bias", (vocab_size,), 0, "zeros")
        else:
            self.register_parameter("bias", None)

    def forward(self, normed: Normed, weight: Tensor | None = None) -> Tensor:
        """n [R, m, D], the tied weight [V/R, D] or None -> logits [M, V/R]"""
        options: dict[str, Any] = dict(tp=self.tp, recompute=normed.recompute, columns=self.columns)
        return gather_linear(normed.n, self._weight(weight), local(self.bias), **options)

    def loss(self, logits: Tensor, labels: Tensor, options: dict[str, Any]) -> Tensor:
        """Cross-entropy over the split vocabulary: logits [M, V/R], labels [M] global -> a scalar, or [M]."""
        columns = self.last - self.first
        check(
            logits.shape[-1] == columns, f"LMHead: logits must be this rank's {columns} columns, got {logits.shape[-1]}"
        )
        return cross_entropy(
            logits,
            labels,
            first_token=self.first,
            vocab_size=self.vocab_size,
            **options,
            gather=lambda stats: gather_stats(stats, self.tp),
        )

    def loss_and_logits(
        self,
        normed: Normed,
        labels: Tensor | None,
        *,
        weight: Tensor | None,
        options: dict[str, Any],
        keep: bool,
        small: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        """n [R, m, D], labels [M] or None -> the loss where there are labels, logits [M, V/R] where ``keep``.

        ``weight`` [V/R, D] is the tied one, ``options`` are those of the loss.  ``small``: a loss alone is made from
        logits that exist in chunks only and are recomputed in backward, for one GEMM more.
        """
        if labels is None or keep or not small:
            logits = self(normed, weight)
            return None if labels is None else self.loss(logits, labels, options), logits if keep else None
        options = options | dict(
            tp=self.tp,
            first_token=self.first,
            vocab_size=self.vocab_size,
            recompute=normed.recompute,
        )
        loss = gather_linear_cross_entropy(normed.n, self._weight(weight), labels, local(self.bias), **options)
        return loss, None

    def _weight(self, tied: Tensor | None) -> Tensor:
        return local(self.weight) if tied is None else tied
