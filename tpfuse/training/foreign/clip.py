"""torch.nn.utils.get_total_norm, clip_grads_with_norm_ and clip_grad_norm_, which calls these two, however they were
imported: over the whole model where a gradient's parameter is split, and torch's own otherwise."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...kernels.runtime.main_grad import PLACES
from ...layers.module import local
from ...layers.shards import SplitParameter
from ...ranks.agreement import agreement_of, names
from .known import any_split, wholes_of
from .norm import part_of, scale_, total_norm

Tensors = Tensor | Iterable[Tensor]
F = TypeVar("F", bound=Callable[..., Any])
_eager: Callable[[F], F] = torch.compiler.disable  # a compiled graph ends here, and goes on behind


def _listed(tensors: Tensors) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def get_total_norm(
    original: Callable[..., Tensor],
    tensors: Tensors,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Stands in the place of torch.nn.utils.get_total_norm."""
    tensors = _listed(tensors)
    total = _whole_norm(tensors, float(norm_type)) if any_split() else None
    if total is None:
        return original(tensors, norm_type, error_if_nonfinite, foreach)
    if error_if_nonfinite and not total.isfinite():
        original([total], norm_type, True, foreach)  # raises torch's own error
    return total


@_eager
def _whole_norm(tensors: list[Tensor], order: float) -> Tensor | None:
    """Returns the norm over all ranks; None where no tensor belongs to a split parameter."""
    wholes = wholes_of(tensors)
    split = [(x, placement) for x, placement in zip(tensors, wholes, strict=True) if placement is not None]
    if not split:
        return None
    _compare(split, order)
    parts = [part_of(x, placement) for x, placement in zip(tensors, wholes, strict=True)]
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    return total_norm(parts, order, "torch.nn.utils.get_total_norm").to(dtype)


def _compare(split: list[tuple[Tensor, SplitParameter]], order: float) -> None:
    """Compares a call over the tensor-parallel ranks: they sum over the same tensors, or wait for each other."""
    group = split[0][1].tp.group
    if group is not None:
        shapes = sorted(f"{x.dtype} {list(placement.spec.shape)}" for x, placement in split)
        call = {"norm_type": order, "the split parameters": names(shapes)}
        agreement_of(group, "torch.nn.utils.get_total_norm", each_call=True)(group, call, {})


def clip_grads_with_norm_(
    original: Callable[..., None], parameters: Tensors, max_norm: float, total_norm: Tensor, foreach: bool | None = None
) -> None:
    """Stands in the place of torch.nn.utils.clip_grads_with_norm_."""
    parameters = _listed(parameters)
    if not torch.compiler.is_compiling() and PLACES and any(p in PLACES for p in parameters):
        raise ValueError(
            "torch.nn.utils.clip_grad_norm_: the gradients of these parameters are in their main_grad; clip"
            " main.parameters(), or call tpfuse.clip_grad_norm_(model)"
        )
    if not (any_split() and _scaled(parameters, float(max_norm), total_norm)):
        original(parameters, max_norm, total_norm, foreach)


@_eager
def _scaled(parameters: list[Tensor], max_norm: float, total: Tensor) -> bool:
    """Scales the gradients, be they DTensors over several meshes or none; False where no parameter is split."""
    grads: list[Any] = [p.grad for p in parameters if p.grad is not None]
    split = any(placement is not None for placement in wholes_of(grads))
    if split:
        scale_(map(local, grads), max_norm, total.full_tensor() if isinstance(total, DTensor) else total)
    return split
