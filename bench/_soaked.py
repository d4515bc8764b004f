"""Runs examples/train_gpt.py in this process, small enough for a soak:  _soaked.py WHERE train_gpt.py arguments ...

WHERE its checkpoints are written: foreground or background.  ``--size soak`` is a model of 130 thousand parameters.
"""

import functools
import importlib
import os
import runpy
import sys

import tpfuse

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
