"""A model on one rank and split over several, compared tensor by tensor: ``tpfuse.check_parity``."""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ..collectives import all_gather
from ..kernels.runtime.errors import check
from ..layers.hooks import onlooker
from ..layers.partial import unchecked
from ..layers.shards import named_specs
from ..models.files.write import full_tensor
from ..parallel import TensorParallel
from ..ranks.messages import channel, gather
from .accuracy import rms_error, split_limit
from .ledger.text import table

Tensors = dict[tuple[str, str], Tensor]  # (kind, name) -> an unsharded tensor, in the order of the computation


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


class Parity(NamedTuple):
    """The result of :func:`check_parity`.  ``skipped``: outputs that are no slice of one rank's."""

    rows: list[ParityRow]
    skipped: list[str]

    @property
    def same(self) -> bool:
        """True where every tensor is the same to rounding."""
        return self.first_difference is None

    @property
    def first_difference(self) -> ParityRow | None:
        """The first tensor that differs: weights before layers, layers in forward order, gradients last."""
        return next((row for row in self.rows if not row.same), None)

    def __str__(self) -> str:
        cells = [
            (r.kind, r.name, f"{r.one:.1e}", f"{r.split:.1e}", f"{r.limit:.1e}", "" if r.same else "differs")
            for r in self.rows
        ]
        lines = [table(("what", "name", "one rank", "split", "limit", ""), cells)]
        if self.skipped:
            lines.append(f"not compared, for their shapes: {', '.join(self.skipped)}")
        row = self.first_difference
        lines.append("the same to rounding" if row is None else f"the first that differs: {row.kind} {row.name}")
        return "\n".join(lines)


def check_parity(
    model_fn: Callable[[TensorParallel | None], nn.Module], inputs: Mapping[str, Any], tp: TensorParallel
) -> Parity:
    """Runs a model on one rank and split over ``tp``, forward and backward, and compares every tensor of the two.

    Args:
        model_fn: makes the model for a tensor-parallel group, or for None on one rank.  It is called after
            ``torch.manual_seed(0)``, and so is the model.
        inputs: the arguments of the model's forward, the same on every rank.
        tp: the group; all of its ranks call this, and all get the same answer.

    The model returns a tensor, or anything nested that holds some; a scalar ``loss`` among them is what is
    differentiated, else a fixed random sum of all.  Compared are the weights, each module's output, the gradients of
    float inputs and of parameters; outputs that are shards are put together first.

    A tensor's error is the RMS of its difference from the same model in fp64 on one rank, relative to the RMS of the
    latter.  A split may have 4 times the error of one rank, or 16 units in the last place: its sums are in another
    order (:func:`tpfuse.tools.accuracy.split_limit`).  ValueError where the two models have other parameters.
    """
    torch.manual_seed(0)
    model = model_fn(None)
    exact = _run(copy.deepcopy(model).double(), _doubled(inputs), TensorParallel(), None)
    one = _run(model, inputs, TensorParallel(), None)
    torch.manual_seed(0)
    split = _run(model_fn(tp), inputs, tp, one)
    kinds = {key for key in one if key[0] != "output"}
    unknown = sorted(f"{kind} {name}" for kind, name in kinds ^ {key for key in split if key[0] != "output"})
    check(not unknown, f"check_parity: {', '.join(unknown[:4])} is there on one rank or split, and not in both")
    ranks = gather([_row(key, one[key], split[key], exact[key]) for key in one if key in split], channel(tp.group))
    worst = [max(rows, key=lambda row: float("inf") if row.split != row.split else row.split) for rows in zip(*ranks)]
    return Parity(worst, [name for kind, name in one if (kind, name) not in split])


def _row(key: tuple[str, str], one: Tensor, split: Tensor, exact: Tensor) -> ParityRow:
    error = rms_error(one, exact)
    return ParityRow(*key, one=error, split=rms_error(split, exact), limit=split_limit(error, one.dtype))


def _doubled(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {key: _doubled(item) for key, item in value.items()}
    return value


# ---- one run ----


def _run(model: nn.Module, inputs: Mapping[str, Any], tp: TensorParallel, one_rank: Tensors | None) -> Tensors:
    """Returns all tensors of a forward and a backward, unsharded; ``one_rank``: those of one rank, for their shapes."""
    tensors: Tensors = {("weight", name): p.clone() for name, p in _parameters(model, lambda p: p.detach())}
    floats = {k: x.detach().clone().requires_grad_() for k, x in inputs.items() if _differentiable(x)}
    outputs: dict[str, Tensor] = {}
    hooks = [part.register_forward_hook(_recording(outputs, name)) for name, part in model.named_modules() if name]
    torch.manual_seed(0)
    try:
        result = model(**{**inputs, **floats})
    finally:
        for hook in hooks:
            hook.remove()
    outputs |= dict(_tensors("", result))
    for name, x in outputs.items():
        if one_rank is None:
            tensors["output", name] = x.detach().clone()
        elif (expected := one_rank.get(("output", name))) is not None:
            if (full := _unsharded(x.detach(), expected.shape, tp)) is not None:
                tensors["output", name] = full.clone()
    with unchecked():
        _loss(dict(_tensors("", result)), tensors, tp).backward()
    tensors |= {("input gradient", name): x.grad for name, x in floats.items() if x.grad is not None}
    tensors |= {("gradient", name): g for name, g in _parameters(model, lambda p: p.grad) if g is not None}
    return tensors


def _parameters(model: nn.Module, value: Callable[[nn.Parameter], Tensor | None]) -> Iterator[tuple[str, Tensor]]:
    """Yields a value of every trained or frozen parameter, unsharded, by collectives where it is split."""
    for (name, spec, tp), p in zip(named_specs(model), model.parameters(), strict=True):
        x = value(p)
        if x is not None:
            yield name, full_tensor(x, spec, tp)


def _differentiable(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _recording(outputs: dict[str, Tensor], name: str) -> Callable[[nn.Module, Any, Any], None]:
    @onlooker
    def record(_module: nn.Module, _args: Any, output: Any) -> None:
        outputs.update(_tensors(name, output))

    return record


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields the float tensors in a nested value, by names."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield name or "the result", value
        return
    fields = value._asdict() if hasattr(value, "_asdict") else value
    if isinstance(fields, (tuple, list)):
        fields = {str(i): item for i, item in enumerate(fields, 1)}
    if isinstance(fields, Mapping):
        for key, item in fields.items():
            yield from _tensors(f"{name}.{key}" if name else str(key), item)


def _unsharded(x: Tensor, shape: torch.Size, tp: TensorParallel) -> Tensor | None:
    """Returns the tensor of ``shape`` that x is a rank's chunk of, as torch.chunk splits; None where it is no chunk."""
    if x.shape == shape:
        return x
    cut = [d for d, (n, full) in enumerate(zip(x.shape, shape)) if n != full]
    if x.dim() != len(shape) or len(cut) != 1:
        return None
    (d,), n = cut, shape[cut[0]]
    rows, width = x.movedim(d, 0), tp.slice_size(n)
    if len(rows) > width:
        return None
    rows = pad(rows.flatten(1), (0, 0, 0, width - len(rows))) if len(rows) < width else rows.flatten(1)
    full: Tensor = all_gather(rows.contiguous(), tp.size, tp.group_name).flatten(0, 1)[:n]
    return full.unflatten(1, x.movedim(d, 0).shape[1:]).movedim(0, d) if x.dim() > 1 else full[:, 0]


def _loss(outputs: dict[str, Tensor], tensors: Tensors, tp: TensorParallel) -> Tensor:
    """Returns the model's loss, or a fixed random sum of its outputs, of sharded ones this rank's part."""
    if "loss" in outputs and outputs["loss"].dim() == 0:
        return outputs["loss"]
    total = torch.zeros((), dtype=torch.float64)
    for name, x in outputs.items():
        if x.requires_grad and ("output", name) in tensors:
            generator = torch.Generator().manual_seed(1)
            weight = torch.randn(tensors["output", name].shape, generator=generator, dtype=torch.float64).to(x.device)
            for d, (n, full) in enumerate(zip(x.shape, weight.shape)):
                if n != full:
                    width = tp.slice_size(full)
                    padded = pad(weight.movedim(d, -1), (0, width * tp.size - full))
                    weight = padded.narrow(-1, tp.rank * width, n).movedim(-1, d)
            total = total.to(x.device) + (x.double() * weight).sum()
    check(total.requires_grad, "check_parity: the model returned nothing that has a gradient")
    return total
