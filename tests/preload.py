"""Modules that every worker process needs, imported once: the fork server imports this file, and a worker forked from
it starts in milliseconds rather than in the five seconds of processor time that ``import torch, tpfuse`` takes."""

import contextlib
import gc
import os

os.environ.pop("TRITON_INTERPRET", None)  # before triton is imported: workers run the references

import torch
import torch._dynamo  # an optimizer, a DTensor or DDP would import it

import tpfuse  # noqa: F401
import tpfuse.models  # noqa: F401

with contextlib.suppress(ImportError):  # optional
    import matplotlib.pyplot  # noqa: F401
    import transformers  # noqa: F401

torch.set_num_threads(1)  # no thread exists when a worker is forked
gc.collect()
gc.freeze()  # half a million objects of modules, through which collections and tpfuse's look for layers would go
