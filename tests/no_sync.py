"""A GPU that is not there: the host's code runs on meta tensors, and whatever would wait for a device is an error.

Launchers run as they would, up to the start of their kernels, which are counted.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tpfuse.kernels.runtime import launch
from tpfuse.kernels.runtime.op import OPS

GPU = torch.device("meta")
aten = torch.ops.aten
_COPIES = {aten._to_copy, aten.copy_, aten.copy}
_FROM_HOST = {torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, Tensor.new_tensor}
_CONTENT = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
_LAUNCHED = {op.overload: op for op in OPS.values() if op.launch is not None}


class Waits(AssertionError):
    """A call that would make the host wait for the GPU."""


def why_it_waits(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Returns the reason for which an op waits for the GPU; None where it does not."""
    packet, tensors = func.overloadpacket, [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    devices = {t.device for t in tensors} | {torch.device(kwargs["device"]) for _ in "1" if kwargs.get("device")}
    if packet in _COPIES:
        return "a copy between the host and the GPU" if len(devices) > 1 else None
    if GPU not in devices:
        return None
    if packet in (aten.index, aten.index_put, aten.index_put_):
        mask = any(isinstance(t, Tensor) and t.dtype in (torch.bool, torch.uint8) for t in args[1])
        return "an index that is a boolean mask, whose elements are counted" if mask else None
    if packet is aten.isin:
        return "it sorts and counts what is unique, where there are many elements"
    return "its result, or its shape, depends on values" if _CONTENT & set(func.tags) else None


def _of_host(value: Any) -> Any:
    """What a launch fixes of an argument: a number itself, of a tensor its kind and layout."""
    return (value.dtype, value.shape, value.stride()) if isinstance(value, Tensor) else value


class _FromHost(TorchFunctionMode):
    """Sees what makes tensors of numbers on the host, which copies them without an op."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in _FROM_HOST and out.device == GPU and not any(a is out for a in args):
            raise Waits(f"{func.__name__}: a copy from the host to the GPU")
        return out


class NoSync(TorchDispatchMode):
    """Raises :class:`Waits` for an op that does, and counts the others and the kernels they start."""

    def __init__(self):
        super().__init__()
        self.started: Counter[str] = Counter()
        self.calls: list[Any] = []  # of ops and kernels, with what the host gave them

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        reason = why_it_waits(func, args, kwargs or {})
        if reason is not None:
            raise Waits(f"{func}: {reason}")
        with self:  # what an op is made of, and what a launcher calls
            if func in _LAUNCHED:
                return _LAUNCHED[func].launch(*_LAUNCHED[func].pack(args))
            out = func.decompose(*args, **(kwargs or {}))
        if out is not NotImplemented:
            return out
        self.started[func.overloadpacket.__name__] += 1
        self.calls.append((func, tree_map(_of_host, (args, kwargs))))
        return func(*args, **(kwargs or {}))

    def start(self, kernel: Any, grid: tuple[int, ...], device: torch.device, **given: Any) -> None:
        assert device == GPU
        self.started[kernel.__name__] += 1
        self.calls.append((kernel.__name__, grid, tree_map(_of_host, given)))


@contextlib.contextmanager
def no_sync(arch: str = "sm_90") -> Iterator[NoSync]:
    """Inside, meta tensors are on a GPU of ``arch``, and what waits for it raises :class:`Waits`."""
    watch, there = NoSync(), launch.Target(arch, launch.MULTIPROCESSORS[arch])
    before = launch._target, launch._start
    launch._target, launch._start = lambda device: there, watch.start
    try:
        with watch, _FromHost():
            yield watch
    finally:
        launch._target, launch._start = before
