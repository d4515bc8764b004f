"""Options of several commands whose choices are the library's tables."""

import torch

from ..kernels.runtime.launch import MULTIPROCESSORS
from .command import Options
from .ledger.memory import BY_ELEMENTS, OPTIMIZERS
from .ledger.presets import PRESETS

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MODEL_HELP = (
    "local Hugging Face directory with a config.json, that file, or, where no directory has the name, one of"
    f" {', '.join(PRESETS)}"
)


def add_model(parser: Options, default: str | None = None) -> None:
    """Adds --model, which must be given unless it has a default."""
    parser.add_argument("--model", required=default is None, default=default, metavar="MODEL", help=MODEL_HELP)


def add_dtype(parser: Options, default: str = "bf16") -> None:
    parser.add_argument("--dtype", choices=DTYPES, default=default, help="dtype of weights and activations")


def add_optimizer(parser: Options, default: str = "adamw") -> None:
    """Adds an optimizer by elements, for what chooses among splits."""
    text = "optimizer whose states are counted; adamw-fp32: fp32 moments and master weights"
    parser.add_argument("--optimizer", choices=BY_ELEMENTS, default=default, help=text)


def add_any_optimizer(parser: Options) -> None:
    """Adds an optimizer, by elements or of whole matrices, for what counts one split."""
    text = (
        "optimizer whose states are counted; adamw-fp32: fp32 moments and master weights; muon, kfac: whole matrices on"
        " every rank, adamw for the rest"
    )
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw", help=text)


def add_arch(parser: Options) -> None:
    text = "GPU architecture whose launch parameters tpfuse's kernels are counted with"
    parser.add_argument("--arch", choices=MULTIPROCESSORS, default="sm_90", help=text)
