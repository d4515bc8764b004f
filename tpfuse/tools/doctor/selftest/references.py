"""Runs every op by its definition in plain torch, whatever the device would pick, and notes the calls."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ....kernels.runtime.op import NAMESPACE, OPS, tensors


class OpCall(NamedTuple):
    name: str
    args: tuple[Any, ...]  # the reference's, records packed
    outputs: list[Tensor]


class References(TorchDispatchMode):
    """While it is on, ops run their references; ``calls`` holds each call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[OpCall] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace != NAMESPACE:
            return func(*args, **(kwargs or {}))
        op = OPS[func.__name__.split(".")[0]]
        packed = op.pack(args)
        with self:  # a reference calls ops too
            outputs = op.reference(*packed, **(kwargs or {}))
        kept = [t.clone() for t in tensors((outputs,))]  # what an op has left room for, another one fills
        self.calls.append(OpCall(op.name, packed, kept))
        return outputs


def cast(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Returns an op's argument on ``device``: fp64, tensors and dtypes, becomes ``dtype``; a record's fields too."""
    if isinstance(value, Tensor):
        return value.detach().to(device, dtype if value.dtype == torch.float64 else value.dtype)
    if isinstance(value, tuple):
        fields = [cast(field, device, dtype) for field in value]
        return type(value)(*fields) if hasattr(value, "_fields") else tuple(fields)
    return dtype if value is torch.float64 else value
