"""The process groups of a model: tensor-parallel, data-parallel, and over its pipeline stages."""

from typing import TypeVar

import torch.distributed as dist

from ..parallel import TensorParallel, resolve
from ..ranks.messages import gather

T = TypeVar("T")


class Groups:
    """The process groups that a model knows of, by their names, so that a model can be copied and pickled.

    ``experts``: the ranks that hold experts, ``tp`` or those of all replicas.  ``dp``, ``dp_rank``: the replicas, where
    the model was given them.  ``pp_name``: the group over its pipeline stages, known once a schedule has been made;
    ``staged``: whether it has stages.
    """

    def __init__(self, tp: TensorParallel, dp: dist.ProcessGroup | None, *, staged: bool):
        self.tp, self.experts, self.staged = tp, tp, staged
        self.dp_rank = None if dp is None else dp.rank()
        self.dp_name: str | None = None if dp is None else dp.group_name
        self.pp_name: str | None = None

    def all(self) -> list[dist.ProcessGroup]:
        """Returns every group, in the order tp (with cp), dp, pp."""
        names = self.tp.call_group_name, self.dp_name, self.pp_name
        return [resolve(name) for name in names if name is not None]

    @property
    def cp(self) -> dist.ProcessGroup | None:
        """The context-parallel ranks; None for none."""
        return None if self.tp.cp is None else self.tp.cp.group

    @property
    def dp(self) -> dist.ProcessGroup | None:
        """The replicas that the model was given; None for none."""
        return None if self.dp_name is None else resolve(self.dp_name)

    def pp(self, caller: str) -> dist.ProcessGroup | None:
        """Returns the ranks that hold the model's pipeline stages; None for a whole model.

        ValueError of ``caller`` before a schedule has been made.
        """
        if self.staged and self.pp_name is None:
            raise ValueError(
                f"{caller}: the model is one rank's stages, and the others are not known before"
                " tpfuse.pipeline.schedule(model, mesh, ...)"
            )
        return None if self.pp_name is None else resolve(self.pp_name)

    def over_stages(self, caller: str, value: T) -> list[T]:
        """Gathers a value of every pipeline stage's rank, in their order; each rank of the pipeline calls it."""
        return gather(value, self.pp(caller))

    @property
    def writes(self) -> bool:
        """True where this rank writes the files of its stages: the first of those with its calls, and of replicas."""
        return self.tp.rank == self.tp.cp_rank == 0 and not self.dp_rank
