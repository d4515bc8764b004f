"""The state of torch's optimizers in state dictionaries: whole where a parameter is split.

An optimizer is given parameters without their modules, and has hooks only one by one: its two methods are wrapped once
for all classes.  An optimizer without split parameters never notices.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..layers.module import Whole, wholes
from ..layers.state import as_local, as_whole, is_split

State = dict[str, Any]


def _split(optimizer: Optimizer) -> Iterator[tuple[int, Tensor, Whole]]:
    """Yields (position, parameter, whole) of the optimizer's split parameters."""
    known = wholes()
    for i, p in enumerate(itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)):
        whole = known.get(p)
        if whole is not None and is_split(*whole):
            yield i, p, whole


def _whole_states(optimizer: Optimizer, state_dict: State) -> State:
    """Returns a state dictionary with DTensors for what is shaped as a split parameter."""
    state = dict(state_dict["state"])
    order = list(itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"]))
    for i, p, whole in _split(optimizer):
        key = order[i]
        if isinstance(state.get(key), dict):
            state[key] = {k: _whole_state(k, v, p, whole) for k, v in state[key].items()}
    return state_dict | {"state": state}


def _whole_state(key: str, value: Any, p: Tensor, whole: Whole) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.shape == p.shape:
        return as_whole(value, *whole)
    if value.numel() > 1:
        raise ValueError(
            f"Optimizer.state_dict: {key} of shape {tuple(value.shape)} belongs to a parameter that is split over"
            f" {whole.tp.size} ranks, and is neither a number nor shaped as this rank's {tuple(p.shape)}: the whole is"
            " not known, and the update was not that of the whole; use an optimizer that works element by element"
        )
    return value


def _local_states(optimizer: Optimizer, state_dict: State) -> State:
    """Returns a state dictionary with this rank's slices of what :func:`_whole_states` made whole."""
    state = dict(state_dict["state"])
    order = list(itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"]))
    for i, p, whole in _split(optimizer):
        found = state.get(order[i]) if i < len(order) else None
        if isinstance(found, dict) and not isinstance(p, DTensor):
            state[order[i]] = {k: _local_state(f"{k} of parameter {i}", v, whole) for k, v in found.items()}
    return state_dict | {"state": state}


def _local_state(name: str, value: Any, whole: Whole) -> Any:
    tensor = isinstance(value, Tensor)
    return as_local(f"Optimizer.load_state_dict: {name}", value, *whole) if tensor else value


def _install(name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wraps a method of Optimizer, once in a process."""
    method = getattr(Optimizer, name)
    if not hasattr(method, "_tpfuse"):
        wrapped = functools.wraps(method)(wrap(method))
        wrapped._tpfuse = True  # type: ignore[attr-defined]
        setattr(Optimizer, name, wrapped)


def _saving(method: Callable[..., State]) -> Callable[..., State]:
    @torch._disable_dynamo
    def state_dict(self: Optimizer) -> State:
        return _whole_states(self, method(self))

    return state_dict


def _loading(method: Callable[..., None]) -> Callable[..., None]:
    @torch._disable_dynamo
    def load_state_dict(self: Optimizer, state_dict: State) -> None:
        method(self, _local_states(self, state_dict))

    return load_state_dict


def install() -> None:
    """Makes torch's optimizers keep split parameters whole in state dictionaries."""
    _install("state_dict", _saving)
    _install("load_state_dict", _loading)
