"""A layer of experts on a CPU against transformers' own, on the same weights: training steps and single tokens.

    python -m bench.models.moe                                       every case: some minutes
    python -m bench.models.moe --case mixtral --dtype fp32 --rounds 5
    python -m bench.models.moe --json bench/results/moe.json

"train" is forward and backward of so many rows, "decode" forward without gradients.  All providers run in one process
on one thread, round by round in an order drawn anew, so that what slows the machine down slows all of them.  A row
gives the median of the ratios of a round's runs, processor time of transformers over tpfuse's, and their quartiles, for
each of transformers' implementations of experts; values are compared first.
"""

import argparse
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn

from bench import documents
from bench._parser import check_rounds, parser_of
from tpfuse.kernels import Routing
from tpfuse.layers import ParallelMoE

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PEERS = "eager", "grouped_mm", "batched_mm"
MOST_COPIED = 1 << 28  # bytes of the weights that batched_mm copies for its rows: beyond it a run takes minutes


class Case(NamedTuple):
    """E experts of width F, of which a row of width D has k."""

    D: int
    F: int
    E: int
    k: int


CASES = {"mixtral": Case(512, 1792, 8, 2), "fine": Case(512, 192, 64, 8)}
ROWS = {"train": (512,), "decode": (1, 8)}


def arguments() -> argparse.Namespace:
    parser = parser_of("bench.models.moe", __doc__)
    several = dict(action="append", metavar="NAME")
    parser.add_argument("--case", choices=CASES, help="default: both", **several)
    parser.add_argument("--dtype", choices=DTYPES, help="default: both", **several)
    parser.add_argument("--kind", choices=ROWS, help="default: both", **several)
    parser.add_argument("--peer", choices=PEERS, help="default: all; one that copies weights slows the next", **several)
    parser.add_argument("--rounds", type=int, default=15, help="runs of each (default 15)")
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    args = parser.parse_args()
    check_rounds(parser, args.rounds)
    args.case, args.dtype, args.kind = args.case or [*CASES], args.dtype or [*DTYPES], args.kind or [*ROWS]
    args.peer = args.peer or [*PEERS]
    return args


def layers(case: Case, dtype: torch.dtype, std: float = 0.05) -> tuple[ParallelMoE, nn.Module]:
    """Returns tpfuse's layer and transformers', with the same weights, normal of this deviation."""
    from transformers.models.mixtral import modeling_mixtral as mixtral

    D, F, E, k = case
    config = mixtral.MixtralConfig(hidden_size=D, intermediate_size=F, num_local_experts=E, num_experts_per_tok=k)
    peer, ours = mixtral.MixtralSparseMoeBlock(config).to(dtype), ParallelMoE(D, F, E, Routing(k), dtype=dtype)
    torch.manual_seed(0)
    with torch.no_grad():
        for p in peer.parameters():
            p.normal_(0, std)
        ours.router.copy_(peer.gate.weight)
        ours.fc1.copy_(rearrange(peer.experts.gate_up_proj, "e (t f) d -> e f t d", t=2))
        ours.fc2.copy_(peer.experts.down_proj)
    return ours, peer


def runs(
    kind: str, case: Case, dtype: torch.dtype, rows: int, *, peers: Sequence[str] = PEERS
) -> dict[str, Callable[[], Tensor]]:
    """The name of each provider -> a run, which returns its output."""
    ours, peer = layers(case, dtype)
    x, dy = torch.randn(2, 1, rows, case.D, generator=torch.Generator().manual_seed(1)).to(dtype)

    def run(layer: nn.Module, implementation: str | None) -> Tensor:
        if implementation is not None:
            peer.experts.config._experts_implementation = implementation
        with torch.set_grad_enabled(kind == "train"):
            y = layer(x.detach().requires_grad_(kind == "train"))
            y = y[0] if isinstance(y, tuple) else y
        if kind == "train":
            y.backward(dy)
            layer.zero_grad()
        return y.detach()

    copied = 3 * rows * case.k * case.F * case.D * dtype.itemsize
    names = [name for name in peers if name != "batched_mm" or copied <= MOST_COPIED]
    return {"tpfuse": lambda: run(ours, None)} | {name: lambda name=name: run(peer, name) for name in names}


def measure(rounds: int, providers: dict[str, Callable[[], Tensor]]) -> dict[str, Any]:
    """Returns milliseconds of each provider, ratios over tpfuse's with their quartiles, and the largest difference."""
    outputs = {name: run().float() for name, run in providers.items()}
    error = max(float((y - outputs["tpfuse"]).norm() / y.norm()) for y in outputs.values())
    times: dict[str, list[float]] = {name: [] for name in providers}
    order = random.Random(0)  # a run is faster behind one that leaves memory of its sizes
    for _ in range(rounds):
        for name, run in order.sample([*providers.items()], len(providers)):
            start = time.process_time()
            run()
            times[name].append(time.process_time() - start)
    ours = times.pop("tpfuse")
    ratios = {n: statistics.quantiles([a / b for a, b in zip(t, ours, strict=True)], n=4) for n, t in times.items()}
    return dict(milliseconds=1e3 * statistics.median(ours), over=ratios, error=error)


def line(result: dict[str, Any]) -> str:
    """Returns a row of the table."""
    cells = [str(result[key]) for key in ("case", "dtype", "kind", "rows")] + [f"{result['milliseconds']:.2f}"]
    cells += [documents.spread(result["over"][name]) if name in result["over"] else "" for name in PEERS]
    return "| " + " | ".join([*cells, f"{result['error']:.0e}"]) + " |"


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    print("| case | dtype | kind | rows | tpfuse, ms | " + " | ".join(f"{n} over it" for n in PEERS) + " | error |")
    print("|---" * (6 + len(PEERS)) + "|")
    results = []
    shapes = [(kind, rows) for kind in args.kind for rows in ROWS[kind]]
    for name, dtype, (kind, rows) in itertools.product(args.case, args.dtype, shapes):
        result = measure(args.rounds, runs(kind, CASES[name], DTYPES[dtype], rows, peers=args.peer))
        results.append(dict(case=name, dtype=dtype, kind=kind, rows=rows, **result))
        print(line(results[-1]), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
