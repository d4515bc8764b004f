"""Gradients of a step's micro-batches as binary trees: the same bits however they are shared out to replicas and
stages.

    T(g) = g      T(g_0 .. g_(2n-1)) = round(T(g_0 .. g_(n-1)) + T(g_n .. g_(2n-1)))

K micro-batches, K a power of two, are a step's, whoever computes them: of R replicas, R a divisor of K, replica r takes
those from r K / R on.  It adds their gradients as they come, which in order holds log2(K / R) of them beside the last,
and its sum is a node of the tree.  The upper levels are added shard by shard: each replica sends every other one its
shard, adds the R nodes of its own, and hands the sum to all, 2 (R - 1) / R of the gradients' bytes, as a ring does.

A weight that the head shares with the embedding has a tree for each use, and their sum is the gradient: the two uses
may be on stages of two ranks.
"""

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.runtime.errors import check
from ..kernels.runtime.function import Function, once_differentiable
from ..kernels.runtime.leaves import TreeSum, tree
from ..kernels.runtime.rules import listed
from ..layers.module import local

_BUCKET = 25 << 20  # bytes of gradients a message
EMBEDDING, HEAD = range(2)  # uses of a tied weight; what is no tied weight has the first
_counts: "weakref.WeakKeyDictionary[nn.Module, int]" = weakref.WeakKeyDictionary()


class GradientTrees:
    """The sums of a model's gradients over micro-batches.

    ``local``: how many of them are here; ``replicas`` take the others, None for none.
    """

    def __init__(self, model: nn.Module, local: int, replicas: dist.ProcessGroup | None):
        self.local, self.replicas = local, replicas
        self.size = 1 if replicas is None else replicas.size()
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._sums: dict[tuple[nn.Parameter, int], TreeSum] = {}
        _counts[model] = local * self.size

    def index(self, i: int) -> int:
        """Returns the number, among all of a step, of the i-th micro-batch here."""
        rank = 0 if self.replicas is None else self.replicas.rank()
        return rank * self.local + i

    def add(self, p: nn.Parameter, gradient: Tensor, micro_batch: int, use: int = EMBEDDING) -> None:
        """Adds a parameter's gradient of a micro-batch, from 0 here, which the tree then owns."""
        self._sums.setdefault((p, use), TreeSum()).add(gradient, micro_batch)

    def take(self, micro_batch: int) -> None:
        """Adds what ``.grad`` holds of a micro-batch, and leaves None there."""
        for p in self.trained.values():
            if p.grad is not None:
                self.add(p, p.grad, micro_batch)
                p.grad = None

    def clear(self) -> None:
        """Drops what was added up of a step that did not end."""
        self._sums.clear()

    def totals(self) -> dict[nn.Parameter, Tensor]:
        """Ends a step: returns the sums over all micro-batches of all replicas, the same on each."""
        totals: dict[nn.Parameter, Tensor] = {}
        for keys in self._buckets():
            for (p, _), total in zip(keys, self._reduced(keys), strict=True):
                totals[p] = totals[p].add_(total) if p in totals else total
        self._sums.clear()
        return totals

    def check(self, name: str) -> None:
        """ValueError, by ``name``, where a parameter had no part in a micro-batch."""
        counts: dict[nn.Parameter, set[int]] = {}
        for (p, _), sums in self._sums.items():
            counts.setdefault(p, set()).add(sums.count)
        absent = [path for path, p in self.trained.items() if counts.get(p) != {self.local}]
        check(
            not absent,
            f"{name}: {listed(absent)} took no part in the loss of a micro-batch; each trainable parameter takes part"
            " in each",
        )

    def _buckets(self) -> Iterator[list[tuple[nn.Parameter, int]]]:
        """Yields trees of one dtype and device, in the model's order, whose sums fill a message."""
        kinds: dict[tuple[torch.dtype, torch.device], list[tuple[nn.Parameter, int]]] = {}
        for p in self.trained.values():
            uses = [(p, use) for use in (EMBEDDING, HEAD) if (p, use) in self._sums]
            kinds.setdefault((p.dtype, p.device), []).extend(uses)
        for keys in kinds.values():
            bucket: list[tuple[nn.Parameter, int]] = []
            for p, use in keys:
                if bucket and sum(q.nbytes for q, _ in bucket) + p.nbytes > _BUCKET:
                    yield bucket
                    bucket = []
                bucket.append((p, use))
            yield bucket

    def _reduced(self, keys: list[tuple[nn.Parameter, int]]) -> list[Tensor]:
        totals = [self._sums[key].total() for key in keys]
        if self.size == 1:
            return totals
        flat = torch.cat([t.reshape(-1) for t in totals])
        sums = self._over_replicas(F.pad(flat, (0, -len(flat) % self.size)))
        pieces = sums[: len(flat)].split([t.numel() for t in totals])
        return [piece.view(p.shape).clone() for piece, (p, _) in zip(pieces, keys, strict=True)]

    def _over_replicas(self, flat: Tensor) -> Tensor:
        """Returns the tree over the replicas' vectors, of a length that they divide."""
        nodes = torch.empty_like(flat)
        dist.all_to_all_single(nodes, flat, group=self.replicas)
        shard = tree(nodes.chunk(self.size))
        dist.all_gather_into_tensor(flat, shard.contiguous(), group=self.replicas)
        return flat


# ---- a tied weight ----

TakeGradient = Callable[[nn.Parameter, Tensor], bool]  # whether it has taken it
_TAKER = "_tpfuse_take_gradient"  # an attribute of the model while a call runs: compiled graphs depend on it


class _Apart(Function):
    """A weight whose gradient goes no further where ``take`` takes it."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, p: nn.Parameter, take: TakeGradient) -> Tensor:
        ctx.p, ctx.take = p, take
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        return None if ctx.take(ctx.p, gradient.clone()) else gradient, None, None


@contextlib.contextmanager
def taking_head_gradients(model: nn.Module, take: TakeGradient) -> Iterator[None]:
    """Hands the gradient that a model's head has for a tied weight, by calls in here, to ``take``, before it is added
    to the other's."""
    _prepare_graphs()
    setattr(model, _TAKER, take)
    try:
        yield
    finally:
        delattr(model, _TAKER)


def apart(model: nn.Module, weight: nn.Parameter) -> Tensor:
    """Returns the embedding's weight as the head of ``model`` uses it."""
    take = getattr(model, _TAKER, None)
    return local(weight) if take is None else _taken_apart(weight, take)


def _taken_apart(weight: nn.Parameter, take: TakeGradient) -> Tensor:
    x: Tensor = _Apart.apply(local(weight), weight, take)
    return x


def _prepare_graphs() -> None:
    """Takes :func:`_taken_apart` out of graphs, which have no place for what its backward pass calls, in a process that
    makes some."""
    global _taken_apart
    if "torch._dynamo.eval_frame" in sys.modules and not hasattr(_taken_apart, "_torchdynamo_disable"):
        _taken_apart = torch.compiler.disable(_taken_apart)


def micro_batches_of(model: nn.Module) -> int | None:
    """Returns the K micro-batches of which a model's gradients are trees; None where they are none."""
    return _counts.get(model)


def forget_micro_batches(model: nn.Module) -> None:
    """Says that a model's gradients are no trees from now on, as they may have been before."""
    _counts.pop(model, None)
