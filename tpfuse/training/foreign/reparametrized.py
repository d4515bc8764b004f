"""Parametrizations and masks of torch that need the whole of a weight are refused where a rank holds a slice of it.

A norm over a shard is not the norm of the whole, and each rank would divide by another.  What is pruned of a shard is
not what is pruned of the whole, and a state dictionary would take its mask for the whole's.  Parametrizations that work
element by element stay allowed.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from ...layers.module import ParallelModule
from ...layers.state import is_split

_OF_THE_WHOLE = {"_WeightNorm": "weight_norm", "_SpectralNorm": "spectral_norm", "_Orthogonal": "orthogonal"}
Original = Callable[..., Any]
Named = Iterable[tuple[nn.Module, str]]


def register(original: Original, module: nn.Module, tensor_name: str, parametrization: Any, **options: Any) -> Any:
    """Stands in the place of torch.nn.utils.parametrize.register_parametrization."""
    function = _OF_THE_WHOLE.get(type(parametrization).__name__)
    if function is not None:
        _check(function, module, tensor_name)
    _check_stored("register_parametrization", module, tensor_name)
    return original(module, tensor_name, parametrization, **options)


def _refusing(parameters: Callable[..., tuple[str, Named]]) -> Callable[..., Any]:
    """Returns the replacement of a function; from its arguments ``parameters`` are its name and those it works on."""

    def around(original: Original, *args: Any, **options: Any) -> Any:
        function, named = parameters(*args, **options)
        for module, name in named:
            _check(function, module, name)
            _check_stored(function, module, name)
        return original(*args, **options)

    return around


# In the places of the older WeightNorm.apply and SpectralNorm.apply, of prune.BasePruningMethod.apply, to which all of
# its methods come, and of prune.global_unstructured, which prunes one parameter after the other.
weight_norm = _refusing(lambda module, name, *args, **options: ("weight_norm", [(module, name)]))
spectral_norm = _refusing(lambda module, name, *args, **options: ("spectral_norm", [(module, name)]))
pruning = _refusing(lambda cls, module, name, *args, **options: (f"prune.{cls.__name__}", [(module, name)]))
global_pruning = _refusing(lambda parameters, *args, **options: ("prune.global_unstructured", parameters))


def _check(function: str, module: nn.Module, name: str) -> None:
    """Raises ValueError where a parameter that ``function`` is called on is split."""
    if isinstance(module, ParallelModule) and name in module.specs and is_split(module.specs[name], module.tp):
        raise ValueError(
            f"{function}: {name} of {type(module).__name__} is split over {module.tp.size} ranks, and {function} needs"
            " the whole; use it at tensor-parallel size 1, or on a replicated parameter"
        )


def _check_stored(function: str, module: nn.Module, name: str) -> None:
    """Raises ValueError where a split parameter shows the whole under its name, which torch would replace."""
    if isinstance(module, ParallelModule) and name in module._parameters and name in module.specs:
        shows = isinstance(getattr(type(module), name, None), property)
        if shows and is_split(module.specs[name], module.tp):
            raise ValueError(
                f"{function}: {name} of {type(module).__name__} shows the whole table of which this rank has its rows,"
                " and cannot be computed from another parameter"
            )
