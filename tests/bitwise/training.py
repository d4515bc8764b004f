"""Steps of training whose every number is compared as bits, over layouts of tensor and sequence parallelism."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from bench.bits.kinds import KINDS, LAYOUTS, SMALL_KINDS, TRAINED_KINDS, MakeKind
from tests.pool import World
from tpfuse import TensorParallel, clip_grad_norm_, load_checkpoint, save_checkpoint
from tpfuse.layers.shards import named_specs
from tpfuse.tools.bits.difference import bits
from tpfuse.tools.bits.layouts import Layout

__all__ = ["KINDS", "LAYOUTS", "SMALL_KINDS", "TRAINED_KINDS", "Layout", "Result", "differences", "train"]


class Result(NamedTuple):
    """This rank's losses, gradients and weights after the steps, norms; and the slices of the whole that they are."""

    losses: list[Tensor]
    norms: list[Tensor]
    tensors: dict[str, Tensor]
    slices: dict[str, tuple[slice, ...]]


def train(
    world: World | None,
    kind: str,
    *,
    dtype: torch.dtype,
    sequence_parallel: bool = False,
    bitwise: int | None = 8,
    saving: str = "fastest",
    steps: int = 2,
    save: Path | None = None,
    load: Path | None = None,
) -> Result:
    """Trains ``steps`` steps, from the checkpoint ``load`` on if there is one."""
    group = None if world is None else world.group
    tp = TensorParallel(group, sequence_parallel=sequence_parallel, bitwise=bitwise)
    model = MakeKind(kind, dtype, saving)(tp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(5)
    losses, norms = [], []
    tensors: dict[str, Tensor] = {}
    specs = {name: (spec, owner) for name, _, spec, owner in named_specs(model)}
    done = 0 if load is None else load_checkpoint(load, model, optimizer)[0]
    for step in range(steps):
        ids = torch.randint(model.config.vocab_size, (3, 13), generator=generator)
        if step < done:
            continue
        optimizer.zero_grad()
        loss = model(ids, labels=ids, step=step).loss
        loss.backward()
        losses.append(loss.detach())
        tensors |= {f"gradient {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        norms.append(clip_grad_norm_(model, 0.5))
        optimizer.step()
    if save is not None:
        save_checkpoint(save, model, optimizer, step=steps)
    tensors |= {f"weight {name}": p.detach() for name, p in model.named_parameters()}
    slices = {name: specs[name.split(" ", 1)[1]][0].local(specs[name.split(" ", 1)[1]][1]) for name in tensors}
    return Result(losses, norms, tensors, slices)


def differences(one: Result, other: Result) -> dict[str, float]:
    """Returns the names of what differs, and the share of the elements that do."""
    scalars = {f"{what} {i}": (a, b) for what in ("losses", "norms") for i, (a, b) in enumerate(
        zip(getattr(one, what), getattr(other, what), strict=True))}  # fmt: skip
    assert one.tensors.keys() == other.tensors.keys()
    pairs = scalars | {name: (one.tensors[name][other.slices[name]], t) for name, t in other.tensors.items()}
    for name, (a, b) in pairs.items():
        assert a.shape == b.shape and a.dtype == b.dtype and b.numel(), name
    shares = {name: (bits(a) != bits(b)).double().mean().item() for name, (a, b) in pairs.items()}
    return {name: share for name, share in shares.items() if share}
