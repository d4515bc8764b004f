"""Parameters that no module has any more: the step of an optimizer that holds some is an error.

It would train them in silence, and the modules' new ones would stay as they are.
"""

import functools
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..kernels.runtime.errors import check
from .originals import original_of

_BY = "_tpfuse_dropped_by"  # attribute of such a parameter: the function that gave its module another


def drop(parameters: Iterable[nn.Parameter], function: str) -> None:
    """Makes a step on these parameters, or on what stands for one, an error that names ``function``."""
    for p in parameters:
        setattr(p, _BY, function)
    _watch_steps()


@functools.cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_check_step)


def _check_step(optimizer: Optimizer, *_: Any) -> None:
    stepped = [original_of(p) for group in optimizer.param_groups for p in group["params"]]
    functions = [getattr(p, _BY) for p in stepped if hasattr(p, _BY)]
    check(
        not functions,
        f"{type(optimizer).__name__}.step: {len(functions)} of its parameters were dropped by"
        f" {' and '.join(dict.fromkeys(functions))}, which gave the module new ones; make the optimizer after it",
    )
