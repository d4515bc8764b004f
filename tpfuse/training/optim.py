"""Help for optimizers of a split model: the parameters that decay, and the norm of the whole gradient."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..kernels.runtime.errors import check
from ..kernels.runtime.rules import NOT_NEGATIVE, check_number, described, limited, listed
from ..layers.module import local
from ..layers.norm import LayerNorm
from ..layers.partial import check_when_due
from ..layers.shards import named_specs
from ..models.model import staged_in
from ..parallel import TensorParallel
from ..ranks.agreement import agreement_of, names, raise_everywhere
from ..ranks.messages import attempt, gather
from .calls import clipped
from .foreign.known import wholes_of
from .foreign.norm import GradPart, over_groups, part_of, scale_, total_norm
from .main_grad import gradient, stepped
from .micro_batches import REPLICAS


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Returns two groups for a torch optimizer: weights with ``weight_decay``, norms and biases without.

    Frozen parameters are in neither.  ValueError for a ``weight_decay`` that is no finite number from 0.
    """
    check_number("param_groups: weight_decay", weight_decay, NOT_NEGATIVE)
    norms = {
        id(p)
        for m in model.modules()
        if isinstance(m, LayerNorm | nn.LayerNorm | nn.RMSNorm)
        for p in m.parameters(recurse=False)
    }
    decayed: list[nn.Parameter] = []
    undecayed: list[nn.Parameter] = []
    for name, p in model.named_parameters():
        if p.requires_grad:
            plain = id(p) in norms or name.endswith("bias")
            (undecayed if plain else decayed).append(stepped(p))
    return [dict(params=decayed, weight_decay=weight_decay), dict(params=undecayed, weight_decay=0.0)]


_MAX_NORM = limited("be at least 0", lambda v: v >= 0)  # inf: the norm alone is wanted


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, *, error_if_nonfinite: bool = False) -> Tensor:
    """Scales the gradients so that their norm over the whole model is at most ``max_norm``.

    Returns the norm before, a scalar, the same on every rank; with an infinite ``max_norm`` that is all.  A sharded
    parameter is counted over its ranks (experts over those of all replicas that hold some), a replicated one, or a
    shard that several ranks hold, once.  Works on plain shards, under DDP, and on the DTensors of FSDP2.
    torch.nn.utils.clip_grad_norm_ computes the same, of any parameters and with any ``norm_type``.

    ``error_if_nonfinite``: where the norm is not finite, a RuntimeError on every rank names the parameters whose
    gradients are not, before any is changed; asking for it waits for a GPU.  ValueError for a max_norm that is NaN or
    negative or differs over tensor-parallel ranks or stages (where it differs over replicas, the next step's backward
    raises it), and for gradients that should be the same on every tensor-parallel rank and are not, with the cure.
    """
    check(
        isinstance(model, nn.Module),
        f"clip_grad_norm_: model must be a module, got {described(model)}; torch.nn.utils.clip_grad_norm_ takes"
        " parameters",
    )
    check_number("clip_grad_norm_: max_norm", max_norm, _MAX_NORM)
    pipeline = staged_in(model)
    stages = None if pipeline is None else pipeline.groups.pp("clip_grad_norm_")
    _compare(model, stages, dict(max_norm=max_norm, error_if_nonfinite=error_if_nonfinite))
    check_when_due(model, lambda: model, "clip_grad_norm_")
    clipped(model.module if isinstance(model, REPLICAS) else model, max_norm)
    grads = {name: grad for name, p in model.named_parameters() if (grad := gradient(p)) is not None}
    if not grads and pipeline is None:
        return torch.zeros(())
    wholes = wholes_of(list(grads.values()), in_leaves=True)
    parts = {name: part_of(grad, placement) for (name, grad), placement in zip(grads.items(), wholes, strict=True)}
    if not parts:  # the other stages may have some: theirs are gathered on this one's device
        name, p = next(model.named_parameters())
        parts[name] = GradPart(local(p).new_empty(0))
    if pipeline is None or stages is None:
        total = total_norm(list(parts.values()))
    else:
        parts = {name: p._replace(copies=p.copies * pipeline.stages.copies_of(name)) for name, p in parts.items()}
        total = total_norm(list(parts.values()), stages=stages, in_leaves=pipeline.tp.bitwise is not None)
    if error_if_nonfinite:
        _check_finite(total, parts, stages)
    if max_norm < math.inf:  # torch's own makes NaN of all gradients where one is infinite
        scale_([part.elements for part in parts.values()], max_norm, total)
    return total.to(torch.promote_types(next(model.parameters()).dtype, torch.float32))


def _compare(model: nn.Module, stages: dist.ProcessGroup | None, arguments: Mapping[str, float | bool]) -> None:
    """Compares a call over the ranks that make the same ones, which sum over the same gradients or wait for each other,
    and its arguments over pipeline stages, which have gradients of their own."""
    name = "clip_grad_norm_"
    widest = max((tp for *_, tp in named_specs(model)), key=lambda tp: tp.call_size, default=TensorParallel())
    absent = names([name for name, p in model.named_parameters() if gradient(p) is None])
    calls = [(widest.call_group, widest.call_axis, {**arguments, "parameters without a gradient": absent})]
    calls += [(stages, "pipeline", {**arguments})]
    axes = [(ranks, axis, call) for ranks, axis, call in calls if ranks is not None and ranks.size() > 1]
    compare = lambda ranks, axis, call: agreement_of(ranks, name, each_call=True, axis=axis)(ranks, call, {})
    errors = [attempt(functools.partial(compare, *axis))[1] for axis in axes]
    error = next((e for e in errors if e is not None), None)
    if stages is not None:
        raise_everywhere(error, [ranks for ranks, *_ in axes], call=name)
    elif error is not None:
        raise error


def _check_finite(total: Tensor, parts: dict[str, GradPart], stages: dist.ProcessGroup | None) -> None:
    """Raises RuntimeError where the norm is not finite on any rank, with the same names on every rank."""
    groups = tuple(dict.fromkeys(group for part in parts.values() for group in part.groups))
    if not over_groups((~total.isfinite()).double(), groups):
        return
    local = [(~part.elements.isfinite()).any() for part in parts.values()]
    anywhere = over_groups(torch.stack(local).double(), groups).tolist() if local else []
    bad = [name for name, count in zip(parts, anywhere, strict=True) if count]
    bad = list(dict.fromkeys(name for stage in gather(bad, stages) for name in stage))
    whose = f"that of {listed(bad)} is not finite" if bad else "each is finite, their squares' sum is not"
    raise RuntimeError(f"clip_grad_norm_: the norm of the gradients is {total.item()}: {whose}; none was changed")
