"""What the parallel tests share: who holds what, how exact is equal, and what ran."""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tpfuse import TensorParallel
from tpfuse.kernels.runtime.op import NAMESPACE, OPS


def own_ops() -> set[str]:
    """Returns the names of tpfuse's ops, without those that tests of this process have made."""
    return {name for name, op in OPS.items() if op.reference.__module__.startswith("tpfuse.")}


def make_tp(world, sequence_parallel: bool = True) -> TensorParallel:
    return TensorParallel(world.group, sequence_parallel=sequence_parallel)


def fake_tp(size: int, rank: int = 0, sequence_parallel: bool = False) -> TensorParallel:
    """A member of a group of any size that does not exist: for what asks a TensorParallel for numbers only."""
    tp = TensorParallel(sequence_parallel=sequence_parallel)
    object.__setattr__(tp, "size", size)
    object.__setattr__(tp, "rank", rank)
    return tp


def my_rows(x: Tensor, tp: TensorParallel) -> Tensor:
    """This rank's rows of what all rows are."""
    m = len(x) // tp.row_shards // tp.cp_size
    first = (tp.cp_rank * tp.row_shards + tp.row_rank) * m
    return x[first : first + m]


def error(ours: Tensor, exact: Tensor) -> float:
    """The largest difference over the largest value; a difference where the exact value is zero everywhere counts in
    full."""
    assert ours.shape == exact.shape, f"{tuple(ours.shape)} for {tuple(exact.shape)}"
    if not exact.numel():
        return 0.0
    exact = exact.double()
    return ((ours.double() - exact).abs().max() / (exact.abs().max() or 1.0)).item()


TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
DTYPES_AND_RANKS = [
    *(pytest.param(torch.float64, R, id=f"fp64-{R}") for R in (1, 2, 4)),
    *(pytest.param(torch.float32, R, id=f"fp32-{R}", marks=[pytest.mark.slow] * (R == 2)) for R in (1, 2, 4)),
]


def assert_close(ours: dict[str, Tensor], exact: dict[str, Tensor], dtype: torch.dtype) -> dict[str, float]:
    """-> the errors."""
    assert ours.keys() == exact.keys()
    errors = {name: error(ours[name], exact[name]) for name in ours}
    wrong = {name: e for name, e in errors.items() if not e <= TOLERANCE[dtype]}
    assert not wrong, wrong
    return errors


def assert_equal(ours: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    """Bitwise."""
    assert ours.keys() == exact.keys()
    wrong = [name for name in ours if not torch.equal(ours[name], exact[name])]
    assert not wrong, wrong


class Call(NamedTuple):
    """One op that ran: its name (without a namespace where the op is ours), and the tensors that went in and came
    out."""

    name: str
    ours: bool
    view: bool
    inputs: list[Tensor]
    outputs: list[Tensor]


class Recorder(TorchDispatchMode):
    """Every op that runs while it is on; autograd's own additions too."""

    def __init__(self):
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        ours = func.namespace == NAMESPACE
        name = func.__name__.split(".")[0] if ours else str(func)
        flat = lambda tree: [t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, Tensor)]
        inputs, outputs = flat((args, kwargs)), flat(out)
        storages = {t.untyped_storage().data_ptr() for t in inputs}
        view = not func._schema.is_mutable and all(t.untyped_storage().data_ptr() in storages for t in outputs)
        self.calls.append(Call(name, ours, view, inputs, outputs))
        return out

    def messages(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        """(kind, shape sent, dtype) of every collective of ours, in order."""
        kinds = "all_gather", "all_to_all"
        return [(c.name, tuple(c.inputs[0].shape), c.inputs[0].dtype) for c in self.calls if c.ours and c.name in kinds]

    def passes(self, elements: int) -> list[str]:
        """Ops not ours that read or wrote a tensor of at least so many elements, views excepted."""
        big = lambda c: any(t.numel() >= elements for t in c.inputs + c.outputs)
        return [c.name for c in self.calls if not c.ours and not c.view and big(c)]


@contextlib.contextmanager
def saved_bytes(*apart: Tensor) -> Iterator[Callable[[], int]]:
    """Yields a function: bytes saved for backward so far, each storage once, those of ``apart`` not counted."""
    skip = {t.untyped_storage().data_ptr() for t in apart}
    kept: dict[int, Tensor] = {}  # the tensors too: a storage must not be freed, or its address would come again

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.detach()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield lambda: sum(t.untyped_storage().nbytes() for pointer, t in kept.items() if pointer not in skip)


@contextlib.contextmanager
def changed(owner, name, value):
    """``owner`` has another value of an attribute inside."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
