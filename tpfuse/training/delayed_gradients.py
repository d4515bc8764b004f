"""Gradients one step late in one process, as the pipeline schedule 2bw makes them."""

from torch import Tensor, nn

from ..kernels.runtime.main_grad import refuse
from ..pipeline.delays import Pending, register
from .checkpoint.state import unwrap

_MAIN_GRAD = "DelayedGradients: the gradients are in main_grad; use it without a MainGrad"


class DelayedGradients:
    """Delays the gradients of ``model`` by one step: each is exchanged for that of the batch before.

        delayed = tpfuse.DelayedGradients(model)
        for batch in batches:
            loss = model(**batch).loss
            loss.backward()
            loss = delayed.swap(loss)  # of the batch whose gradients are now in .grad; None at first
            optimizer.step()
            optimizer.zero_grad()

    save_checkpoint and load_checkpoint keep the gradient that waits, also from and to pipeline stages under "2bw".
    ValueError under a MainGrad, and where gradients of the model wait in another DelayedGradients, or in a pipeline.
    """

    def __init__(self, model: nn.Module):
        refuse(model.parameters(), _MAIN_GRAD)
        self._model = unwrap(model)
        self._pending: Pending | None = None
        register("DelayedGradients", self._model, self)

    @property
    def waits(self) -> bool:
        return self._pending is not None

    def swap(self, loss: Tensor) -> Tensor | None:
        """Exchanges a batch's gradients and ``loss`` for those of the batch before, whose loss it returns.

        Call it after the backward pass and before clipping.  The first call leaves no gradients and returns None.
        """
        gradients = {p: p.grad.clone() for p in self._model.parameters() if p.grad is not None}
        pending, self._pending = self._pending, Pending(loss.detach(), gradients)
        for p in gradients:
            p.grad = None
        return None if pending is None else pending.add_to_grad()

    def drain(self) -> Tensor | None:
        """Adds the gradient that waits to ``.grad``, and returns its loss; None where none waits."""
        pending, self._pending = self._pending, None
        return None if pending is None else pending.add_to_grad()

    def finish(self) -> Pending | None:
        return self._pending

    def resume(self, pending: Pending | None) -> None:
        self._pending = pending
