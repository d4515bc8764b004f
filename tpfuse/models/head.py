"""The parts of models below and above their blocks: tables of replicated rows, replicated linear layers, and the head
over a split vocabulary."""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.gemm.op import linear
from ..kernels.losses.op import Reduction, cross_entropy
from ..kernels.norm import layer_norm
from ..kernels.runtime.leaves import cut
from ..kernels.runtime.main_grad import derived
from ..layers.loss import VocabParallelHead, check_columns
from ..layers.module import ParallelModule, local, on_pieces, on_rows, per_leaf
from ..layers.norm import LayerNorm
from ..layers.wiring import Normed
from ..parallel import TensorParallel
from ..sequence_parallel import gather_linear_cross_entropy
from ..sequence_parallel.loss import gather_stats, leaf_of, loss_of_pieces


class ReplicatedTable(ParallelModule):
    """Learned rows [P, D], replicated: positions, token types."""

    weight: nn.Parameter

    def __init__(self, count: int, width: int, tp: TensorParallel, init_std: float):
        super().__init__(tp)
        self.add_parameter("weight", (count, width), None, init_std)

    def forward(self, index: Tensor) -> Tensor:
        """index int64 [m] of this rank's rows -> [m, D]"""
        weight, leaves = on_rows(local(self.weight), self.tp), max(self.tp.row_leaves, 1)
        pieces = zip(cut("ReplicatedTable", index, 0, leaves), per_leaf(weight, leaves), strict=True)
        return torch.cat([nn.functional.embedding(rows, table) for rows, table in pieces])


class ReplicatedLinear(ParallelModule):
    """A replicated linear layer, for rows of this rank or for values that are the same on every rank."""

    repr_fields = "in_features", "out_features", "activation"
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        tp: TensorParallel,
        init_std: float,
        of_rows: bool,
        activation: str = "none",
        bias: bool = True,
    ):
        super().__init__(tp)
        self.in_features, self.out_features, self.activation, self.of_rows = inputs, outputs, activation, of_rows
        self.add_parameter("weight", (outputs, inputs), None, init_std)
        self.add_parameter("bias", (outputs,), None, "zeros", present=bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [m, K] -> act(W x + b) [m, N]"""
        weight, bias = local(self.weight), local(self.bias)
        run = functools.partial(linear, tile=self.tp.row_tile, fixed=self.tp.bitwise is not None)
        if self.of_rows:
            bias = None if bias is None else on_rows(bias, self.tp)
            leaves = self.tp.row_leaves
            if leaves > 1:
                weight = on_rows(weight, self.tp)
                biases = [None] * leaves if bias is None else per_leaf(bias, leaves)
                pieces = zip(cut("ReplicatedLinear", x, 0, leaves), per_leaf(weight, leaves), biases, strict=True)
                return torch.cat([run(rows, w, b, self.activation) for rows, w, b in pieces])
            weight = derived(lambda w: on_rows(w, self.tp), weight)
        return run(x, weight, bias, self.activation)


class WholeNorm(LayerNorm):
    """A LayerNorm of values that are the same on every rank, as is its gradient."""

    def forward(self, x: Tensor) -> Tensor:
        """x [B, D] -> [B, D]"""
        return layer_norm(x, local(self.weight), local(self.bias), self.eps)


class LMHead(VocabParallelHead):
    """A model's head: its rows are normed ones, and its labels and options have been compared with the call's.

    ``softcap`` bounds the model's logits, softcap tanh(z / softcap) of what the head's own call gives.
    """

    def __init__(self, *args: Any, softcap: float | None = None, **options: Any):
        super().__init__(*args, **options)
        self.softcap = softcap

    def logits(self, normed: Normed, weight: Tensor | None) -> Tensor:
        """n [R, m, D] -> logits [M, V/R]; ``weight`` [V/R, D] is the tied one."""
        return self.capped(self(normed, weight))

    def capped(self, z: Tensor) -> Tensor:
        """Returns what the head's call gives, bounded."""
        return z if self.softcap is None else torch.tanh(z / self.softcap) * self.softcap

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
        logits that exist in chunks only and are recomputed in backward, for one GEMM more; not of soft-capped ones.
        """
        options = options | dict(first_token=self.first, vocab_size=self.vocab_size)
        if labels is None or keep or not small or self.softcap is not None:
            logits = self.logits(normed, weight)
            return None if labels is None else self._loss(logits, labels, options), logits if keep else None
        weight, bias = on_pieces(self._weight(weight), self.tp), on_pieces(self.shard("bias"), self.tp)
        run = lambda normalizer: gather_linear_cross_entropy(
            normed.n, weight, labels, bias, tp=self.tp, recompute=normed.recompute,
            **options | dict(normalizer=normalizer),
        )  # fmt: skip
        return loss_of_pieces(run, labels, _reduction(options), self.tp), None

    def log_probs(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """logits [M, V/R], tokens [M] -> the log-probability of each, as a loss with reduction="none" has it."""
        return -self._loss(logits, tokens, dict(first_token=self.first, vocab_size=self.vocab_size, reduction="none"))

    def _loss(self, logits: Tensor, labels: Tensor, options: dict[str, Any]) -> Tensor:
        check_columns("LMHead: logits", logits.shape[-1], self.vocab_size, self.tp)  # a hook may have changed them
        leaf = leaf_of(self.vocab_size, self.tp)
        run = lambda normalizer: cross_entropy(
            logits, labels, **options | dict(normalizer=normalizer), gather=lambda stats: gather_stats(stats, self.tp),
            leaf=leaf,
        )  # fmt: skip
        return loss_of_pieces(run, labels, _reduction(options), self.tp)


def _reduction(options: Mapping[str, Any]) -> Reduction:
    return Reduction(options["reduction"], options.get("normalizer"))
