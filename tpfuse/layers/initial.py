"""Initial weights of modules that were made on the meta device."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .module import ParallelModule, initialize
from .shards import owned


@torch.no_grad()
def init_weights(module: nn.Module, *, seed: int) -> nn.Module:
    """Fills the parameters of ``module``, its layers' and torch's, in place, and returns it.

    For a module made on the meta device and given memory by ``to_empty``: the weights are those that the constructor
    draws after ``torch.manual_seed(seed)`` on the CPU, bitwise and at every split, where layers are constructed in the
    order in which they are assigned.  A model of tpfuse.models in it keeps its own seed.  torch's generator is left as
    it was.  Every rank calls it.  Buffers are filled where a layer's ``reset_parameters`` fills them.

    ValueError, before anything changes, for a module that has parameters of its own and no ``reset_parameters``, or
    whose parameters are on the meta device still.
    """
    resets = list(_resets(module, "", seed))
    for name, p in module.named_parameters():
        if p.is_meta:
            raise ValueError(f"init_weights: {name} is on the meta device; call to_empty before")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for reset in resets:
            reset()
    for layer in _outermost(module):
        if layer._agreement is None:
            layer.compare_alone()
    return module


def _is_model(module: nn.Module) -> bool:
    """True for a model of tpfuse.models, whose layers have initial weights by names and a seed of its own."""
    return hasattr(module, "init_weights") and hasattr(module, "seed")


def _no_reset(module: nn.Module, path: str, names: list[str]) -> ValueError:
    label = f"{type(module).__name__} {path.removesuffix('.')}".strip()
    return ValueError(f"init_weights: {label} has {', '.join(names)} of its own and no reset_parameters")


def _resets(module: nn.Module, path: str, seed: int) -> Iterator[Any]:
    """Yields what fills the module's parameters, parts first, as constructors do."""
    if _is_model(module):
        yield module.init_weights
        return
    for name, part in module.named_children():
        yield from _resets(part, f"{path}{name}.", seed)
    names = [name for name, _ in module.named_parameters(recurse=False)]
    if isinstance(module, ParallelModule):
        covered = {name for name, *_ in owned(module)}
        if type(module).reset_parameters is ParallelModule.reset_parameters and not covered.issuperset(names):
            raise _no_reset(module, path, [name for name in names if name not in covered])
        yield module.reset_parameters if module._draws or not names else lambda: initialize(module, seed, prefix=path)
    elif names:
        reset = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
        if reset is None:
            raise _no_reset(module, path, names)
        yield reset


def _outermost(module: nn.Module) -> Iterator[ParallelModule]:
    """Yields the layers that are no part of another one or of a model."""
    if isinstance(module, ParallelModule):
        yield module
    elif not _is_model(module):
        for part in module.children():
            yield from _outermost(part)
