"""DTensor counterparts of the tables: placements of a layout, tensors in them, and the bytes that a rank sends."""

import contextlib
from unittest import mock

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, placement_types
from torch.utils._python_dispatch import TorchDispatchMode

from tpfuse.tools.plan.intra.signatures import FORKED, PARTIAL, REPLICATE, SHARDS

FORWARD = {name: Shard(i) for i, name in enumerate(SHARDS)} | {REPLICATE: Replicate(), FORKED: Replicate()}
GRADIENT = FORWARD | {FORKED: Partial(), PARTIAL: Replicate()}
FORWARD = FORWARD | {PARTIAL: Partial()}


def placements(layout):
    return [FORWARD[kind] for kind in layout]


def gradients(layout):
    return [GRADIENT[kind] for kind in layout]


def laid_out(tensor, mesh, layout):
    """A tensor in placements; a Partial one of which each rank has another term."""
    t = distribute_tensor(tensor, mesh, [Replicate() if p.is_partial() else p for p in layout], src_data_rank=None)
    if not any(p.is_partial() for p in layout):
        return t
    local, terms = t.to_local(), torch.ones((), dtype=tensor.dtype)
    for axis, p in enumerate(layout):
        if p.is_partial():
            n, rank = mesh.size(axis), mesh.get_local_rank(axis)
            terms = terms * (rank + 1) / (n * (n + 1) / 2)
    return DTensor.from_local(local * terms, mesh, layout, run_check=False, shape=tensor.shape, stride=tensor.stride())


class Sent(TorchDispatchMode):
    """Counts ``bytes`` that a rank sends in collectives of n ranks, and their ``names``."""

    VOLUME = {  # of the input
        "all_reduce": lambda n: 2 * (n - 1) / n,
        "all_gather_into_tensor": lambda n: n - 1,
        "reduce_scatter_tensor": lambda n: (n - 1) / n,
        "shard_dim_alltoall": lambda n: (n - 1) / n,
        "wait_tensor": lambda n: 0,
        "_wrap_tensor_autograd": lambda n: 0,
    }

    def __init__(self, n):
        super().__init__()
        self.n, self.bytes, self.names = n, 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("_c10d_functional", "_dtensor", "c10d"):
            name = func._schema.name.split("::")[1]
            volume = self.VOLUME[name](self.n)
            self.bytes += volume * args[0].nbytes
            self.names += [name] if volume else []
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def all_to_all():
    """On CPUs DTensor gathers where it could exchange, and sends n times the bytes; gloo can exchange."""

    def exchange(t, gather_dim, shard_dim, mesh, axis):
        return torch.ops._dtensor.shard_dim_alltoall(t, gather_dim, shard_dim, mesh.get_group(axis).group_name)

    with mock.patch.object(placement_types, "shard_dim_alltoall", exchange):
        yield


class Walked(torch.autograd.Function):
    """A tensor after one step of a conversion, with the step's own backward.  (DTensor's sums a gradient that is
    Partial along another axis at once, where a step leaves it for later.)"""

    @staticmethod
    def forward(ctx, t, step):
        ctx.step = step
        return t.redistribute(t.device_mesh, placements(step.end)).view_as(t)

    @staticmethod
    def backward(ctx, grad):
        return grad.redistribute(grad.device_mesh, gradients(ctx.step.start)), None


def walked(t, steps):
    """A tensor after all of them."""
    for step in steps:
        t = Walked.apply(t, step)
    return t
