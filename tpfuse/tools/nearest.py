"""Proposes a name for one that is not there."""

import difflib
from collections.abc import Iterable


def proposal(name: object, names: Iterable[object]) -> str:
    """Returns "; did you mean 'gpt2'?" with the one of ``names`` that is most like ``name``, "" where none is.

    Capitals and the owner of a hub's id ("owner/name") do not count.
    """
    plain = {str(each).lower(): str(each) for each in names}
    alike = difflib.get_close_matches(str(name).lower().rpartition("/")[2], plain, n=1)
    return f"; did you mean {plain[alike[0]]!r}?" if alike else ""
