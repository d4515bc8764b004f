"""The projections in a layer's weights, by their names in a Hugging Face model; a model without such names has its own
paths."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .linear import Adaptable, Parts
from .moe import ParallelMoE

EXPERT_WEIGHTS = "fc1", "fc2"


class ExpertNames(NamedTuple):
    """Names of a weight of experts: the parameter of all of them, and the projections in it, which older models of
    transformers, and files, have as layers of each expert."""

    merged: str
    projections: tuple[str, ...]


class ProjectionNames(NamedTuple):
    """The tensors of a Hugging Face file that each parameter is made of, and the map to a whole model's names."""

    sources: Mapping[str, Any]
    hf_name: Callable[[str], str]

    @classmethod
    def of(cls, base: Any) -> "ProjectionNames":
        return cls(base.files.sources(), base.files.hf_name) if hasattr(base, "files") else cls({}, str)

    def parts(self, path: str, layer: Adaptable) -> Parts:
        """Returns the projections of a layer's weights, one a Hugging Face tensor; without names one a weight."""
        if isinstance(layer, ParallelMoE):
            return {leaf: [(1, merged)] for leaf, (merged, _) in self.experts(path).items()}
        leaves = [leaf for leaf, spec in layer.specs.items() if "bias" not in leaf]
        if f"{path}.{leaves[0]}" not in self.sources:
            return {leaf: [(1, path)] for leaf in leaves}
        named = lambda s: [self.hf_name(name).removesuffix(".weight") for name in s.names]
        sources = {leaf: self.sources[f"{path}.{leaf}"] for leaf in leaves}
        return {leaf: list(zip(s.widths, named(s), strict=True)) for leaf, s in sources.items()}

    def experts(self, path: str) -> dict[str, ExpertNames]:
        """Returns the names of each weight of the experts at ``path``."""
        return {leaf: self._expert_names(f"{path}.{leaf}") for leaf in EXPERT_WEIGHTS}

    def shared_expert(self, path: str) -> list[str]:
        """Returns the names of the projections of the expert at ``path`` that every row has; none without one."""
        sources = (self.sources.get(f"{path}.{leaf}") for leaf in ("shared_fc1", "shared_fc2"))
        return [self.hf_name(name).removesuffix(".weight") for s in sources if s is not None for name in s.names]

    def _expert_names(self, weight: str) -> ExpertNames:
        if weight not in self.sources:
            return ExpertNames(weight, ())
        source = self.sources[weight]
        merged = self.hf_name(source.alternative.names[0])
        leaves = (name.removesuffix(".weight").rpartition(".")[2] for name in source.each[0].names)
        return ExpertNames(merged, tuple(f"{merged.rpartition('.')[0]}.{leaf}" for leaf in leaves))
