"""Runs examples/train_gpt.py in this process, small enough for a soak:  _soaked.py WHERE train_gpt.py arguments ...

WHERE its checkpoints are written: foreground or background.  ``--size soak`` is a model of 130 thousand parameters.
SIGUSR2 flips a bit of a weight that every rank holds, after the step that is under way.
"""

import functools
import importlib
import os
import runpy
import signal
import sys
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import tpfuse
from tpfuse.layers.shards import wholes

BIT = 12  # of an fp32 weight's mantissa: no step of training rounds it away
due: list[int] = []  # flips


def flip(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Flips a bit of the first weight that is not split, where one is due."""
    if due:
        due.pop()
        whole_of = wholes()
        weights = (p for group in optimizer.param_groups for p in group["params"] if p in whole_of)
        weight = next(p for p in weights if whole_of[p].spec.dim is None)
        weight.data.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << BIT)


signal.signal(signal.SIGUSR2, lambda number, frame: due.append(number))
register_optimizer_step_post_hook(flip)

mode, script, *arguments = sys.argv[1:]
sys.argv = [script, *arguments]
sys.path[0] = os.path.dirname(script)
importlib.import_module("_options").SIZES["soak"] = dict(hidden_size=64, num_layers=2, num_heads=4)
if mode == "background":
    tpfuse.save_checkpoint = functools.partial(tpfuse.save_checkpoint, background=True)
launcher = os.getppid()
runpy.run_path(script, run_name="__main__")
if os.getppid() != launcher:
    sys.exit()  # torchrun waits here, in forked processes, for a word of the launcher that was killed
