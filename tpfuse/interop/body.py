"""The model below the head of a parallelized module: transformers' ``base_model``, which trainers call and freeze."""

from importlib import import_module
from typing import Any

from torch import nn

from ..models.files.names import ModelFiles
from .arguments import ForwardSignature


class Body(nn.Module):
    """Called as the base class of transformers is, it returns that class's output; its parameters are the model's own
    but those of the head."""

    def __init__(self, module: Any):
        super().__init__()
        self.__dict__["module"] = module  # of which this is a part, not the other way round
        family = module.parallel.config.hf
        self.config, self.name = module.config, family.base_architecture
        for name, child in module.parallel.named_children():
            if _below(module.parallel.files, name):
                self.add_module(name, child)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model up to its last hidden state, which every rank gets whole."""
        original = getattr(import_module("transformers"), self.name)
        return self.__dict__["module"]._forward(ForwardSignature.of(original).bind(self, args, kwargs), body=self.name)


def _below(files: ModelFiles, child: str) -> bool:
    """Returns whether a child of a model belongs to the base class in transformers' files."""
    names = [source.names[0] for name, source in files.sources().items() if name.startswith(f"{child}.")]
    return all(files.hf_name(name).startswith(files.base_prefix) for name in names)
