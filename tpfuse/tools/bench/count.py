"""What a call of tpfuse moves, computes and launches: the declared costs of its ops, the least that any kernel would
have to move in their place, and the kernels behind them."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...kernels.replay import replay
from ...kernels.runtime import launch as _launch
from ...kernels.runtime.op import NAMESPACE, OPS, Cost, least


@dataclass
class Kernel:
    """What was launched."""

    name: str
    registers: int | None = None  # a thread; None under the interpreter
    spills: int | None = None  # bytes a thread


@dataclass
class Call:
    """One call of an op."""

    op: str
    cost: Cost
    kernels: list[Kernel]
    device: str
    least: int | None = None  # bytes: every input read once and every output written once; None: as declared

    @property
    def path(self) -> str:
        """Says which kernels it launched; without any, which torch implementation ran."""
        if self.kernels:
            return " ".join(dict.fromkeys(kernel.name for kernel in self.kernels))
        faster = self.device == "cpu" and OPS[self.op].cpu is not OPS[self.op].reference
        return f"{self.op} on CPU" if faster else f"{self.op} by torch"


@dataclass
class Counted:
    """The calls of ops, in their order."""

    calls: list[Call] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Counts as declared: what this implementation moves, second reads and partial sums included."""
        return sum(call.cost.read + call.cost.written for call in self.calls)

    @property
    def least(self) -> int:
        """Counts what any implementation moves: a roofline of declared bytes would reward reading twice."""
        return sum(call.cost.read + call.cost.written if call.least is None else call.least for call in self.calls)

    @property
    def flops(self) -> int:
        """Counts as declared."""
        return sum(call.cost.flops for call in self.calls)

    @property
    def path(self) -> str:
        """Says what ran, each thing once."""
        return ", ".join(dict.fromkeys(call.path for call in self.calls))

    def largest(self, what: str) -> int | None:
        """Returns "registers" or "spills" of the kernel that has most of them; None without any."""
        found = [getattr(kernel, what) for call in self.calls for kernel in call.kernels]
        return max((n for n in found if n is not None), default=None)


class _Mode(TorchDispatchMode):
    def __init__(self, counted: Counted, launched: list[Kernel]) -> None:
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
        call = Call(op.name, cost, list(self.launched), device, least=least_bytes(cost, args, outputs))
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
def count() -> Iterator[Counted]:
    """``with count() as counted: call()`` records every tpfuse op, backward ones included, with what it launches."""
    counted, start = Counted(), _launch._start
    launched: list[Kernel] = []
    watched = lambda kernel, *rest, **call: start(_Watched(kernel, launched), *rest, **call)
    launching = mock.patch.object(replay, "REPLAY", False)  # a tape starts kernels past ``_start``
    with launching, mock.patch.object(_launch, "_start", watched), _Mode(counted, launched):
        yield counted
