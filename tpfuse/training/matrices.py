"""Whole weight matrices for optimizers that need them, as Muon and Shampoo do."""

import math
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from ..kernels.runtime.errors import check
from ..layers.module import local
from ..layers.shards import SplitParameter, named_specs
from ..layers.spec import Spec
from ..layers.state import as_whole, is_split
from ..ranks.agreement import agreement_of, names
from .main_grad import gradient, stepped
from .originals import stand_in


class WholeMatrices:
    """The weights of ``module`` as whole matrices [rows, columns], for an optimizer whose update is not by elements.

    A weight of more dimensions is a matrix of all its rows: qkv [G, Q + 2, E, D] is [G (Q + 2) E, D], a gated fc1
    [F, 2, D] is [2 F, D].  Where it is split the matrix is a DTensor over the tensor-parallel group, which shares the
    shard's memory: an update of the one is an update of the other.  Gradients are gathered before a step, so that every
    rank computes the whole update, of which it applies its slice; the optimizer's state is whole on every rank.

        matrices = tpfuse.WholeMatrices(model.blocks)
        muon = torch.optim.Muon(matrices.parameters(), lr=0.02)
        muon.register_step_pre_hook(matrices.gather_gradients)
        adamw = torch.optim.AdamW(matrices.others(model), lr=3e-4)

    Beside a :class:`tpfuse.MainGrad`, which is made before, the matrices are those of its fp32 weights.

    ValueError for kv heads that several ranks hold, for parameters that are DTensors already, and for a weight whose
    strides no matrix has, as of channels_last.
    """

    def __init__(self, module: nn.Module, *, only: Iterable[nn.Parameter] | None = None):
        """``only``: the weights among those of ``module``; without it, all."""
        self.sources: dict[str, tuple[nn.Parameter, SplitParameter, nn.Parameter]] = {}
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # whose zero_grad resets these too
        for name, p, placement in matrices_in(module, only):
            matrix = nn.Parameter(_matrix(stepped(p).detach(), placement), requires_grad=p.requires_grad)
            check(
                local(matrix).data_ptr() == stepped(p).data_ptr(),
                f"WholeMatrices: the matrix of {name} would be a copy, of which its update would not be one: its"
                f" strides are {p.stride()} (channels_last?); make the weight contiguous first",
            )
            self.sources[name] = p, placement, matrix
            stand_in(matrix, stepped(p))

    def parameters(self) -> list[nn.Parameter]:
        """Returns the matrices, for the optimizer."""
        return [matrix for *_, matrix in self.sources.values()]

    def others(self, module: nn.Module) -> list[nn.Parameter]:
        """Returns the parameters of ``module`` that are not here, for another optimizer: its weights, of a MainGrad."""
        mine = {p for p, *_ in self.sources.values()}
        return [stepped(p) for p in module.parameters() if p not in mine]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets the gradients of the weights that the matrices are of."""
        for source, *_ in self.sources.values():
            p = stepped(source)
            if set_to_none:
                p.grad = None
            elif p.grad is not None:
                p.grad.zero_()

    @torch.no_grad()
    def gather_gradients(self, optimizer: torch.optim.Optimizer | None = None, *_: Any) -> None:
        """Gives every matrix its whole gradient.  A step pre-hook of the optimizer, whose ``zero_grad()`` resets the
        weights' gradients too from then on; every rank calls it.

        ValueError on every rank where a parameter has a gradient on some ranks only, RuntimeError for a MainGrad's that
        is not reduced.
        """
        if optimizer is not None and optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            _extend_zero_grad(optimizer, self)
        gradients = {name: gradient(p) for name, (p, *_) in self.sources.items()}
        group = next((placement.tp.group for _, placement, _ in self.sources.values() if placement.tp.size > 1), None)
        if group is not None:
            absent = names([name for name, grad in gradients.items() if grad is None])
            compare = agreement_of(group, "WholeMatrices.gather_gradients", each_call=True)
            compare(group, {"parameters without a gradient": absent}, {})
        for name, (p, placement, matrix) in self.sources.items():
            weight, grad = stepped(p), gradients[name]
            if local(matrix).data_ptr() != weight.data_ptr():  # a step under 2bw has given the parameter other memory
                matrix.data = _matrix(weight.detach(), placement)
            slices = None if grad is None else _matrix(grad, placement)
            matrix.grad = slices.redistribute(placements=[Replicate()]) if isinstance(slices, DTensor) else slices


def _extend_zero_grad(optimizer: torch.optim.Optimizer, matrices: WholeMatrices) -> None:
    """Makes an optimizer's zero_grad reset the gradients of the weights as well as those of their matrices."""
    of_matrices = optimizer.zero_grad

    def zero_grad(set_to_none: bool = True) -> None:
        of_matrices(set_to_none)
        matrices.zero_grad(set_to_none)

    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]


def matrices_in(
    module: nn.Module, only: Iterable[nn.Parameter] | None = None
) -> Iterator[tuple[str, nn.Parameter, SplitParameter]]:
    """Yields (name, parameter, the matrix that it is a slice of) of a module's weights, or of ``only`` some of them.

    ValueError for kv heads that several ranks hold, and for DTensors.
    """
    chosen = None if only is None else set(only)
    for name, p, spec, tp in named_specs(module):
        if len(spec.shape) < 2 or name.endswith("bias"):  # a fused bias has its weight's shape but for the columns
            continue
        if chosen is not None and p not in chosen:
            continue
        if isinstance(p, DTensor):
            raise ValueError(f"WholeMatrices: {name} is a DTensor; leave as_dtensor and fully_shard off")
        if spec.copies > 1:
            raise ValueError(
                f"WholeMatrices: {name} is held by {spec.copies} ranks at tensor-parallel size {tp.size}, where no"
                " rank's slice is one of whole rows; use a size up to the number of kv heads"
            )
        yield name, p, SplitParameter(_matrix_spec(spec), tp)


def _matrix_spec(spec: Spec) -> Spec:
    """Returns the spec of a weight seen as a matrix; a weight is split on its first or its last dimension."""
    *rows, columns = spec.shape
    return Spec((math.prod(rows), columns), None if spec.dim is None else int(spec.dim == len(rows)), spec.init)


def _matrix(x: Tensor, placement: SplitParameter) -> Tensor:
    matrix = x.reshape(-1, x.shape[-1])
    return as_whole(matrix, *placement) if is_split(*placement) else matrix
