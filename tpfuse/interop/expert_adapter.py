"""Adapters of experts in PEFT's files, as its ``target_parameters`` makes them of parameters of all experts.

{experts}.base_layer.lora_A.weight  [E r, D]    ...lora_B.weight  [2 F, r E]    of gate_up_proj
{experts}.lora_A.weight             [E r, F]    ...lora_B.weight  [D, r E]      of down_proj

``base_layer`` stands there where both are adapted: PEFT wraps the module once for each.  B's columns are sorted by
rank, then by expert.  A ``target_modules`` that names gate and up as layers of each expert becomes, in PEFT, a
``rank_pattern`` and an ``alpha_pattern`` of gate_up_proj, both twice as large.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ..kernels.runtime.errors import check
from ..kernels.runtime.rules import quoted
from ..layers.expert_lora import ExpertLoRA, ExpertNames
from ..layers.moe import ParallelMoE
from ..layers.shards import named_specs, unwrapped_name
from ..models.files.source import Source
from ..models.model import Model

_GATE_UP, _DOWN = "gate_up_proj", "down_proj"
_PATTERN = rf".*\.{_GATE_UP}"  # PEFT's key in rank_pattern and alpha_pattern


class ExpertParameter(NamedTuple):
    """The full shape [E, N, K] of a parameter of experts, and Hugging Face's names of the projections in it."""

    shape: tuple[int, ...]
    projections: tuple[str, ...]

    def tensor_shapes(self, rank: int) -> dict[str, tuple[int, int]]:
        """Returns the shapes of A and B in a file."""
        E, N, K = self.shape
        return {"A": (E * rank, K), "B": (N, rank * E)}


def expert_parameters(base: Model) -> dict[str, ExpertParameter]:
    """Returns the parameters of a model's experts, by their names in transformers."""
    specs, sources = {name: spec for name, spec, _ in named_specs(base)}, base.files.sources()
    parameters = {}
    for path, module in base.named_modules():
        if isinstance(module, ParallelMoE):
            path = unwrapped_name(path)
            for leaf, (merged, projections) in ExpertNames.of(base, path).items():
                source, spec = sources[f"{path}.{leaf}"].alternative, specs[f"{path}.{leaf}"]
                assert source is not None
                parameters[merged] = ExpertParameter(source.file_shape(spec.shape), projections)
    return parameters


def targeted(place: str, targets: Any, parameters: Iterable[str]) -> set[str]:
    """Returns the parameters that a LoraConfig's target_parameters names by their endings; ValueError for one that
    names none."""
    targets = targets or []
    listed = isinstance(targets, list | tuple | set) and all(isinstance(t, str) for t in targets)
    check(listed, f"{place}: target_parameters must be names of parameters, got {quoted(targets)}")
    matches = {t: {name for name in parameters if f".{name}".endswith(f".{t}")} for t in targets}
    missing = sorted(t for t, names in matches.items() if not names)
    check(
        not missing,
        f"{place}: target_parameters={quoted(missing)} is not built: they are parameters of experts, of which there are"
        f" {', '.join(sorted({name.rpartition('.')[2] for name in parameters})) or 'none'}",
    )
    return set().union(*matches.values())


def check_parameter_options(place: str, options: Mapping[str, Any]) -> None:
    """Raises ValueError for options that PEFT refuses beside target_parameters, by PEFT's rule."""
    for key in ("lora_dropout", "fan_in_fan_out"):
        value = options.get(key)
        check(
            not (value and options.get("target_parameters")),
            f"{place}: {key}={quoted(value)} is not built with target_parameters, as PEFT has no adapters of parameters"
            " with it",
        )


def without_patterns(options: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Returns a LoraConfig's options without the patterns that PEFT makes of gate and up, and whether they were there.

    Others are left, and so are these with use_rslora, by which PEFT scales gate and up otherwise than they would be
    scaled apart.
    """
    doubled = {key: {_PATTERN: 2 * options.get(value, 0)} for key, value in _DOUBLED.items()}
    apart = not options.get("use_rslora") and all(options.get(key) == value for key, value in doubled.items())
    return {key: value for key, value in options.items() if not (apart and key in doubled)}, apart


_DOUBLED = {"rank_pattern": "r", "alpha_pattern": "lora_alpha"}


def patterns(rank: int, alpha: float) -> dict[str, Any]:
    """Returns the patterns that PEFT makes of gate and up as layers of each expert."""
    return {key: {_PATTERN: 2 * value} for key, value in zip(_DOUBLED, (rank, alpha), strict=True)}


def stored_module(name: str, adapted: Iterable[str]) -> str:
    """Returns the module in a file that a parameter's A and B are named by, of a model with these adapted."""
    experts, _, leaf = name.rpartition(".")
    return f"{experts}.base_layer" if leaf == _GATE_UP and f"{experts}.{_DOWN}" in adapted else experts


def rank_of(name: str, rank: int, apart: bool) -> int:
    """Returns the rank of a parameter's adapter."""
    return 2 * rank if apart and name.endswith(_GATE_UP) else rank


def expert_sources(base: Model, path: str, lora: ExpertLoRA) -> dict[str, Source]:
    """Returns, by their names in the model, the tensors of the file that an adapter's parameters are made of."""
    weights, names = base.files.sources(), ExpertNames.of(base, path)
    result: dict[str, Source] = {}
    for leaf in lora.leaves:
        weight, module = weights[f"{path}.{leaf}"].alternative, stored_module(names[leaf].merged, lora.adapted)
        assert weight is not None
        (expert,), rows, (column,) = weight.file_letters
        tensor = lambda letter, pattern, module=module: Source.one(f"{module}.lora_{letter}.weight", pattern)
        a = f"({expert} r) {column} -> {expert} r {column}"
        b = f"({' '.join(rows)}) (r {expert}) -> {' '.join(weight.letters[:-1])} r"
        result |= {f"{path}.lora.A_{leaf}": tensor("A", a), f"{path}.lora.B_{leaf}": tensor("B", b)}
    return result


def expert_targets(name: str, parameter: ExpertParameter, apart: bool) -> list[str]:
    """Returns the targets of add_lora that adapt a parameter."""
    return list(parameter.projections) if apart and name.endswith(_GATE_UP) else [name]
