"""The base of parallel modules: plain local shards as parameters, each with a record of the whole it is a slice of."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, overload

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from ..collectives import all_reduce, copy, copy_within
from ..kernels.runtime.errors import check
from ..kernels.runtime.function import Function, once_differentiable
from ..kernels.runtime.leaves import tree
from ..kernels.runtime.main_grad import derived
from ..kernels.runtime.op import acc_dtype
from ..kernels.runtime.philox import normal
from ..kernels.runtime.rules import NOT_NEGATIVE, WHOLE, check_number
from ..parallel import TensorParallel, resolve
from ..ranks.agreement import Agreement, Header, comparable, names, raise_everywhere
from ..ranks.messages import attempt
from ..ranks.split import ON_SPLIT
from .hooks import onlooker
from .partial import watch
from .shards import named_specs, owned, register
from .spec import Origin as Origin
from .spec import Spec as Spec
from .state import as_local, as_whole, is_split

_CHUNK = 1 << 20  # elements initialised at a time
_PLAIN = bool, int, float, str
_ROWS = "argument 1", "ids"  # of a layer's call: of context-parallel ranks each has other ones


class ParallelModule(nn.Module):
    """An nn.Module whose parameters are this rank's shards; ``specs`` records for each the whole it is a slice of.

    Subclass it to write a parallel layer: call :meth:`add_parameter` for each parameter and, at the end of the
    constructor, :meth:`initialize_alone`.  Checkpoints, optimizers and DTensor views then work on it.

    Where a parameter is split, ``state_dict`` holds a DTensor over the tensor-parallel group, which shares the shard's
    memory; ``load_state_dict`` takes such DTensors, shards, and whole tensors.

    A layer that is no part of another one or of a model compares its calls over the ranks, the first of each kind:
    shapes, dtypes, modes, and the values of what every rank must have (``shards_input``: not the input).
    """

    shards_input: ClassVar[bool] = False
    repr_fields: ClassVar[tuple[str, ...]] = ()  # the attributes that repr() shows, beside the bias and the rank

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:  # not __init__, which copies and unpickled modules never see
        module = super().__new__(cls)
        register(module)
        return module

    def __init__(self, tp: TensorParallel | None):
        super().__init__()
        check(
            tp is None or isinstance(tp, TensorParallel),
            f"{type(self).__name__}: tp must be a TensorParallel, such as TensorParallel(mesh['tp']), got {tp!r}",
        )
        self.tp = TensorParallel() if tp is None else tp
        self.specs: dict[str, Spec] = {}
        self._agreement: Agreement | None = None
        self._replicas: Agreement | None = None
        self._pieces: Agreement | None = None
        self._compares: RemovableHandle | None = None
        self._draws = False
        self.register_state_dict_post_hook(_as_wholes)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Loads what a state dictionary has for this module; torch calls it, with a copy of the caller's dictionary."""
        handle = self.register_load_state_dict_pre_hook(_as_shards)  # behind hooks of others, which may rename
        try:
            super()._load_from_state_dict(*args, **kwargs)
        finally:
            handle.remove()

    def ranks_of(self, name: str) -> TensorParallel:
        """Returns the ranks that a parameter is split over; a derived class may split some over others than ``tp``."""
        return self.tp

    @property
    def widest(self) -> TensorParallel:
        """The ranks that take part in a call: those of ``tp``, or of all replicas if experts are divided among them."""
        return max((tp for *_, tp in named_specs(self)), key=lambda tp: tp.size, default=self.tp)

    def shard(self, name: str) -> Any:
        """Returns this rank's part of a parameter; a derived class may show the whole under the parameter's name.

        Of one that torch has parametrized, or pruned, what is computed of it.
        """
        return self._parameters[name] if name in self._parameters else getattr(self, name)

    def add_parameter(
        self,
        name: str,
        shape: tuple[int, ...],
        dim: int | None,
        init: float | str,
        *,
        present: bool = True,
        copies: int = 1,
        origin: Origin | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """Registers this rank's slice of a parameter of the full ``shape``, not yet initialised; not ``present``: None.

        ``dtype`` and ``device`` as torch's layers take them; ``copies`` leaves, without ``tp.bitwise`` ranks, in a row
        hold the same slice; the rest as in :class:`Spec`.
        """
        if not present:
            self.register_parameter(name, None)
            return
        if not isinstance(init, str):
            check_number(f"{type(self).__name__}: init_std", init, NOT_NEGATIVE)
        for size in shape:
            check_number(f"{type(self).__name__}: a size of {name}", size, WHOLE)
        tp = self.ranks_of(name)
        ranks = tp.rank_copies(copies)
        spec = self.specs[name] = Spec(tuple(shape), dim, init, copies=ranks, leaf_copies=copies, origin=origin)
        values = torch.empty([s.stop - s.start for s in spec.local(tp)], dtype=dtype, device=device)
        self.register_parameter(name, nn.Parameter(values))
        self._announce({name: spec})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._announce(self.specs)

    def _announce(self, specs: Mapping[str, Spec]) -> None:
        if any(is_split(spec, self.ranks_of(name)) for name, spec in specs.items()):
            for call in ON_SPLIT:
                call()

    def extra_repr(self) -> str:
        fields = [f"{name}={getattr(self, name)!r}" for name in self.repr_fields]
        fields += [f"bias={p is not None}" for name, p in self._parameters.items() if name == "bias"]
        fields += [f"rank {self.tp.rank} of {self.tp.size}"] * (self.tp.size > 1)
        return ", ".join(fields)

    def initialize_alone(self) -> None:
        """Initialises a layer made on its own, by a seed from torch's CPU generator that is the same on every rank.

        Called at the end of a layer's constructor.  On the meta device nothing happens: a model makes its layers there
        and initialises them all by names of its own; any other module of layers is given to :func:`init_weights`.
        """
        self._draws = True
        if any(p.is_meta for p in self.parameters()):
            return
        self.compare_alone()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the initial weights again, as the constructor drew them: the next ones of torch's CPU generator.

        A collective call where weights are random: the ranks compare their generators.  ValueError on every rank where
        they differ.
        """
        if not self._draws:  # a layer of layers, which are reset one by one
            return
        if all(isinstance(spec.init, str) for _, _, spec, _ in named_specs(self)):
            return initialize(self, 0)
        seed = int(torch.randint(1 << 62, (), device="cpu"))
        label = "the seed drawn from torch's generator (call torch.manual_seed before)"
        self.widest.agree(type(self).__name__, {label: seed})
        initialize(self, seed)

    def compare_alone(self) -> None:
        """Makes this layer, and none of those in it, compare its calls.  Called at the end of a constructor."""
        ranks = self.widest
        if ranks.call_size == 1 or any(p.is_meta for p in self.parameters()):
            return
        for child in self.modules():
            if isinstance(child, ParallelModule):
                child._agreement = child._replicas = child._pieces = None
                if child._compares is not None:
                    child._compares.remove()
                    child._compares = None
        name, floats = type(self).__name__, not (self.tp.sequence_parallel or self.shards_input)
        self._agreement = Agreement(Header(name), each_call=False, floats=floats)
        if self.tp.cp is not None:
            header = Header(name, axis=self.tp.call_axis)
            self._pieces = Agreement(header, each_call=False, floats=False, different=_ROWS)
        if ranks.replicas > 1:
            self._replicas = Agreement(Header(name, axis=ranks.axis), each_call=True)
        self._compares = self.register_forward_pre_hook(_compare_call, with_kwargs=True)
        if self.tp.size > 1:
            watch(self)


@onlooker
def _compare_call(module: ParallelModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if module._agreement is not None and not torch.compiler.is_compiling():
        call = _flat("", {f"argument {i}": x for i, x in enumerate(args, 1)} | kwargs)
        state = lambda: module_state(module)
        dtype = next((p.dtype for p in module.parameters()), None)
        modes = {"training": module.training, "dtype": dtype}
        agreement, replicas, cp = module._agreement, module._replicas, module.tp.cp
        if module._pieces is not None and cp is not None:  # their other ranks would wait for those of ``tp``
            compared = module._pieces(module.tp.call_group, call, modes, state)
            _, error = attempt(lambda: agreement(module.tp.group, call, modes, state))
            if compared:
                raise_everywhere(error, [resolve(str(cp.group_name))], call=type(module).__name__)
            return
        if replicas is None or not comparable(call.values()):
            agreement(module.tp.group, call, modes, state)
            return
        group = resolve(str(module.widest.group_name))
        _, error = attempt(lambda: agreement(module.tp.group, call, modes, state))
        raise_everywhere(error, [group], call=type(module).__name__)  # other replicas would wait
        replicas(group, {}, modes, state, mark=lambda: tuple(mark_of(module)))  # which may have other rows


def _flat(name: str, value: Any) -> dict[str, Any]:
    """Returns what is in nested tuples and dictionaries, by names."""
    if not isinstance(value, (tuple, list, dict)):
        return {name: value}
    items = value.items() if isinstance(value, dict) else enumerate(value, 1)
    return {k: v for key, x in items for k, v in _flat(f"{name}.{key}" if name else str(key), x).items()}


# ---- what decides a call beside its arguments ----

DECIDING = "dropout", "p", "eps", "activation", "causal", "window", "scale", "softcap", "saving"  # attributes of parts


def module_state(module: nn.Module) -> dict[str, Any]:
    """Returns what the ranks must share of a module's state, in words: all that :func:`mark_of` holds."""
    parts, parameters = list(module.named_modules()), list(module.named_parameters())
    state = {
        "frozen parameters": names([name for name, p in parameters if not p.requires_grad]),
        "parts in another mode": names([name for name, part in parts if part.training != module.training]),
    }
    alike: dict[str, list[str]] = {}  # names of what is alike in one point, by what it is
    for name, p in parameters:
        alike.setdefault(f"parameters of {p.dtype}", []).append(name)
    for name, part in parts:
        for key, value in _deciding(part.__dict__):
            alike.setdefault(f"parts with {key}={value!r}", []).append(name)
    return state | {key: names(alike[key]) for key in sorted(alike)}


def mark_of(module: nn.Module) -> list[Any]:
    """Returns a list that changes when :func:`module_state` does: one walk over the parts, for every call."""
    mark: list[Any] = []
    parts = [module]
    while parts:
        part = parts.pop()
        fields = part.__dict__
        mark.append(part.training)  # which torch.compile's module has no field of
        mark += _deciding(fields)
        for p in fields["_parameters"].values():
            if p is not None:
                mark += p.requires_grad, p.dtype
        parts += [child for child in fields["_modules"].values() if child is not None]
    return mark


def _deciding(fields: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(key, fields[key]) for key in DECIDING if key in fields and isinstance(fields[key], _PLAIN)]


def check_gathered(method: str, module: "ParallelModule") -> None:
    """ValueError where FSDP2 has not gathered a layer's parameters: it does so for ``forward`` alone."""
    for shard in shards_of_replicas(module):
        raise ValueError(
            f"{method}: {shard}; call torch.distributed.fsdp.register_fsdp_forward_method(model, {method!r}) once,"
            " before"
        )


def shards_of_replicas(module: "ParallelModule") -> Iterator[str]:
    """Says of each of a layer's own parameters that FSDP2 has sharded how much of it is here."""
    for leaf, p, spec, tp in owned(module):
        shape = tuple(s.stop - s.start for s in spec.local(tp))
        if isinstance(p, DTensor) and tuple(p.to_local().shape) != shape:
            yield f"fully_shard holds {tuple(p.to_local().shape)} of this rank's {shape} of {leaf}"


def _as_shards(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """The hook by which this rank's slices are taken of what a state dictionary holds."""
    for leaf, p, spec, tp in owned(module):
        value = state_dict.get(prefix + leaf)
        reads = is_split(spec, tp) or isinstance(value, DTensor)  # one rank reads what several have saved
        if reads and isinstance(value, Tensor) and not isinstance(p, DTensor):
            state_dict[prefix + leaf] = as_local(prefix + leaf, value, spec, tp)


def _as_wholes(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    """The hook by which a state dictionary holds DTensors for split parameters."""
    assert isinstance(module, ParallelModule)
    for leaf, _p, spec, tp in owned(module):
        if is_split(spec, tp) and isinstance(state_dict.get(prefix + leaf), Tensor):
            state_dict[prefix + leaf] = as_whole(state_dict[prefix + leaf], spec, tp)


@torch.no_grad()
def initialize(module: nn.Module, seed: int, prefix: str = "") -> None:
    """Fills every parameter, bitwise the same however it is split.

    Weights are Philox of (seed, name, global index), in fp64 on the CPU.  ``prefix`` precedes the names of a module
    that joins a larger one.
    """
    for name, p, spec, tp in named_specs(module):
        if spec.init is None:
            continue
        x = local(p)
        if isinstance(spec.init, str):
            x.fill_(1.0 if spec.init == "ones" else 0.0)
            continue
        rows, *inner = _places(p, spec, tp)
        columns = np.zeros((), np.int64)
        stride = 1
        for places, n in zip(reversed(inner), reversed(spec.shape[1:]), strict=True):
            columns = np.add.outer(places * stride, columns)
            stride *= n
        name = prefix + name
        if spec.origin is not None:
            name = name.rpartition(".")[0] + "." * ("." in name) + spec.origin.leaf
        step = max(1, _CHUNK // max(columns.size, 1))
        for i in range(0, len(rows), step):
            chunk = rows[i : i + step]
            offsets = chunk * stride if spec.origin is None else spec.origin.offset(chunk, spec.shape)
            values = torch.from_numpy(normal(seed, name, np.add.outer(offsets, columns)) * spec.init)
            x[i : i + len(chunk)] = values.to(x.dtype)


def _places(p: Tensor, spec: Spec, tp: TensorParallel) -> list[np.ndarray]:
    """Returns the indices, by dimension, of the elements of the whole that are here."""
    if not isinstance(p, DTensor):
        return [np.arange(s.start, s.stop, dtype=np.int64) for s in spec.local(tp)]
    (chunk,) = p.__create_chunk_list__()
    indices = [np.arange(o, o + n, dtype=np.int64) for o, n in zip(chunk.offsets, chunk.sizes, strict=True)]
    if spec.dim is not None and spec.copies > 1:  # a DTensor is of all ranks' slices, one after the other
        per_rank = spec.spread[spec.dim] // tp.size
        places = indices[spec.dim]
        indices[spec.dim] = places // per_rank // spec.copies * per_rank + places % per_rank
    return indices


@overload
def local(p: Tensor) -> Tensor: ...
@overload
def local(p: Tensor | None) -> Tensor | None: ...
def local(p: Tensor | None) -> Tensor | None:
    """Returns the plain tensor behind a parameter, which FSDP2 makes a DTensor of."""
    return p.to_local() if isinstance(p, DTensor) else p


def as_parameter(x: Tensor, p: nn.Parameter) -> Tensor:
    """Returns x, of the shape of p's elements on this rank, as p is: a DTensor where p is one."""
    if not isinstance(p, DTensor):
        return x
    return DTensor.from_local(x, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


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

    Under sequence parallelism its gradient is summed over the ranks, and over context-parallel ones.
    """
    x = x if tp.cp is None else copy(x, tp.cp)
    return copy(x, tp) if tp.sequence_parallel else x


def sum_of_rows(x: Tensor, tp: TensorParallel) -> Tensor:
    """Returns the sum of x over the ranks that have other rows of the same sequences, the adjoint of
    :func:`on_rows`."""
    x = all_reduce(x, tp) if tp.sequence_parallel else x
    return x if tp.cp is None else all_reduce(x, tp.cp)


@overload
def on_pieces(p: Tensor, tp: TensorParallel) -> Tensor: ...
@overload
def on_pieces(p: Tensor | None, tp: TensorParallel) -> Tensor | None: ...
def on_pieces(p: Tensor | None, tp: TensorParallel) -> Tensor | None:
    """Returns this rank's slice of a parameter for use on all rows of its piece of the sequences.

    Its gradient is summed over the context-parallel ranks, which have the other pieces.
    """
    p, cp = local(p), tp.cp
    return p if p is None or cp is None else derived(lambda x: copy(x, cp), p)


class _PerLeaf(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, leaves: int) -> Tensor:
        return x.repeat(leaves, *[1] * x.dim())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
        return tree(d.unbind(0)), None


def per_leaf(x: Tensor, leaves: int) -> tuple[Tensor, ...]:
    """Returns x once for each leaf; its gradient is the sum of theirs as a binary tree."""
    if leaves == 1:
        return (x,)
    copies: Tensor = _PerLeaf.apply(x, leaves)
    return copies.unbind(0)


def leaf_slices(x: Tensor, tp: TensorParallel, copies: int) -> list[Tensor]:
    """Returns the slice of each leaf here (without ``tp.bitwise`` the rank's) of a parameter split in dimension 0.

    ``copies`` leaves in a row have the same slice, whose gradient is the sum of theirs, as a binary tree.
    """
    leaves = max(tp.leaves, 1)
    here = min(copies, leaves)
    slices = copy_within(x, tp, tp.rank_copies(copies)).chunk(leaves // here)
    return [leaf for piece in slices for leaf in per_leaf(piece, here)]


def check_rows(name: str, x: Tensor, width: int, *, tp: TensorParallel, batch: int, seq: int | None) -> None:
    """Raises the ValueError of ``name`` for an x that is no rows s * batch + b, [m, width]."""
    if x.dim() != 2 or x.shape[1] != width:
        cure = "a batch [B, S, D] is x.transpose(0, 1).reshape(-1, D) with batch=B"
        place = "position s of sample b in row s * batch + b"
        raise ValueError(f"{name}: x must be [rows, {width}], {place}, got {tuple(x.shape)}; {cure}")
    rows = x.shape[0] * tp.row_shards * tp.cp_size
    if not isinstance(batch, int) or batch < 1 or (seq is not None and not isinstance(seq, int)):
        return  # attention names it
    if seq is not None:
        least = tp.piece(seq) * tp.cp_size * batch
    if rows % (batch * tp.cp_size) if seq is None else least > rows:
        fits = "a multiple of batch, or seq given" if seq is None else f"at least seq * batch = {least}"
        over = " over the ranks" * (tp.row_shards * tp.cp_size > 1)
        raise ValueError(
            f"{name}: x has {rows} rows{over}, which must be {fits}, with batch={batch}: position s of sample b is row"
            " s * batch + b"
        )


def check_width(name: str, x: Tensor, width: int) -> None:
    """Raises the ValueError of ``name`` for an x that is not [..., width]."""
    if x.dim() == 0 or x.shape[-1] != width:
        raise ValueError(f"{name}: x must be [..., {width}], got {tuple(x.shape)}")
