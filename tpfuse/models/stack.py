"""A model's blocks one after another, each kept whole for backward or recomputed from its input."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..kernels.norm import Recompute, norm_apply
from ..kernels.runtime.errors import check
from ..kernels.runtime.function import Function, once_differentiable
from ..layers.block import SAVING, TransformerBlock
from ..layers.call import Call
from ..layers.hooks import served_backward
from ..layers.shapes import Init
from ..layers.wiring import INNER, LAST, Normed
from ..parallel import TensorParallel
from .config.model import ModelConfig

SELECTIVE, FULL = RECOMPUTE = "selective", "full"


def saving_of(name: str, saving: str | None, recompute: str | None) -> str:
    """Returns what a model's blocks save; ValueError of ``name`` for options that are none or contradict each other."""
    check(
        recompute is None or recompute in RECOMPUTE,
        f"{name}: recompute must be one of {', '.join(RECOMPUTE)} or None, got {recompute!r}",
    )
    check(saving is None or saving in SAVING, f"{name}: saving must be one of {', '.join(SAVING)}, got {saving!r}")
    check(
        not (recompute == SELECTIVE and saving == "fastest"),
        f"{name}: recompute='selective' is saving='smallest', got saving='fastest' beside it",
    )
    return "smallest" if recompute == SELECTIVE else saving or "fastest"


def make_block(
    config: ModelConfig, layer: int, *, tp: TensorParallel, saving: str, experts: TensorParallel | None = None
) -> TransformerBlock:
    """Returns block ``layer`` of a model, whose initial output projections have GPT-2's scale where its family says."""
    c, place = config, LAST if layer == config.num_layers - 1 else INNER
    out_std = c.init_std / (2 * c.num_layers) ** 0.5 if c.hf.scaled_residuals else None
    return TransformerBlock.of(
        c.attention_shape(layer), c.mlp_shape(layer), c.norm_shape, wiring=c.wiring, place=place,
        layer=layer, dropout=c.dropout, saving=saving, tp=tp, experts=experts, init=Init(c.init_std, out_std),
    )  # fmt: skip


def run_blocks(
    blocks: Iterable[nn.Module], h: Tensor, normed: Normed, *, states: list[Tensor] | None, full: bool, call: Call
) -> tuple[Tensor, Normed]:
    """h [m, D] and n through the blocks; ``full``: of each only the input is kept for backward.

    ``states`` gets the h that enters each.
    """
    block: Any = None
    for block in blocks:
        if states is not None:
            states.append(h)
        of_block = call._replace(layer=block.layer)
        recomputes = full and torch.is_grad_enabled()
        h, normed = _recomputed(block, h, normed, of_block) if recomputes else block(h, normed, call=of_block)
    if block is not None and not block.post_norm and served_backward(block):
        normed = normed._replace(n=_beside_unused(normed.n, h))
    return h, normed


def _beside_unused(n: Tensor, h: Tensor) -> Tensor:
    """A frame of its own: torch.compile, which gives up that of the loop above at a graph break, cannot begin one at a
    Function's apply."""
    return _BesideUnused.apply(n, h)


class _BesideUnused(Function):
    """n as it is, and zeros as h's gradient: torch's backward hook on the last block waits for that of h, of which the
    model makes no use."""

    @staticmethod
    def forward(ctx: Any, n: Tensor, h: Tensor) -> Tensor:
        ctx.kind = h.shape, h.dtype, h.device
        return n.view_as(n)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dn: Tensor) -> tuple[Tensor, Tensor]:
        shape, dtype, device = ctx.kind
        return dn, torch.zeros(shape, dtype=dtype, device=device)


def _recomputed(block: Any, h: Tensor, normed: Normed, call: Call) -> tuple[Tensor, Normed]:
    """Runs a block by torch's checkpoint, whose input is h and what n is made of again; n alone where that is unknown.

    No random state is kept: dropout's masks are functions of positions.
    """
    n, recipe, before = normed
    rerun = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    if torch.compiler.is_compiling():  # whose graphs return tensors

        def tensors_of(h: Tensor, n: Tensor) -> tuple[Tensor, ...]:
            h, normed = block(h, Normed(n), call=call)
            return h, normed.n, *normed.sums

        h, n, *sums = rerun(tensors_of, h, n)
        return h, Normed(n, sums=(*before, *sums))
    run = _as_now(block)
    if recipe is None or block.post_norm:  # in post-norm n is h
        return _normed(rerun(lambda h, n: _flat(run(h, Normed(n), call=call)), h, n), before)
    forward, shape, differentiated = [n], n.shape, n.requires_grad
    (_, *tensors), constants = recipe.tensors, recipe.constants

    def from_recipe(h: Tensor, *saved: Any) -> tuple[Any, ...]:
        if forward:  # where the graph goes on to what made n
            return _flat(run(h, Normed(forward.pop()), call=call))
        with torch.no_grad():  # tensors of a compiled block's recipe require gradients
            n = norm_apply(Recompute(h, *saved, *constants)).expand(shape)
        n.requires_grad_(differentiated)
        return _flat(run(h, Normed(n), call=call))

    return _normed(rerun(from_recipe, h, *tensors), before)


def _as_now(block: Any) -> Callable[..., Any]:
    """Returns the call of a block with its parts in the modes that they are in now, saving what it saves now."""
    modes = ((part, "training", part.training) for part in block.modules())
    state = [*modes, (block, "saving", block.saving)]

    def run(h: Tensor, normed: Normed, *, call: Call) -> tuple[Tensor, Normed]:
        present = [(part, key, getattr(part, key)) for part, key, _ in state]
        _set(state)
        try:
            result: tuple[Tensor, Normed] = block(h, normed, call=call)
            return result
        finally:
            _set(present)

    return run


def _set(state: list[tuple[Any, str, Any]]) -> None:
    for part, key, value in state:
        if getattr(part, key) != value:
            setattr(part, key, value)


def _flat(output: tuple[Tensor, Normed]) -> tuple[Any, ...]:
    h, (n, recompute, sums) = output
    return h, n, recompute, *sums


def _normed(flat: tuple[Any, ...], before: tuple[Tensor, ...]) -> tuple[Tensor, Normed]:
    h, n, recompute, *sums = flat
    return h, Normed(n, recompute, (*before, *sums))
