"""Collectives with gradients.  Each is a linear map; its backward is its adjoint.

    Shoeybi et al. 2019 (arXiv:1909.08053), Korthikanti et al. 2022 (arXiv:2205.05198).

    name            layout       forward          backward         paper
    copy            R -> R       identity         all-reduce       f
    reduce          P -> R       all-reduce       identity         f-bar
    gather(dim)     S -> V       all-gather       reduce-scatter   g
    scatter_sum(d)  P -> S       reduce-scatter   all-gather       g-bar
    split(dim)      R -> S       slice            all-gather
    collect(dim)    S -> R       all-gather       slice            the conjugate of split
    copy_within(c)  R -> R       identity         sum over c       f, where c ranks in a row hold the same value

R = the same value on every rank, and what follows counts it once; S = sharded; P = a partial sum; V = gathered for
rank-varying use.  ``gather`` where every rank then computes something of its own with the rows (a column-parallel
GEMM); ``collect`` where every rank then computes the same thing (a head, a loss): the wrong one of the two multiplies
gradients by the number of ranks.

Every cross-rank sum is an exchange of parts and a sum in fp32 in rank order: exact to one rounding, the same at every
position and in every run (a bf16 all_reduce of 256 + 1 + 1 + 1 over four gloo ranks gives 260 or 256 by position).
"""

import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .kernels.norm.core import reduce_parts
from .kernels.runtime.errors import check
from .kernels.runtime.function import Function, once_differentiable
from .kernels.runtime.leaves import tree
from .kernels.runtime.op import COMMUNICATION, op
from .parallel import TensorParallel, resolve
from .ranks import gloo
from .ranks.agreement import agreement_of, comparable, gather_number
from .ranks.failure import named
from .ranks.messages import channel
from .ranks.shared_memory import SharedMemory, shared_memory

# ---- the messages everything is made of: opaque ops, so that compiled graphs keep their order ----


# torch 2.13 deprecates the older name
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def start_all_gather(result: Tensor, x: Tensor, group: dist.ProcessGroup) -> list[gloo.Handle]:
    """Starts to gather contiguous x [n, ...] of every rank into ``result`` [R, n, ...].  Neither may be touched before
    the returned handles are waited for.

    On a CPU by sends and receives: gloo's own gather copies all it has gathered once more (an attention layer's step,
    fp32, over a link of 1 Gbit/s: 417 ms, so 383).
    """
    if not x.is_cpu:
        return [_all_gather_single(result.view(-1), x.view(-1), group=group, async_op=True)]
    rank, size = group.rank(), group.size()
    result[rank] = x
    shifts = range(1, size)
    receives = [gloo.receive(result[(rank - s) % size], group, (rank - s) % size) for s in shifts]
    return receives + [gloo.send(x, group, (rank + s) % size) for s in shifts]


def all_gather_ref(x: Tensor, size: int, group_name: str) -> Tensor:
    """[n, ...] -> [R, n, ...]: every rank's tensor."""
    result, group = x.new_empty(size, *x.shape), resolve(group_name)
    with named("all_gather", group):
        if memory := _memory(x, group):
            memory.all_gather(result, x.contiguous())
        else:
            for handle in start_all_gather(result, x.contiguous(), group):
                handle.wait()
    return result


def all_to_all_ref(x: Tensor, group_name: str) -> Tensor:
    """[R, n, ...] -> [R, n, ...]: part r goes to rank r, and part r comes from rank r."""
    result, group = x.new_empty(x.shape), resolve(group_name)
    with named("all_to_all", group):
        if memory := _memory(x, group):
            memory.exchange(list(result), list(x.contiguous()))
        else:
            dist.all_to_all_single(result, x.contiguous(), group=group)
    return result


def all_gather_copies_ref(x: Tensor, copies: int, size: int, group_name: str) -> Tensor:
    """[n, ...] -> [copies, n, ...]: the tensors of the ``copies`` consecutive ranks that hold this rank's value."""
    group = resolve(group_name)
    start = group.rank() // copies * copies
    counts = [1 if start <= r < start + copies else 0 for r in range(size)]
    with named("all_gather_copies", group):
        return _exchanged(x.expand(copies, *x.shape), counts, counts, group)


def exchange_rows_ref(x: Tensor, sent: list[int], received: list[int], group_name: str) -> Tensor:
    """x [sum of sent, ...] -> [sum of received, ...]: so many rows to each rank, in order of ranks, and from each."""
    group = resolve(group_name)
    with named("exchange_rows", group):
        return _exchanged(x, sent, received, group)


def _exchanged(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    result = x.new_empty(sum(received), *x.shape[1:])
    if memory := _memory(x, group):
        memory.exchange(result.split(received), x.contiguous().split(sent))
    else:
        dist.all_to_all_single(result, x.contiguous(), received, sent, group=group)
    return result


def _memory(x: Tensor, group: dist.ProcessGroup) -> SharedMemory | None:
    """Returns what messages of x go through between CPUs of one machine; None where they go through the group."""
    return shared_memory(group) if x.is_cpu else None


all_gather = op(all_gather_ref, kind=COMMUNICATION, fake=lambda x, size, group_name: x.new_empty(size, *x.shape))
all_to_all = op(all_to_all_ref, kind=COMMUNICATION, fake=lambda x, group_name: x.new_empty(x.shape))
all_gather_copies = op(
    all_gather_copies_ref, kind=COMMUNICATION, fake=lambda x, copies, size, group_name: x.new_empty(copies, *x.shape)
)
exchange_rows = op(
    exchange_rows_ref,
    kind=COMMUNICATION,
    fake=lambda x, sent, received, group_name: x.new_empty(sum(received), *x.shape[1:]),
)


# ---- raw collectives: a new tensor out, the input untouched, a view at size 1 ----


def _identity(x: Tensor, tp: TensorParallel, dim: int) -> Tensor:
    return x.view_as(x)


def _all_gather(x: Tensor, tp: TensorParallel, dim: int) -> Tensor:
    if tp.size == 1:
        return x.view_as(x)
    return all_gather(x.movedim(dim, 0).contiguous(), tp.size, tp.group_name).flatten(0, 1).movedim(0, dim)


def _reduce_scatter(x: Tensor, tp: TensorParallel, dim: int) -> Tensor:
    if tp.size == 1:
        return x.view_as(x)
    n = tp.divide(x.shape[dim], f"scatter_sum: dim {dim}")
    parts = all_to_all(x.movedim(dim, 0).reshape(tp.size, n, *x.movedim(dim, 0).shape[1:]).contiguous(), tp.group_name)
    return summed(parts, tp).movedim(0, dim)


def summed(parts: Tensor, tp: TensorParallel) -> Tensor:
    """[R, ...] of every rank -> their sum in parts' dtype: in fp32 in rank order, or with ``tp.bitwise`` as a tree; of
    integers as they are, which is exact."""
    if not parts.is_floating_point():
        return parts.sum(0, dtype=parts.dtype)
    return reduce_parts(parts) if tp.bitwise is None else tree(parts.unbind(0))


_ONE_MESSAGE = 1 << 19  # elements up to which a gather of everything is cheaper than an exchange and a gather of sums


def all_reduce(x: Tensor, tp: TensorParallel) -> Tensor:
    """Returns the sum over ranks, as :func:`summed`: by one gather if x is small, else by an exchange of 1/R pieces."""
    if tp.size == 1:
        return x.view_as(x)
    if x.numel() <= _ONE_MESSAGE:
        return summed(all_gather(x.contiguous(), tp.size, tp.group_name), tp)
    flat = x.reshape(-1)
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % tp.size))
    mine = summed(all_to_all(padded.view(tp.size, -1), tp.group_name), tp)
    return all_gather(mine, tp.size, tp.group_name).view(-1)[: flat.numel()].view(x.shape)


def reduced_bytes(elements: int, element_size: int, ranks: int) -> int:
    """Returns the bytes that a rank sends in :func:`all_reduce`."""
    if elements <= _ONE_MESSAGE:
        return (ranks - 1) * elements * element_size
    return 2 * (ranks - 1) * -(-elements // ranks) * element_size


def reduce_messages(elements: int, ranks: int) -> int:
    """Returns the messages that a rank sends in :func:`all_reduce`."""
    return (ranks - 1) * (1 if elements <= _ONE_MESSAGE else 2)


def _all_reduce(x: Tensor, tp: TensorParallel, dim: int) -> Tensor:
    return all_reduce(x, tp)


def _slice(x: Tensor, tp: TensorParallel, dim: int) -> Tensor:
    n = tp.divide(x.shape[dim], f"split: dim {dim}")
    return x.narrow(dim, tp.rank * n, n).clone()


# ---- the table ----


Move = Callable[[Tensor, TensorParallel, int], Tensor]


class _LinearMap(Function):
    """y = forward(x); dx = adjoint(dy)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Move, adjoint: Move, tp: TensorParallel, dim: int) -> Tensor:
        ctx.args = adjoint, tp, dim
        return forward(x, tp, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        adjoint, tp, dim = ctx.args
        return adjoint(dy, tp, dim), None, None, None, None


_known: "weakref.WeakKeyDictionary[dist.ProcessGroup, set[Hashable]]" = weakref.WeakKeyDictionary()


def _collective(
    forward: Move, adjoint: Move, x: Tensor, tp: TensorParallel, dim: int = 0, *, size: int | None = None
) -> Tensor:
    """Runs a collective; compares the first call of each kind over the ranks, as gloo aborts on messages of two
    lengths."""
    if tp.size > 1 and tp.group_name is not None and not torch.compiler.is_compiling():
        group = resolve(tp.group_name)
        key = forward, adjoint, x.dtype, x.shape, x.requires_grad, dim, size
        agreed = _known.setdefault(group, set())
        if key not in agreed:
            name = f"{forward.__name__.strip('_')}, backward {adjoint.__name__.strip('_')}"
            different = () if forward in (_identity, _slice) else ("x",)  # shards, or parts of a sum
            compare = agreement_of(group, name, each_call=False, axis=tp.axis, different=different)
            compare(group, dict(x=x, dim=dim, size=size), {})
            agreed.add(key)
        elif links := channel(group):
            links.threads.enter()
    return _LinearMap.apply(x, forward, adjoint, tp, dim)


def copy(x: Tensor, tp: TensorParallel) -> Tensor:
    """f: identity forward, all-reduce backward.  For a replicated tensor that each rank goes on to use differently."""
    return _collective(_identity, _all_reduce, x, tp)


class _CopyWithin(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel, copies: int) -> Tensor:
        ctx.args = copies, tp
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        copies, tp = ctx.args
        if copies == 1:
            return dy, None, None
        return summed(all_gather_copies(dy.contiguous(), copies, tp.size, tp.group_name), tp), None, None


def copy_within(x: Tensor, tp: TensorParallel, copies: int) -> Tensor:
    """f over a part of the group: identity forward, backward the sum over the ``copies`` consecutive ranks with the
    same x."""
    return _CopyWithin.apply(x, tp, copies)


def reduce(x: Tensor, tp: TensorParallel) -> Tensor:
    """f-bar: all-reduce forward, identity backward."""
    return _collective(_all_reduce, _identity, x, tp)


def gather(x: Tensor, tp: TensorParallel, dim: int = 0) -> Tensor:
    """g: all-gather forward, reduce-scatter backward.  For rows that each rank then uses differently."""
    return _collective(_all_gather, _reduce_scatter, x, tp, dim=dim)


def scatter_sum(x: Tensor, tp: TensorParallel, dim: int = 0) -> Tensor:
    """g-bar: reduce-scatter forward, all-gather backward.  ValueError where ``dim`` is not divisible by the size."""
    return _collective(_reduce_scatter, _all_gather, x, tp, dim=dim)


def split(x: Tensor, tp: TensorParallel, dim: int = 0) -> Tensor:
    """This rank's slice of a replicated tensor; all-gather backward.  ValueError where ``dim`` is not divisible by the
    size."""
    return _collective(_slice, _all_gather, x, tp, dim=dim)


def collect(x: Tensor, tp: TensorParallel, dim: int = 0, *, size: int | None = None) -> Tensor:
    """All-gather forward, slice backward.  For shards that every rank then uses in the same way.

    ``size``: that of the whole ``dim``.  Where ranks do not divide it, as an odd vocabulary, the last ones have less of
    it (:meth:`TensorParallel.chunk`).  Without it the ranks tell each other theirs in each call (8 bytes to each, not
    in a compiled graph, in which they have the same).  ValueError where x is not this rank's slice of the whole.
    """
    if tp.size == 1:
        return _collective(_all_gather, _slice, x, tp, dim=dim)
    if size is None:
        size = _whole_size(x, tp, dim)
    if x.shape[dim] * tp.size == size:
        return _collective(_all_gather, _slice, x, tp, dim=dim)
    first, end = tp.chunk(size, "collect: size")
    mine = f"this rank's {end - first} of {size}"
    check(x.shape[dim] == end - first, f"collect: dim {dim} must be {mine}, got {tuple(x.shape)}")
    rows = x.movedim(dim, -1)
    rows = torch.nn.functional.pad(rows, (0, tp.slice_size(size) - rows.shape[-1]))
    return _collective(_all_gather, _slice, rows, tp, dim=-1, size=size)[..., :size].movedim(-1, dim)


def _whole_size(x: Tensor, tp: TensorParallel, dim: int) -> int:
    """Returns the sum of the ranks' sizes of ``dim``.  ValueError on every rank unless they are those of slices."""
    n = x.shape[dim]
    if tp.group_name is None or torch.compiler.is_compiling() or not comparable([x]):
        return n * tp.size
    sizes = gather_number(resolve(tp.group_name), "collect", n)
    total = sum(sizes)
    if len(set(sizes)) > 1:
        step = tp.slice_size(total, "collect: size")
        if sizes != [max(0, min(step, total - rank * step)) for rank in range(tp.size)]:
            each = "; ".join(f"rank {rank}: {size}" for rank, size in enumerate(sizes))
            raise ValueError(
                f"collect: dim {dim} must be the same on every tensor-parallel rank, or less on the last ones as by"
                f" TensorParallel.chunk, got {each}"
            )
    return total
