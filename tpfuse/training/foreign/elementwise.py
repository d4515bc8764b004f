"""Optimizers of split parameters: one whose update of a slice is not the slice of its update is refused.

torch's own are in a table, which a test holds to the installed release.  Any other class is tried, on a matrix and on
its halves.
"""

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...kernels.runtime.main_grad import PLACES
from .known import split_parameters

# Of torch.optim, by the name of the class that defines the step: whether it works element by element.
ELEMENTWISE = dict.fromkeys(
    "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD SparseAdam".split(), True
) | dict.fromkeys(("Adafactor", "LBFGS", "Muon"), False)
_SHAPE, _STEPS, _MOST = (8, 6), 3, 1e-3  # of the trial; the largest difference, relative to the largest update


@torch._disable_dynamo
def add_param_group(original: Callable[..., None], optimizer: Optimizer, group: Mapping[str, Any]) -> None:
    """Stands in the place of Optimizer.add_param_group, to which a constructor gives all its parameters."""
    original(optimizer, group)
    split = split_parameters()
    if not split:
        return
    masters = {PLACES[p].main for p in split if p in PLACES}
    if any(p in split or p in masters for p in optimizer.param_groups[-1]["params"]):
        try:
            _check(optimizer)
        except ValueError:
            optimizer.param_groups.pop()
            raise


def _check(optimizer: Optimizer) -> None:
    step = next(cls for cls in type(optimizer).__mro__ if "step" in vars(cls))
    name = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
    elementwise = ELEMENTWISE.get(step.__name__) if step.__module__.startswith("torch.optim.") else _tried(optimizer)
    if elementwise is None:
        warnings.warn(
            f"{name} steps on slices of parameters that are split over ranks, and tpfuse cannot tell whether it works"
            " element by element; where it does not, the update depends on the split: use tpfuse.WholeMatrices",
            stacklevel=5,
        )
    elif not elementwise:
        raise ValueError(
            f"{name}: its update of a slice is not the slice of its update, and tensor-parallel ranks hold slices of"
            " these parameters; give it tpfuse.WholeMatrices(model).parameters(), or use an optimizer that works"
            " element by element, as AdamW does"
        )


def _tried(optimizer: Optimizer) -> bool | None:
    """Returns whether an optimizer with the same options updates a matrix as it updates its halves; None if it cannot
    be made, or takes no plain step."""
    accepted = inspect.signature(type(optimizer)).parameters
    options = {key: value for key, value in optimizer.defaults.items() if key in accepted}
    generator = torch.Generator().manual_seed(0)
    start, *grads = torch.randn(1 + _STEPS, *_SHAPE, generator=generator)

    def stepped(cut: Callable[[Tensor], tuple[Tensor, ...]], dim: int) -> Tensor:
        parts = [nn.Parameter(part.clone()) for part in cut(start)]
        steps: Any = type(optimizer)(parts, **options)
        for grad in grads:
            for p, part in zip(parts, cut(grad), strict=True):
                p.grad = part.clone()
            steps.step()
        return torch.cat([p.detach() for p in parts], dim)

    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            whole = stepped(lambda x: (x,), 0)
            halves = [stepped(lambda x, dim=dim: x.chunk(2, dim), dim) for dim in (0, 1)]  # type: ignore[misc]
    except Exception:  # whatever a class of somebody's raises that wants other parameters, or a closure
        return None
    bound = _MOST * (whole - start).abs().max()
    return all(bool((half - whole).abs().max() <= bound) for half in halves)
