"""A shard in a state dictionary: a DTensor that knows the whole, and back.

A plain shard under a name that looks whole is taken for a replicated tensor by whatever reads a state dictionary:
torch.distributed.checkpoint writes the one of one rank.  A DTensor says which slice it is, in a file too.
"""

import math
import weakref
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..kernels.runtime.errors import check
from ..parallel import TensorParallel
from .spec import Spec

_meshes: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, DeviceMesh]]" = weakref.WeakKeyDictionary()


def to_dtensor(x: Tensor, spec: Spec, tp: TensorParallel, mesh: DeviceMesh) -> DTensor:
    """Returns this rank's slice ``x`` as the DTensor that ``spec`` describes, sharing its memory.

    ValueError, on every rank, for slices of whole leaves that are not those of torch.chunk, which a DTensor has.
    """
    if spec.dim is not None:
        n, chunk = spec.shape[spec.dim], -(-spec.spread[spec.dim] // tp.size)
        check(
            tp.slice_size(n, copies=spec.leaf_copies) == chunk,
            f"a parameter of shape {spec.shape} over {tp.size} ranks with bitwise={tp.bitwise} is in slices of whole"
            f" leaves, which no DTensor has, nor a state dictionary: {n} is not divisible by {tp.bitwise}."
            " tpfuse.save_checkpoint and save_pretrained write it; or pad that dimension",
        )
    placement = Replicate() if spec.dim is None else Shard(spec.dim)
    stride = tuple(math.prod(spec.spread[i + 1 :]) for i in range(len(spec.spread)))
    return DTensor.from_local(x, mesh, [placement], run_check=False, shape=torch.Size(spec.spread), stride=stride)


def dtensors(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Returns the names of those parameters that are DTensors."""
    return [name for name, p in named if isinstance(p, DTensor)]


def is_split(spec: Spec, tp: TensorParallel) -> bool:
    """True if a rank holds a slice of the parameter."""
    return spec.dim is not None and tp.size > 1


def as_whole(x: Tensor, spec: Spec, tp: TensorParallel) -> Tensor:
    """Returns a split parameter, or what is shaped as it, as a DTensor over the tensor-parallel group.

    A DTensor is returned as it is; ValueError where it does not know the whole.
    """
    group = tp.group
    if isinstance(x, DTensor) or group is None:
        check_whole(x, spec)
        return x
    specs = _meshes.setdefault(group, {})
    kind = x.device.type
    if kind not in specs:
        specs[kind] = DeviceMesh.from_group(group, kind, mesh_dim_names=("tp",))
    return to_dtensor(x, spec, tp, specs[kind])


def check_whole(x: Tensor, spec: Spec) -> None:
    """ValueError for a DTensor of this rank's slice alone."""
    if isinstance(x, DTensor) and tuple(x.shape) != spec.spread:
        raise ValueError(
            f"a parameter of shape {spec.spread} is a DTensor of {tuple(x.shape)}, one rank's slice alone: call"
            " tpfuse.as_dtensor before fully_shard"
        )


def as_local(name: str, x: Tensor, spec: Spec, tp: TensorParallel) -> Tensor:
    """Returns this rank's slice of what a state dictionary holds for a split parameter.

    That is a DTensor, the whole as a plain tensor, or the slice already; another shape is returned as it is.
    ValueError for a DTensor that is split in another way.
    """
    if isinstance(x, DTensor):
        chunk = x.__create_chunk_list__()
        held = [slice(o, o + n) for c in chunk for o, n in zip(c.offsets, c.sizes, strict=True)]
        full, x = tuple(x.shape), x.to_local()
        if full == spec.spread and held == list(_slice(spec, tp)):
            return x
        if full != spec.spread or tuple(x.shape) != full:
            raise ValueError(
                f"{name} must be elements {_describe(_slice(spec, tp))} of {spec.spread} on rank {tp.rank} of its"
                f" tensor-parallel group, got a DTensor with elements {_describe(held)} of {full}; torch.distributed"
                ".checkpoint and tpfuse.load_checkpoint load what was saved at another split"
            )
    return x[_slice(spec, tp)] if tuple(x.shape) == spec.spread else x


def _slice(spec: Spec, tp: TensorParallel) -> tuple[slice, ...]:
    """Returns this rank's slice of all ranks' slices concatenated."""
    dim = spec.dim
    return tuple(slice(*tp.chunk(n)) if i == dim else slice(0, n) for i, n in enumerate(spec.spread))


def _describe(slices: "list[slice] | tuple[slice, ...]") -> str:
    return f"[{', '.join(f'{s.start}:{s.stop}' for s in slices)}]"
