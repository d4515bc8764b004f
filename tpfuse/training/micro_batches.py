"""Gradients of micro-batches as one binary tree: the same bits however they are shared out to replicas.

    T(g) = g      T(g_0 .. g_(2n-1)) = round(T(g_0 .. g_(n-1)) + T(g_n .. g_(2n-1)))      .grad = T(g_0 .. g_(K-1)) / K

K micro-batches, K a power of two, are a step's, whoever computes them: of R replicas, R a divisor of K, replica r takes
those from r K / R on, in order.  It adds their gradients as they come, which holds log2(K / R) of them beside the last,
and its sum is a node of the tree.  The upper levels are added shard by shard: each replica sends every other one its
shard, adds the R nodes of its own, and hands the sum to all, 2 (R - 1) / R of the gradients' bytes, as a ring does.
"""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.runtime.errors import check
from ..kernels.runtime.leaves import TreeSum, tree
from ..kernels.runtime.rules import listed
from ..models.model import Model
from ..ranks.messages import together

_BUCKET = 25 << 20  # bytes of gradients a message
_counts: "weakref.WeakKeyDictionary[nn.Module, int]" = weakref.WeakKeyDictionary()


class MicroBatchReplica(nn.Module):
    """A replica of a model whose gradients are those of K micro-batches, by :func:`tpfuse.data_parallel`.

    It is called like the model, once a micro-batch, and each call is followed by its ``backward()``.  After the last
    one of a step, and not before, ``.grad`` of every trainable parameter is there, the mean of all micro-batches of all
    replicas.  ``zero_grad()`` begins a step anew, also one that an error has ended.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None, micro_batches: int):
        super().__init__()
        self.module, self.micro_batches = module, micro_batches
        self._group, self._size = group, 1 if group is None else group.size()
        self._trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._sums: dict[nn.Parameter, TreeSum] = {}
        self._done, self._called, self._in_backward = 0, False, False
        _counts[module] = micro_batches
        for p in self._trained.values():
            p.register_post_accumulate_grad_hook(self._accumulated)

    @property
    def local_micro_batches(self) -> int:
        """The number of a step's micro-batches that this replica computes."""
        return self.micro_batches // self._size

    @property
    def micro_batch(self) -> int:
        """The index, among all K of a step, of the micro-batch of the next call."""
        rank = 0 if self._group is None else self._group.rank()
        return rank * self.local_micro_batches + self._done % self.local_micro_batches

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model.  A model that drops is told which masks: ``step``, and ``first_sample`` among all replicas'
        samples (``micro_batch`` times the samples of one).  ValueError where it is not, or where a micro-batch's
        backward pass or ``zero_grad()`` is missing."""
        if self.training and torch.is_grad_enabled():
            self._check_call(kwargs)
            output = self.module(*args, **kwargs)
            self._called = True
            return output
        return self.module(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients, and what was added up of a step that did not end."""
        super().zero_grad(set_to_none=True)
        self._sums.clear()
        self._done, self._called, self._in_backward = 0, False, False

    def _check_call(self, kwargs: dict[str, Any]) -> None:
        name = f"data_parallel: {type(self.module).__name__}"
        check(
            not self._called,
            f"{name}: the micro-batch before has had no whole backward pass; call backward() once after each call, or"
            " zero_grad() to begin the step anew",
        )
        if self._done % self.local_micro_batches == 0:
            left = [path for path, p in self._trained.items() if p.grad is not None]
            check(not left, f"{name}: {listed(left)} has a gradient when a step begins; call zero_grad() first")
        if isinstance(self.module, Model) and self.module._drops():
            missing = [key for key in ("step", "first_sample") if kwargs.get(key) is None]
            check(
                not missing,
                f"{name}: dropout's masks are numbered by {' and '.join(missing)}; give it with each micro-batch",
            )

    def _accumulated(self, p: nn.Parameter) -> None:
        """Takes a parameter's gradient of one micro-batch."""
        if not self._called:  # a backward pass of other calls
            return
        if not self._in_backward:
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        assert p.grad is not None
        self._sums.setdefault(p, TreeSum()).add(p.grad)
        p.grad = None

    def _end_backward(self) -> None:
        self._done, self._called, self._in_backward = self._done + 1, False, False
        if self._done % self.local_micro_batches == 0:
            self._called = True  # until zero_grad, if this raises
            together(self._check_sums, [] if self._group is None else [self._group])
            for parameters in self._buckets():
                self._reduce(parameters)
            self._sums.clear()
            self._called = False

    def _check_sums(self) -> None:
        sums, local = self._sums, self.local_micro_batches
        absent = [path for path, p in self._trained.items() if p not in sums or sums[p].count != local]
        check(
            not absent,
            f"data_parallel: {listed(absent)} took no part in the loss of a micro-batch; each trainable parameter takes"
            " part in each",
        )

    def _buckets(self) -> Iterator[list[nn.Parameter]]:
        """Yields parameters of one dtype and device, in the model's order, whose gradients fill a message."""
        kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for p in self._trained.values():
            kinds.setdefault((p.dtype, p.device), []).append(p)
        for parameters in kinds.values():
            bucket: list[nn.Parameter] = []
            for p in parameters:
                if bucket and sum(q.nbytes for q in bucket) + p.nbytes > _BUCKET:
                    yield bucket
                    bucket = []
                bucket.append(p)
            yield bucket

    def _reduce(self, parameters: list[nn.Parameter]) -> None:
        totals = [self._sums[p].total() for p in parameters]
        if self._size > 1:
            flat = torch.cat([t.reshape(-1) for t in totals])
            sums = self._over_replicas(F.pad(flat, (0, -len(flat) % self._size)))
            pieces = sums[: len(flat)].split([t.numel() for t in totals])
            totals = [piece.view(p.shape).clone() for piece, p in zip(pieces, parameters, strict=True)]
        for p, total in zip(parameters, totals, strict=True):
            p.grad = total.div_(self.micro_batches)

    def _over_replicas(self, flat: Tensor) -> Tensor:
        """Returns the tree over the replicas' vectors, of a length that they divide."""
        nodes = torch.empty_like(flat)
        dist.all_to_all_single(nodes, flat, group=self._group)
        shard = tree(nodes.chunk(self._size))
        dist.all_gather_into_tensor(flat, shard.contiguous(), group=self._group)
        return flat


def micro_batches_of(model: nn.Module) -> int | None:
    """Returns the K micro-batches of which a model's gradients are a tree; None where they are none."""
    return _counts.get(model)
