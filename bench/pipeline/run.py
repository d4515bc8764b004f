"""One rank of the bench."""

import argparse
import logging
from typing import Any

import torch.distributed as dist

from bench.pipeline import sleeping, training
from tpfuse.tools.ledger.text import Progress


def run(args: argparse.Namespace) -> dict[str, Any]:
    logging.disable(logging.WARNING)  # torch's, of metadata that it infers
    progress = Progress(long=True)
    say = progress.update if dist.get_rank() == 0 else lambda line: None
    rows = training.measure(args, say) if args.rounds else []
    slept = sleeping.measure(args.micro_batches, args.sleep, args.sleep_rounds, say) if args.sleep else {}
    progress.clear()
    return dict(rows=rows, sleeping=slept)
