"""Partial gradients are found and named: gradients of parameters that are not split are compared over the ranks.

A plain module on this rank's rows, or a shard that nobody declared, trains wrongly in silence: every rank has another
gradient.  Compared are a norm and 64 sums of elements with random signs, which no structure of a gradient cancels.
This happens at the end of a model's backward pass and before an optimizer's step, at the 1st, 2nd, 4th, 8th, ... of
them until each parameter has had a gradient; after that a call costs nothing and a step one look at a set.  The layers
of the library are right by construction and not compared.
"""

import contextlib
import functools
import gc
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes

from ..kernels.runtime.rules import listed
from ..parallel import TensorParallel
from ..ranks.agreement import CLOSE
from ..ranks.messages import channel, gather
from .hooks import onlooker
from .shards import living, named_buffers, wholes

_CURE = (
    "a plain module on this rank's rows needs tpfuse.replicated(module, tp) (tpfuse.layers.LayerNorm and RMSNorm are"
    " complete by themselves); a parameter that is a shard by intent ParallelModule.add_parameter(..., dim=...); and"
    " plain dropout on values that every rank has the same torch.manual_seed"
)
_SUMS, _PIECE = 64, 1 << 18  # sums of a digest; elements that are converted at a time


def check_gradients(of: nn.Module | Mapping[str, Tensor] | Iterable[Tensor], name: str = "check_gradients") -> bool:
    """Compares the gradients of a model's, or of given, parameters that are not split over the tensor-parallel ranks.

    Each rank calls it.  ValueError on every rank, in the name of the caller ``name``, where a gradient is not the same
    on every rank or is missing on some: it names the parameters and the cure.  Returns whether each parameter has been
    seen with a gradient.  Nothing is compared where no parameter belongs to a parallel layer that is split, and nothing
    of the library's own layers.
    """
    parameters = _named(of)
    differing, complete = _compare(parameters, lambda p: p.grad)
    if differing:
        whose = listed([_readable(key, parameters[key]) for key in differing])
        raise ValueError(f"{name}: not every tensor-parallel rank has the same gradient of {whose}; {_CURE}")
    return complete


def warn_of_drift(model: Any, name: str) -> None:
    """Warns, on every rank, of buffers, and of parameters that are not split, whose values differ; each rank calls
    it."""
    if not isinstance(model, nn.Module):
        return
    differing, _ = _compare(_named(model), lambda p: p, named_buffers(model))
    if differing:
        message = f"{listed(differing)} should be the same on every tensor-parallel rank and differ"
        warnings.warn(f"{name}: {message}; {_CURE}", stacklevel=3)


# ---- the comparison ----


class _Digest(NamedTuple):
    norm: float
    sums: tuple[float, ...]

    def matches(self, another: "_Digest") -> bool:
        if not math.isfinite(self.norm + another.norm):
            return math.isfinite(self.norm) == math.isfinite(another.norm)
        return math.dist(self.sums, another.sums) <= CLOSE * max(self.norm, another.norm)


def _digest(x: Tensor | None) -> _Digest | None:
    if x is None or x.is_meta:
        return None
    x = x.to_local() if isinstance(x, DTensor) else x
    x = (x.to_dense() if x.is_sparse else x).detach().reshape(-1)
    signs = _signs(x.device)
    sums = signs.new_zeros(_SUMS + 1)
    for piece in x.split(_PIECE):
        values = piece.to(torch.float64)
        signed = nn.functional.pad(values * signs[: len(piece)], (0, -len(piece) % _SUMS))
        sums += torch.cat([signed.view(-1, _SUMS).sum(0), values.square().sum()[None]])
    *projections, square = sums.tolist()
    return _Digest(math.sqrt(square) if math.isfinite(square) else math.inf, tuple(projections))


@functools.lru_cache(maxsize=1)
def _signs(device: torch.device) -> Tensor:
    drawn = torch.randint(2, (_PIECE,), generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    return (2 * drawn - 1).to(device, torch.float64)


def _compare(
    parameters: dict[str, Tensor], value: Callable[[Tensor], Tensor | None], buffers: Mapping[str, Tensor] | None = None
) -> tuple[list[str], bool]:
    """Returns the names of what differs, the same on every rank, and whether everything has been seen."""
    tp, compared = _compared(parameters)
    links = None if tp is None else channel(tp.call_group)
    if links is None:
        return [], True
    with _disable_current_modes(), torch.no_grad():
        mine = {name: _digest(value(p)) for name, p in (compared | dict(buffers or {})).items()}
        digests: list[Any] = gather(mine, links)  # if it is empty too: another rank may hold more
    common = [name for name in digests[0] if all(name in by_rank for by_rank in digests)]
    differing, complete = [], True
    for name in common:
        reference, *remaining = (by_rank[name] for by_rank in digests)
        if reference is None or None in remaining:
            complete = False
            if reference is not None or any(another is not None for another in remaining):
                differing.append(name)
            continue
        complete = complete and 0 < reference.norm < math.inf
        if not all(reference.matches(another) for another in remaining):
            differing.append(name)
    return differing, complete


def _compared(parameters: dict[str, Tensor]) -> tuple[TensorParallel | None, dict[str, Tensor]]:
    """Returns the ranks that these parameters are split over, and those parameters that should be the same on all."""
    whole_of, ours = wholes(), {p for module in living() if _is_ours(module) for p in module._parameters.values()}
    ranks = (whole_of[p].tp for p in parameters.values() if p in whole_of)
    tp = next((tp for tp in ranks if tp.call_size > 1 and tp.replicas == 1), None)
    if tp is None:
        return None, {}
    compared = lambda p: p.requires_grad and p not in ours and not (p in whole_of and whole_of[p].spec.dim is not None)
    return tp, {name: p for name, p in parameters.items() if compared(p) and not _is_sharded(p, tp)}


def _is_ours(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] == __name__.partition(".")[0]


def _is_sharded(p: Tensor, tp: TensorParallel) -> bool:
    """True if torch's own tensor parallelism has split a parameter over these ranks."""
    if not isinstance(p, DTensor):
        return False
    placed = zip(p.device_mesh.get_all_groups(), p.placements, strict=True)
    return any(g.group_name == tp.group_name and not s.is_replicate() for g, s in placed)


# ---- modules of parameters and layers ----


def _modules() -> Iterator[nn.Module]:
    """Yields the modules that are alive, but for those whose constructor failed before nn.Module's."""
    return (x for x in gc.get_objects() if issubclass(type(x), nn.Module) and "_modules" in x.__dict__)


def _named(of: nn.Module | Mapping[str, Tensor] | Iterable[Tensor]) -> dict[str, Tensor]:
    if isinstance(of, nn.Module):
        return dict(of.named_parameters())
    return dict(of) if isinstance(of, Mapping) else {str(i): p for i, p in enumerate(of)}


def _readable(name: str, p: Tensor) -> str:
    """Returns the name that a module has for a parameter, where a call was given a number."""
    if not name.isdecimal():
        return name
    owners = (f"{type(m).__name__}.{leaf}" for m in _modules() for leaf, q in m._parameters.items() if q is p)
    return f"parameter {name} ({next(owners, 'of no module')} {tuple(p.shape)})"


def _outermost(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Returns the modules that hold these and are held by none: one pass over everything that is alive."""
    parents: dict[int, list[nn.Module]] = {}
    for module in _modules():
        for child in module._modules.values():
            if child is not None:
                parents.setdefault(id(child), []).append(module)
    sums: dict[int, nn.Module] = {}
    complete: set[int] = set()
    waiting = list(layers)
    while waiting:
        module = waiting.pop()
        if id(module) not in complete:
            complete.add(id(module))
            above = parents.get(id(module), [])
            waiting += above
            if not above:
                sums[id(module)] = module
    return list(sums.values())


# ---- when it is done ----


class _Schedule:
    """The 1st, 2nd, 4th, 8th, ... call of each model or optimizer, until it is settled."""

    def __init__(self) -> None:
        self.paused = False
        self.settled: weakref.WeakSet[Any] = weakref.WeakSet()
        self._calls: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def due(self, subject: Any) -> bool:
        if subject in self.settled:
            return False
        calls = self._calls[subject] = self._calls.get(subject, 0) + 1
        return calls & (calls - 1) == 0


_backward, _steps = _Schedule(), _Schedule()
_ending: list[nn.Module] = []  # layers of the backward pass that is under way
_watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def check_when_due(subject: Any, parameters: Callable[[], Any], name: str) -> None:
    """Does :func:`check_gradients` of ``parameters()`` at the 1st, 2nd, 4th, ... call for ``what``, a model or an
    optimizer, until it is settled.  Not in a graph that is compiled or captured, and not without a parameter of a
    watched layer: what else a rank has in its process must not make it wait for others."""
    if not (torch.compiler.is_compiling() or _captures()) and _steps.due(subject):
        parameters_of = _named(parameters())
        watched = {p for layer in _watched for p in layer.parameters()}
        if not watched.isdisjoint(parameters_of.values()) and check_gradients(parameters_of, name):
            _steps.settled.add(subject)


def watch(layer: nn.Module) -> None:
    """Makes the backward passes of the models that hold ``layer`` compare gradients, and the steps of optimizers."""
    layer.register_forward_hook(_after_forward)
    _watched.add(layer)
    _watch_steps()


@functools.cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    parameters_of = lambda: [p for group in optimizer.param_groups for p in group["params"]]
    check_when_due(optimizer, parameters_of, f"{type(optimizer).__name__}.step")


@onlooker
def _after_forward(layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return
    _ending.clear()  # of a backward pass that failed
    tensors = output if isinstance(output, tuple) else (output,)
    reference = next((x for x in tensors if isinstance(x, Tensor) and x.requires_grad), None)
    if reference is not None and not reference.is_meta:
        weak = weakref.ref(layer)
        reference.register_hook(lambda gradient: _in_backward(weak()))


def _in_backward(layer: nn.Module | None) -> None:
    if layer is not None and not torch.compiler.is_compiling():
        if not _ending:  # twice: what others do at the end of a backward pass, such as DDP, comes before
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: engine.queue_callback(_after_backward))
        _ending.append(layer)


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """In it, no backward pass compares gradients: for a caller that compares them itself."""
    paused, _backward.paused = _backward.paused, True
    try:
        yield
    finally:
        _backward.paused = paused


def _after_backward() -> None:
    layers = list(dict.fromkeys(_ending))
    _ending.clear()
    if _captures() or _backward.paused:
        return
    due = [layer for layer in layers if _backward.due(layer)]
    if due:
        models = _outermost(due)
        named = {name: p for model in reversed(models) for name, p in model.named_parameters()}
        if check_gradients(named, "backward"):
            _settle(models)


def _settle(models: list[nn.Module]) -> None:
    """Takes the hooks off, so that later calls cost nothing."""
    for part in (part for model in models for part in model.modules()):
        _backward.settled.add(part)
        for key in [key for key, hook in part._forward_hooks.items() if hook is _after_forward]:
            del part._forward_hooks[key]


def _captures() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
