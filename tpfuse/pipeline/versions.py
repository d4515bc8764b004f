"""The weights of a batch whose passes go on while an optimizer makes the next ones."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


class Version:
    """A model as it is now: its trainable weights, its modules' modes, autocast.

    ``leaves``: by parameter, a leaf in the same memory, so the batch's graphs have gradients of their own.  Nothing is
    copied before :meth:`keep`.
    """

    def __init__(self, model: nn.Module, device: torch.device):
        # Of .data: a detached tensor would count the optimizer's changes of the parameter as its own.
        self.leaves = {p: nn.Parameter(p.data) for p in model.parameters() if p.requires_grad}
        self.parameters = {leaf: p for p, leaf in self.leaves.items()}
        self.device = device.type
        self.autocast = torch.is_autocast_enabled(self.device), torch.get_autocast_dtype(self.device)
        self._modules = [(m.__dict__, m.training) for m in model.modules()]
        self._places = [
            (m._parameters, name, self.leaves[p])
            for m in model.modules()
            for name, p in m._parameters.items()
            if p is not None and p in self.leaves
        ]

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Runs a pass of the batch: the model is as it was, and gradients go to the leaves."""
        enabled, dtype = self.autocast
        modes = [fields["training"] for fields, _ in self._modules]
        parameters = [fields[name] for fields, name, _ in self._places]
        try:
            for fields, mode in self._modules:
                fields["training"] = mode
            for fields, name, leaf in self._places:
                fields[name] = leaf
            with torch.enable_grad(), torch.autocast(self.device, dtype, enabled=enabled):
                yield
        finally:
            for (fields, _), mode in zip(self._modules, modes, strict=True):
                fields["training"] = mode
            for (fields, name, _), p in zip(self._places, parameters, strict=True):
                fields[name] = p

    @torch.no_grad()
    def keep(self) -> None:
        """Leaves the memory to the leaves, and gives the parameters a copy, which an optimizer may change."""
        for p in self.leaves:
            p.data = p.data.clone()
