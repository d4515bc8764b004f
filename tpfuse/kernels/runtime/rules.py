"""Rules of values: their type, their range and the words of the error.

A bool is no number, and neither NaN nor an infinity lies in any range.
"""

import operator
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

INF = float("inf")
INTEGERS, REALS = (int, np.integer, torch.SymInt), (int, float, np.integer, np.floating, torch.SymInt, torch.SymFloat)
MAX_SIZE = (1 << 31) - 1
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxdict, _SHORT.maxtuple, _SHORT.maxlist = 2, 8, 8, 8
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80


class Rule(NamedTuple):
    """A rule of values: called with one, returns the phrase that it breaks ("be positive"), None where it holds.

    ``integer``: a tensor that stands for such a value holds integers.
    """

    broken: Callable[[Any], str | None]
    integer: bool = False

    def __call__(self, value: Any) -> str | None:
        return self.broken(value)


def check_rules(
    caller: str, values: Mapping[str, Any], rules: Mapping[str, Rule], keys: Mapping[str, str] | None = None
) -> None:
    """Raises ValueError for the first of ``values`` that breaks its rule.

    ``keys``: what a value is called in the file that it was read from, where it has another name there.
    """
    for name, rule in rules.items():
        broken = rule(values[name]) if name in values else None
        if broken is not None:
            key = (keys or {}).get(name, name)
            raise ValueError(
                f"{caller}: {name} must {broken}, got {quoted(values[name])}{'' if key == name else f' as {key}'}"
            )


def check_number(subject: str, value: Any, rule: Rule) -> None:
    """Raises ValueError where ``value``, which ``subject`` names, breaks ``rule``."""
    broken = rule(value)
    if broken is not None:
        raise ValueError(f"{subject} must {broken}, got {described(value)}")


def check_numbers(caller: str, values: Mapping[str, Any], rules: Mapping[str, Rule]) -> None:
    """Holds each of ``values`` that is not None to its rule."""
    for key, rule in rules.items():
        if values[key] is not None:
            check_number(f"{caller}: {key}", values[key], rule)


def check_scalar(subject: str, value: Any, rule: Rule, *, readable: bool) -> None:
    """Holds a number, or a 0-d tensor of numbers, to ``rule``.

    A tensor's value is read only where it is ``readable``, which on a GPU it is not: the host would wait for it.
    """
    if not isinstance(value, Tensor):
        return check_number(subject, value, rule)
    dtype = value.dtype
    integer = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    if value.dim() != 0 or not (integer or (dtype.is_floating_point and not rule.integer)):
        kind = "an integer" if rule.integer else "a number"
        raise ValueError(f"{subject} must be {kind} or a 0-d tensor of one, got {described(value)}")
    if readable and value.device.type == "cpu":
        check_number(subject, value.item(), rule)


def limited(phrase: str, accepts: Callable[[Any], bool], *, integer: bool = False) -> Rule:
    """Returns a rule: a number for which ``accepts(value)`` is true; ``phrase`` goes into the error.

    A comparison with NaN is false, so that no such rule takes it.
    """
    kinds, kind = (INTEGERS, "be an integer") if integer else (REALS, "be a number")

    def broken(value: Any) -> str | None:
        if isinstance(value, bool) or not isinstance(value, kinds):
            return kind
        return None if accepts(value) else phrase

    return Rule(broken, integer)


def _fits_float(v: Any) -> bool:
    """Returns whether v is at most the largest float, which an integer may exceed.

    Of a name of that float torch.compile(dynamic=True) would make a symbol that belongs to the first autograd function
    in whose trace it is met, and a second one's could not use it.
    """
    return bool(v <= 1.7976931348623157e308)


POSITIVE = limited("be positive and finite", lambda v: v > 0 and _fits_float(v))
NOT_NEGATIVE = limited("be at least 0 and finite", lambda v: v >= 0 and _fits_float(v))
WHOLE = limited("be at least 0", lambda v: 0 <= v < 1 << 63, integer=True)
COUNT = limited("be at least 1", lambda v: 1 <= v < 1 << 63, integer=True)
STEP = limited("lie in 0 to 2**63 - 1", lambda v: 0 <= v < 1 << 63, integer=True)
SAMPLE = limited("lie in 0 to 2**32 - 1", lambda v: 0 <= v < 1 << 32, integer=True)
INT64 = limited("be an int64", lambda v: -(1 << 63) <= v < 1 << 63, integer=True)
SEED = limited("lie in -2**63 to 2**64 - 1", lambda v: -(1 << 63) <= v < 1 << 64, integer=True)


def integer(least: int = 1, most: int = MAX_SIZE) -> Rule:
    """Returns the rule of an integer from ``least`` to ``most``."""
    phrase = "be a positive integer" if least == 1 else f"be an integer of at least {least}"

    def broken(value: Any) -> str | None:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            return phrase
        return f"be at most {most}" if value > most else None

    return Rule(broken, integer=True)


def number(low: float, high: float, ends: str = "[]") -> Rule:
    """Returns the rule of an int or float in an interval; ``ends`` are its brackets, round where an end is outside."""
    above, below = ({"[": operator.ge, "(": operator.gt}[ends[0]], {"]": operator.le, ")": operator.lt}[ends[1]])
    interval = f"{ends[0]}{low:g}, {high:g}{ends[1]}"

    def broken(value: Any) -> str | None:
        if not isinstance(value, int | float) or isinstance(value, bool):
            return f"be a number in {interval}"
        return None if above(value, low) and below(value, high) else f"lie in {interval}"

    return Rule(broken)


def one_of(names: Iterable[str]) -> Rule:
    """Returns the rule of a string that is one of ``names``."""
    names = tuple(names)
    phrase = f"be one of {', '.join(names)}"
    return Rule(lambda value: None if isinstance(value, str) and value in names else phrase)


def instance(phrase: str, *kinds: type) -> Rule:
    """Returns the rule of a value of one of ``kinds``, which ``phrase`` names."""
    return Rule(lambda value: None if isinstance(value, kinds) else f"be {phrase}")


boolean = instance("true or false", bool)
integers = Rule(
    lambda value: (
        None if isinstance(value, list | tuple) and all(type(i) is int for i in value) else "be a list of integers"
    )
)


def optional(rule: Rule) -> Rule:
    """Returns the rule, extended to accept None."""

    def broken(value: Any) -> str | None:
        phrase = None if value is None else rule(value)
        return None if phrase is None else f"{phrase} or None"

    return Rule(broken, rule.integer)


def described(value: Any) -> str:
    """Returns what an argument is, for an error: a tensor's dtype, shape and device; a number; a value and its type."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}" + (f" on {value.device}" if value.device.type != "cpu" else "")
    number = isinstance(value, REALS) and not isinstance(value, bool)
    return str(value) if number and abs(value) < 1e99 else f"{quoted(value)} ({type(value).__name__})"


def listed(names: Sequence[str]) -> str:
    """Returns the first of many names, which may be of unknown origin, and how many more there are."""
    return ", ".join(map(brief, names[:4])) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def quoted(value: Any) -> str:
    """Returns a value's repr on one line, shortened where it is long."""
    try:
        return brief(_SHORT.repr(value))
    except Exception:  # an integer of more digits than Python writes, an object whose repr fails
        return f"a {type(value).__name__}"


def brief(text: object) -> str:
    """Returns text of unknown origin for an error: printable, on one line, shortened where it is long."""
    line = str(text)[:240]
    line = line if line.isprintable() else line.encode("unicode_escape").decode("ascii")
    return line if len(line) <= 200 else f"{line[:200]}..."
