"""Replaces the functions of :mod:`.table` and puts them back: from the first parameter that is split over ranks, or the
first MainGrad, until :func:`guard_torch` ends it.  ``import tpfuse`` and models on one rank replace nothing.
"""

from .behind import Undo

_undo: list[Undo] = []  # of what is replaced now
_off = False  # by guard_torch


def install() -> None:
    """Replaces all of the table, unless that is done or :func:`guard_torch` has forbidden it."""
    if not (_off or _undo):
        from .table import TABLE  # and with it FSDP

        _undo.extend(replacement.put() for replacement in TABLE)


def guard_torch(enabled: bool = True) -> None:
    """Switches off, or on again, what the library replaces in torch once a parameter is split over ranks.

    ``guard_torch(False)`` puts torch's own functions back and leaves them so: DistributedDataParallel, FSDP, gradient
    clipping, GradScaler, optimizers and their state dictionaries then take a split parameter for a whole one, in
    silence.
    ``guard_torch()`` replaces them at once.
    """
    global _off
    _off = not enabled
    install()
    while _off and _undo:
        _undo.pop()()
