"""What a value must be, said once: its type, its range and the words of the error.

A rule takes a value and returns what it must do and does not ("be a positive integer"); None where it holds.  A bool is
no number, and neither NaN nor an infinity lies in any range.
"""

import operator
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Rule = Callable[[Any], str | None]
MAX_SIZE = (1 << 31) - 1
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxdict, _SHORT.maxtuple, _SHORT.maxlist = 2, 8, 8, 8
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80


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
                f"{caller}: {name} must {broken}, got {shown(values[name])}{'' if key == name else f' as {key}'}"
            )


def whole(least: int = 1, most: int = MAX_SIZE) -> Rule:
    """Returns the rule of an integer from ``least`` to ``most``."""
    words = "be a positive integer" if least == 1 else f"be an integer of at least {least}"

    def broken(value: Any) -> str | None:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            return words
        return f"be at most {most}" if value > most else None

    return broken


def number(low: float, high: float, ends: str = "[]") -> Rule:
    """Returns the rule of an int or float in an interval; ``ends`` are its brackets, round where an end is outside."""
    after, before = ({"[": operator.ge, "(": operator.gt}[ends[0]], {"]": operator.le, ")": operator.lt}[ends[1]])
    interval = f"{ends[0]}{low:g}, {high:g}{ends[1]}"

    def broken(value: Any) -> str | None:
        if not isinstance(value, int | float) or isinstance(value, bool):
            return f"be a number in {interval}"
        return None if after(value, low) and before(value, high) else f"lie in {interval}"

    return broken


def one_of(names: Iterable[str]) -> Rule:
    """Returns the rule of a string that is one of ``names``."""
    names = tuple(names)
    return lambda value: None if isinstance(value, str) and value in names else f"be one of {', '.join(names)}"


def instance(words: str, *kinds: type) -> Rule:
    """Returns the rule of a value of one of ``kinds``, which ``words`` name."""
    return lambda value: None if isinstance(value, kinds) else f"be {words}"


boolean = instance("true or false", bool)


def optional(rule: Rule) -> Rule:
    """Returns the rule that None breaks not either."""

    def broken(value: Any) -> str | None:
        words = None if value is None else rule(value)
        return None if words is None else f"{words} or None"

    return broken


def shown(value: Any) -> str:
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
