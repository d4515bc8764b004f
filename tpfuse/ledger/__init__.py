"""Accounting: bytes and flops of what runs, memory, any model at any scale, utilisation, step times.

recorder     every op under a dispatch mode: bytes, least bytes, flops
aten         costs of ops that are not tpfuse's
operators    the operator table of 2020
layer        one layer, side by side with plain torch and that table
memory       saved activations, state; closed forms and measured
dryrun       a rank of any world, on meta tensors
stages       every rank of a pipeline, on meta tensors
mfu          MFU, HFU, ThroughputMeter
machine      what this machine can do, calibrated
steptime     predicted step times
plots        pictures
"""

from .dryrun import Plan, fake_world
from .dryrun import run as dry_run
from .layer import compare
from .memory import activation_bytes, parameter_count, saved_bytes, state_bytes
from .mfu import ThroughputMeter, hardware_flops, known_peak, model_flops, utilization
from .presets import load_config
from .recorder import Ledger, mue
from .stages import Pipe
from .stages import run as dry_pipeline

__all__ = [
    "Ledger",
    "Pipe",
    "Plan",
    "ThroughputMeter",
    "activation_bytes",
    "compare",
    "dry_pipeline",
    "dry_run",
    "fake_world",
    "hardware_flops",
    "known_peak",
    "load_config",
    "model_flops",
    "mue",
    "parameter_count",
    "saved_bytes",
    "state_bytes",
    "utilization",
]
