"""What an optimizer needs of a split model: which parameters decay, and the norm of the whole gradient."""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from ..agreement import agreement_of, names
from ..collectives import all_gather
from ..kernels.runtime.rules import check_number, limited, some
from ..layers.module import named_specs
from ..layers.norm import LayerNorm
from ..parallel import resolve
from .main_grad import gradient, stepped


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Returns two groups for a torch optimizer: weights with ``weight_decay``, norms and biases without.

    Frozen parameters are in neither.
    """
    norms = {
        id(p)
        for m in model.modules()
        if isinstance(m, LayerNorm | nn.LayerNorm | nn.RMSNorm)
        for p in m.parameters(recurse=False)
    }
    decayed: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, p in model.named_parameters():
        if p.requires_grad:
            plain = id(p) in norms or name.endswith("bias")
            (rest if plain else decayed).append(stepped(p))
    return [dict(params=decayed, weight_decay=weight_decay), dict(params=rest, weight_decay=0.0)]


_MAX_NORM = limited("be at least 0", lambda v: v >= 0)  # inf: the norm alone is wanted


class Named(NamedTuple):
    """A gradient as it is here, and the groups over which it is sharded."""

    name: str
    groups: tuple[str, ...]
    grad: Tensor


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, *, error_if_nonfinite: bool = False) -> Tensor:
    """Scales the gradients so that their norm over the whole model is at most ``max_norm``.

    Returns the norm before, a scalar, the same on every rank.  A sharded parameter is counted over its ranks, a
    replicated one, or a shard that several ranks hold, once.  Works on plain shards, under DDP, and on the DTensors of
    FSDP2.

    ``error_if_nonfinite``: where the norm is not finite, a RuntimeError on every rank names the parameters whose
    gradients are not, before any is changed; asking for it waits for a GPU.  ValueError for a max_norm that is NaN or
    negative.
    """
    check_number("clip_grad_norm_: max_norm", max_norm, _MAX_NORM)
    _compare(model, dict(max_norm=max_norm, error_if_nonfinite=error_if_nonfinite))
    kinds: dict[tuple[tuple[str, ...], int, torch.dtype], list[Tensor]] = {}  # by groups, copies, dtype
    named: list[Named] = []
    for (name, spec, tp), p in zip(named_specs(model), model.parameters(), strict=True):
        grad = gradient(p)
        if grad is None:
            continue
        groups: tuple[str, ...] = ()
        if isinstance(grad, DTensor):
            mesh = grad.device_mesh
            sharded = (i for i, placement in enumerate(grad.placements) if not isinstance(placement, Replicate))
            groups = tuple(mesh.get_group(i).group_name for i in sharded)
            grad = grad.to_local()
        elif spec.dim is not None and tp.size > 1 and tp.group_name is not None:
            groups = (tp.group_name,)
        kinds.setdefault((groups, spec.copies, grad.dtype), []).append(grad)
        named.append(Named(name, groups, grad))
    if not kinds:
        return torch.zeros(())
    sums: dict[tuple[str, ...], Tensor] = {}  # of squares, by the groups that they are to be summed over
    for (groups, copies, dtype), grads in kinds.items():
        square = _sum_of_squares(grads, dtype) / copies
        sums[groups] = sums[groups] + square if groups in sums else square
    total = functools.reduce(torch.add, (_over_groups(square, groups) for groups, square in sums.items())).sqrt()
    if error_if_nonfinite:
        _check_finite(total, named)
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for dtype in {dtype: None for *_, dtype in kinds}:
        scaled = [grad for (*_, own), grads in kinds.items() if own == dtype for grad in grads]
        torch._foreach_mul_(scaled, scale.to(dtype))
    *_, first = next(iter(kinds))
    return total.to(torch.promote_types(first, torch.float32))


def _compare(model: nn.Module, arguments: dict[str, Any]) -> None:
    """Compares a call over the tensor-parallel ranks: they sum over the same gradients, or wait for each other."""
    group = next((tp.group for *_, tp in named_specs(model) if tp.size > 1), None)
    if group is not None:
        absent = names([name for name, p in model.named_parameters() if gradient(p) is None])
        call = arguments | {"parameters without a gradient": absent}
        agreement_of(group, "clip_grad_norm_", every=True)(group, call, {}, dict)


def _check_finite(total: Tensor, named: list[Named]) -> None:
    """Raises RuntimeError where the norm is not finite on any rank, with the same names on every rank."""
    groups = tuple(dict.fromkeys(group for each in named for group in each.groups))
    if not _over_groups((~total.isfinite()).double(), groups):
        return
    local = torch.stack([(~each.grad.isfinite()).any() for each in named])
    anywhere = _over_groups(local.double(), groups).tolist()
    bad = [each.name for each, count in zip(named, anywhere, strict=True) if count]
    whose = f"that of {some(bad)} is not finite" if bad else "each is finite, their squares' sum is not"
    raise RuntimeError(f"clip_grad_norm_: the norm of the gradients is {total.item()}: {whose}; none was changed")


def _sum_of_squares(grads: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Returns the sum over gradients of one dtype, in fp64, from norms in fp32 (fp64 for fp64), in a few launches."""
    norms = torch._foreach_norm(grads, dtype=torch.promote_types(dtype, torch.float32))
    return torch.stack(norms).double().square().sum()


def _over_groups(square: Tensor, groups: tuple[str, ...]) -> Tensor:
    """Returns the sum over each group, in rank order."""
    for name in groups:
        square = all_gather(square, resolve(name).size(), name).sum(0)
    return square
