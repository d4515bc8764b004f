"""Losses over a vocabulary that is split over the ranks, and a head that makes its logits.

    logits [..., V/R], this rank's columns          cross_entropy, log_probs         four numbers a row travel
    x [m, D] and W [V/R, D], no logits              linear_cross_entropy             the rows too

What comes out is the same on every rank, and the gradients are complete.  A slice is split as torch.chunk splits, so
that any vocabulary size works; the last ranks may have fewer columns.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..kernels.losses.op import Reduction
from ..kernels.losses.op import cross_entropy as kernel
from ..kernels.losses.options import IGNORE
from ..kernels.runtime.errors import check
from ..parallel import TensorParallel
from ..ranks.agreement import agreement_of
from ..sequence_parallel import gather_linear, gather_linear_cross_entropy
from ..sequence_parallel.loss import gather_stats, leaf_of, loss_of_pieces
from .module import ParallelModule, local, on_pieces
from .wiring import Normed


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    tp: TensorParallel | None = None,
    ignore_index: int = IGNORE,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    normalizer: float | Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Returns the cross-entropy of split logits, fp32 (fp64 for fp64), the same on every rank.

    Args:
        logits: [..., V/R], this rank's columns, as :class:`ColumnParallelLinear` and :class:`VocabParallelHead` leave
            them.
        labels: int64 [...], global token ids, the same on every tensor-parallel rank; of context-parallel ones each has
            those of its piece, and the loss is that of all pieces.
        vocab_size: V, of the whole vocabulary, which smoothing counts.
        ignore_index: rows with this label count nothing.
        label_smoothing: the share of the target that is spread over the vocabulary, in [0, 1).
        z_loss: the weight of the squared logsumexp that is added.
        normalizer: divides the summed loss in place of the count of valid labels; with "mean" only.
        reduction: "mean", "sum", or "none" for the loss of each row, [...], 0 where it is ignored.

    ValueError for logits that are not this rank's columns (gathered ones, say), shapes that do not agree or, on CPU, a
    label outside 0 to V - 1.
    """
    tp = TensorParallel() if tp is None else tp
    first_token = check_columns("cross_entropy: logits", logits.shape[-1], vocab_size, tp)
    loss = LossOptions(
        vocab_size, ignore_index, label_smoothing, z_loss=z_loss, normalizer=normalizer, reduction=reduction
    )
    loss.compare("cross_entropy", labels, tp)
    run = lambda normalizer: kernel(
        logits, labels, first_token=first_token, gather=lambda stats: gather_stats(stats, tp), vocab_size=vocab_size,
        ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss, normalizer=normalizer,
        reduction=reduction, leaf=leaf_of(vocab_size, tp),
    )  # fmt: skip
    return loss_of_pieces(run, labels, Reduction(reduction, normalizer), tp, ignore_index=ignore_index)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    vocab_size: int,
    tp: TensorParallel | None = None,
    ignore_index: int = IGNORE,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    normalizer: float | Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Returns :func:`cross_entropy` of x W' + b, whose logits exist in chunks only and are made again in backward.

    x [m, D] are this rank's rows (without sequence parallelism all M), weight [V/R, D] and bias [V/R] this rank's rows
    of the vocabulary, labels int64 [M] of all rows.  The rest is as there, ValueErrors too.
    """
    name, tp = "linear_cross_entropy", TensorParallel() if tp is None else tp
    first_token = check_columns(f"{name}: weight", len(weight), vocab_size, tp)
    check(x.dim() == 2, f"{name}: x must be rows [m, D], got {tuple(x.shape)}")
    loss = LossOptions(
        vocab_size, ignore_index, label_smoothing, z_loss=z_loss, normalizer=normalizer, reduction=reduction
    )
    loss.compare(name, labels, tp)
    weight, bias = on_pieces(weight, tp), on_pieces(bias, tp)
    run = lambda normalizer: gather_linear_cross_entropy(
        x, weight, labels, bias, tp=tp, first_token=first_token, vocab_size=vocab_size,
        ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss, normalizer=normalizer,
        reduction=reduction,
    )  # fmt: skip
    return loss_of_pieces(run, labels, Reduction(reduction, normalizer), tp, ignore_index=ignore_index)


def log_probs(
    logits: Tensor, labels: Tensor, *, vocab_size: int, tp: TensorParallel | None = None, ignore_index: int = IGNORE
) -> Tensor:
    """Returns log softmax(logits) at the labels, [...], with its gradient: 0 where a label is ``ignore_index``.

    The arguments are those of :func:`cross_entropy`.
    """
    return -cross_entropy(logits, labels, vocab_size=vocab_size, tp=tp, ignore_index=ignore_index, reduction="none")


class VocabParallelHead(ParallelModule):
    """logits = x W' (+ b) over a vocabulary of any size, split over the ranks as :class:`VocabParallelEmbedding` is.

    The methods take the embedding's weight in place of the head's own, where the two are tied (``tied=True``: it has
    none).
    """

    repr_fields = "hidden_size", "vocab_size"
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        bias: bool = False,
        *,
        tp: TensorParallel | None = None,
        tied: bool = False,
        init_std: float = 0.02,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__(tp)
        self.first, self.last = self.tp.chunk(vocab_size, f"{type(self).__name__}: vocab_size")
        self.columns = self.tp.slice_size(vocab_size)  # the last ranks may have fewer
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        shape = vocab_size, hidden_size
        self.add_parameter("weight", shape, 0, init_std, present=not tied, dtype=dtype, device=device)
        self.add_parameter("bias", (vocab_size,), 0, "zeros", present=bias, dtype=dtype, device=device)
        self.initialize_alone()
        if tied:
            self._agreement = None  # calls are given a slice of the vocabulary, which ranks may have more or less of

    def forward(self, x: Tensor | Normed, weight: Tensor | None = None) -> Tensor:
        """x [m, D] (without sequence parallelism [M, D]), or a block's n -> logits [M, V/R]"""
        n, recompute, _ = x if isinstance(x, Normed) else Normed(self._rows(x))
        return gather_linear(
            n,
            on_pieces(self._weight(weight), self.tp),
            on_pieces(self.shard("bias"), self.tp),
            tp=self.tp,
            recompute=recompute,
            columns=self.columns,
        )

    def loss(self, x: Tensor, labels: Tensor, weight: Tensor | None = None, **options: Any) -> Tensor:
        """x [m, D], labels int64 [M] -> :func:`linear_cross_entropy`, whose options these are; no logits are kept."""
        options |= dict(tp=self.tp, vocab_size=self.vocab_size)
        return linear_cross_entropy(self._rows(x), self._weight(weight), labels, local(self.shard("bias")), **options)

    def _rows(self, x: Tensor) -> Tensor:
        width = x.shape[-1] if x.dim() else 0
        rule = f"VocabParallelHead: x must be rows [m, {self.hidden_size}]"
        check(x.dim() == 2 and width == self.hidden_size, f"{rule}, got {tuple(x.shape)}")
        return x

    def _weight(self, tied: Tensor | None) -> Tensor:
        weight = self.shard("weight") if tied is None else tied
        if weight is None:
            raise ValueError(
                "VocabParallelHead: a tied head is given the embedding's weight: head(x, embedding.weight)"
            )
        return local(weight)


def check_columns(subject: str, columns: int, vocab_size: int, tp: TensorParallel) -> int:
    """Returns the global id of this rank's first token; ValueError where ``columns`` are not this rank's."""
    first_token, end_token = tp.chunk(vocab_size, f"{subject.partition(':')[0]}: vocab_size")
    hint = " (they are gathered: give the slice)" if columns == vocab_size != end_token - first_token else ""
    rule = f"{subject} must be this rank's {end_token - first_token} of the {vocab_size} tokens"
    check(columns == end_token - first_token, f"{rule}, got {columns}{hint}")
    return first_token


class LossOptions(NamedTuple):
    """Options of a loss, as ranks compare them; see :func:`cross_entropy`."""

    vocab_size: int
    ignore_index: int
    label_smoothing: float
    z_loss: float
    normalizer: float | Tensor | None
    reduction: str

    def compare(self, name: str, labels: Tensor, tp: TensorParallel) -> None:
        """Compares the first call of each kind over the ranks, which must have the same labels and options."""
        if tp.size > 1 and not torch.compiler.is_compiling() and tp.group is not None:
            agreement_of(tp.group, name, each_call=False)(tp.group, {"labels": labels} | self._asdict(), {})
