"""A model on one rank and split over several, compared tensor by tensor: ``tpfuse.check_parity``."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils._pytree import tree_map_only

from ..kernels.runtime.errors import check
from ..parallel import TensorParallel
from ..ranks.messages import channel, gather
from .accuracy import rms_error, split_limit
from .bits.difference import BitsRow
from .bits.trace import Trace, trace
from .bits.whole import Pair, pairs
from .ledger.text import table


class ParityRow(NamedTuple):
    """A tensor: its relative RMS error against fp64, on one rank and split, and the limit of the latter."""

    kind: str
    name: str
    one: float
    split: float
    limit: float

    @property
    def same(self) -> bool:
        """True where rounding explains the error; False for NaN."""
        return self.split <= self.limit

    @property
    def distance(self) -> float:
        """The larger, the worse: NaN is the worst."""
        return float("inf") if self.split != self.split else self.split

    @property
    def cells(self) -> dict[str, str]:
        return {"one rank": f"{self.one:.1e}", "split": f"{self.split:.1e}", "limit": f"{self.limit:.1e}"}

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


class Parity(NamedTuple):
    """The result of :func:`check_parity`.  ``skipped``: outputs that are no slice of one rank's."""

    rows: list[ParityRow] | list[BitsRow]
    skipped: list[str]

    @property
    def same(self) -> bool:
        """True where every tensor is the same, to rounding or in its bits."""
        return self.first_difference is None

    @property
    def first_difference(self) -> ParityRow | BitsRow | None:
        """The first tensor that differs: weights before layers, layers in forward order, gradients last."""
        return next((row for row in self.rows if not row.same), None)

    def __str__(self) -> str:
        cells = [(r.kind, r.name, *r.cells.values(), "" if r.same else "differs") for r in self.rows]
        lines = [table(("what", "name", *(self.rows[0].cells if self.rows else ()), ""), cells)]
        if self.skipped:
            lines.append(f"not compared, for their shapes: {', '.join(self.skipped)}")
        row, same = self.first_difference, any(isinstance(r, BitsRow) for r in self.rows)
        lines.append(
            ("the same bits" if same else "the same to rounding") if row is None else f"the first that differs: {row}"
        )
        return "\n".join(lines)


def check_parity(
    model_fn: Callable[[TensorParallel | None], nn.Module],
    inputs: Mapping[str, Any],
    tp: TensorParallel,
    *,
    bitwise: bool = False,
) -> Parity:
    """Runs a model on one rank and split over ``tp``, forward and backward, and compares every tensor of the two.

    Args:
        model_fn: makes the model for a tensor-parallel group, or for None on one rank; with ``tp.bitwise`` for a group
            of one with as many leaves.  It is called after ``torch.manual_seed(0)``, and so is the model.
        inputs: the arguments of the model's forward, the same on every rank.
        tp: the group; all of its ranks call this, and all get the same answer.
        bitwise: compares bits, not errors.

    The model returns a tensor, or anything nested that holds some; a scalar ``loss`` among them is what is
    differentiated, else a fixed random sum of all.  Compared are the weights, each module's output, the gradients of
    float inputs and of parameters; outputs that are shards are put together first.

    A tensor's error is the RMS of its difference from the same model in fp64 on one rank, relative to the RMS of the
    latter.  A split may have 4 times the error of one rank, or 16 units in the last place: its sums are in another
    order (:func:`tpfuse.tools.accuracy.split_limit`).

    With ``bitwise`` the outputs of ops inside fused layers and the gradients of all outputs are compared too, and the
    rows are in the order of execution, forward then backward: bits part in the op that the first different one names.

    ValueError where the two models have other parameters.
    """
    doubled = lambda x: x.double() if x.is_floating_point() else x
    run = lambda model, inputs, tp, shapes: trace(
        model, inputs, tp, loss=lambda outputs: _loss(outputs, shapes, tp), ops=bitwise
    )
    torch.manual_seed(0)
    model = model_fn(None if tp.bitwise is None else TensorParallel(bitwise=tp.bitwise))
    exact = (
        None
        if bitwise
        else run(copy.deepcopy(model).double(), tree_map_only(Tensor, doubled, dict(inputs)), TensorParallel(), {})
    )
    one = run(model, inputs, TensorParallel(bitwise=tp.bitwise), {})
    torch.manual_seed(0)
    split = run(model_fn(tp), inputs, tp, {key.name: x.tensor.shape for key, x in one.items() if key.kind == "output"})
    _check_parameters(one, split)
    compared = list(pairs(one, split))
    rows = [_row(pair, exact) for pair in compared if pair.split is not None]
    by_rank = gather(rows, channel(tp.group))
    worst = [max(rows, key=lambda row: row.distance) for rows in zip(*by_rank)]
    return Parity(worst, [pair.key.name for pair in compared if pair.split is None])


def _row(pair: Pair, exact: Trace | None) -> Any:
    key, one, split = pair
    assert split is not None
    if exact is None:
        return BitsRow.of(key, one, split)
    reference = exact[key].tensor
    error = rms_error(one, reference)
    limit = split_limit(error, one.dtype)
    return ParityRow(key.kind, key.label, error, split=rms_error(split, reference), limit=limit)


def _check_parameters(one: Trace, split: Trace) -> None:
    """Raises the ValueError of two models whose parameters, or inputs with gradients, are not the same."""
    names = [{f"{key.kind} {key.name}" for key in made if key.kind in PARAMETERS} for made in (one, split)]
    unknown = sorted(names[0] ^ names[1])
    check(not unknown, f"check_parity: {', '.join(unknown[:4])} is there on one rank or split, and not in both")


PARAMETERS = "weight", "gradient", "input gradient"  # kinds that both models must have


def _loss(outputs: dict[str, Tensor], shapes: Mapping[str, torch.Size], tp: TensorParallel) -> Tensor:
    """Returns the model's loss, or a fixed random sum of its outputs, of sharded ones this rank's part.

    ``shapes``: those of the whole outputs by their names, where they are sharded.
    """
    if "loss" in outputs and outputs["loss"].dim() == 0:
        return outputs["loss"]
    total = torch.zeros((), dtype=torch.float64)
    for name, x in outputs.items():
        whole = shapes.get(name, x.shape)
        cut = [d for d, (n, full) in enumerate(zip(x.shape, whole)) if n != full]
        if not x.requires_grad or x.dim() != len(whole) or len(cut) > 1:
            continue
        generator = torch.Generator().manual_seed(1)
        weight = torch.randn(whole, generator=generator, dtype=torch.float64).to(x.device)
        for d in cut:
            width = tp.slice_size(whole[d])
            padded = pad(weight.movedim(d, -1), (0, width * tp.size - whole[d]))
            weight = padded.narrow(-1, tp.rank * width, x.shape[d]).movedim(-1, d)
        total = total.to(x.device) + (x.double() * weight).sum()
    check(total.requires_grad, "check_parity: the model returned nothing that has a gradient")
    return total
