"""Partial gradients are found and named: gradients of parameters that are not split are compared over the ranks.

A plain module on this rank's rows, or a shard that nobody declared, trains wrongly in silence: every rank has another
gradient.  Compared are a norm and 64 sums of elements with random signs, which no structure of a gradient cancels.
This happens at the end of a model's backward pass and before an optimizer's step, at the 1st, 2nd, 4th, 8th, ... of
them until each parameter has had a gradient; after that a call costs one look at a set.  The layers of the library are
right by construction and not compared.
"""

import gc
import math
import warnings
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes

from ..agreement import CLOSE, channel
from ..kernels.runtime.rules import some
from ..parallel import TensorParallel
from .module import ParallelModule, wholes

_CURE = (
    "a plain module on this rank's rows needs tpfuse.replicated(module, tp) (tpfuse.layers.LayerNorm and RMSNorm are"
    " complete by themselves), and a parameter that is a shard by intent ParallelModule.add_parameter(..., dim=...)"
)
_SUMS, _PIECE = 64, 1 << 18  # sums of a digest; elements that are converted at a time


def check_gradients(of: nn.Module | Iterable[Tensor], name: str = "check_gradients") -> bool:
    """Compares the gradients of a model's, or of given, parameters that are not split over the tensor-parallel ranks.

    Each rank calls it.  ValueError on every rank, in the name of the caller ``name``, where a gradient is not the same
    on every rank or is missing on some: it says which parameters have one and the cure.  Returns whether each
    parameter has been seen with a gradient.  Nothing is compared where no parameter belongs to a parallel layer that is
    split, and nothing of the library's own layers.
    """
    parameters = dict(of.named_parameters()) if isinstance(of, nn.Module) else _named(of)
    with _disable_current_modes(), torch.no_grad():
        differing, seen = _compare(parameters, lambda p: p.grad)
    if differing:
        whose = some(_readable(differing, parameters))
        raise ValueError(
            f"{name}: the gradient must be the same on every tensor-parallel rank, is not for {whose}: {_CURE}"
        )
    return seen


def warn_of_drift(model: nn.Module, name: str) -> None:
    """Warns, on every rank, of parameters that are not split and whose values differ; each rank calls it."""
    parameters = dict(model.named_parameters())
    with _disable_current_modes(), torch.no_grad():
        differing, _ = _compare(parameters, lambda p: p)
    if differing:
        words = f"{some(differing)} should be the same on every tensor-parallel rank and differ"
        warnings.warn(f"{name}: {words}; rank 0's is kept: {_CURE}", stacklevel=3)


# ---- the comparison ----


class _Digest(NamedTuple):
    norm: float
    sums: tuple[float, ...]

    def like(self, other: "_Digest") -> bool:
        if not math.isfinite(self.norm + other.norm):
            return math.isfinite(self.norm) == math.isfinite(other.norm)
        return math.dist(self.sums, other.sums) <= CLOSE * max(self.norm, other.norm)


def _digest(x: Tensor | None) -> _Digest | None:
    if x is None or x.is_meta:
        return None
    x = x.to_local() if isinstance(x, DTensor) else x
    x = (x.coalesce().to_dense() if x.is_sparse else x).detach().reshape(-1)
    signs = torch.randint(2, (_PIECE,), generator=torch.Generator("cpu").manual_seed(0), device="cpu") * 2.0 - 1.0
    signs = signs.to(x.device, torch.float64)
    sums = signs.new_zeros(_SUMS + 1)
    for piece in x.split(_PIECE):
        values = piece.to(torch.float64)
        signed = nn.functional.pad(values * signs[: len(piece)], (0, -len(piece) % _SUMS))
        sums += torch.cat([signed.view(-1, _SUMS).sum(0), values.square().sum()[None]])
    *found, square = sums.tolist()
    return _Digest(math.sqrt(square) if math.isfinite(square) else math.inf, tuple(found))


def _compare(parameters: dict[str, Tensor], value: Any) -> tuple[list[str], bool]:
    """Returns the names of what differs, the same on every rank, and whether everything has been seen."""
    tp, compared = _compared(parameters)
    between = None if tp is None else channel(tp.group)
    if between is None or not compared:
        return [], True
    every = between.gather({name: _digest(value(p)) for name, p in compared.items()})
    common = [name for name in every[0] if all(name in each for each in every)]
    differing, seen = [], True
    for name in common:
        first, *others = (each[name] for each in every)
        if first is None or None in others:
            seen = False
            if first is not None or any(other is not None for other in others):
                differing.append(name)
            continue
        seen = seen and 0 < first.norm < math.inf
        if not all(first.like(other) for other in others):
            differing.append(name)
    return differing, seen


def _compared(parameters: dict[str, Tensor]) -> tuple[TensorParallel | None, dict[str, Tensor]]:
    """Returns the ranks that these parameters are split over, and those parameters that should be the same on all."""
    known, ours = wholes(), _library()
    tp = next((known[p].tp for p in parameters.values() if p in known and known[p].tp.size > 1), None)
    if tp is None:
        return None, {}
    takes = lambda p: p.requires_grad and p not in ours and not (p in known and known[p].spec.dim is not None)
    return tp, {name: p for name, p in parameters.items() if takes(p) and not _is_sharded(p, tp)}


def _library() -> set[Tensor]:
    """Returns the parameters of the library's own layers."""
    prefix = __name__.partition(".")[0] + "."
    modules = [m for m in _modules() if isinstance(m, ParallelModule) and type(m).__module__.startswith(prefix)]
    return {p for module in modules for p in module._parameters.values() if p is not None}


def _is_sharded(p: Tensor, tp: TensorParallel) -> bool:
    """Whether torch's own tensor parallelism has split a parameter over these ranks."""
    if not isinstance(p, DTensor):
        return False
    names = (p.device_mesh.get_group(i).group_name for i in range(p.device_mesh.ndim))
    return any(n == tp.group_name and not isinstance(s, Replicate) for n, s in zip(names, p.placements, strict=True))


# ---- modules of parameters and layers ----


def _modules() -> Iterator[nn.Module]:
    return (x for x in gc.get_objects() if issubclass(type(x), nn.Module))


def _named(parameters: Iterable[Tensor]) -> dict[str, Tensor]:
    return {f"parameter {i}": p for i, p in enumerate(parameters)}


def _readable(differing: list[str], parameters: dict[str, Tensor]) -> list[str]:
    """Returns the names that modules have for parameters, where a call was given none."""
    wanted = {id(parameters[name]): name for name in differing}
    for module in _modules():
        for leaf, p in module._parameters.items():
            if wanted.get(id(p), "").startswith("parameter "):
                wanted[id(p)] = (
                    f"{wanted[id(p)]} ({type(module).__name__}.{leaf} {tuple(parameters[wanted[id(p)]].shape)})"
                )
    return [wanted[id(parameters[name])] for name in differing]


def _outermost(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Returns the modules that hold these and are held by none: one pass over everything that is alive."""
    parents: dict[int, list[nn.Module]] = {}
    for module in _modules():
        for child in module._modules.values():
            if child is not None:
                parents.setdefault(id(child), []).append(module)
    found: dict[int, nn.Module] = {}
    seen: set[int] = set()
    waiting = list(layers)
    while waiting:
        module = waiting.pop()
        if id(module) not in seen:
            seen.add(id(module))
            above = parents.get(id(module), [])
            waiting += above
            if not above:
                found[id(module)] = module
    return list(found.values())


# ---- when it is done ----


class _Schedule:
    """The 1st, 2nd, 4th, 8th, ... call of each model or optimizer, until it is settled."""

    def __init__(self) -> None:
        self.settled: weakref.WeakSet[Any] = weakref.WeakSet()
        self._calls: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def due(self, what: Any) -> bool:
        calls = self._calls[what] = self._calls.get(what, 0) + 1
        return calls & (calls - 1) == 0


_backward, _steps = _Schedule(), _Schedule()
_ending: list[nn.Module] = []  # layers of the backward pass that is under way


def watch(layer: ParallelModule) -> None:
    """Makes the backward passes of the models that hold ``layer`` compare gradients, and the steps of optimizers."""
    layer.register_forward_hook(_after_forward)
    _watch_steps()


def _after_forward(layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    if layer in _backward.settled or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return
    tensors = output if isinstance(output, tuple) else (output,)
    first = next((x for x in tensors if isinstance(x, Tensor) and x.requires_grad), None)
    if first is not None and not first.is_meta:
        weak = weakref.ref(layer)
        first.register_hook(lambda gradient: _in_backward(weak()))


def _in_backward(layer: nn.Module | None) -> None:
    if layer is not None and not torch.compiler.is_compiling():
        if not _ending:  # twice: what others do at the end of a backward pass, such as DDP, comes before
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: engine.queue_callback(_after_backward))
        _ending.append(layer)


def _after_backward() -> None:
    layers = [layer for layer in dict.fromkeys(_ending) if layer not in _backward.settled]
    _ending.clear()
    if not layers or _captures():
        return
    due = [layer for layer in layers if _backward.due(layer)]
    if due:
        models = _outermost(due)
        seen = [check_gradients(model, "backward") for model in models]
        if all(seen):
            _backward.settled.update(part for model in models for part in model.modules())


_watching: list[Any] = []


def _watch_steps() -> None:
    if not _watching:
        _watching.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer in _steps.settled or torch.compiler.is_compiling() or _captures():
        return
    if _steps.due(optimizer):
        given = [p for group in optimizer.param_groups for p in group["params"]]
        if check_gradients(given, f"{type(optimizer).__name__}.step"):
            _steps.settled.add(optimizer)


def _captures() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
