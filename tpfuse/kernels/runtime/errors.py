"""How a public function refuses an argument; the rules that numbers keep, each written once."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

INF = float("inf")


def check(condition: bool, message: str) -> None:
    """Raises ``ValueError(message)`` unless ``condition`` holds; it names the argument, the rule and what came."""
    if not condition:
        raise ValueError(message)


class Rule(NamedTuple):
    """Which numbers an argument takes.  A comparison with NaN is false, so that no rule takes it."""

    words: str  # behind the argument's name
    takes: Callable[[Any], bool]
    whole: bool = False


POSITIVE = Rule("must be positive and finite", lambda v: 0 < v < INF)
NOT_NEGATIVE = Rule("must be at least 0 and finite", lambda v: 0 <= v < INF)
WHOLE = Rule("must be at least 0", lambda v: 0 <= v < 1 << 63, whole=True)
COUNT = Rule("must be at least 1", lambda v: 1 <= v < 1 << 63, whole=True)
STEP = Rule("must lie in 0 to 2**63 - 1", lambda v: 0 <= v < 1 << 63, whole=True)
SAMPLE = Rule("must lie in 0 to 2**32 - 1", lambda v: 0 <= v < 1 << 32, whole=True)
INT64 = Rule("must be an int64", lambda v: -(1 << 63) <= v < 1 << 63, whole=True)
SEED = Rule("must lie in -2**63 to 2**64 - 1", lambda v: -(1 << 63) <= v < 1 << 64, whole=True)
INTEGERS, REALS = (int, np.integer), (int, float, np.integer, np.floating)


def check_number(what: str, value: Any, rule: Rule) -> None:
    """Raises ValueError unless ``value`` is a number (no bool, no tensor) that ``rule`` takes."""
    if isinstance(value, bool) or not isinstance(value, INTEGERS if rule.whole else REALS):
        raise ValueError(f"{what} must be {'an integer' if rule.whole else 'a number'}, got {described(value)}")
    if not rule.takes(value):
        raise ValueError(f"{what} {rule.words}, got {value}")


def check_numbers(name: str, rules: dict[str, Rule], values: dict[str, Any]) -> None:
    """Holds each of ``values`` that is not None to its rule."""
    for key, rule in rules.items():
        if values[key] is not None:
            check_number(f"{name}: {key}", values[key], rule)


def check_scalar(what: str, value: Any, rule: Rule, *, readable: bool) -> None:
    """Holds a number, or a 0-d tensor of numbers, to ``rule``.

    A tensor's value is read only where it is ``readable``, which on a GPU it is not: the host would wait for it.
    """
    if not isinstance(value, Tensor):
        return check_number(what, value, rule)
    dtype = value.dtype
    integer = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    if value.dim() != 0 or not (integer or (dtype.is_floating_point and not rule.whole)):
        kind = "an integer" if rule.whole else "a number"
        raise ValueError(f"{what} must be {kind} or a 0-d tensor of one, got {described(value)}")
    if readable and value.device.type == "cpu":
        check_number(what, value.item(), rule)


def described(value: Any) -> str:
    """Returns what an argument is, for an error: a tensor's dtype, shape and device, or the value and its type."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}" + (f" on {value.device}" if value.device.type != "cpu" else "")
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"
