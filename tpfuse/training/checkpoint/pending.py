"""The gradient that waits for the next step where gradients are one step late: a tensor by each parameter's name, and
its batch's loss in meta.json."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...layers.module import as_parameter
from ...pipeline.delays import Pending, delay_of
from .hooks import Reading
from .meta import WITH_GRADIENT, Meta
from .pieces import Piece, piece
from .ranks import Ranks, ranks_named
from .state import Entries, as_slice, stored_name

KEY = "pending"  # in meta.json
_PREFIX = "gradient."


def pending_pieces(entries: Entries, pending: Pending | None) -> tuple[list[Piece], Meta]:
    """Returns what is here of a gradient that waits, sharing its memory, and what meta.json says of it.

    The format is one that a reader without delayed gradients refuses.
    """
    if pending is None:
        return [], {}
    pieces = [
        piece(f"{_PREFIX}{stored_name(name, spec)}", pending.gradients[p], spec, tp)
        for name, (p, spec, tp) in entries.items()
        if p in pending.gradients
    ]
    loss = pending.loss.item()
    return pieces, dict(version=WITH_GRADIENT, pending=dict(loss=loss if math.isfinite(loss) else str(loss)))


def check_pending_everywhere(waiting: Sequence[bool]) -> None:
    """ValueError where a gradient waits on some ranks alone, of those that ``waiting`` lists."""
    having, lacking = ([rank for rank, waits in enumerate(waiting) if waits is kind] for kind in (True, False))
    if having and lacking:
        raise ValueError(
            f"a gradient that is not yet applied waits on {ranks_named(having)} and not on {ranks_named(lacking)}:"
            " where gradients are one step late, as of tpfuse.DelayedGradients, they are so on every rank"
        )


def ranks_without(meta: Meta, model: nn.Module, ranks: Ranks) -> list[int]:
    """Returns the ranks on which nothing of the model would apply the gradient that waits in a checkpoint, if one
    does; each rank calls it."""
    if meta.get(KEY) is None:
        return []
    return [rank for rank, delays in enumerate(ranks.gather(lambda: delay_of(model) is not None)) if not delays]


def check_pending(path: Path, without: Sequence[int], ranks: Ranks) -> None:
    """ValueError where a checkpoint has a gradient that waits, which ranks are ``without`` use for."""
    if without:
        lacking = f", and nothing on {ranks_named(without)} would apply it" if len(without) < ranks.size else ""
        raise ValueError(
            f"{path} holds a gradient that is not yet applied, of training with gradients one step late{lacking}; load"
            ' it after tpfuse.pipeline.schedule(model, mesh, "2bw", ...) or, in one process,'
            " tpfuse.DelayedGradients(model), or without the optimizer"
        )


def read_pending(reading: Reading) -> Pending | None:
    """Returns the gradient that waits, in new tensors; None where the checkpoint has none."""
    about: Any = reading.meta.get(KEY)
    if about is None:
        return None
    gradients = {}
    for name, (p, spec, _) in reading.entries.items():
        key = f"{_PREFIX}{stored_name(name, spec)}"
        if key in reading.stock:
            gradients[p] = as_parameter(as_slice(reading.part(key, name), spec).to(p.device, p.dtype), p)
    parameter = next(p for p, *_ in reading.entries.values())
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return Pending(torch.tensor(float(about["loss"]), dtype=dtype, device=parameter.device), gradients)
