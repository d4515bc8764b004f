"""One rank of the bench."""

import argparse
import logging
import os
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bench.pipeline import sleeping, training
from tpfuse.tools.ledger.text import Progress


def run(rank: int, args: argparse.Namespace, port: int, results: mp.SimpleQueue) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # torch's, of metadata that it infers
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=args.ranks)
    progress = Progress(long=True)
    say = progress.update if rank == 0 else lambda line: None
    rows = training.measure(args, say) if args.rounds else []
    slept = sleeping.measure(args.micro_batches, args.sleep, args.sleep_rounds, say) if args.sleep else {}
    progress.clear()
    if rank == 0:
        results.put(dict(rows=rows, sleeping=slept))
    dist.barrier()
    dist.destroy_process_group()
