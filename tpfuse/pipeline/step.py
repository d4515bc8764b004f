"""A step of training over a pipeline: micro-batches through the stages of a model, all gradients complete at the end,
one loss on every rank."""

import contextlib
import functools
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..collectives import all_gather
from ..kernels.runtime.captures import all_or_nothing
from ..kernels.runtime.deferred import WeightGradients
from ..kernels.runtime.errors import check
from ..kernels.runtime.leaves import tree
from ..kernels.runtime.main_grad import GradientSlot, main_grads
from ..kernels.runtime.op import autocast
from ..layers.module import local, mark_of, module_state
from ..layers.shards import same_on_replicas
from ..ranks.agreement import Agreement, Header, described, next_number, raise_everywhere
from ..ranks.messages import attempt, together
from . import failures
from .action import FORWARD, KINDS
from .bubbles import Filler, Filling
from .copies import compare_copies, copied, sum_copies
from .placement import Chunk
from .runtime import ChunkStage, Passes, Runtime, Shapes
from .schedules import EVERY, Order
from .sharded import Shards, is_shard
from .simulator import Timeline, simulate
from .trees import HEAD, GradientTrees, forget_micro_batches, taking_head_gradients

_WHICH = "which pipeline, in the order in which they were made"


class Pipeline:
    """Runs steps of a staged model; made by :func:`schedule`."""

    def __init__(self, model: Any, group: dist.ProcessGroup, order: Order, *, bitwise: bool):
        self.model, self.group, self.order = model, group, order
        self.trees: GradientTrees | None = None
        if bitwise:
            self.trees = self._new_trees()
        else:
            forget_micro_batches(model)
        self.micro_batch = 0  # of the backward pass that runs
        self.splits = EVERY[order.schedule].split
        self.store, self.shards = WeightGradients(), Shards(model)
        self._runtimes: dict[tuple[Any, ...], Runtime] = {}
        self.filler: Filler | None = None
        name = f"pipeline {order.schedule}"
        self._agreement = Agreement(Header(name, axis="pipeline"), each_call=True)
        self._of_replicas = Agreement(Header(name, axis="data-parallel"), each_call=True)
        self._number = next_number(group)
        self._trained_copies: list[str] | None = None  # as compared last

    def step(self, input_ids: Tensor | None = None, **arguments: Any) -> Tensor:
        """Runs forward and backward over a batch; each rank passes the same arguments, those of the model's forward.

        Samples are cut into micro-batches along the first dimension; packed documents are one micro-batch a row, with a
        list of ``cu_seqlens``, one of each.  Adds to ``.grad`` the gradient of the mean loss over the whole batch (of
        all data-parallel replicas if the model was given ``dp``); dropout masks and the loss are those of one process.
        Returns that loss, a scalar, the same on every rank.  After an error ``.grad`` is as it was before.

        If the model has a MainGrad, gradients are added to ``.main_grad``, and nothing is summed over ranks before its
        ``reduce()``; after an error call its ``zero()``.

        ValueError on every rank, before anything is sent, for arguments that the model does not take, a batch that
        cannot be cut evenly, and labels that are missing.
        """
        with failures.naming_lost_ranks(self.order, self.group, self._dp):
            return self._run(dict(arguments, input_ids=input_ids), backward=True)

    def drain(self) -> Tensor | None:
        """Completes a batch in flight, as :meth:`DelayedPipeline.drain`: a step with a flush leaves none."""
        return None

    @torch.no_grad()
    def evaluate(self, input_ids: Tensor | None = None, **arguments: Any) -> Tensor:
        """Returns the loss of a batch, the same on every rank; nothing is kept for backward."""
        with failures.naming_lost_ranks(self.order, self.group, self._dp):
            return self._run(dict(arguments, input_ids=input_ids), backward=False)

    def measure(self, input_ids: Tensor | None = None, **arguments: Any) -> Timeline:
        """Runs a step without work in its bubbles, and returns the timeline of its passes, for :func:`fill`.

        The time of a stage's pass is the median over micro-batches and the mean over replicas, tensor-parallel ranks
        and chains, so every rank gets the same timeline.  Compilation in a first step would count: measure a second.
        Gradients are made as by ``step``.
        """
        passes: Passes = []
        filler, self.filler = self.filler, None
        try:
            with failures.naming_lost_ranks(self.order, self.group, self._dp):
                self._run(dict(arguments, input_ids=input_ids), backward=True, passes=passes)
        finally:
            self.filler = filler
        return simulate(self.order, *self._seconds(passes))

    def fill(self, filling: Filling | None) -> None:
        """Runs the work of a filling in the bubbles of every later ``step``, all of it once in ``filling.steps`` steps.
        None ends this.

        A piece runs right before the pass after its bubble, whose input is on its way by then.  Passes keep their
        order: a piece that takes longer than its ``seconds`` lengthens the step.  Every rank runs its own pieces, which
        must leave parameters and gradients alone, and may send only to ranks with the same pieces: the tensor-parallel
        ranks and replicas of its stages.  ValueError for a filling of another order, and for
        work that depends on another rank.
        """
        check(
            filling is None or filling.timeline.order == self.order,
            "pipeline: the filling is of another order; fill the timeline of pipeline.measure(...), or one that"
            " simulate(pipeline.order, ...) makes",
        )
        self.filler = None if filling is None else Filler(filling, self.group.rank())

    def _run(self, arguments: Mapping[str, Any], *, backward: bool, passes: Passes | None = None) -> Tensor:
        model, name = self.model, f"pipeline {self.order.schedule}"
        mains = main_grads(model.parameters()) if backward else []
        calls = self._agreed(arguments, mains, backward=backward)
        sums = backward and not mains  # MainGrad sums gradients itself
        earlier = self._set_aside() if sums else {}
        filler = self.filler if backward else None
        if backward and self.trees is not None:
            self.trees = self._new_trees()  # of the parameters that are trained now
        elif backward:
            forget_micro_batches(model)
        try:
            with all_or_nothing(model.parameters() if backward else ()):
                with self.shards.gathered(backward=backward):
                    runtime = self._runtime(calls[0], backward)
                    losses = runtime.run(calls, filler.run_before if filler else lambda place: None, passes)
                totals = self._totals(name, self.trees) if sums and self.trees is not None else {}
                loss = self._total(losses, model.stages.take_added(), calls[0].inputs.tokens.device)
                if sums:
                    self._complete(earlier, totals)
        except BaseException:  # a half-done step is of no use to another
            self._forget()
            for p in model.parameters() if sums else ():
                p.grad = earlier.get(p)
            raise
        if filler is not None:
            filler.end()
        model._count(arguments.get("step"))
        return loss

    def _new_trees(self) -> GradientTrees:
        return GradientTrees(self.model, self.order.micro_batches, self._dp)

    def _forget(self) -> None:
        """Drops what a step that failed has left."""
        self._runtimes.clear()
        self.model.stages.take_added()
        self.store.take()

    def _agreed(self, arguments: Mapping[str, Any], mains: list[GradientSlot], *, backward: bool) -> list[Any]:
        """Compares a step over every axis, checks it, and returns its micro-batches.

        One rank's error is an error on every rank of every stage and replica, before anything else is sent.
        """
        model, stages = self.model, self.model.stages
        mode = {"training": model.training, "backward": backward, "dtype": next(p.dtype for p in model.parameters())}
        mode["whether MainGrad has reduced"] = any(main.reduced for main in mains)
        numbers, step = lambda: tuple(self._state().values()), arguments.get("step")
        waits = isinstance(step, Tensor) and not step.is_cpu  # its value is not read
        of_call = {"step": None if waits else described(step)}
        whole = lambda: self._state() | of_call | module_state(model)
        marks = lambda: (numbers(), *of_call.values(), mark_of(model))
        made, error = attempt(lambda: stages.micro_batches(model, self.order.micro_batches, arguments))
        comparisons = (
            # Replicas have the same parts, stages have not.
            lambda: self._compare_stages(arguments, mode, numbers),
            lambda: self._of_replicas(self._dp, {}, mode, whole, marks),
            lambda: stages.agree(model, arguments, mode | {_WHICH: self._number}),
            lambda: self._check(mains, backward=backward),
            lambda: self._check_batch(made[0]) if made and backward else None,
        )
        errors = [attempt(compare)[1] for compare in comparisons]
        groups = [group for group in model.groups.all() if group.size() > 1]
        found = next((e for e in (*errors, error) if e is not None), None)
        raise_everywhere(found, groups, call="a pipeline's step")
        model._at_call()
        return stages.normalized(model, made[0])

    def _compare_stages(
        self, arguments: Mapping[str, Any], mode: Mapping[str, Any], numbers: Callable[[], tuple[int, ...]]
    ) -> None:
        """Compares a step over the pipeline's ranks; and what they train of the parameters that two of them hold, in a
        message of its own, where that has changed on one."""
        trained = [name for name, p in copied(self.model).items() if p.requires_grad]
        changed = None if trained == self._trained_copies else self.group.rank()  # by which the ranks' marks differ
        if self._agreement(self.group, arguments, mode, self._state, lambda: (*numbers(), changed)):
            compare_copies(f"pipeline {self.order.schedule}", trained, self.group)
            self._trained_copies = trained

    def _check(self, mains: list[GradientSlot], *, backward: bool) -> None:
        """Raises an error where this rank cannot run a step."""
        name = f"pipeline {self.order.schedule}"
        check(
            not backward or torch.is_grad_enabled(),
            f"{name}: step makes gradients, and they are disabled; call evaluate",
        )
        check(
            not (mains and self.trees), f"{name}: MainGrad adds micro-batches one after another, bitwise a tree of them"
        )
        for main in mains:
            main.check_open()
        compiled = backward and self.splits and any(m._compiled_call_impl is not None for m in self.model.modules())
        check(not compiled, f"{name} splits the backward pass, which a compiled module does not: do not compile")

    def _check_batch(self, calls: list[Any]) -> None:
        """Raises an error where this rank cannot run a batch after those before."""

    def _state(self) -> dict[str, int]:
        """Returns what decides a step beside its arguments, the same on every stage and replica."""
        return self.model._seed_and_step() | {_WHICH: self._number}

    def _runtime(self, call: Any, backward: bool) -> Runtime:
        """Returns the runtime for calls of these shapes; messages have the same shape in all of them."""
        key, tokens, model = self._kind(call, backward), call.inputs.tokens, self.model
        if key not in self._runtimes:
            sent = torch.empty(call.rows.per_shard, model.config.hidden_size, dtype=key.dtype, device="meta")
            meta = Shapes(sent.requires_grad_(), torch.empty_like(tokens, device="meta"))
            build = self._take if self.splits else None
            around = self._around if backward else lambda kind, micro_batch: contextlib.nullcontext()
            make = functools.partial(ChunkStage, device=tokens.device, group=self.group, build=build, around=around)
            stages = [make(chunk, self._chunk, meta) for chunk in model.stages.chunks]
            self._runtimes[key] = self._over(stages, backward)
        return self._runtimes[key]

    def _over(self, stages: list[ChunkStage], backward: bool) -> Runtime:
        return Runtime(stages, self.order, backward=backward)

    def _kind(self, call: Any, backward: bool) -> "CallKind":
        (batch, seq), device = call.inputs.shape, call.inputs.tokens.device
        (prototype,) = autocast(torch.empty(0, dtype=next(self.model.parameters()).dtype, device=device))
        return CallKind(batch, seq, device, dtype=prototype.dtype, backward=backward)

    def _take(self) -> Callable[[], None]:
        """Returns a function that makes the weight gradients deferred by the latest backward pass."""
        make = self.store.take()

        def run() -> None:
            make()
            self.shards.add_up()

        return run

    def _chunk(self, chunk: Chunk, x: Tensor | None, call: Any) -> Tensor:
        deferring = self.store.deferring() if self.splits else contextlib.nullcontext()
        taking = contextlib.nullcontext() if self.trees is None else taking_head_gradients(self.model, self._of_head)
        with deferring, taking:
            output: Tensor = self.model.stages.run(self.model, chunk, x, call)
        return output

    # ---- gradients that more than one rank holds ----

    def _set_aside(self) -> dict[nn.Parameter, Tensor]:
        """Removes and returns the gradients of earlier steps, which are complete and must not be summed again, and
        which are as they were after a step that fails."""
        earlier = {p: p.grad for p in self.model.parameters() if p.grad is not None}
        for p in earlier:
            p.grad = None
        return earlier

    def _totals(self, name: str, trees: GradientTrees) -> dict[nn.Parameter, Tensor]:
        """Returns the trees' sums.  ValueError on every rank where a parameter had no part in a micro-batch."""
        together(lambda: trees.check(name), [g for g in (self.group, self._dp) if g is not None])
        return trees.totals()

    def _complete(self, earlier: dict[nn.Parameter, Tensor], totals: dict[nn.Parameter, Tensor]) -> None:
        """Sums the gradients of copies, and over the replicas, of which ``totals`` are; then adds those of
        ``earlier``."""
        for p, total in totals.items():
            p.grad = total
        sum_copies([_gradient(p) for p in copied(self.model).values() if p.requires_grad], self.group)
        if (dp := self._dp) is not None and self.trees is None:
            summed = [p for p in same_on_replicas(self.model) if p.requires_grad and not is_shard(p, dp)]
            gradients = [_gradient(p) for p in summed]
            for message in [dist.all_reduce(grad, group=dp, async_op=True) for grad in gradients]:
                message.wait()
        for p, grad in earlier.items():
            p.grad = grad if p.grad is None else grad.add_(p.grad)

    @contextlib.contextmanager
    def _around(self, kind: str, micro_batch: int) -> Iterator[None]:
        """Runs a pass, whose gradients are then those of a micro-batch."""
        self.micro_batch = micro_batch
        yield
        if self.trees is not None and kind != FORWARD:
            self.trees.take(micro_batch)

    def _of_head(self, p: nn.Parameter, gradient: Tensor) -> bool:
        assert self.trees is not None
        self.trees.add(p, gradient, self.micro_batch, HEAD)
        return True

    @property
    def _dp(self) -> dist.ProcessGroup | None:
        """The replicas; None where there is one."""
        group: dist.ProcessGroup | None = self.model.groups.dp
        return None if group is None or group.size() == 1 else group

    def _seconds(self, passes: Passes) -> tuple[list[float], list[float], list[float]]:
        """Returns the seconds of F, I and W of each stage, the same on every rank."""
        parameter = next(self.model.parameters())
        sums = torch.zeros(2, self.order.stages, len(KINDS), dtype=torch.float64, device=parameter.device)
        for chunk, kind in {(chunk, kind) for chunk, kind, _ in passes}:
            median = statistics.median(seconds for *key, seconds in passes if key == [chunk, kind])
            sums[:, chunk.stage, KINDS.index(kind)] += sums.new_tensor([median, 1.0])
        for group in (self.group, self._dp, self.model.tp.group, self.model.groups.cp):
            if group is not None and group.size() > 1:
                dist.all_reduce(sums, group=group)
        times = (sums[0] / sums[1].clamp(min=1)).tolist()  # F, B, I, W; a B makes as much as an I and a W
        return [t[0] for t in times], [t[2] or t[1] / 2 for t in times], [t[3] or t[1] / 2 for t in times]

    def _total(self, losses: dict[int, Tensor], added: Tensor | None, device: torch.device) -> Tensor:
        """Returns the sum of all micro-batches' losses in their order, and of what stages have ``added``, over the
        replicas too; with trees, a tree."""
        dtype = torch.promote_types(next(self.model.parameters()).dtype, torch.float32)
        by_micro_batch = torch.zeros(self.order.micro_batches, dtype=dtype, device=device)
        for m, loss in losses.items():
            by_micro_batch[m] = loss
        if added is not None:
            by_micro_batch[0] += added
        dist.all_reduce(by_micro_batch, group=self.group)
        if self.trees is None:
            if self._dp is not None:
                dist.all_reduce(by_micro_batch, group=self._dp)
            return by_micro_batch.sum()
        if self._dp is not None:
            by_micro_batch = all_gather(by_micro_batch, self._dp.size(), self._dp.group_name).flatten()
        return tree(by_micro_batch.unbind())


class CallKind(NamedTuple):
    """What messages between stages, and the runtime that sends them, depend on in a micro-batch's call."""

    batch: int
    seq: int
    device: torch.device
    dtype: torch.dtype
    backward: bool


def _gradient(p: nn.Parameter) -> Tensor:
    if p.grad is None:
        p.grad = torch.zeros_like(p)
    return local(p.grad)
