"""The part of a model that generation uses, as a protocol: GPT has it, and imports generation."""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...layers.call import Rope, Ropes
from ...layers.embedding import VocabParallelEmbedding
from ...layers.wiring import Normed
from ...parallel import TensorParallel
from ..config.gpt import GPTConfig
from ..groups import Groups
from ..head import LMHead, ReplicatedTable
from ..inputs import Inputs
from ..rows import BatchRows
from ..stages import ModelStages


class CausalModel(Protocol):
    """A causal language model; its weights, and the parts of its forward pass."""

    tp: TensorParallel
    groups: Groups
    config: GPTConfig
    stages: ModelStages
    embedding: VocabParallelEmbedding
    positions: ReplicatedTable | None
    input_norm: Any
    blocks: nn.ModuleList
    head: LMHead | None

    def modules(self) -> Iterator[nn.Module]: ...
    def parameters(self) -> Iterator[nn.Parameter]: ...
    def eval(self) -> Any: ...
    def _compare(self, call: str, arguments: dict[str, Any]) -> None: ...
    def _check_inputs(self, inputs: Inputs) -> None: ...
    def _embed(
        self, rows: BatchRows, tokens: Tensor, position_ids: Tensor | None, rng: Tensor | None
    ) -> tuple[Tensor, Normed]: ...
    def _rope(
        self, rows: BatchRows, position_ids: Tensor | None, device: torch.device, below: int | None = None
    ) -> Rope | Ropes | None: ...
    def _tied(self) -> Tensor | None: ...
