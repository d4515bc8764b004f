"""The layers and parameters of a model that may have adapters, by Hugging Face's names, with their full sizes."""

from typing import NamedTuple

from ..layers.linear import Adaptable
from ..layers.lora import trained_modules
from ..layers.moe import ParallelMoE
from ..layers.projections import ProjectionNames
from ..layers.shards import named_specs, unwrapped_name
from ..models.files.names import tied_names
from ..models.head import ReplicatedLinear
from ..models.model import Model


class ExpertParameter(NamedTuple):
    """The full shape [E, N, K] of a parameter of experts, and the names of the projections in it."""

    shape: tuple[int, ...]
    projections: tuple[str, ...]


class Adaptables(NamedTuple):
    """``layers``: linear layers, with their outputs and inputs.  ``experts``: parameters of experts."""

    layers: dict[str, tuple[int, int]]
    experts: dict[str, ExpertParameter]

    @classmethod
    def of(cls, base: Model) -> "Adaptables":
        """Returns those of this pipeline stage."""
        names, adaptables = ProjectionNames.of(base), cls({}, {})
        modules = {unwrapped_name(path): module for path, module in base.named_modules()}
        for name, _, spec, _ in named_specs(base):
            path, _, leaf = name.rpartition(".")
            module, source = modules[path], names.sources.get(name)
            if source is None or "bias" in leaf or not isinstance(module, Adaptable):
                continue
            if not isinstance(module, ParallelMoE):
                for tensor, (rows, columns) in zip(source.names, source.file_shapes(spec.shape), strict=True):
                    sizes = (columns, rows) if base.config.hf.transposed else (rows, columns)
                    adaptables.layers[names.hf_name(tensor).removesuffix(".weight")] = sizes
            elif leaf in names.experts(path):  # the router and a shared expert have none
                merged, projections = names.experts(path)[leaf]
                adaptables.experts[merged] = ExpertParameter(source.alternative.file_shape(spec.shape), projections)
        return adaptables

    def over_stages(self, base: Model, caller: str) -> "Adaptables":
        """Returns those of all pipeline stages; a collective call."""
        layers, experts = zip(*base.groups.over_stages(caller, tuple(self)), strict=True)
        joined = lambda stages: {name: value for stage in stages for name, value in stage.items()}
        return Adaptables(joined(layers), joined(experts))


def unadaptable(base: Model) -> dict[str, bool]:
    """Returns the modules whose adapters are not built, by Hugging Face's names; True for a linear layer.

    A head over the vocabulary is one, also where its weight is the embedding's; a head that is trained beside adapters
    is none.
    """
    names, trained, modules = ProjectionNames.of(base), trained_modules(base), dict[str, bool]()
    layers = {unwrapped_name(path): module for path, module in base.named_modules()}
    for name, source in names.sources.items():
        path, _, leaf = name.rpartition(".")
        if leaf == "weight" and not isinstance(layers[path], Adaptable):
            stored = {names.hf_name(tensor).removesuffix(".weight") for tensor in source.names}
            modules |= dict.fromkeys(stored - trained.keys(), isinstance(layers[path], ReplicatedLinear))
    if base.head is not None and base.config.tie_embeddings:  # whose weight is the embedding's
        modules[names.hf_name(tied_names(base.config)[1]).removesuffix(".weight")] = False
    return modules
