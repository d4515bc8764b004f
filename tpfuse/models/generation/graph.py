"""A step of generation as a CUDA graph: its kernels are started by one call, without the host's time for each.

Its first tokens are made one by one, which compiles kernels and makes tables; then the step is captured, which runs
nothing, and every later token is a replay.  Not measured yet: no GPU has run it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from ...layers.hooks import served
from .model import CausalModel
from .step import TokenStep

_FIRST = 2  # tokens before the capture
_LEAST = 8  # tokens after it, fewer than which are not worth it


def may_capture(model: CausalModel, step: TokenStep, new: int) -> bool:
    """Returns whether ``new`` tokens may be made by replaying one step.

    Hooks and processors are Python that a replay does not call; autocast keeps copies of weights that a graph must not;
    of messages NCCL's alone can be captured; and rotary positions that depend on the length are the host's choice.
    """
    tp = model.tp
    return (
        step.text.is_cuda
        and new >= _FIRST + _LEAST
        and not step.choose.scores.processors
        and not served(cast(nn.Module, model))
        and not torch.is_autocast_enabled("cuda")
        and not model.config.depends_on_length(step.text.shape[1])
        and step.forward.alike
        and (tp.size == 1 or "nccl" in dist.get_backend_config(tp.group))
    )


class GraphStep:
    """A step that is captured when it has run a few times."""

    def __init__(self, step: TokenStep):
        self.step, self.run, self.left = step, step.__call__, _FIRST

    def __call__(self) -> None:
        if self.left == 0:
            self.run = captured(self.step)
        self.left -= 1
        self.run()


def captured(step: TokenStep) -> Callable[[], None]:
    """Returns what starts the step's kernels once more; the step itself, and a warning, where it cannot be captured.

    The stream is one of the step's device: torch's own for captures is of the device of a process's first one.
    """
    device, graph = step.text.device, torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(torch.cuda.current_stream(device)):  # the stream that was, whatever happens
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(device), capture_error_mode="thread_local"):
                step()
    except RuntimeError as error:
        warnings.warn(f"generate: goes on without a CUDA graph, which could not be captured: {error}", stacklevel=2)
        return step.__call__
    return graph.replay
