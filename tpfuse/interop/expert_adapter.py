"""Adapters of experts in PEFT's files, as its ``target_parameters`` makes them of parameters of all experts.

{experts}.base_layer.lora_A.weight  [E r, D]    ...lora_B.weight  [2 F, r E]    of gate_up_proj
{experts}.lora_A.weight             [E r, F]    ...lora_B.weight  [D, r E]      of down_proj

``base_layer`` stands there where both are adapted: PEFT wraps the module once for each.  B's columns are sorted by
rank, then by expert.  A ``target_modules`` that names gate and up as layers of each expert becomes, in PEFT, a
``rank_pattern`` and an ``alpha_pattern`` of gate_up_proj, both twice as large: gate and up are ``apart``.
"""

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

from ..kernels.runtime.errors import check
from ..kernels.runtime.rules import quoted
from ..layers.expert_lora import ExpertLoRA
from ..layers.projections import ProjectionNames
from ..models.files.source import Source
from .adaptable import ExpertParameter

_GATE_UP, _DOWN = "gate_up_proj", "down_proj"
_PATTERN = rf".*\.{_GATE_UP}"  # PEFT's key in its patterns


# ---- the config ----


def expert_targets(place: str, options: Mapping[str, Any], experts: Iterable[str]) -> set[str]:
    """Returns the parameters that a LoraConfig's target_parameters names by their endings.

    ValueError for one that names none, and for an option that PEFT refuses beside them.
    """
    targets = options.get("target_parameters") or []
    listed = isinstance(targets, list | tuple | set) and all(isinstance(t, str) for t in targets)
    check(listed, f"{place}: target_parameters must be names of parameters, got {quoted(targets)}")
    for key in ("lora_dropout", "fan_in_fan_out"):
        check(
            not (targets and options.get(key)),
            f"{place}: {key}={quoted(options.get(key))} is not built with target_parameters, as PEFT refuses the two",
        )
    matches = {t: {name for name in experts if f".{name}".endswith(f".{t}")} for t in targets}
    missing = sorted(t for t, names in matches.items() if not names)
    leaves = sorted({name.rpartition(".")[2] for name in experts})
    check(
        not missing,
        f"{place}: target_parameters={quoted(missing)} is not built: parameters with adapters are those of experts,"
        f" here {', '.join(leaves) or 'none'}",
    )
    return set().union(*matches.values())


def take_patterns(options: MutableMapping[str, Any]) -> bool:
    """Returns whether gate and up are apart, and then takes PEFT's two patterns out of a LoraConfig's options.

    With use_rslora they are left, to be refused: PEFT scales gate and up otherwise than other layers then.
    """
    rank, alpha = options.get("r"), options.get("lora_alpha")
    if options.get("use_rslora") or not (isinstance(rank, int) and isinstance(alpha, int | float)):
        return False
    doubled = patterns(rank, alpha)
    apart = all(options.get(key) == pattern for key, pattern in doubled.items())
    for key in doubled if apart else ():
        del options[key]
    return apart


def patterns(rank: int, alpha: float) -> dict[str, dict[str, float]]:
    """Returns the patterns that PEFT makes where gate and up are apart."""
    return {"rank_pattern": {_PATTERN: 2 * rank}, "alpha_pattern": {_PATTERN: 2 * alpha}}


# ---- tensors ----


def expert_modules(name: str, parameter: ExpertParameter, apart: bool) -> list[str]:
    """Returns the targets of add_lora that adapt a parameter."""
    return list(parameter.projections) if apart and name.endswith(_GATE_UP) else [name]


def stored_module(name: str, adapted: Iterable[str]) -> str:
    """Returns the module in a file that a parameter's A and B are named by, of a model with these adapted."""
    experts, _, leaf = name.rpartition(".")
    return f"{experts}.base_layer" if leaf == _GATE_UP and f"{experts}.{_DOWN}" in adapted else experts


def stored_shapes(name: str, parameter: ExpertParameter, rank: int, apart: bool) -> dict[str, tuple[int, int]]:
    (E, N, K), r = parameter.shape, 2 * rank if apart and name.endswith(_GATE_UP) else rank
    return {"A": (E * r, K), "B": (N, r * E)}


def expert_sources(names: ProjectionNames, path: str, lora: ExpertLoRA, prefix: str) -> dict[str, Source]:
    """Returns the tensor of a file that each parameter of an adapter is made of; ``prefix`` precedes modules' names."""
    sources = {}
    for leaf in lora.leaves:
        weight, (merged, _) = names.sources[f"{path}.{leaf}"].alternative, names.experts(path)[leaf]
        (expert,), rows, (column,) = weight.file_letters
        module = stored_module(merged, lora.adapted)
        a = f"({expert} r) {column} -> {expert} r {column}"
        b = f"({' '.join(rows)}) (r {expert}) -> {' '.join(weight.letters[:-1])} r"
        for letter, pattern in (("A", a), ("B", b)):
            sources[f"{letter}_{leaf}"] = Source.one(f"{prefix}{module}.lora_{letter}.weight", pattern)
    return sources
