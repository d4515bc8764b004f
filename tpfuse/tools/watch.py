"""``with tpfuse.watch(model):`` raises at the first op whose output is not finite, and says where it is in the model.

A tool for finding a fault: every op's inputs and outputs are read, which on a GPU waits after each, and what is
replayed otherwise runs op by op.  Values stay bitwise what they are.  A compiled model is to be watched as it was
before.

What is no fault: uninitialised memory, an infinite number given as such (a mask's -inf), the infinite lse of a row of
attention that sees no key, and what follows from these.  NaN made from infinities is one.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from ..kernels.runtime.op import NAMESPACE
from ..layers.hooks import onlooker

_INFINITE = {"attention_fwd": {1}, "gather_attention_exchange_fwd": {3}}  # outputs that may be: lse
_UNINITIALISED = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_"}
# What these read is not theirs.
_OVERWRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_"}
_LABEL = "tpfuse.watch"


class Faults(NamedTuple):
    nan: int
    inf: int

    @property
    def finite(self) -> bool:
        return self.nan == self.inf == 0


class Argument(NamedTuple):
    """A tensor of numbers that an op is given or gives."""

    name: str
    tensor: Tensor
    faults: Faults

    def __str__(self) -> str:
        t = self.tensor.detach()
        finite = t[t.isfinite()]
        within = f" in [{finite.min().item():.4g}, {finite.max().item():.4g}]" if finite.numel() else ""
        bad = "" if self.faults.finite else f", {self.faults.nan} NaN and {self.faults.inf} infinite"
        return f"{self.name} {str(t.dtype)[6:]} {tuple(t.shape)}{within}{bad}"


@contextlib.contextmanager
def watch(model: nn.Module) -> Iterator[None]:
    """Watches forward, backward and whatever else runs inside, optimizer included.

    FloatingPointError for the first op that gives a number that is not finite, or that is given one which no op made: a
    parameter, an argument, a gradient.  It names the module, the op, forward or backward, the rank, how many elements,
    and the ranges of the inputs.  Under tensor parallelism each rank watches its own ops; the first to raise leaves the
    others waiting for its message, as any error on one rank does.
    """
    mode = _Watch(model)
    handles = [handle for path, module in model.named_modules() for handle in mode.follow(path, module)]
    try:
        with mode:
            yield
    finally:
        for handle in handles:
            handle.remove()


class _Watch(TorchDispatchMode):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.root = type(model).__name__
        self.parameters = {storage_of(p): name for name, p in model.named_parameters() if not p.is_meta}
        self.stack: list[tuple[str, set[Any]]] = []  # modules that run: a path, the nodes that their inputs come from
        self.excused = WeakIdKeyDictionary()  # storages -> whether anything may be in them, or infinities only

    # ---- where we are ----

    def follow(self, path: str, module: nn.Module) -> Iterator[Any]:
        """Notes when ``module`` runs, and labels the nodes of the graph that it made."""

        @onlooker
        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            self.stack.append((path, {t.grad_fn for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}))

        @onlooker
        def leave(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            path, borders = self.stack.pop()
            _label([t.grad_fn for t in tree_leaves(output) if isinstance(t, Tensor)], borders, path)

        yield module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
        yield module.register_forward_hook(leave, with_kwargs=True, always_call=True)

    def _place(self, inputs: list[Argument]) -> str:
        """Returns the phase and the module: of the parameter that the op reads, else that runs or made the node."""
        backward = torch._C._current_graph_task_id() >= 0
        node: Any = torch._C._current_autograd_node() if backward else None
        path: str | None = None
        if self.stack:
            path = self.stack[-1][0]
        elif node is not None:
            path = node.metadata.get(_LABEL)
        owners = [
            self.parameters[s].rpartition(".")[0] for a in inputs if (s := storage_of(a.tensor)) in self.parameters
        ]
        path = next((owner for owner in owners if owner.startswith(path or "")), path)
        phase = "forward" if not backward else "forward, recomputed in backward" if self.stack else "backward"
        place = "outside the model" if path is None else path or self.root
        return f"{phase}, {place}" + (f" ({node.name()})" if node is not None and not self.stack else "")

    # ---- what happens ----

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_view(func):
            return func(*args, **kwargs)
        name = func._schema.name.split("::")[1]
        inputs = _arguments(func, args, kwargs, overwrites=name in _OVERWRITES)
        anything, infinities = self._check_inputs(func, inputs)
        infinities |= any(isinstance(x, float) and math.isinf(x) for x in tree_leaves((args, kwargs)))
        result = func(*args, **kwargs)
        results = [*tree_leaves(result), *_written(func, args, kwargs)]
        outputs = {id(t): (i, t) for i, t in reversed(list(enumerate(results))) if _has_numbers(t)}
        for index, output in outputs.values():
            if name in _UNINITIALISED:
                self._excuse(output, True)
                continue
            value = Argument(f"output {index}", _plain(output), _count(output))
            allowed = infinities or (func.namespace == NAMESPACE and index in _INFINITE.get(name, ()))
            if not anything and (value.faults.nan or (value.faults.inf and not allowed)):
                self._refuse(func, value, inputs, "gives")
            if not value.faults.finite:
                self._excuse(output, anything)
        return result

    def _check_inputs(self, func: Any, inputs: list[Argument]) -> tuple[bool, bool]:
        """Returns whether inputs hold anything, and infinities, that are no fault; raises for what was bad before any
        op under watch."""
        anything = infinities = False
        for x in inputs:
            if x.faults.finite:
                continue
            excused = self.excused.get(x.tensor.untyped_storage())
            parameter = self.parameters.get(storage_of(x.tensor))
            if parameter is not None or (x.faults.nan and not excused):
                name = x.name if parameter is None else f"{x.name} = {parameter}"
                self._refuse(func, x._replace(name=name), inputs, "is given, and no op under watch made,")
            anything |= bool(excused)
            infinities = True
        return anything, infinities

    def _excuse(self, t: Tensor, anything: bool) -> None:
        storage = _plain(t).untyped_storage()
        self.excused[storage] = anything or self.excused.get(storage, False)

    def _refuse(self, func: Any, wrong: Argument, inputs: list[Argument], verb: str) -> None:
        name = func._schema.name if func.namespace != NAMESPACE else func._opname
        rank = f"rank {dist.get_rank()} of {dist.get_world_size()}" if dist.is_initialized() else "rank 0"
        total, (nan, inf), place = wrong.tensor.numel(), wrong.faults, self._place([wrong, *inputs])
        bad, ranges = f"{nan} NaN and {inf} infinite of {total} elements", "; ".join(map(str, inputs)) or "none"
        raise FloatingPointError(
            f"tpfuse.watch: {name} ({place}, {rank}) {verb} {wrong.name} with {bad}; inputs: {ranges}"
        )


def _label(nodes: list[Any], borders: set[Any], path: str) -> None:
    """Gives the nodes behind ``nodes``, up to ``borders``, the path of the innermost module that made them."""
    while nodes:
        node = nodes.pop()
        if node is not None and node not in borders and _LABEL not in node.metadata:
            node.metadata[_LABEL] = path
            nodes += [behind for behind, _ in node.next_functions]


def _is_view(func: Any) -> bool:
    schema = func._schema
    return not schema.is_mutable and bool(schema.returns) and all(r.alias_info is not None for r in schema.returns)


def _bound(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """Yields the schema's arguments with their values."""
    for i, argument in enumerate(func._schema.arguments):
        if i < len(args):
            yield argument, args[i]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _arguments(func: Any, args: Any, kwargs: Any, *, overwrites: bool) -> list[Argument]:
    """Returns the numbers that an op reads, not those that it overwrites."""
    return [
        Argument(argument.name, _plain(t), _count(t))
        for argument, value in _bound(func, args, kwargs)
        if not (_writes(argument) and (overwrites or argument.kwarg_only or argument.name == "out"))
        for t in tree_leaves(value)
        if _has_numbers(t)
    ]


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    return [t for argument, value in _bound(func, args, kwargs) if _writes(argument) for t in tree_leaves(value)]


def _plain(t: Tensor) -> Tensor:
    return t._local_tensor if isinstance(t, DTensor) else t


def _has_numbers(t: Any) -> bool:
    if not isinstance(t, Tensor):
        return False
    t = _plain(t)
    return t.is_floating_point() and t.layout == torch.strided and not t.is_meta and t.numel() > 0


def _count(t: Tensor) -> Faults:
    t = _plain(t).detach()
    if t.isfinite().all():
        return Faults(0, 0)
    return Faults(int(t.isnan().sum()), int(t.isinf().sum()))


def storage_of(t: Tensor) -> int:
    """Identifies the memory of a tensor that is alive."""
    return _plain(t).untyped_storage()._cdata
