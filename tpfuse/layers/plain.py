"""Plain torch modules on this rank's rows: their parameters are the same on every rank, their gradients are summed.

    forward     w -> a copy of w, under the same name, while the module runs
    backward    dw of this rank's rows, all of the module's in one message -> the sum over the ranks

The module keeps its type, its parameters and their names.  Only its call is seen: two hooks put the copies in the
instances' dictionaries, where attribute access finds them before the parameters, and take them out again.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parameter import UninitializedParameter

from ..kernels.runtime.errors import check
from ..kernels.runtime.function import Function, once_differentiable
from ..parallel import TensorParallel
from .module import ParallelModule, sum_of_rows
from .shards import REPLICATED, wholes

M = TypeVar("M", bound=nn.Module)
_HELD = "_tensor_parallel_copies"  # of a module that runs: what is to be put back, a list for each call
_ABSENT = object()


def replicated(module: M, tp: TensorParallel) -> M:
    """Makes the gradients of a plain torch module complete where it acts on this rank's rows, in place; returns it.

    Under sequence parallelism ``module(x)`` sees 1/R of the rows, under context parallelism a piece of them, so that
    the gradients of its parameters would be partial sums.  After this call backward sums them over the ranks, the
    module's all in one message for each dtype.  The module, its parts, parameters and state_dict stay what they are;
    parallel layers in it are left alone.  It changes no result where every rank has all rows, and a second call is
    harmless.

    Every rank runs the module equally often.  A parameter that is used other than through the module's call (its
    weight in a product of your own) goes through :func:`tpfuse.layers.copy`.  ValueError for a parallel layer, for a
    parameter that is a shard, not initialised or complex, or where the module is replicated over other ranks.
    """
    check(not isinstance(module, ParallelModule), f"replicated: {type(module).__name__} is parallel already")
    whole_of = wholes()
    for name, p in module.named_parameters():
        check(
            not isinstance(p, UninitializedParameter), f"replicated: {name} is not initialised; run the module before"
        )
        check(not p.is_complex(), f"replicated: {name} is complex, which is not built")
    for part, leaf, indices in _parameters(module):
        shard = indices in whole_of and whole_of[indices].spec.dim is not None
        check(
            not shard, f"replicated: {type(part).__name__}.{leaf} is this rank's shard of a parallel layer's parameter"
        )
    for part in _parts(module):
        previous = part.__dict__.get(REPLICATED, tp)
        check(previous == tp, f"replicated: {type(part).__name__} is replicated over {previous}, not {tp}")
        part.__dict__[REPLICATED] = tp
    if not any(isinstance(hook, _Put) for hook in module._forward_pre_hooks.values()):
        module.__dict__[_HELD] = []
        module.register_forward_pre_hook(_Put(tp))
        module.register_forward_hook(_take, always_call=True)
    return module


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    return (part for part in module.modules() if not isinstance(part, ParallelModule))


def _parameters(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yields (module, name in it, parameter), a shared parameter under each of its names."""
    for part in _parts(module):
        for leaf, p in part._parameters.items():
            if p is not None:
                yield part, leaf, p


# ---- the sum ----


class _Copies(Function):
    """Every parameter, whose gradient is summed over the ranks; None where no rank has one."""

    @staticmethod
    def forward(ctx: Any, tp: TensorParallel, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.tp, ctx.shapes = tp, [(p.shape, p.dtype) for p in parameters]
        return tuple(p.view_as(p) for p in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        sums: list[Tensor | None] = list(gradients)
        template = next(g for g in gradients if g is not None)
        for dtype in dict.fromkeys(dtype for _, dtype in ctx.shapes):
            indices = [i for i, (_, parameter_dtype) in enumerate(ctx.shapes) if parameter_dtype == dtype]
            flat = [_flat(gradients[i], ctx.shapes[i], template) for i in indices]
            has = template.new_tensor([gradients[i] is not None for i in indices], dtype=dtype)
            *pieces, counts = sum_of_rows(torch.cat([*flat, has]), ctx.tp).split([*map(len, flat), len(indices)])
            for place, i in enumerate(indices):
                if gradients[i] is not None or counts[place] > 0:  # only what is None here waits for a GPU
                    sums[i] = pieces[place].view(ctx.shapes[i][0])
        return None, *sums


def _flat(gradient: Tensor | None, shape: tuple[torch.Size, torch.dtype], template: Tensor) -> Tensor:
    return template.new_zeros(shape[0].numel(), dtype=shape[1]) if gradient is None else gradient.reshape(-1)


# ---- while the module runs ----


@dataclass(frozen=True)
class _Put:
    """The hook before a call: the parameters' copies take their place."""

    tp: TensorParallel

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        held: list[tuple[nn.Module, str, Any]] = []
        getattr(module, _HELD).append(held)
        several = self.tp.cp is not None or self.tp.row_shards > 1
        sums = several and torch.is_grad_enabled()
        # A module that runs inside another one, or inside itself, has its copies already.
        named = [(part, leaf, p) for part, leaf, p in _parameters(module) if leaf not in part.__dict__]
        plain = {id(p): _plain(leaf, p) for _, leaf, p in named if isinstance(p, DTensor) or (sums and p.requires_grad)}
        summed = [key for key, p in plain.items() if sums and p.requires_grad]
        if summed:
            plain |= zip(summed, _Copies.apply(self.tp, *(plain[key] for key in summed)), strict=True)
        for part, leaf, p in named:
            if id(p) in plain:
                held.append((part, leaf, _ABSENT))
                part.__dict__[leaf] = plain[id(p)]
        for part in dict.fromkeys(part for part, *_ in held):
            if isinstance(part, nn.RNNBase):  # it computes with a list of its own
                held.append((part, "_flat_weights", part._flat_weights))
                part.__dict__["_flat_weights"] = [plain.get(id(p), p) for p in part._flat_weights]


def _take(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """The hook after a call, also of one that failed."""
    calls = getattr(module, _HELD)
    if not calls:  # a hook before _Put has failed
        return
    for part, name, previous in calls.pop():
        if previous is _ABSENT:
            del part.__dict__[name]
        else:
            part.__dict__[name] = previous


def _plain(name: str, p: Tensor) -> Tensor:
    """Returns the tensor behind a parameter that FSDP2 made a DTensor of and has gathered for this call."""
    if not isinstance(p, DTensor):
        return p
    is_whole = all(isinstance(placement, Replicate) for placement in p.placements)
    rule = "fully_shard the replicated module or one that holds it, not a part of it"
    check(is_whole, f"replicated: {name} is sharded over {p.device_mesh} while its module runs; {rule}")
    return p.to_local()
