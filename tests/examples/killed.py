"""Runs an example in this process and ends it with SIGKILL at an exact point:  killed.py WHERE COUNT script.py
arguments ...

WHERE, in the COUNT-th step or the COUNT-th save, and as WHERE@RANK on that rank alone:
    forward, backward   the second micro-batch of a pipeline's stage is about to go that way
    step                gradients are there, the optimizer has not run
    shards              a save's first file is written, nothing is synced
    rename              everything is on disk, ``latest`` still names the one before
    clean               ``latest`` names the new one, an older one is about to be removed
    slow                nowhere: every step waits COUNT tenths of a second, for a signal from outside to find it
"""

import os
import runpy
import shutil
import signal
import sys
import time
import traceback

import tpfuse
from tpfuse.pipeline.runtime import ChunkStage

calls = {"step": 0, "save": 0}


def before(module, name, condition=lambda *args: True):
    """Makes ``module.name`` kill this process instead, where the condition holds."""
    original = getattr(module, name)

    def patched(*args, **kwargs):
        if condition(*args):
            os.write(2, b"SIGKILL to this process\n")  # torchrun may name another, which misses this one
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(module, name, patched)


def count(name, key):
    original = getattr(tpfuse, name)

    def patched(*args, **kwargs):
        calls[key] += 1
        return original(*args, **kwargs)

    setattr(tpfuse, name, patched)


where, number, script, *arguments = sys.argv[1:]
where, _, rank = where.partition("@")
if rank not in ("", os.environ.get("RANK", "")):
    where = "never"
in_save = lambda: calls["save"] == int(number)
match where:
    case "forward" | "backward":
        in_step = lambda _, micro_batch, *rest: calls["step"] == int(number) - 1 and micro_batch == 1
        before(ChunkStage, f"{where}_one_chunk", in_step)
        count("clip_grad_norm_", "step")
    case "step":
        before(tpfuse, "clip_grad_norm_", lambda *_: calls["step"] == int(number))
        count("clip_grad_norm_", "step")
    case "slow":
        before_step, wait = tpfuse.clip_grad_norm_, int(number) / 10
        tpfuse.clip_grad_norm_ = lambda *args: time.sleep(wait) or before_step(*args)
    case "shards":
        before(os, "fsync", lambda *_: in_save())
    case "rename":
        before(os, "replace", lambda _, target: in_save() and os.path.basename(target) == "latest")
    case "clean":
        before(shutil, "rmtree", lambda *_: in_save())
count("save_checkpoint", "save")
sys.argv = [script, *arguments]
sys.path[0] = os.path.dirname(script)
try:
    runpy.run_path(script, run_name="__main__")
except Exception:
    traceback.print_exc()  # of forked processes the launcher prints one's error alone
    raise
