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


def register(original: Original, module: nn.Module, tensor_name: str, parametrization: Any, **options: Any) -> Any:
    """Stands in the place of torch.nn.utils.parametrize.register_parametrization."""
    function = _OF_THE_WHOLE.get(type(parametrization).__name__)
    if function is not None:
        _check(function, module, tensor_name)
    return original(module, tensor_name, parametrization, **options)


def weight_norm(original: Original, module: nn.Module, name: str, *args: Any, **options: Any) -> Any:
    """Stands in the place of the older torch.nn.utils.weight_norm's WeightNorm.apply."""
    _check("weight_norm", module, name)
    return original(module, name, *args, **options)


def spectral_norm(original: Original, module: nn.Module, name: str, *args: Any, **options: Any) -> Any:
    """Stands in the place of the older torch.nn.utils.spectral_norm's SpectralNorm.apply."""
    _check("spectral_norm", module, name)
    return original(module, name, *args, **options)


def prune(original: Original, method: type, module: nn.Module, name: str, *args: Any, **options: Any) -> Any:
    """Stands in the place of torch.nn.utils.prune's BasePruningMethod.apply, which all of its methods call."""
    _check(f"prune.{method.__name__}", module, name)
    return original(method, module, name, *args, **options)


def prune_globally(original: Original, parameters: Iterable[tuple[nn.Module, str]], *args: Any, **options: Any) -> Any:
    """Stands in the place of torch.nn.utils.prune.global_unstructured, which prunes one parameter after the other."""
    parameters = list(parameters)
    for module, name in parameters:
        _check("prune.global_unstructured", module, name)
    return original(parameters, *args, **options)


def _check(function: str, module: nn.Module, name: str) -> None:
    """Raises ValueError where a parameter that ``function`` is called on is split."""
    if isinstance(module, ParallelModule) and name in module.specs and is_split(module.specs[name], module.tp):
        raise ValueError(
            f"{function}: {name} of {type(module).__name__} is split over {module.tp.size} ranks, and {function} needs"
            " the whole; use it at tensor-parallel size 1, or on a replicated parameter"
        )
