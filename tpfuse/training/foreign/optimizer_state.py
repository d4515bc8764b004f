"""The state of torch's optimizers in state dictionaries: whole where a parameter is split.

An optimizer is given parameters without their modules, and has hooks only one by one: its two methods are replaced for
all classes.  An optimizer without split parameters keeps torch's own dictionaries.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ...layers.shards import SplitParameter, wholes
from ...layers.state import as_local, as_whole, is_split

StateDict = dict[str, Any]


@torch._disable_dynamo
def state_dict(original: Callable[..., StateDict], optimizer: Optimizer) -> StateDict:
    """Stands in the place of Optimizer.state_dict: holds DTensors for what is shaped as a split parameter."""
    saved = original(optimizer)
    state = dict(saved["state"])
    for _, key, p, placement in _split(optimizer, saved):
        if isinstance(state.get(key), dict):
            state[key] = {name: _as_whole(name, value, p, placement) for name, value in state[key].items()}
    return saved | {"state": state}


@torch._disable_dynamo
def load_state_dict(original: Callable[..., None], optimizer: Optimizer, state_dict: StateDict) -> None:
    """Stands in the place of Optimizer.load_state_dict: gives it this rank's slices of what is whole."""
    state = dict(state_dict["state"])
    for i, key, p, placement in _split(optimizer, state_dict):
        if isinstance(state.get(key), dict) and not isinstance(p, DTensor):
            state[key] = {name: _as_local(f"{name} of parameter {i}", x, placement) for name, x in state[key].items()}
    original(optimizer, state_dict | {"state": state})


def _split(optimizer: Optimizer, state_dict: StateDict) -> Iterator[tuple[int, Any, Tensor, SplitParameter]]:
    """Yields (position, key in the dictionary, parameter, its whole) of the optimizer's split parameters."""
    placements = wholes()
    keys = list(itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"]))
    parameters = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for i, (key, p) in enumerate(zip(keys, parameters)):
        placement = placements.get(p)
        if placement is not None and is_split(*placement):
            yield i, key, p, placement


def _as_whole(key: str, value: Any, p: Tensor, placement: SplitParameter) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.shape == p.shape:
        return as_whole(value, *placement)
    if value.numel() > 1:
        raise ValueError(
            f"Optimizer.state_dict: {key} of shape {tuple(value.shape)} belongs to a parameter that is split over"
            f" {placement.tp.size} ranks, and is neither a number nor shaped as this rank's {tuple(p.shape)}: the whole"
            " is not known, and the update was not that of the whole; use an optimizer that works element by element"
        )
    return value


def _as_local(name: str, value: Any, placement: SplitParameter) -> Any:
    return as_local(f"Optimizer.load_state_dict: {name}", value, *placement) if isinstance(value, Tensor) else value
