"""Messages between the ranks of one machine, through shared memory and gloo's: all-gathers, exchanges, and all-gathers
that are read where they lie.

    python -m bench.shared_memory
    python -m bench.shared_memory --tp 4 --rounds 11

Microseconds a call, the median and the quartiles of the rounds, which take all in turn; each is of 50 calls.
"""

import argparse
import statistics
import time
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from bench._parser import parser_of
from tpfuse import TensorParallel
from tpfuse.collectives import all_gather, all_to_all, start_all_gather
from tpfuse.ranks.shared_memory import shared_memory
from tpfuse.ranks.turns import ROOM
from tpfuse.tools.ledger.processes import on_ranks

CALLS = 50


def arguments() -> argparse.Namespace:
    parser = parser_of("bench.shared_memory", __doc__)
    parser.add_argument("--tp", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--rounds", type=int, default=7, help="default 7")
    parser.add_argument("--kilobytes", type=int, action="append", help="sent by a rank (default: 2, 32, 512 and 3072)")
    return parser.parse_args()


def seconds(call) -> float:
    call()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS


def gloo_gather(x: Tensor, group: dist.ProcessGroup) -> None:
    for handle in start_all_gather(x.new_empty(group.size(), *x.shape), x, group):
        handle.wait()


def gloo_exchange(x: Tensor, group: dist.ProcessGroup) -> None:
    dist.all_to_all_single(torch.empty_like(x), x, group=group)


def run(args: argparse.Namespace) -> None:
    tp = TensorParallel(dist.group.WORLD)
    memory = shared_memory(tp.group)
    if memory is None:
        raise RuntimeError("bench.shared_memory: these ranks share no memory: it needs Linux on an x86 processor")
    for kilobytes in args.kilobytes or [2, 32, 512, 3072]:
        x = torch.randn(256 * kilobytes)
        tiles = torch.randn(tp.size, 256 * kilobytes // (tp.size - 1))
        calls = {
            "all-gather": partial(all_gather, x, tp.size, tp.group_name),
            "gloo's": partial(gloo_gather, x, tp.group),
            "exchange": partial(all_to_all, tiles, tp.group_name),
            "gloo's exchange": partial(gloo_exchange, tiles, tp.group),
        }
        if 1024 * kilobytes <= ROOM:
            calls["read in place"] = partial(memory.view_all, x)
        times = {name: [] for name in calls}
        for _ in range(args.rounds):
            for name, call in calls.items():
                times[name].append(1e6 * seconds(call))
        if tp.rank == 0:
            for name, values in times.items():
                low, mid, high = statistics.quantiles(values, n=4)
                row = f"{kilobytes:4} kB, {tp.size} ranks, {name:15} {mid:6.0f} us ({low:.0f} to {high:.0f})"
                print(row, flush=True)


def main() -> None:
    args = arguments()
    on_ranks(args.tp, run, args)


if __name__ == "__main__":
    main()
