"""What parallel modules share: plain local shards as parameters, each with a record of the whole it is a slice of."""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, overload

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..agreement import Agreement, Asked, names
from ..collectives import copy
from ..kernels.runtime.op import acc_dtype
from ..kernels.runtime.philox import normal
from ..kernels.runtime.rules import NOT_NEGATIVE, check_number
from ..parallel import TensorParallel

_CHUNK = 1 << 20  # elements initialised at a time
REPLICATED = "_tensor_parallel"  # of a plain module: the ranks that have the same parameters, where it was said


@dataclass(frozen=True)
class Spec:
    """A parameter as a whole.

    ``shape`` is the full shape, ``dim`` the dimension it is sharded on (None: replicated), ``init`` its standard
    deviation at the start (or "ones" or "zeros"; None: initialised elsewhere).  A shard is one contiguous slice, split
    as torch.chunk splits.  ``copies`` ranks in a row hold the same slice (kv heads that are fewer than ranks).
    ``origin``: the initial values are those of another parameter's elements, so that a layout which depends on the
    number of ranks does not change them.
    """

    shape: tuple[int, ...]
    dim: int | None
    init: float | str | None
    copies: int = 1
    origin: "Origin | None" = None

    @property
    def spread(self) -> tuple[int, ...]:
        """The shape of all ranks' slices concatenated: the full shape, times ``copies`` on the sharded dimension."""
        return tuple(n * self.copies if i == self.dim else n for i, n in enumerate(self.shape))

    def local(self, tp: TensorParallel) -> tuple[slice, ...]:
        """Returns this rank's slice of the full tensor."""
        whole = [slice(0, n) for n in self.shape]
        if self.dim is not None:
            whole[self.dim] = slice(*tp.chunk(self.shape[self.dim], copies=self.copies))
        return tuple(whole)


@dataclass(frozen=True)
class Origin:
    """Index i of dimension 0 takes its initial values from another parameter of the same module.

    They are the elements from ``offset(i)`` on of the parameter ``leaf``, flattened.
    """

    leaf: str
    offset: Callable[[np.ndarray], np.ndarray]


_alive: "weakref.WeakSet[ParallelModule]" = weakref.WeakSet()


class ParallelModule(nn.Module):
    """An nn.Module whose parameters are this rank's shards; ``specs`` records for each the whole it is a slice of.

    Subclass it to write a parallel layer: call :meth:`add_parameter` for each parameter and, at the end of the
    constructor, :meth:`initialize_alone`.  Checkpoints, optimizers and DTensor views then work on it.

    A layer that is no part of another one or of a model compares its calls over the ranks, the first of each kind:
    shapes, dtypes, modes, and the values of what every rank must have (``shards_input``: not the input).
    """

    shards_input: ClassVar[bool] = False
    shown: ClassVar[tuple[str, ...]] = ()  # the attributes that repr() shows, beside the bias and the rank

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:  # not __init__, which copies and unpickled modules never see
        module = super().__new__(cls)
        _alive.add(module)
        return module

    def __init__(self, tp: TensorParallel | None):
        super().__init__()
        self.tp = TensorParallel() if tp is None else tp
        self.specs: dict[str, Spec] = {}
        self._agreement: Agreement | None = None

    def add_parameter(
        self,
        name: str,
        shape: tuple[int, ...],
        dim: int | None,
        init: float | str,
        *,
        copies: int = 1,
        origin: Origin | None = None,
        **factory: Any,
    ) -> None:
        """Registers this rank's slice of a parameter of the full ``shape``, not yet initialised.

        ``factory``: dtype and device, as torch's layers take them; the rest as in :class:`Spec`.
        """
        if not isinstance(init, str):
            check_number(f"{type(self).__name__}: init_std", init, NOT_NEGATIVE)
        spec = self.specs[name] = Spec(tuple(shape), dim, init, copies=copies, origin=origin)
        values = torch.empty([s.stop - s.start for s in spec.local(self.tp)], **factory)
        self.register_parameter(name, nn.Parameter(values))

    def extra_repr(self) -> str:
        words = [f"{name}={getattr(self, name)!r}" for name in self.shown]
        words += [f"bias={p is not None}" for name, p in self._parameters.items() if name == "bias"]
        words += [f"rank {self.tp.rank} of {self.tp.size}"] * (self.tp.size > 1)
        return ", ".join(words)

    def initialize_alone(self) -> None:
        """Initialises a layer made on its own, by a seed from torch's CPU generator that is the same on every rank.

        Called at the end of a layer's constructor.  On the meta device nothing happens: a model makes its layers there
        and initialises them all by names of its own.
        """
        if any(p.is_meta for p in self.parameters()):
            return
        self.compare_alone()
        if all(isinstance(spec.init, str) for _, spec, _ in named_specs(self)):
            return initialize(self, 0)
        seed = int(torch.randint(1 << 62, (), device="cpu"))
        what = "the seed drawn from torch's generator (call torch.manual_seed before)"
        self.tp.agree(type(self).__name__, {what: seed})
        initialize(self, seed)

    def compare_alone(self) -> None:
        """Makes this layer, and none of those in it, compare its calls.  Called at the end of a constructor."""
        if self.tp.size == 1 or any(p.is_meta for p in self.parameters()):
            return
        for child in self.modules():
            if isinstance(child, ParallelModule):
                child._agreement = None
        floats = not (self.tp.sequence_parallel or self.shards_input)
        self._agreement = Agreement(Asked(type(self).__name__), every=False, floats=floats)
        self.register_forward_pre_hook(_compare_call, with_kwargs=True)
        from .partial import watch  # it needs what is here

        watch(self)


def _compare_call(module: ParallelModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The hook of a layer that compares its calls."""
    if module._agreement is not None and not torch.compiler.is_compiling():
        call = _flat("", dict({f"argument {i}": x for i, x in enumerate(args, 1)}, **kwargs))
        state = lambda: module_state(module)
        module._agreement(module.tp.group, call, {"training": module.training}, state)


def _flat(name: str, value: Any) -> dict[str, Any]:
    """Returns what is in nested tuples and dictionaries, by names."""
    if not isinstance(value, (tuple, list, dict)):
        return {name: value}
    items = value.items() if isinstance(value, dict) else enumerate(value, 1)
    return {k: v for key, x in items for k, v in _flat(f"{name}.{key}" if name else str(key), x).items()}


def module_state(module: nn.Module) -> dict[str, Any]:
    """Returns what the ranks must share of a module's state: the frozen parameters, the parts that train otherwise."""
    other = [name for name, part in module.named_modules() if part.training != module.training]
    return {
        "frozen parameters": names([name for name, p in module.named_parameters() if not p.requires_grad]),
        "parts in another mode": names(other),
    }


def named_specs(module: nn.Module) -> Iterator[tuple[str, Spec, TensorParallel]]:
    """Yields (name, spec, tp) of every parameter, each once, in the order of named_parameters.

    A plain module's parameters are replicated.
    """
    owners = dict(module.named_modules())
    for name, p in module.named_parameters():
        path, _, leaf = name.rpartition(".")
        owner = owners[path]
        if isinstance(owner, ParallelModule):
            yield name, owner.specs[leaf], owner.tp
        else:
            yield name, Spec(tuple(p.shape), None, None), owner.__dict__.get(REPLICATED) or TensorParallel()


def living() -> "list[ParallelModule]":
    """Returns the parallel modules that are alive."""
    return list(_alive)


class Whole(NamedTuple):
    """What a parameter is a slice of, and over which ranks."""

    spec: Spec
    tp: TensorParallel


def wholes() -> dict[Tensor, Whole]:
    """Returns what is known of every parameter of the parallel modules that are alive.

    For torch's tools that are given parameters without their modules: optimizers, clipping, gradient scalers.
    """
    found: dict[Tensor, Whole] = {}
    for module in living():
        own: dict[str, Any] = module.__dict__
        for leaf, p in own.get("_parameters", {}).items():
            if p is not None and leaf in own["specs"]:
                found[p] = Whole(own["specs"][leaf], own["tp"])
    return found


@torch.no_grad()
def initialize(module: nn.Module, seed: int, prefix: str = "") -> None:
    """Fills every parameter, bitwise the same however it is split.

    Weights are Philox of (seed, name, global index), in fp64 on the CPU.  ``prefix`` precedes the names of a module
    that joins a larger one.
    """
    for (name, spec, tp), p in zip(named_specs(module), module.parameters(), strict=True):
        if spec.init is None:
            continue
        if isinstance(spec.init, str):
            p.fill_(1.0 if spec.init == "ones" else 0.0)
            continue
        start, *inner = spec.local(tp)
        columns = np.zeros((), np.int64)
        stride = 1
        for s, n in zip(reversed(inner), reversed(spec.shape[1:]), strict=True):
            columns = np.add.outer(np.arange(s.start, s.stop, dtype=np.int64) * stride, columns)
            stride *= n
        name = prefix + name
        if spec.origin is not None:
            name = name.rpartition(".")[0] + "." * ("." in name) + spec.origin.leaf
        step = max(1, _CHUNK // max(columns.size, 1))
        for i in range(start.start, start.stop, step):
            rows = np.arange(i, min(i + step, start.stop), dtype=np.int64)
            offsets = rows * stride if spec.origin is None else spec.origin.offset(rows)
            values = torch.from_numpy(normal(seed, name, np.add.outer(offsets, columns)) * spec.init)
            p[i - start.start : i - start.start + len(rows)] = values.to(p.dtype)


@overload
def local(p: Tensor) -> Tensor: ...
@overload
def local(p: Tensor | None) -> Tensor | None: ...
def local(p: Tensor | None) -> Tensor | None:
    """Returns the plain tensor behind a parameter, which FSDP2 makes a DTensor of."""
    return p.to_local() if isinstance(p, DTensor) else p


def replicated(tp: TensorParallel, *vectors: Tensor | None) -> list[Any]:
    """Returns replicated parameters of one shape for use on this rank's rows: a tensor for a tensor, None for None.

    They are packed in fp32, so that their gradients are summed over the ranks as one message.
    """
    present: list[Tensor] = [local(v) for v in vectors if v is not None]
    if not present:
        return list(vectors)
    dtype = acc_dtype(present[0])
    for v in present:
        dtype = torch.promote_types(dtype, v.dtype)
    packed = on_rows(torch.stack([v.to(dtype) for v in present]), tp)
    rows = iter(packed.unbind(0))
    return [None if v is None else next(rows) for v in vectors]


def on_rows(x: Tensor, tp: TensorParallel) -> Tensor:
    """Returns a replicated tensor for use on this rank's rows.

    Under sequence parallelism its gradient is summed over the ranks.
    """
    return copy(x, tp) if tp.sequence_parallel else x
