"""What every parallel module shares: plain local shards as parameters, each with a record of the whole it is a slice of."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..collectives import copy
from ..kernels._op import acc_dtype
from ..kernels._philox import normal
from ..parallel import TensorParallel

_CHUNK = 1 << 20  # elements initialised at a time


@dataclass(frozen=True)
class Spec:
    """A parameter as a whole: its full shape, the dimension it is sharded on (None: replicated), and its standard deviation at the
    start (or "ones" or "zeros"; None: not ours to initialise).  A shard is one contiguous slice, split as torch.chunk splits.

    ``copies`` ranks in a row hold the same slice (kv heads that are fewer than ranks).  ``origin``: the initial values are those of
    another parameter's elements, so that a layout which depends on the number of ranks does not change them."""

    shape: tuple[int, ...]
    dim: int | None
    init: float | str | None
    copies: int = 1
    origin: "Origin | None" = None

    @property
    def spread(self) -> tuple[int, ...]:
        """The shape of all ranks' slices put together: the full shape, with what several ranks hold as often as they do."""
        return tuple(n * self.copies if i == self.dim else n for i, n in enumerate(self.shape))

    def local(self, tp: TensorParallel) -> tuple[slice, ...]:
        """This rank's slice of the full tensor."""
        whole = [slice(0, n) for n in self.shape]
        if self.dim is not None:
            whole[self.dim] = slice(*tp.chunk(self.shape[self.dim], copies=self.copies))
        return tuple(whole)


@dataclass(frozen=True)
class Origin:
    """Index i of dimension 0 is the elements from ``offset(i)`` on of the parameter ``leaf`` of the same module, flattened."""

    leaf: str
    offset: Callable[[np.ndarray], np.ndarray]


class ParallelModule(nn.Module):
    """An nn.Module whose parameters are this rank's shards; ``specs`` says of what."""

    def __init__(self, tp: TensorParallel | None):
        super().__init__()
        self.tp = TensorParallel() if tp is None else tp
        self.specs: dict[str, Spec] = {}

    def add_parameter(
        self,
        name: str,
        shape: tuple[int, ...],
        dim: int | None,
        init: float | str,
        *,
        copies: int = 1,
        origin: Origin | None = None,
        **factory,
    ) -> None:
        """Registers this rank's slice of a parameter of the full ``shape``, not yet initialised."""
        spec = self.specs[name] = Spec(tuple(shape), dim, init, copies, origin)
        self.register_parameter(name, nn.Parameter(torch.empty([s.stop - s.start for s in spec.local(self.tp)], **factory)))

    def initialize_alone(self) -> None:
        """At the end of a layer's constructor: weights by a seed from torch's CPU generator, the same on every rank.

        On the meta device nothing happens: a model makes its layers there and initialises them all by names of its own.
        """
        if any(p.is_meta for p in self.parameters()):
            return
        if all(isinstance(spec.init, str) for _, spec, _ in named_specs(self)):
            return initialize(self, 0)
        seed = int(torch.randint(1 << 62, (), device="cpu"))
        self.tp.agree(f"{type(self).__name__}: the seed drawn from torch's generator (call torch.manual_seed before)", seed)
        initialize(self, seed)


def named_specs(module: nn.Module) -> Iterator[tuple[str, Spec, TensorParallel]]:
    """(name, spec, tp) of every parameter, each once, in the order of named_parameters; a plain module's parameters are replicated."""
    owners = dict(module.named_modules())
    for name, p in module.named_parameters():
        path, _, leaf = name.rpartition(".")
        owner = owners[path]
        if isinstance(owner, ParallelModule):
            yield name, owner.specs[leaf], owner.tp
        else:
            yield name, Spec(tuple(p.shape), None, None), TensorParallel()


@torch.no_grad()
def initialize(module: nn.Module, seed: int, prefix: str = "") -> None:
    """Fills every parameter from its full shape: weights by Philox of (seed, name, global index), in fp64 on the CPU, so that they are
    bitwise the same however they are split.  ``prefix``: what comes before the names of a module that joins a larger one."""
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


def local(p: Tensor | None) -> Tensor | None:
    """The plain tensor behind a parameter, which FSDP2 makes a DTensor of."""
    return p.to_local() if isinstance(p, DTensor) else p


def replicated(tp: TensorParallel, *vectors: Tensor | None) -> list[Tensor | None]:
    """Replicated parameters of one shape, used on this rank's rows: packed in fp32, so that their gradients are summed over the ranks as
    one message.  None stays None."""
    present = [local(v) for v in vectors if v is not None]
    if not present:
        return list(vectors)
    dtype = acc_dtype(present[0])
    for v in present:
        dtype = torch.promote_types(dtype, v.dtype)
    packed = on_rows(torch.stack([v.to(dtype) for v in present]), tp)
    rows = iter(packed.unbind(0))
    return [None if v is None else next(rows) for v in vectors]


def on_rows(x: Tensor, tp: TensorParallel) -> Tensor:
    """A replicated tensor for use on this rank's rows: under sequence parallelism its gradient is summed over the ranks."""
    return copy(x, tp) if tp.sequence_parallel else x
