"""What is planned: a job, the ways to split it, and what the pieces of its model cost one rank."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch

from ...models.config.model import ModelConfig

PARTS = GEMM, ATTENTION, MEMORY, TP = "GEMM", "attention", "memory-bound", "tp"  # where a pass spends its time


class Job(NamedTuple):
    """What is trained: ``batch`` sequences of ``seq`` tokens a step, over all ranks."""

    config: ModelConfig
    batch: int
    seq: int
    dtype: torch.dtype = torch.bfloat16
    optimizer: str = "adamw"


class Split(NamedTuple):
    """How a job is spread over dp x tp x pp ranks, numbered as in a mesh ("pp", "dp", "tp"): tp varies fastest.

    ``chunks``: stages that a rank holds of each chain.  ``saving``, ``full``: as of a ledger's Plan.  ``sharded``:
    FSDP2 over dp; else replicas.  ``layers``: the number of blocks of each stage; None: not chosen yet.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    micro_batch: int = 1
    saving: str = "fastest"
    full: bool = False
    sharded: bool = False
    layers: tuple[int, ...] | None = None

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.pp


class Piece(NamedTuple):
    """What one part of a model costs one rank: the embedding, a block, or the head with the loss.

    ``passes``: action kind (F, B, I, W of tpfuse.pipeline.action) -> one of PARTS -> seconds of a micro-batch.
    ``saved``, ``held``: bytes kept from F to B or I, and from I to W.  ``transient``: the most bytes alive beside those
    during a pass.  ``parameters``: elements on this rank, before FSDP.  ``sizes``: (rows, elements of one) -> how many
    parameters are so large, which FSDP cuts by rows; empty where that is not known.  Counts below 0 are of what another
    piece has in this one's place.
    """

    passes: Mapping[str, Mapping[str, float]]
    saved: float
    held: float
    transient: float
    parameters: float
    sizes: Mapping[tuple[int, int], int] = MappingProxyType({})

    def seconds(self, kind: str) -> float:
        """Returns how long a pass takes."""
        return sum(self.passes[kind].values())


class Pieces(NamedTuple):
    """Those of a model under a split; ``rows``: bytes of h that a rank sends to the next stage.

    ``border``: what every stage but the first costs beside its blocks, where a norm that is fused with the block before
    it stands alone; None: nothing.
    """

    embedding: Piece
    blocks: Sequence[Piece]
    head: Piece
    rows: float
    border: Piece | None = None

    def stage(self, layers: range) -> list[Piece]:
        """Returns the pieces of the stage that holds the blocks ``layers``."""
        first = [self.embedding] if layers[0] == 0 else [] if self.border is None else [self.border]
        last = [self.head] if layers[-1] == len(self.blocks) - 1 else []
        return [*first, *(self.blocks[layer] for layer in layers), *last]


class Elements(NamedTuple):
    """How many elements of parameters a rank holds, numbers or arrays: before FSDP, of its shard for good, and whole
    beside the shard at the most."""

    own: Any
    shard: Any
    whole: Any


class Costs(Protocol):
    """Tells what the pieces of a job's model cost; ValueError for a split that the model cannot do."""

    def __call__(self, job: Job, split: Split) -> Pieces: ...
