"""Accounting: bytes and flops of what runs, memory, any model at any scale, utilisation, step times.

aten            costs of ops that are not tpfuse's
coefficients    counts as exact functions of the sizes
commands        ledger, memory and dryrun on the command line
context         what a block sends over context-parallel ranks
dryrun          one rank of any world, on meta tensors
layer           one layer, side by side
machine         what this machine can do, calibrated
memory          saved activations and state, closed forms and measured
mfu             model flops, share of the peak, ThroughputMeter
operators       the operator table of arXiv:2007.00072
page            a layer as a page that counts for itself
page.html       its script and looks
plain           the plain torch layer it is compared with
plots           pictures
presets         models by name
processes       real gloo processes for calibrate and predict
recorder        every op that runs under it
shapes          sizes that every formula is written in
speed_commands  mfu, calibrate and predict on the command line
stages          every rank of a pipeline, on meta tensors
steptime        predicted step times
text            tables and units
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
