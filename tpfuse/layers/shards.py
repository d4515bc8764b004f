"""Parameters of parallel modules, each with the whole that it is a slice of."""

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..parallel import TensorParallel
from .spec import Spec

SUFFIXES = "orig", "g", "v"  # of what torch.nn.utils' prune, spectral_norm and weight_norm make of a whole parameter
REPLICATED = "_tensor_parallel"  # attribute of a plain module: the ranks that have the same parameters
# Names that torch's wrappers put into those of the parameters below them.
WRAPPERS = {"_checkpoint_wrapped_module", "_orig_mod"}
_alive: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def register(module: nn.Module) -> None:
    """Adds a parallel module to those of :func:`living`."""
    _alive.add(module)


def owned(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, Spec, TensorParallel]]:
    """Yields (name, parameter, spec, tp) of a layer's own parameters, and of those that torch.nn.utils (parametrize,
    prune, weight_norm) has put in the place of one."""
    fields: dict[str, Any] = module.__dict__  # nn.Module's attribute access costs the host
    parametrized: Any = fields.get("_modules", {}).get("parametrizations", {})
    for leaf, spec in fields.get("specs", {}).items():
        tp: TensorParallel = module.ranks_of(leaf)  # type: ignore[operator]  # of a module with specs
        for name in (leaf, *(f"{leaf}_{suffix}" for suffix in SUFFIXES)):
            p = fields["_parameters"].get(name)
            if p is not None:
                yield name, p, spec, tp
        if leaf in parametrized:
            for inner, p in parametrized[leaf].named_parameters(recurse=False):
                yield f"parametrizations.{leaf}.{inner}", p, spec, tp


def unwrapped_name(name: str) -> str:
    """Returns a parameter's name without what torch's checkpoint_wrapper and torch.compile put into it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def named_specs(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, Spec, TensorParallel]]:
    """Yields (name, parameter, spec, tp) of every parameter, each once, in the order of named_parameters.

    A plain module's parameters are replicated.  The names are those without torch's wrappers.
    """
    specs = {p: (spec, tp) for m in module.modules() if m in _alive for _, p, spec, tp in owned(m)}
    owners = dict(module.named_modules())
    for name, p in module.named_parameters():
        owner = specs.get(p)
        if owner is None:
            ranks = owners[name.rpartition(".")[0]].__dict__.get(REPLICATED) or TensorParallel()
            owner = Spec(tuple(p.shape), None, None), ranks
        yield unwrapped_name(name), p, *owner


def named_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Returns the buffers that a state dictionary has, by name without torch's wrappers."""
    return {
        unwrapped_name(f"{path}.{name}".removeprefix(".")): x
        for path, part in module.named_modules()
        for name, x in part._buffers.items()
        if x is not None and name not in part._non_persistent_buffers_set
    }


def same_on_replicas(module: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters of which every replica holds the same: all but those of experts that are divided among
    replicas, whose gradients are of the rows of all."""
    return [p for _, p, _, tp in named_specs(module) if tp.replicas == 1]


def living() -> list[nn.Module]:
    """Returns the parallel modules that are alive."""
    return list(_alive)


class SplitParameter(NamedTuple):
    """The full parameter that a shard is a slice of, and the ranks that it is split over."""

    spec: Spec
    tp: TensorParallel


def wholes(modules: Iterable[nn.Module] | None = None) -> dict[Tensor, SplitParameter]:
    """Returns what is known of every parameter of these parallel modules; without them, of all that are alive.

    For torch's tools that are given parameters without their modules: optimizers, clipping, gradient scalers.  Those
    from which torch computes a parameter (torch.nn.utils.parametrize) are slices as it is.
    """
    return {p: SplitParameter(spec, tp) for module in modules or living() for _, p, spec, tp in owned(module)}
