"""Low-rank adapters of experts: y = x W_e' + s (x A_e') B_e' of each expert e, s = alpha / rank.

              W                A             B
    fc1       [E, F, 2, D]     [E, r, D]     [E, F, 2, r]
    fc2       [E, D, F]        [E, r, F]     [E, D, r]

They are split by experts, as the weights are, and so are complete after a bare backward.  PEFT adapts the same tensors
by ``target_parameters``, gate and up together with one A.  Where an older config names gate and up as layers of each
expert, PEFT gives fc1's pair twice the rank at the same scale, so that each has columns of A of its own.
"""

from collections.abc import Callable

from torch import Tensor

from ..kernels.experts.low_rank import LowRank
from ..parallel import TensorParallel
from ..sequence_parallel.experts import ExpertAdapters
from .linear import Adapter
from .module import local, on_pieces
from .moe import ParallelMoE
from .projections import EXPERT_WEIGHTS


class ExpertLoRA(Adapter):
    """The adapters of experts: ``A_fc1`` and ``B_fc1`` beside fc1, ``A_fc2`` and ``B_fc2`` beside fc2, of those that
    are adapted.

    ``apart``: fc1's rank is twice ``rank``, and its scale the same.
    """

    def _make(self, layer: ParallelMoE, add: Callable[..., None]) -> None:
        self.experts = layer.experts
        self.leaves = [leaf for leaf, ((_, name),) in self.parts.items() if name in self.adapted]
        for leaf in self.leaves:
            (E, *rows, K), r = layer.specs[leaf].shape, self.rank * (2 if self.apart and leaf == "fc1" else 1)
            add(f"A_{leaf}", (E, r, K), 0, self.std_of(K))
            add(f"B_{leaf}", (E, *rows, r), 0, "zeros")

    def ranks_of(self, name: str) -> TensorParallel:
        return self.experts

    def pairs(self) -> ExpertAdapters:
        """Returns what stands beside ``fc1`` and ``fc2``, of this rank's experts."""
        return ExpertAdapters(*(self._pair(leaf) if leaf in self.leaves else None for leaf in EXPERT_WEIGHTS))

    def _pair(self, leaf: str) -> LowRank:
        a, b = (on_pieces(getattr(self, f"{letter}_{leaf}"), self.tp) for letter in "AB")
        return LowRank(a, b.flatten(1, -2), self.scale)

    def deltas(self) -> dict[str, Tensor]:
        deltas = {}
        for leaf in self.leaves:
            (a, b, scale), rows = self._pair(leaf), local(getattr(self, f"B_{leaf}")).shape[:-1]
            deltas[leaf] = (scale * (b @ a)).view(*rows, -1)
        return deltas
