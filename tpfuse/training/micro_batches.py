"""A replica whose gradients are the mean of K micro-batches, added as binary trees (pipeline/trees.py)."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..kernels.runtime.captures import forget_captured
from ..kernels.runtime.errors import check
from ..kernels.runtime.rules import listed
from ..models.model import Model
from ..pipeline.trees import EMBEDDING, HEAD, GradientTrees, taking_head_gradients
from .calls import CallRecord, at_backward, roots


class MicroBatchReplica(nn.Module):
    """A replica of a model whose gradients are those of K micro-batches, by :func:`tpfuse.data_parallel`.

    It is called like the model, once a micro-batch, and each call is followed by its ``backward()``, in ``eval()`` too.
    After the last one of a step, and not before, ``.grad`` of every trainable parameter is there, the mean of all
    micro-batches of all replicas.  ``zero_grad()`` begins a step anew, also one that an error has ended.  To freeze a
    parameter, or to make one trainable, is a ValueError at the end of the step: call ``data_parallel`` again.
    """

    def __init__(self, module: nn.Module, trees: GradientTrees):
        super().__init__()
        self.module, self.micro_batches, self._trees = module, trees.local * trees.size, trees
        self._record = CallRecord("data_parallel", trees.replicas)
        self._done, self._called, self._in_backward = 0, False, False
        self._steps: list[int | None] = []  # that the micro-batches of a step have been given
        for p in self._trees.trained.values():
            p.register_post_accumulate_grad_hook(self._accumulated)

    @property
    def local_micro_batches(self) -> int:
        """The number of a step's micro-batches that this replica computes."""
        return self._trees.local

    @property
    def micro_batch(self) -> int:
        """The index, among all K of a step, of the micro-batch of the next call."""
        return self._trees.index(self._done % self.local_micro_batches)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model.  A model that drops is told which masks: ``step``, and ``first_sample`` among all replicas'
        samples (``micro_batch`` times the samples of one).  ValueError where it is not, or where a micro-batch's
        backward pass or ``zero_grad()`` is missing."""
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        call = self._record.describe(self.module, kwargs)

        def count() -> None:
            self._record.add(call)
            self._steps.append(self._step_of(kwargs))
            self._called = True

        def begin() -> None:
            self._check_call(kwargs)
            count()

        if self.training:
            self._check_call(kwargs)
        with taking_head_gradients(self.module, self._of_head):
            output = self.module(*args, **kwargs)
        if self.training:
            count()
        elif tensors := roots(output):  # an evaluation, unless a backward pass follows
            at_backward(tensors, self.module, begin)
        return output

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients, and what was added up of a step that did not end."""
        super().zero_grad(set_to_none=True)
        forget_captured(self.parameters())
        self._trees.clear()
        self._record.clear()
        self._steps.clear()
        self._done, self._called, self._in_backward = 0, False, False

    def _check_call(self, kwargs: dict[str, Any]) -> None:
        name = f"data_parallel: {type(self.module).__name__}"
        check(
            not self._called,
            f"{name}: the micro-batch before has had no whole backward pass; call backward() once after each call, or"
            " zero_grad() to begin the step anew",
        )
        if self._done % self.local_micro_batches == 0:
            left = [path for path, p in self._trees.trained.items() if p.grad is not None]
            check(
                not left,
                f"{name}: {listed(left)} has a gradient when a step begins; call zero_grad() first, an optimizer's with"
                " set_to_none=True: zeros are a gradient too",
            )
        if isinstance(self.module, Model) and self.module._drops():
            missing = [key for key in ("step", "first_sample") if kwargs.get(key) is None]
            check(
                not missing,
                f"{name}: dropout's masks are numbered by {' and '.join(missing)}; give it with each micro-batch",
            )

    def _step_of(self, kwargs: dict[str, Any]) -> int | None:
        """Returns the step that a call of a model counts for; to another module the argument may mean anything."""
        step = kwargs.get("step") if isinstance(self.module, Model) else None
        return None if step is None or (isinstance(step, Tensor) and not step.is_cpu) else int(step)

    def _check_steps(self, steps: list[int | None]) -> None:
        """Checks that a step's micro-batches were of one step, once the replicas have compared them: so that the error
        is one on every rank."""
        count, of_one = len(steps), steps.count(steps[0])
        check(
            of_one == count,
            f"data_parallel: {type(self.module).__name__}: a step has {count} micro-batches on each replica, and"
            f" {of_one} of them came with step={steps[0]}, the others with another; call the model {count} times before"
            " the optimizer, or zero_grad() to begin anew",
        )

    def _check_gradients(self) -> None:
        """ValueError where a parameter has not been trained in each micro-batch of the step."""
        trained = {name for name, p in self.module.named_parameters() if p.requires_grad}
        changed = sorted(trained ^ self._trees.trained.keys())
        check(
            not changed,
            f"data_parallel: {listed(changed)} has been frozen or made trainable since, and the replica adds up"
            " gradients of the parameters that were trainable then; call data_parallel again",
        )
        self._trees.check("data_parallel")

    def _accumulated(self, p: nn.Parameter) -> None:
        """Takes a parameter's gradient of one micro-batch."""
        assert p.grad is not None
        if self._add(p, p.grad, EMBEDDING):
            p.grad = None

    def _of_head(self, p: nn.Parameter, gradient: Tensor) -> bool:
        """Takes the gradient that the head has for the embedding's weight, of a micro-batch."""
        return self._add(p, gradient, HEAD)

    def _add(self, p: nn.Parameter, gradient: Tensor, use: int) -> bool:
        """Returns whether the gradient is of a micro-batch, and then adds it."""
        if self._called:
            if not self._in_backward:
                self._in_backward = True
                torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            self._trees.add(p, gradient, self._done % self.local_micro_batches, use)
        return self._called

    def _end_backward(self) -> None:
        self._done, self._called, self._in_backward = self._done + 1, False, False
        if self._done % self.local_micro_batches == 0:
            self._called = True  # until zero_grad, if this raises
            steps, self._steps = self._steps, []
            self._record.compare(self._check_gradients)
            self._check_steps(steps)
            for p, total in self._trees.totals().items():
                p.grad = total.div_(self.micro_batches)
            self._called = False


REPLICAS = DistributedDataParallel, MicroBatchReplica  # what a model is within, as its ``module``
