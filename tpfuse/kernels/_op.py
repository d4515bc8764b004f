"""One op = one schema, a plain-torch reference and, where there is one, a Triton launcher.  PyTorch dispatches by device.

``Library`` with an ``autograd.Function`` on top, rather than ``custom_op``: half the overhead a call, and the Function may pick
what it saves.  Both trace with ``fullgraph=True``.  The namespace carries the library's version, so that a compiled graph in a
disk cache never outlives the fake kernels it was traced with.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .._version import __version__

NAMESPACE = "tpfuse_" + __version__.replace(".", "_").replace("+", "_")
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
OPS: dict[str, "Op"] = {}  # by name


class Cost(NamedTuple):
    """What one call moves and computes.  Bytes are those that reach memory: an element counts once a launch, however often it is read.
    ``sent`` go to other ranks; ``scores`` are those that attention makes: an exponential each, and its share of a mask."""

    read: int
    written: int
    flops: int = 0
    sent: int = 0
    scores: int = 0


def moved(*tensors: Tensor | None) -> int:
    """Bytes of the distinct elements of some tensors; what a dimension of stride 0 repeats counts once."""
    return sum(t.element_size() * math.prod(n for n, s in zip(t.shape, t.stride()) if s or not n) for t in tensors if t is not None)


def least(args: tuple, outputs: tuple) -> Cost:
    """The lower bound, and the cost of an op that makes one pass: every input read once, every output written once."""
    return Cost(moved(*(a for a in args if isinstance(a, Tensor))), moved(*outputs))


class Op:
    """``torch.ops.<NAMESPACE>.<name>``: CPU runs ``cpu`` or the reference, CUDA ``launch`` or the reference, tracing ``fake``.

    ``fake`` is the reference itself where that needs shapes only; an op with data-dependent control flow brings its own.
    ``cost(args, outputs)`` is what its launcher moves and computes (:func:`least` unless given), from shapes alone.
    An op never mutates or aliases its inputs; only a backward op may fill an ``out`` it is given (``mutates=("out",)``).
    fp64 on a GPU runs the reference.
    """

    def __init__(
        self,
        name: str,
        reference: Callable,
        launch: Callable | None = None,
        *,
        cpu: Callable | None = None,
        fake: Callable | None = None,
        mutates: tuple[str, ...] = (),
        cost: Callable[[tuple, tuple], Cost] = least,
    ):
        self.name, self.reference, self.cpu, self.launch, self._cost = name, reference, cpu or reference, launch, cost
        OPS[name] = self
        _LIBRARY.define(name + torch.library.infer_schema(reference, mutates_args=mutates))
        _LIBRARY.impl(name, _outside_autocast(self.cpu, "cpu"), "CPU")
        _LIBRARY.impl(name, _outside_autocast(self._cuda, "cuda"), "CUDA")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake or reference, lib=_LIBRARY)
        self.overload = getattr(getattr(torch.ops, NAMESPACE), name).default

    def _cuda(self, *args):
        double = any(isinstance(a, Tensor) and a.dtype == torch.float64 for a in args)
        return (self.reference if self.launch is None or double else self.launch)(*args)

    def __call__(self, *args):
        return self.overload(*args)

    def into(self, places: tuple[Tensor, ...], *args):
        """The call, for the body of another op: its outputs go to contiguous ``places``, which its implementations take last."""
        double = places[0].dtype == torch.float64
        return (self.cpu if places[0].is_cpu or double else self.launch)(*args, *places)

    def cost(self, args: tuple, outputs: Tensor | tuple[Tensor, ...]) -> Cost:
        """Of the call that took ``args`` and gave ``outputs``; meta tensors will do."""
        return self._cost(args, (outputs,) if isinstance(outputs, Tensor) else tuple(outputs))


def op(reference: Callable, **options) -> Op:
    """An :class:`Op` named after its reference: ``linear_fwd = op(linear_fwd_ref)``."""
    return Op(reference.__name__.removesuffix("_ref"), reference, **options)


def _outside_autocast(impl: Callable, device: str) -> Callable:
    """Autocast acts in public functions; inside an op it would quietly lower what the op keeps in fp32."""

    def run(*args):
        if torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return impl(*args)
        return impl(*args)

    return run


def autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Under ``torch.autocast``: floating tensors (fp64 excepted) in its dtype; otherwise the tensors as they are."""
    device = next(t.device.type for t in tensors if t is not None)
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    lower = (torch.float32, torch.float16, torch.bfloat16)
    return tuple(t.to(dtype) if t is not None and t.dtype in lower else t for t in tensors)


def acc_dtype(x: Tensor) -> torch.dtype:
    """The dtype that sums and statistics of x are kept in: fp32, or fp64 for fp64."""
    return torch.promote_types(x.dtype, torch.float32)


def sum_parts(parts: Tensor) -> Tensor:
    """[R, ...] -> [...]: a new tensor, added in rank order in fp32 (fp64 for fp64), not yet rounded."""
    total = parts[0].to(acc_dtype(parts), copy=True)
    for part in parts[1:]:
        total += part
    return total


def row_blocks(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of rows whose fp32 temporaries stay in a core's cache, at least one; for CPU implementations."""
    step = max(1, (1 << 17) // max(columns, 1))
    return ((i, min(i + step, rows)) for i in range(0, max(rows, 1), step))


def check(condition: bool, message: str) -> None:
    """A named error: ``ValueError`` with what was wrong, the rule and what came."""
    if not condition:
        raise ValueError(message)
