"""Records of a mixture of experts: how experts are chosen, and rows sorted by expert."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..runtime.errors import check
from ..runtime.rules import POSITIVE, boolean, check_rules, integer, one_of

SCORES = "softmax", "sigmoid", "chosen"


class Routing(NamedTuple):
    """How the experts of a row are chosen, and weighed.

    ``score``: "softmax" over all experts (Shazeer et al. 2017, arXiv:1701.06538; Mixtral, arXiv:2401.04088), "sigmoid"
    of each (DeepSeek-V3, arXiv:2412.19437), or "chosen", a softmax over the logits of the ``k`` chosen ones.
    ``renormalize``: the weights of a row are divided by their sum, then multiplied by ``scale``.  Of several ``groups``
    of experts only the ``best_groups`` are chosen from, whose two largest scores have the largest sum.  ``biased``: a
    layer has a bias [E], which is added to the scores for the choice alone (arXiv:2408.15664).
    """

    k: int
    score: str = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    groups: int = 1
    best_groups: int = 1
    biased: bool = False

    @property
    def normalized(self) -> str:
        """The map from logits to weights: "sigmoid" or "softmax" of each, "sigmoid sum" over the sum of those chosen,
        "chosen", a softmax over the chosen logits, which a softmax over its sum is too."""
        if self.score == "sigmoid":
            return "sigmoid sum" if self.renormalize else "sigmoid"
        return "softmax" if self.score == "softmax" and not self.renormalize else "chosen"


_RULES = dict(
    k=integer(),
    score=one_of(SCORES),
    renormalize=boolean,
    scale=POSITIVE,
    groups=integer(),
    best_groups=integer(),
    biased=boolean,
)


def check_routing(caller: str, routing: Routing, experts: int) -> None:
    """Raises ValueError, in the name of ``caller``, for a routing that so many experts do not allow."""
    check_rules(caller, routing._asdict(), _RULES)
    k, groups, best = routing.k, routing.groups, routing.best_groups
    check(k <= experts, f"{caller}: k must be 1 to num_experts={experts}, got {k}")
    check(experts % groups == 0, f"{caller}: num_experts={experts} is not divisible by groups={groups}")
    check(best <= groups, f"{caller}: best_groups must be 1 to groups={groups}, got {best}")
    allowed = experts // groups * best
    check(k <= allowed, f"{caller}: k must be at most {allowed}, the experts of best_groups={best} groups, got {k}")


class Routed(NamedTuple):
    """The router's results for m rows."""

    logits: Tensor  # [m, E]
    weights: Tensor  # [m, k]
    chosen: Tensor  # int32 [m, k]


class ExpertRows(NamedTuple):
    """Rows sorted by expert, of which expert e has the places ``offsets[e]`` to ``offsets[e + 1]``: at place i stands
    row ``row_index[i]`` of a tensor.  Without it the tensor itself is sorted."""

    row_index: Tensor | None  # int64 [n]
    offsets: Tensor  # int64 [experts + 1]


class Sides(NamedTuple):
    """The rows of dW_e = dy_e' x_e: of dy and x sorted by expert, or by the index that brings them into that order."""

    dy: Tensor  # [.., N]
    x: Tensor  # [.., K]
    offsets: Tensor  # int64 [experts + 1], as of ExpertRows
    dy_index: Tensor | None = None  # int64 [n]
    x_index: Tensor | None = None


class ExpertOrder(NamedTuple):
    """The order of chosen [m, k] by expert, and of one expert by row: the numbers row * k + slot in it."""

    numbers: Tensor  # int64 [m k]
    offsets: Tensor  # int64 [experts + 1]

    @classmethod
    def of(cls, chosen: Tensor, experts: int) -> "ExpertOrder":
        """Sorts on the device, whose host learns no number of rows."""
        sorted_experts, numbers = torch.sort(chosen.flatten(), stable=True)
        bounds = torch.arange(experts + 1, dtype=chosen.dtype, device=chosen.device)
        return cls(numbers, torch.searchsorted(sorted_experts, bounds))

    def rows(self, k: int) -> ExpertRows:
        """Returns where the rows stand in a tensor [m, D]."""
        return ExpertRows(self.numbers // k, self.offsets)

    def places(self, k: int, m: int) -> ExpertRows:
        """Returns where they stand in parts [k, m, D], seen as [k m, D]: slot after slot."""
        return ExpertRows(self.numbers % k * m + self.numbers // k, self.offsets)
