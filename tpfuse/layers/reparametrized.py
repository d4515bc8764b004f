"""Parametrizations of torch that need the whole of a weight are refused where a rank holds a slice of it.

A norm over a shard is not the norm of the whole, and each rank would divide by another: torch's functions are wrapped
once, so that they raise before anything is changed.  What works element by element goes on.
"""

import functools
from typing import Any

from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from .module import ParallelModule
from .state import is_split

_OF_THE_WHOLE = {"_WeightNorm": "weight_norm", "_SpectralNorm": "spectral_norm", "_Orthogonal": "orthogonal"}


def _check(what: str, module: nn.Module, name: str) -> None:
    """ValueError where ``what`` is asked for on a parameter that is split."""
    if isinstance(module, ParallelModule) and name in module.specs and is_split(module.specs[name], module.tp):
        raise ValueError(
            f"{what}: {name} of {type(module).__name__} is split over {module.tp.size} ranks, and {what} needs the"
            " whole; use it at tensor-parallel size 1, or on a replicated parameter"
        )


def _wrap(owner: Any, name: str, what: str | None) -> None:
    """Wraps a function that is given (module, name of the parameter, ...), once in a process."""
    function = getattr(owner, name)
    if hasattr(function, "_tpfuse"):
        return

    @functools.wraps(function)
    def wrapped(module: nn.Module, tensor_name: str, *args: Any, **kwargs: Any) -> Any:
        given = type(args[0] if args else kwargs.get("parametrization")).__name__
        asked = _OF_THE_WHOLE.get(given) if what is None else what
        if asked is not None:
            _check(asked, module, tensor_name)
        return function(module, tensor_name, *args, **kwargs)

    wrapped._tpfuse = True  # type: ignore[attr-defined]
    setattr(owner, name, staticmethod(wrapped) if isinstance(owner, type) else wrapped)


def install() -> None:
    """Makes torch refuse weight_norm, spectral_norm and orthogonal on split parameters."""
    _wrap(parametrize, "register_parametrization", None)
    _wrap(WeightNorm, "apply", "weight_norm")
    _wrap(SpectralNorm, "apply", "spectral_norm")
