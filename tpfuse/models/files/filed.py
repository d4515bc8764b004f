"""What a model's tensors are called in Hugging Face files, by its family's table."""

from pathlib import Path
from typing import Any

from torch import nn

from ...layers.module import named_specs
from ..classify import ClassifierHead
from ..config.gpt import ModelConfig
from ..head import LMHead
from .model import PretrainedModule
from .source import Source
from .write import save


class FiledModel(PretrainedModule):
    """A model whose family says what its files hold."""

    config: ModelConfig
    has_head: bool  # the whole model, over its vocabulary
    head: LMHead | None
    classifier: ClassifierHead | None

    def beside_adapters(self) -> dict[str, nn.Module]:
        return {} if self.classifier is None else {self.classifier.hf_module: self.classifier}

    @property
    def base_prefix(self) -> str:
        return self.config.hf.base_prefix

    def sources(self) -> dict[str, Source]:
        every = self.config.hf.sources(self.config) | ({} if self.classifier is None else self.classifier.sources())
        return {name: every[name] for name, *_ in named_specs(self) if name in every}

    def ignorable(self) -> tuple[str, ...]:
        return self.config.hf.ignorable + self.elsewhere()

    def elsewhere(self) -> tuple[str, ...]:
        """Returns patterns of the tensors that a file holds for parts of the model on other ranks."""
        return ()

    def hf_name(self, name: str) -> str:
        if not self.has_head and self.classifier is None:
            return name
        own = (*self.config.hf.head_prefixes, *(f"{module}." for module in self.beside_adapters()))
        return name if name.startswith(own) else self.base_prefix + name

    def hf_config(self) -> dict[str, Any]:
        family = self.config.hf
        if self.classifier is not None:
            return self.classifier.classifier.to_hf(family, self.hf_source or {})
        return {"architectures": [family.base_architecture if not self.has_head else family.architecture]}

    def save_pretrained(self, path: str | Path) -> None:
        """Writes a directory that transformers loads: full tensors, config.json, the tokenizer the model came with."""
        save(self, Path(path))
