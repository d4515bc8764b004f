"""A pipeline without a flush: two versions of the weights, gradients one step late (PipeDream-2BW, Narayanan et al.
2020, arXiv:2006.09503).

A step of batch t runs the end of batch t-1, on the weights that it began with, between the passes of batch t.  So it
ends with the gradients of batch t-1, and those of batch t are half made:

    w_(t+1) = w_t - update(grad f_(t-1)(w_(t-1)))

The delay is one step whatever the number of stages, so the result is that of one process with the same delay.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..kernels.runtime.errors import check
from ..kernels.runtime.main_grad import GradientSlot, main_grads
from ..layers.moe import ParallelMoE
from ..ranks.agreement import raise_everywhere
from . import failures
from .action import FORWARD
from .bubbles import Filling
from .delays import Pending, register
from .runtime import ChunkStage, ContinuedRuntime, Runtime
from .schedules import Order, order
from .sharded import Shards
from .simulator import Timeline
from .step import CallKind, Pipeline
from .trees import HEAD, GradientTrees
from .versions import Version


class BatchInFlight:
    """A batch in flight: its calls, one a micro-batch, the model that they run on, and what has been made of them."""

    def __init__(self, model: nn.Module, calls: list[Any], kind: CallKind, trees: GradientTrees | None):
        self.calls, self.kind, self.trees = calls, kind, trees
        self.version = Version(model, kind.device)
        self.losses: dict[int, Tensor] = {}
        self.added: list[Tensor] = []

    def take(self, micro_batch: int) -> None:
        """Adds the gradients of a micro-batch to their trees."""
        if self.trees is None:
            return
        for p, leaf in self.version.leaves.items():
            if leaf.grad is not None:
                self.trees.add(p, leaf.grad, micro_batch)
                leaf.grad = None


class DelayedPipeline(Pipeline):
    """Runs steps of a staged model whose gradients are one step late; made by :func:`schedule` of "2bw"."""

    def __init__(self, model: Any, group: dist.ProcessGroup, order_: Order, *, bitwise: bool):
        super().__init__(model, group, order_, bitwise=bitwise)
        self._flight: BatchInFlight | None = None
        self._pending: Pending | None = None
        self._halves: dict[int, BatchInFlight] = {}  # of the runtime's numbers of micro-batches
        self._batches = 0
        self._running: BatchInFlight | None = None
        register(f"pipeline {order_.schedule}", model, self)

    @property
    def waits(self) -> bool:
        return self._flight is not None or self._pending is not None

    def step(self, input_ids: Tensor | None = None, **arguments: Any) -> Tensor | None:  # type: ignore[override]
        """Runs a batch's passes on the weights as they are, but for the last ones, which the next step runs on the same
        weights, and completes the batch before.

        Takes what :meth:`Pipeline.step` does.  Adds to ``.grad`` the gradient of the batch before, and returns its
        loss; the first step returns None and leaves ``.grad`` as it is.  A step that fails drops both batches.

        ValueError beside those of :meth:`Pipeline.step` for a batch of other shape or dtype than the one in flight:
        call :meth:`drain` between them.
        """
        with failures.naming_lost_ranks(self.order, self.group, self._dp):
            arguments = dict(arguments, input_ids=input_ids)
            calls = self._agreed(arguments, main_grads(self.model.parameters()), backward=True)
            trees = None if self.trees is None else self._new_trees()
            batch = BatchInFlight(self.model, calls, self._kind(calls[0], True), trees)
            pending = self._advance(batch)
            batch.version.keep()  # the version before is free by now: no third one is alive
            self.model._count(arguments.get("step"))
        return None if pending is None else pending.add_to_grad()

    def drain(self) -> Tensor | None:
        """Completes the batch in flight: adds its gradient to ``.grad`` and returns its loss; None where none is.

        Every rank calls it, after the final step.
        """
        pending, self._pending = self.finish(), None
        return None if pending is None else pending.add_to_grad()

    def finish(self) -> Pending | None:
        """Completes the batch in flight, whose loss and gradients the next step hands out.  Every rank calls it."""
        groups = [group for group in self.model.groups.all() if group.size() > 1]
        raise_everywhere(None, groups, call="completing a pipeline's batch in flight")
        if self._flight is not None:
            with failures.naming_lost_ranks(self.order, self.group, self._dp):
                self._pending = self._advance(None)
        return self._pending

    def resume(self, pending: Pending | None) -> None:
        self._forget()
        self._pending = pending

    def measure(self, input_ids: Tensor | None = None, **arguments: Any) -> Timeline:
        self._refuse("measure")

    def fill(self, filling: Filling | None) -> None:
        self._refuse("fill")

    def _refuse(self, call: str) -> NoReturn:
        raise ValueError(f"pipeline {self.order.schedule}: {call} is of bubbles, and without a flush there are none")

    # ---- batches ----

    def _advance(self, batch: BatchInFlight | None) -> Pending | None:
        """Runs what there is of the batch in flight and of ``batch``, which is then in flight; returns what waits of
        the batch before."""
        previous, pending, number = self._flight, self._pending, self._batches
        flights = {(number + i) % 2: flight for i, flight in enumerate((batch, previous)) if flight is not None}
        calls, previous_calls = (None if flight is None else flight.calls for flight in (batch, previous))
        try:
            self._halves = flights
            runtime: Any = self._runtime(next(iter(flights.values())).calls[0], True)
            for m, loss in runtime.run_batches(previous_calls, calls, number).items():
                flights[(number + (m < 0)) % 2].losses[m % self.order.micro_batches] = loss
            if previous is not None:
                pending = self._completed(previous)
        except BaseException:
            self._forget()
            raise
        self._batches += batch is not None
        self._flight, self._pending, self._halves, self._running = batch, None, {}, None
        return pending

    def _completed(self, batch: BatchInFlight) -> Pending:
        """Returns the loss and the gradients of a batch, summed over the ranks that share them; ``.grad`` is as
        before."""
        leaves = batch.version.leaves
        earlier = {p: p.grad for p in leaves}
        try:
            totals = {} if batch.trees is None else self._totals(f"pipeline {self.order.schedule}", batch.trees)
            for p, leaf in leaves.items():
                p.grad = leaf.grad
            self._complete({}, totals)
            gradients = {p: p.grad for p in leaves if p.grad is not None}
        finally:
            for p, gradient in earlier.items():
                p.grad = gradient
        added = torch.stack(batch.added).sum() if batch.added else None
        return Pending(self._total(batch.losses, added, batch.kind.device), gradients)

    def _forget(self) -> None:
        super()._forget()
        self._flight, self._halves, self._running = None, {}, None

    # ---- passes ----

    def _over(self, stages: list[ChunkStage], backward: bool) -> Runtime:
        if backward:
            return ContinuedRuntime(stages, self.order)
        flushed = order("1f1b", len(self.order.actions), self.order.micro_batches)
        return Runtime(stages, flushed, backward=False)

    @contextlib.contextmanager
    def _around(self, kind: str, micro_batch: int) -> Iterator[None]:
        count = self.order.micro_batches
        batch = self._running = self._halves[micro_batch // count]
        self.micro_batch = micro_batch % count
        with batch.version.in_place():
            yield
        if kind == FORWARD:
            added = self.model.stages.take_added()
            batch.added += [] if added is None else [added]
        else:
            batch.take(self.micro_batch)

    def _of_head(self, p: nn.Parameter, gradient: Tensor) -> bool:
        batch = self._running
        assert batch is not None and batch.trees is not None
        batch.trees.add(batch.version.parameters[p], gradient, self.micro_batch, HEAD)
        return True

    # ---- what is refused ----

    def _check(self, mains: list[GradientSlot], *, backward: bool) -> None:
        super()._check(mains, backward=backward)
        check_delayed(self.model, self.order.schedule)

    def _check_batch(self, calls: list[Any]) -> None:
        kind = self._kind(calls[0], True)
        in_flight = kind if self._flight is None else self._flight.kind
        check(
            kind == in_flight,
            f"pipeline {self.order.schedule}: a micro-batch must be as those in flight, {_described(in_flight)}, got"
            f" {_described(kind)}; call drain() between them",
        )


def check_delayed(model: Any, name: str) -> None:
    """Raises ValueError where a model's weights cannot be kept in two versions."""
    name = f"pipeline {name}"
    check(not main_grads(model.parameters()), f"{name} beside MainGrad is not built: two batches add up gradients")
    check(not Shards(model).modules, f"{name} over FSDP2 is not built: it gathers one version of the parameters")
    compiled = any(m._compiled_call_impl is not None for m in model.modules())
    check(not compiled, f"{name} of a compiled module is not built: it holds on to one version of the parameters")
    biased = any(isinstance(m, ParallelMoE) and m.routing.biased for m in model.modules())
    check(not biased, f"{name} of a router with a bias is not built: balance_experts changes it in place")


def _described(kind: CallKind) -> str:
    return f"{kind.batch} x {kind.seq} tokens in {kind.dtype}"
