"""The layers of a model that the targets of adapters name: by their own names, or those of a Hugging Face model."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from ..kernels.runtime.errors import check
from .linear import Adaptable, Parts
from .moe import ParallelMoE
from .projections import EXPERT_WEIGHTS, ProjectionNames
from .shards import unwrapped_name


def base_of(model: nn.Module) -> Any:
    """Returns the tpfuse model inside a wrapper, which knows its Hugging Face names; else the module itself."""
    return next((m for m in model.modules() if hasattr(m, "files")), model)


def adaptable_layers(model: nn.Module) -> Iterator[tuple[str, Adaptable]]:
    """Yields (path, layer) of every layer that may have an adapter."""
    return ((unwrapped_name(path), m) for path, m in base_of(model).named_modules() if isinstance(m, Adaptable))


class Chosen(NamedTuple):
    """A layer that gets an adapter, of the projections ``adapted`` of its ``parts``; ``apart`` as of ExpertLoRA."""

    path: str
    layer: Adaptable
    parts: Parts
    adapted: list[str]
    apart: bool


def chosen_layers(caller: str, base: nn.Module, targets: Sequence[str]) -> list[Chosen]:
    """Returns the layers that targets name.

    ValueError of ``caller`` for a target that names none, and for one whose adapters are not built.
    """
    check_shared_experts(caller, base, targets)
    names, layers, chosen = ProjectionNames.of(base), list(adaptable_layers(base)), list[Chosen]()
    matched: set[str] = set()
    for path, layer in layers:
        hits = _hits(names, path, layer, set(targets))
        matched.update(*hits.values())
        if any(hits.values()):
            apart = isinstance(layer, ParallelMoE) and _are_apart(caller, names, path, targets)
            adapted = [name for name, by in hits.items() if by]
            chosen.append(Chosen(path, layer, names.parts(path, layer), adapted, apart=apart))
    missing = [t for t in targets if t not in matched]
    experts = any(isinstance(layer, ParallelMoE) for _, layer in layers)
    check(
        bool(chosen) and not missing,
        f"{caller}: no layer is called {', '.join(missing) or 'anything'}; there are {_layer_names(names, layers)}"
        + "; adapters of routers are not built" * experts,
    )
    return chosen


def _named_by(name: str, targets: Iterable[str]) -> set[str]:
    """Returns the targets that are endings of a name."""
    return {t for t in targets if f".{name}".endswith(f".{t}")}


def _hits(names: ProjectionNames, path: str, layer: Adaptable, targets: set[str]) -> dict[str, set[str]]:
    """Returns, by the name of each of a layer's projections, the targets that name it."""
    if isinstance(layer, ParallelMoE):
        return {
            merged: ({leaf} & targets).union(*(_named_by(name, targets) for name in (merged, *projections)))
            for leaf, (merged, projections) in names.experts(path).items()
        }
    return {
        name: _named_by(name, targets) | ({path.rpartition(".")[2]} & targets)
        for projections in names.parts(path, layer).values()
        for _, name in projections
    }


def check_shared_experts(caller: str, base: nn.Module, targets: Iterable[str] | str) -> None:
    """Raises the ValueError of ``caller`` for targets, endings or a regular expression, that name a shared expert: PEFT
    would adapt it beside those that are chosen."""
    names = ProjectionNames.of(base)
    for path in (path for path, layer in adaptable_layers(base) if isinstance(layer, ParallelMoE)):
        for name in names.shared_expert(path):
            if isinstance(targets, str):
                named = [targets] if re.fullmatch(targets, name) else []
            else:
                named = sorted(_named_by(name, targets))
            check(
                not named,
                f"{caller}: {', '.join(named)} names {name}, a shared expert, whose adapters are not built; of the"
                f" others name {' and '.join(merged for merged, _ in names.experts(path).values())}",
            )


def _are_apart(caller: str, names: ProjectionNames, path: str, targets: Iterable[str]) -> bool:
    """Returns whether targets name the projections of a layer's fc1; ValueError where they name one of the two."""
    merged, projections = names.experts(path)["fc1"]
    named = [name for name in projections if _named_by(name, targets)]
    check(
        len(named) in (0, len(projections)),
        f"{caller}: {', '.join(projections)} are one parameter of experts, {merged}, and are adapted together, got"
        f" {', '.join(named)} alone",
    )
    return bool(named)


def _layer_names(names: ProjectionNames, layers: list[tuple[str, Adaptable]]) -> str:
    ours = {path.rpartition(".")[2] for path, layer in layers if not isinstance(layer, ParallelMoE)}
    ours |= {leaf for _, layer in layers if isinstance(layer, ParallelMoE) for leaf in EXPERT_WEIGHTS}
    leaves_in_files = {
        name.rpartition(".")[2]
        for path, layer in layers
        for projections in names.parts(path, layer).values()
        for _, name in projections
    }
    return ", ".join(sorted(ours | leaves_in_files))
