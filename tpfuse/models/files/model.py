"""What a model offers to those who read and write its files: the names of its tensors, and what config.json says."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from ...layers.module import Spec, named_specs
from ...parallel import TensorParallel
from ...ranks.messages import gather
from .source import Source

T = TypeVar("T")


class PretrainedModule(nn.Module):
    """A model whose parameters have names in Hugging Face files.

    ``source`` is the directory that the weights came from and ``hf_source`` the contents of its config.json; None for
    a model that was not read.
    """

    tp: TensorParallel
    dp_rank: int | None
    seed: int
    config: Any
    source: Path | None
    hf_source: dict[str, Any] | None
    fresh: tuple[str, ...] = ()  # modules whose weights are drawn where a file has none of them

    @property
    def base_prefix(self) -> str:
        """The prefix of the base model's tensors in a file of the model with its head."""
        raise NotImplementedError

    def groups(self) -> list[dist.ProcessGroup]:
        """Returns the process groups this model knows of: tensor-parallel, data-parallel, then its pipeline's."""
        raise NotImplementedError

    def stages(self, caller: str) -> dist.ProcessGroup | None:
        """Returns the ranks that hold the model's pipeline stages; None where the whole model is here.

        ValueError of ``caller`` where they are not known yet.
        """
        return None

    def over_stages(self, caller: str, value: T) -> list[T]:
        """Returns a value of every stage's, in the order of the pipeline; each rank of it calls this."""
        return gather(value, self.stages(caller))

    def sources(self) -> dict[str, Source]:
        """Returns, for every parameter of the whole model, the tensors of a Hugging Face file that it is made of."""
        raise NotImplementedError

    def hf_name(self, name: str) -> str:
        """Returns a tensor's name in a file that this model writes, for its name in the base model."""
        raise NotImplementedError

    def hf_config(self) -> dict[str, Any]:
        """Returns what config.json says of the class, beside the sizes."""
        raise NotImplementedError

    def ignorable(self) -> tuple[str, ...]:
        """Returns patterns of tensors that a file may hold and this model has no use for."""
        raise NotImplementedError

    def beside_adapters(self) -> dict[str, nn.Module]:
        """Returns what is trained where adapters are, and kept in their files, by its name in a Hugging Face file."""
        return {}

    @property
    def writes(self) -> bool:
        """Whether this rank is the one that writes the files of its stages, of the whole model where that is here."""
        return self.tp.rank == 0 and not self.dp_rank

    def stored_parameters(self) -> Iterator[tuple[str, nn.Parameter, Spec, TensorParallel]]:
        """Yields (name, parameter, spec, tp) of every parameter but those of adapters."""
        for (name, spec, tp), p in zip(named_specs(self), self.parameters(), strict=True):
            if ".lora." not in name:
                yield name, p, spec, tp
