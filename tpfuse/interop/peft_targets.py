"""The modules that a LoraConfig adapts, by PEFT's rules: tensors of one that are missing are an error, not zeros.

target_modules and exclude_modules are each a regular expression that matches a whole name, or a list of names and of
endings of names.  layers_to_transform holds numbers of layers: an ending then names modules of these layers alone.  A
layer's number stands behind a part of the name that matches layers_pattern, behind any part where there is none.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ..kernels.runtime.errors import check
from ..kernels.runtime.rules import brief


def named_modules(place: str, config: Mapping[str, Any], modules: Iterable[str], reserved: set[str]) -> set[str]:
    """Returns those of ``modules`` that ``config`` adapts.

    ``reserved``: endings that PEFT takes for parameters of experts alone.  ValueError, in the name of ``place``, for an
    expression that is none.
    """
    values = (config.get(key) for key in ("target_modules", "exclude_modules"))
    targets, excluded = (value if isinstance(value, str | list) else [] for value in values)
    numbers = config.get("layers_to_transform")
    numbers = [] if numbers is None else numbers if isinstance(numbers, list) else [numbers]
    if isinstance(targets, list):
        targets = [t for t in targets if isinstance(t, str) and t.rpartition(".")[2] not in reserved]
    before = config.get("layers_pattern")
    before = before if isinstance(before, list) else [before] if before else []
    patterns = [rf"(?:^|.*?\.){p}" for p in before] or [r".*?\.[^.]*"]
    for pattern in (*patterns, *(p for p in (targets, excluded) if isinstance(p, str))):
        check(_compiles(pattern), f"{place} must hold regular expressions, got {brief(pattern)}")
    by_ending = lambda name: isinstance(targets, list) and name not in targets and bool(numbers)
    return {
        name
        for name in modules
        if _names(targets, name)
        and not _names(excluded, name)
        and not (by_ending(name) and _number(patterns, name) not in numbers)
    }


def _names(targets: str | list[Any], name: str) -> bool:
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return name in targets or any(name.endswith(f".{ending}") for ending in targets)


def _number(patterns: list[str], name: str) -> int | None:
    """Returns the number of the layer that a module is in."""
    matches = (re.match(rf"{pattern}\.(\d+)\.", name) for pattern in patterns)
    match = next(filter(None, matches), None)
    return None if match is None else int(match[match.lastindex or 0])


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True
