"""The planner's records: a job, a split of it over ranks, and the costs of a model's pieces on one rank."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch

from ...models.config.model import ModelConfig
from ..ledger.dryrun import Plan

# where a pass spends its time
PARTS = GEMM, ATTENTION, MEMORY, TP, CP = "GEMM", "attention", "memory-bound", "tp", "cp"


class Job(NamedTuple):
    """A training job: ``batch`` sequences of ``seq`` tokens a step, over all ranks."""

    config: ModelConfig
    batch: int
    seq: int
    dtype: torch.dtype = torch.bfloat16
    optimizer: str = "adamw"


class Split(NamedTuple):
    """A split of a job over dp x cp x tp x pp ranks, numbered as in a mesh ("pp", "dp", "cp", "tp"): tp varies fastest.

    ``chunks``: stages that a rank holds of each chain.  ``saving``, ``full``, ``over_replicas``, ``cp``, ``cp_kind``:
    as of a ledger's Plan.  ``sharded``: FSDP2 over dp x cp; else replicas.  ``layers``: the number of blocks of each
    stage; None: not chosen yet.
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
    over_replicas: bool = False
    layers: tuple[int, ...] | None = None
    cp: int = 1
    cp_kind: str = "auto"

    @property
    def ranks(self) -> int:
        return self.dp * self.cp * self.tp * self.pp

    @property
    def shards(self) -> int:
        """The ranks that FSDP divides a parameter among."""
        return self.dp * self.cp if self.sharded else 1

    @property
    def expert_replicas(self) -> int:
        """How many replicas divide the experts among their ranks."""
        return self.dp if self.over_replicas else 1

    @property
    def stages(self) -> int:
        return self.pp * self.chunks

    @property
    def mesh(self) -> str:
        """Sizes of the mesh, as text."""
        cp = f" x cp {self.cp} ({self.cp_kind})" if self.cp > 1 else ""
        return f"dp {self.dp}{cp} x tp {self.tp} x pp {self.pp}"

    def plan(self, job: Job) -> Plan:
        """Returns a replica's run of a micro-batch, without stages."""
        return Plan(
            self.tp, self.dp, job.seq, self.micro_batch, saving=self.saving, dtype=job.dtype, full=self.full,
            over_replicas=self.over_replicas, cp=self.cp, cp_kind=self.cp_kind,
        )  # fmt: skip


class PieceCost(NamedTuple):
    """The cost of one part of a model on one rank: the embedding, a block, or the head with the loss.

    ``passes``: action kind (F, B, I, W of tpfuse.pipeline.action) -> one of PARTS -> seconds of a micro-batch.
    ``saved``, ``held``: bytes kept from F to B or I, and from I to W.  ``transient``: the most bytes alive besides
    those during a pass.  ``parameters``: elements on this rank, before FSDP; ``experts``: those of them that are of
    experts divided among replicas, which neither sum nor cut them.  ``sizes``: (rows, elements of a row) -> number of
    the others of that size, which FSDP cuts by rows; empty where unknown.  Negative counts are of parameters that
    another piece has in place of this one.
    """

    passes: Mapping[str, Mapping[str, float]]
    saved: float
    held: float
    transient: float
    parameters: float
    sizes: Mapping[tuple[int, int], int] = MappingProxyType({})
    experts: float = 0.0

    def seconds(self, kind: str) -> float:
        return sum(self.passes[kind].values())

    def share(self, dp: int) -> float:
        """Returns the elements in the first rank's shard under FSDP over ``dp`` ranks: of each parameter's rows 1 / dp,
        rounded up; an even cut where sizes are unknown."""
        if not self.sizes:
            return (self.parameters - self.experts) / dp + self.experts
        return self.experts + sum(count * -(-rows // dp) * columns for (rows, columns), count in self.sizes.items())


class Pieces(NamedTuple):
    """Costs of a model's pieces under a split; ``hop_bytes``: bytes of h that a rank sends to the next stage.

    ``border``: what every stage but the first costs besides its blocks, where a norm that is otherwise fused with the
    block before it stands alone; None: nothing.
    """

    embedding: PieceCost
    blocks: Sequence[PieceCost]
    head: PieceCost
    hop_bytes: float
    border: PieceCost | None = None

    def stage(self, layers: range) -> list[PieceCost]:
        """Returns the pieces of the stage that holds the blocks ``layers``."""
        begin = [self.embedding] if layers[0] == 0 else [] if self.border is None else [self.border]
        end = [self.head] if layers[-1] == len(self.blocks) - 1 else []
        return [*begin, *(self.blocks[layer] for layer in layers), *end]


class Elements(NamedTuple):
    """Parameter elements of a rank or of stages, numbers or arrays: before FSDP, in the FSDP shard, the most that FSDP
    has gathered at once, and those of experts that are divided among replicas."""

    local: Any
    shard: Any
    gathered: Any
    experts: Any = 0.0


class CostFunction(Protocol):
    """A function from a job and a split to its pieces' costs; ValueError for a split that the model cannot do."""

    def __call__(self, job: Job, split: Split) -> Pieces: ...
