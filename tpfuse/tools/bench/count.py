"""The costs of a call of tpfuse: bytes and flops that its ops declare, the fewest bytes that any kernel would have to
move in their place, and the kernels that were launched."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...kernels import replay
from ...kernels.runtime import launch as _launch
from ...kernels.runtime.op import NAMESPACE, OPS, Cost, least


@dataclass
class Kernel:
    name: str
    registers: int | None = None  # a thread; None under the interpreter
    spills: int | None = None  # bytes a thread


@dataclass
class OpCount:
    op: str
    cost: Cost
    kernels: list[Kernel]
    device: str
    least: int | None = None  # bytes: every input read once and every output written once; None: as declared

    @property
    def path(self) -> str:
        """The names of the kernels that it launched; without any, of the torch implementation that ran."""
        if self.kernels:
            return " ".join(dict.fromkeys(kernel.name for kernel in self.kernels))
        faster = self.device == "cpu" and OPS[self.op].cpu is not OPS[self.op].reference
        return f"{self.op} on CPU" if faster else f"{self.op} by torch"


@dataclass
class CallCount:
    """The ops of a call, in their order."""

    calls: list[OpCount] = field(default_factory=list)

    @property
    def least(self) -> int:
        """Bytes that any implementation moves: a roofline of declared bytes would reward reading twice."""
        return sum(call.cost.read + call.cost.written if call.least is None else call.least for call in self.calls)

    @property
    def flops(self) -> int:
        return sum(call.cost.flops for call in self.calls)

    @property
    def path(self) -> str:
        """The kernels and implementations that ran, each named once."""
        return ", ".join(dict.fromkeys(call.path for call in self.calls))

    def largest(self, field: str) -> int | None:
        """Returns "registers" or "spills" of the kernel that has most of them; None without any."""
        numbers = [getattr(kernel, field) for call in self.calls for kernel in call.kernels]
        return max((n for n in numbers if n is not None), default=None)


class _Mode(TorchDispatchMode):
    def __init__(self, counted: CallCount, launched: list[Kernel]) -> None:
        super().__init__()
        self.counted, self.launched = counted, launched

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace != NAMESPACE:
            return func(*args, **(kwargs or {}))
        self.launched.clear()
        outputs = func(*args, **(kwargs or {}))
        op = OPS[func._opname]
        device = next(a.device.type for a in args if isinstance(a, torch.Tensor))
        cost = op.cost(op.pack(args), outputs)
        call = OpCount(op.name, cost, list(self.launched), device, least=least_bytes(cost, args, outputs))
        self.counted.calls.append(call)
        return outputs


def least_bytes(cost: Cost, args: tuple[Any, ...], outputs: Any) -> int:
    """Counts every input once and every output once; of a table that is looked up in, no more than is declared."""
    once = least(args, (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs))
    return min(cost.read, once.read) + min(cost.written, once.written)


class _Watched:
    """A kernel whose launches leave behind what was compiled."""

    def __init__(self, kernel: Any, launched: list[Kernel]) -> None:
        self.kernel, self.launched = kernel, launched

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def start(*args: Any, **config: Any) -> Any:
            compiled = self.kernel[grid](*args, **config)
            read = () if compiled is None else (compiled.n_regs, 4 * compiled.n_spills)  # Triton counts words
            self.launched.append(Kernel(self.kernel.fn.__name__, *read))
            return compiled

        return start


@contextlib.contextmanager
def count() -> Iterator[CallCount]:
    """``with count() as counted: call()`` records every tpfuse op, backward ones included, with what it launches."""
    counted, start = CallCount(), _launch._start
    launched: list[Kernel] = []
    watched = lambda kernel, *args, **call: start(_Watched(kernel, launched), *args, **call)
    launching = mock.patch.object(replay, "REPLAY", False)  # a tape starts kernels past ``_start``
    with launching, mock.patch.object(_launch, "_start", watched), _Mode(counted, launched):
        yield counted
