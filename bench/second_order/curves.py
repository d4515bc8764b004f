"""Curves of K-FAC and Shampoo in the bubbles of a pipeline, and of AdamW, over steps and over planned seconds.

    python -m bench.second_order.curves --json bench/results/second_order.json

The model and text of examples/train_gpt.py, over three stages of one thread each on gloo processes, in four
micro-batches.  The weights of linear layers are K-FAC's, Shampoo's (pytorch_optimizer's ScalableShampoo, over
tpfuse.WholeMatrices) or AdamW's, all other parameters AdamW's at one rate.  The first learning rate of each gives all
updates one norm; from there it is doubled and halved until the best one lies between two that are worse.  A rate is the
highest, after a warm-up over a tenth of the steps and before a cosine.

Factors and roots are really made in the steps of their plan.  The seconds are not the clock's, since processes share
cores that are never idle in a bubble: a step takes the simulator's seconds of the measured passes, and the measured
seconds of the optimizers' steps, of the slowest rank, both medians.
"""

import argparse
import json
import math
import statistics
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import tpfuse
from bench import machine
from bench._parser import parser_of
from bench.pipeline_fill import NEVER, Roots
from bench.second_order import page
from tpfuse.models import GPT
from tpfuse.pipeline import Filling, Pipeline, Work, demand, fill, schedule
from tpfuse.ranks.messages import gather
from tpfuse.tools.ledger.processes import on_ranks

EXAMPLES = str(Path(__file__).parents[2] / "examples")
SHAPE = dict(family="llama", width=128, layers=3, heads=4, seq=256, dropout=0.0, untied=False)
RANKS, MICRO_BATCHES, ROWS, HELD_OUT = 3, 4, 2, 64  # ROWS sequences a micro-batch; held-out windows
BATCH = MICRO_BATCHES * ROWS
REST = 4e-3  # the rate of the other parameters, and of the demo
GRAFT_SIGN = 4  # of ScalableShampoo: the update's norm is the square root of its size, 5 times that of KFAC's
FIRST = {"AdamW": 4e-3, "K-FAC": 4e-3, "Shampoo": 8e-4}  # rates, at which all updates have one norm


class Options(NamedTuple):
    steps: int
    interval: int  # of steps between validations
    schedule: str
    rates: int


class Run:
    """A model over stages, and optimizers of its linear layers' weights and of the rest."""

    def __init__(self, options: Options, name: str, rate: float):
        sys.path.insert(0, EXAMPLES)
        from _options import config_of

        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("pp",))
        stage = mesh.get_local_rank(), RANKS, options.schedule
        self.options, self.rate = options, rate
        self.model = GPT(config_of(types.SimpleNamespace(**SHAPE)), stage=stage, seed=0).train()
        self.pipeline: Pipeline = schedule(self.model, mesh, options.schedule, MICRO_BATCHES)
        self.optimizer, remaining = getattr(self, f"_{name.replace('-', '').lower()}")()
        self.optimizers = self.optimizer, torch.optim.AdamW(remaining, lr=REST, betas=(0.9, 0.95), weight_decay=0.1)
        self.text = _text()

    def _adamw(self) -> tuple[Any, list[Any]]:
        matrices = tpfuse.WholeMatrices(self.model.blocks)
        weights = [p for p, *_ in matrices.sources.values()]
        return torch.optim.AdamW(weights, lr=self.rate, betas=(0.9, 0.95), weight_decay=0.1), matrices.others(
            self.model
        )

    def _kfac(self) -> tuple[Any, list[Any]]:
        kfac = tpfuse.KFAC(self.model, lr=self.rate, weight_decay=0.1)
        return kfac, kfac.remaining(self.model)

    def _shampoo(self) -> tuple[Any, list[Any]]:
        from pytorch_optimizer import ScalableShampoo

        matrices = tpfuse.WholeMatrices(self.model.blocks)
        options = dict(start_preconditioning_step=1, preconditioning_compute_steps=NEVER, block_size=SHAPE["width"])
        options |= dict(graft_type=GRAFT_SIGN, moving_average_for_momentum=True, use_svd=True)
        options |= dict(weight_decay=0.1, decoupled_weight_decay=True)
        shampoo = ScalableShampoo(matrices.parameters(), lr=self.rate, **options)
        shampoo.register_step_pre_hook(matrices.gather_gradients)
        return shampoo, matrices.others(self.model)

    def work(self, measured: Any) -> list[Work]:
        """Returns the pieces of work of all ranks; ``measured``: of an earlier run, or None."""
        if isinstance(self.optimizer, tpfuse.KFAC):
            return self.optimizer.work(self.pipeline)
        if isinstance(self.optimizer, torch.optim.AdamW):
            return []
        return Roots(self.pipeline, self.optimizer, lambda number: None).work(measured)

    def step(self, number: int) -> tuple[float, float]:
        """Returns the loss, and the seconds of the optimizers' steps."""
        loss = self.pipeline.step(ids := self._batch(number), labels=ids, step=number)
        tpfuse.clip_grad_norm_(self.model, 1.0)
        begin = time.perf_counter()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("highest", group["lr"]) * _share(number, self.options.steps)
            optimizer.step()
        seconds = time.perf_counter() - begin
        self.model.zero_grad()
        return loss.item(), seconds

    def held_out(self) -> float:
        """Returns bits per byte."""
        from _text import windows

        windows_of_batch = [ids for ids in windows(self.text, SHAPE["seq"], BATCH)][: HELD_OUT // BATCH]
        nats = [self.pipeline.evaluate(ids, labels=ids).item() for ids in windows_of_batch]
        return statistics.fmean(nats) / math.log(2)

    def _batch(self, number: int) -> torch.Tensor:
        from _text import sample

        return sample(self.text, SHAPE["seq"], BATCH, 0, number, range(BATCH))


def _text() -> Any:
    from _text import read_text

    return read_text(None, 8, SHAPE["seq"])


def _share(number: int, steps: int) -> float:
    """Returns the share of the highest learning rate."""
    warmup = max(1, steps // 10)
    if number < warmup:
        return (number + 1) / warmup
    return 0.1 + 0.9 * (1 + math.cos(math.pi * (number - warmup) / max(1, steps - warmup))) / 2


class Plan(NamedTuple):
    """A timeline of a step's measured passes, and all pieces of work with measured seconds, which cannot be run."""

    timeline: Any
    pieces: list[Work]
    roots: Any  # the seconds of Shampoo's pieces, by rank

    def filling(self, run: Run) -> Filling:
        """Returns the plan with the pieces of ``run``."""
        pairs = zip(run.work(self.roots), self.pieces, strict=True)
        return fill(self.timeline, [piece._replace(seconds=measured.seconds) for piece, measured in pairs])


def planned(options: Options, name: str) -> Plan:
    run = Run(options, name, FIRST[name])
    for number in range(2):
        run.step(number)
    ids = run._batch(0)
    timelines = sorted((run.pipeline.measure(ids, labels=ids) for _ in range(5)), key=lambda timeline: timeline.seconds)
    roots = Roots(run.pipeline, run.optimizer, lambda number: None).seconds() if name == "Shampoo" else None
    return Plan(timelines[2], [piece._replace(run=None) for piece in run.work(roots)], roots)


def trained(options: Options, name: str, rate: float, plan: Plan) -> dict[str, Any]:
    """``held_out``: pairs of a step and bits per byte after it; ``optimizer``: seconds of a step, of the slowest
    rank."""
    run, held_out, seconds = Run(options, name, rate), [], []
    for number in range(options.steps):
        seconds.append(run.step(number)[1])
        if number == 0:  # which makes all factors, and Shampoo's statistics
            run.pipeline.fill(plan.filling(run))
        if (number + 1) % options.interval == 0:
            held_out.append([number + 1, run.held_out()])
    medians = gather(statistics.median(seconds[1:]), run.pipeline.group)
    if dist.get_rank() == 0:
        print(f"{name} at {rate:g}: {held_out[-1][1]:.3f} bits per byte", file=sys.stderr, flush=True)
    return dict(rate=rate, held_out=held_out, optimizer=max(medians))


def at_rates(start: float, most: int, train: Callable[[float], dict[str, Any]]) -> list[dict[str, Any]]:
    """Trains at ``start`` and at the double and the half of the best rate so far, until both are worse or ``most`` are
    tried."""
    runs = {start: train(start)}
    while len(runs) < most:
        best = min(runs, key=lambda rate: runs[rate]["held_out"][-1][1])
        rate = next((rate for rate in (2 * best, best / 2) if rate not in runs), None)
        if rate is None:
            break
        runs[rate] = train(rate)
    return list(runs.values())


def row_of(options: Options, name: str) -> dict[str, Any]:
    """Plans once, and trains at several learning rates.  ``work``: seconds of all pieces, of the rank with the most."""
    plan = planned(options, name)
    runs = at_rates(FIRST[name], options.rates, lambda rate: trained(options, name, rate, plan))
    timeline, pieces = plan.timeline, plan.pieces
    totals = [sum(piece.seconds for piece in pieces if piece.rank == rank) for rank in range(RANKS)]
    return dict(
        name=name,
        runs=runs,
        seconds=timeline.seconds,
        bubble=timeline.bubble,
        demand=demand(timeline, pieces),
        steps=fill(timeline, pieces).steps,
        work=max(totals),
    )


def everything(options: Options) -> list[dict[str, Any]]:
    return [row_of(options, name) for name in FIRST]


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of("bench.second_order.curves", __doc__)
    parser.add_argument("--steps", type=int, default=400, help="of each run (default %(default)s)")
    parser.add_argument("--every", type=int, default=50, help="steps between validations (default %(default)s)")
    parser.add_argument("--schedule", default="gpipe", help="gpipe, 1f1b, ... (default %(default)s)")
    parser.add_argument("--rates", type=int, default=8, help="tried of each optimizer at most (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    rows = on_ranks(RANKS, everything, Options(args.steps, args.every, args.schedule, args.rates))
    result = dict(
        machine=machine.this_machine(), steps=args.steps, schedule=args.schedule, ranks=RANKS, batch=BATCH, rows=rows
    )
    print(page.table_of(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
