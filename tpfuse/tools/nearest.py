"""Proposes a name for one that is not there."""

import difflib
from collections.abc import Iterable


def proposal(name: object, names: Iterable[object]) -> str:
    """Returns "; did you mean 'gpt2'?" with the one of ``names`` that is most like ``name``, "" where none is.

    One that begins with ``name`` goes before one of like letters.  Capitals and the owner of a hub's id ("owner/name")
    do not count.
    """
    plain = {str(option).lower(): str(option) for option in names}
    typed = str(name).lower().rpartition("/")[2]
    longer = sorted((option for option in plain if typed and option.startswith(typed)), key=len)
    alike = longer or difflib.get_close_matches(typed, plain, n=1)
    return f"; did you mean {plain[alike[0]]!r}?" if alike else ""
