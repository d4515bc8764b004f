"""The names of a model's tensors in Hugging Face files, and what its config.json says."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from ...layers.module import Spec
from ...layers.shards import named_specs
from ...parallel import TensorParallel
from ..classify import ClassifierHead
from ..config.model import ModelConfig
from ..families import Family
from ..groups import Groups
from ..stages import ModelStages
from .source import Source

_ABOVE = "pooler.", "transform.", "transform_norm.", "head."  # modules above an encoder's blocks


class FileOrigin(NamedTuple):
    """The directory that a model's weights came from, if any, and the contents of its config.json."""

    path: Path | None
    config: dict[str, Any]


@dataclass(frozen=True)
class ModelFiles:
    """The tensors of a model in Hugging Face files, by its family's table."""

    module: nn.Module
    config: ModelConfig
    groups: Groups
    stages: ModelStages
    classifier: ClassifierHead | None
    origin: FileOrigin | None

    @property
    def base_prefix(self) -> str:
        """The prefix of the base model's tensors in a file of the model with its head."""
        return self.config.hf.base_prefix

    def beside_adapters(self) -> dict[str, nn.Module]:
        """Returns what is trained where adapters are, and kept in their files, by its name in a Hugging Face file.

        That is the head that classifies, with the linear layer below it where no other class has that.
        """
        if self.classifier is None:
            return {}
        dense, pooler = self.classifier.below.dense, getattr(self.module, "pooler", None)
        return {self.classifier.hf_module: self.classifier} | ({dense: pooler} if dense and pooler is not None else {})

    def sources(self) -> dict[str, Source]:
        """Returns, by the parameters' names, the tensors of a Hugging Face file that each is made of."""
        sources = self.config.hf.sources(self.config)
        if self.classifier is not None:
            sources = sources | self.classifier.sources()
        return {name: sources[name] for name, *_ in named_specs(self.module) if name in sources}

    def hf_name(self, name: str) -> str:
        """Returns a tensor's name in a file that this model writes, for its name in the base model."""
        if not self.stages.head and self.classifier is None:
            return name
        heads = (*self.config.hf.head_prefixes, *(f"{module}." for module in self.beside_adapters()))
        return name if name.startswith(heads) else self.base_prefix + name

    def hf_config(self) -> dict[str, Any]:
        """Returns what config.json says of the class, beside the sizes."""
        family = self.config.hf
        if self.classifier is not None:
            previous = {} if self.origin is None else self.origin.config
            return self.classifier.classifier.to_hf(family, previous, self.classifier.p)
        return {"architectures": [family.architecture if self.stages.head else family.base_architecture]}

    def ignorable(self, names: Iterable[str]) -> set[str]:
        """Returns those of a file's tensors that this model has no use for.

        These are the family's, those of other stages, and what is above the blocks: a tied or absent head, an encoder's
        pooler or head.
        """
        family = self.config.hf
        if not family.causal:
            sources = family.sources(self.config).items()
            above = {n for name, source in sources if name.startswith(_ABOVE) for n in source.names}
        elif self.config.tie_embeddings or not (self.stages.head and self.stages.has_last):
            above = head_weights(family)
        else:
            above = set()
        absent = above | self.stages.absent_tensors()
        return {n for n in names if n in absent or any(re.fullmatch(pattern, n) for pattern in family.ignorable)}

    def stored_parameters(self) -> Iterator[tuple[str, nn.Parameter, Spec, TensorParallel]]:
        """Returns (name, parameter, spec, tp) of every parameter but those of adapters."""
        return (entry for entry in named_specs(self.module) if ".lora." not in entry[0])


def head_weights(family: Family) -> set[str]:
    """Returns the names that the weight of a family's language-model head may have in a file."""
    return {f"{prefix}weight" for prefix in family.head_prefixes}


def tied_names(config: ModelConfig) -> tuple[str, str]:
    """Returns the names in a file of the embedding's table, and of a head's weight that is apart from it."""
    sources = config.hf.sources(replace(config, tie_embeddings=False))
    return sources["embedding.weight"].names[0], sources["head.weight"].names[0]
