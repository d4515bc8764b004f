"""Refreshes of Shampoo's inverse roots in a pipeline's bubbles: how many there are, and how many there could be.

    pip install pytorch_optimizer
    python -m bench.pipeline_fill --schedule 1f1b --ranks 4 --micro-batches 8

Trains a small GPT over pipeline stages on gloo processes of one thread with pytorch_optimizer's ScalableShampoo, which
adds to its statistics in every step.  Its own refresh of the inverse roots is switched off; each matrix's is a piece of
work in the bubbles instead (Osawa et al. 2022, arXiv:2211.14133), by the seconds that passes and pieces were
measured to take.  The same pieces run before the same steps must give the same losses, bit for bit.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import tpfuse
from bench._parser import parser_of
from tpfuse.models import GPT, GPTConfig
from tpfuse.pipeline import Filling, Pipeline, Work, demand, fill, schedule
from tpfuse.ranks.messages import gather
from tpfuse.tools.ledger.processes import on_ranks

NEVER = 1 << 30  # steps
SEQ, ROWS = 64, 2  # of a micro-batch


def _option(default: Any, help_text: str) -> Any:
    return field(default=default, metadata=dict(help=f"{help_text} (default {default})"))


@dataclass(frozen=True)
class Options:
    """The options of the command line."""

    schedule: str = _option("1f1b", "gpipe, 1f1b, ...")
    ranks: int = _option(4, "of the pipeline")
    tp: int = _option(1, "tensor-parallel ranks of each of them")
    micro_batches: int = _option(8, "parts of a step's batch")
    hidden: int = _option(192, "width of the model")
    layers: int = _option(8, "of the model")
    cycles: int = _option(3, "refreshes of every root that are run")


class Run:
    """A model over stages, its optimizer, and how often each of this rank's roots was made."""

    def __init__(self, options: Options):
        from pytorch_optimizer import ScalableShampoo

        mesh = init_device_mesh("cpu", (options.ranks, options.tp), mesh_dim_names=("pp", "tp"))
        sizes = dict(vocab_size=256, max_positions=SEQ, num_heads=4)
        sizes |= dict(hidden_size=options.hidden, num_layers=options.layers)
        config = GPTConfig(**sizes, tie_embeddings=False)  # two copies would be refreshed in different steps
        stage = mesh["pp"].get_local_rank(), options.ranks, options.schedule
        model = GPT(config, tp=tpfuse.TensorParallel(mesh["tp"]), stage=stage, seed=0).train()
        self.options, self.step_number, self.refreshed = options, 0, dict[int, list[int]]()
        self.pipeline: Pipeline = schedule(model, mesh["pp"], options.schedule, options.micro_batches)
        self.optimizer = ScalableShampoo(
            model.parameters(),
            lr=0.01,
            start_preconditioning_step=1,
            preconditioning_compute_steps=NEVER,
            block_size=options.hidden,
            use_svd=True,
        )
        self.roots = Roots(self.pipeline, self.optimizer, self._refreshed)

    def step(self) -> float:
        """Returns the loss."""
        generator = torch.Generator().manual_seed(self.step_number)
        ids = torch.randint(256, (self.options.micro_batches * ROWS, SEQ), generator=generator)
        loss = self.pipeline.step(ids, labels=ids, step=self.step_number).item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step_number += 1
        return loss

    def timeline(self) -> Any:
        ids = torch.randint(256, (self.options.micro_batches * ROWS, SEQ), generator=torch.Generator().manual_seed(0))
        timeline = self.pipeline.measure(ids, labels=ids, step=0)
        self.optimizer.zero_grad()
        return timeline

    def _refreshed(self, number: int) -> None:
        self.refreshed.setdefault(number, []).append(self.step_number)


class Roots:
    """The inverse roots of a rank's ScalableShampoo as work in a pipeline's bubbles; ``refreshed`` is told the number
    of each that is made."""

    def __init__(self, pipeline: Pipeline, optimizer: Any, refreshed: Callable[[int], None]):
        self.pipeline, self.optimizer, self.refreshed = pipeline, optimizer, refreshed

    def runs(self) -> list[Callable[[], None]]:
        """Returns what makes each root."""
        preconditioners = [state["pre_conditioner"] for state in self.optimizer.state.values()]
        return [_root(layer, i) for layer in preconditioners for i in range(len(layer.statistics))]

    def work(self, measured: list[list[float]]) -> list[Work]:
        """The pieces of all ranks, of which this one's can be run; ``measured``: their seconds, by rank."""
        roots, pieces = self.runs(), []
        this_rank = self.pipeline.group.rank()
        for rank, seconds in enumerate(measured):
            for i, duration in enumerate(seconds):
                run = self._refresh(i, roots[i]) if rank == this_rank else None
                pieces.append(Work(rank, duration, run=run))
        return pieces

    def _refresh(self, number: int, root: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            root()
            self.refreshed(number)

        return run

    def seconds(self) -> list[list[float]]:
        """Returns what each rank's pieces take: the median of those of one size, the mean of tensor-parallel ranks."""
        preconditioners = [state["pre_conditioner"] for state in self.optimizer.state.values()]
        sizes = [len(matrix) for layer in preconditioners for matrix in layer.statistics]
        times: dict[int, list[float]] = {}
        for size, root in zip(sizes, self.runs()):
            begin = time.perf_counter()
            root()
            times.setdefault(size, []).append(time.perf_counter() - begin)
        medians = torch.tensor([statistics.median(times[size]) for size in sizes], dtype=torch.float64)
        tp = self.pipeline.model.tp
        if tp.size > 1:
            dist.all_reduce(medians, group=tp.group)
        return gather((medians / tp.size).tolist(), self.pipeline.group)


def _root(roots: Any, i: int) -> Callable[[], None]:
    from pytorch_optimizer.optimizer.utils.matrix import compute_power_svd

    def run() -> None:
        roots.pre_conditioners[i] = compute_power_svd(roots.statistics[i], roots.exponent_for_pre_conditioner)

    return run


def train(run: Run, filling: Filling, steps: int, mode: str) -> tuple[list[float], float]:
    """Returns the losses of ``steps`` and their median seconds, with refreshes "in bubbles", "before" or "never"."""
    run.pipeline.fill(filling if mode == "in bubbles" else None)
    losses, times = [], []
    placements = filling.placed[run.pipeline.group.rank()]
    for i in range(steps):
        dist.barrier()
        begin = time.perf_counter()
        if mode == "before":
            for placed in placements:
                if placed.step == i % filling.steps:
                    filling.work[placed.number].run()
        losses.append(run.step())
        dist.barrier()
        times.append(time.perf_counter() - begin)
    return losses, statistics.median(times)


def measured(options: Options) -> dict[str, Any]:
    """On every rank: one plan, and three runs by it."""
    torch.manual_seed(0)
    warm = Run(options)
    warm.step()
    warm.step()
    plan, runs = None, {}
    for mode in ("in bubbles", "before", "never"):
        run = Run(options)
        run.step()  # the optimizer's statistics are made in its first step
        if plan is None:
            plan = warm.timeline(), warm.roots.seconds()
        timeline, seconds = plan
        work = run.roots.work(seconds)
        filling = fill(timeline, work)
        steps = options.cycles * filling.steps
        run.refreshed.clear()
        losses, duration = train(run, filling, steps, mode)
        runs[mode] = losses, duration, dict(run.refreshed)
    refreshed = runs["in bubbles"][2]
    apart = [b - a for steps in refreshed.values() for a, b in zip(steps, steps[1:])]
    counts = {len(steps) for steps in refreshed.values()}
    return dict(
        bubble=timeline.bubble,
        pieces=len(work),
        work=sum(piece.seconds for piece in work) / (timeline.seconds * options.ranks),
        demand=demand(timeline, work),
        planned=filling.steps,
        reached=sorted({x for xs in gather(apart, dist.group.WORLD) for x in xs}),
        refreshes=sorted({x for xs in gather(counts, dist.group.WORLD) for x in xs}),
        same=runs["in bubbles"][0] == runs["before"][0],
        differs=runs["in bubbles"][0] != runs["never"][0],
        seconds={mode: duration for mode, (_, duration, _) in runs.items()},
    )


def text(options: Options, result: dict[str, Any]) -> str:
    base = result["seconds"]["never"]
    slowdown = {mode: f"{100 * (duration / base - 1):+.1f} %" for mode, duration in result["seconds"].items()}
    return "\n".join(
        (
            f"{options.schedule}, {options.ranks} stages x tp {options.tp}, {options.micro_batches} micro-batches:"
            f" {100 * result['bubble']:.1f} % bubbles;"
            f" {result['pieces']} roots, {100 * result['work']:.1f} % of a step",
            f"refresh interval: at least {result['demand']:.2f} steps of bubbles; planned {result['planned']},"
            f" reached {', '.join(map(str, result['reached']))}; each root made {result['refreshes']} times",
            f"losses: those of the same refreshes before the steps, bit for bit: {result['same']};"
            f" those without refreshes: {not result['differs']}",
            f"a step beside one without refreshes: in bubbles {slowdown['in bubbles']}, before it {slowdown['before']}",
        )
    )


def arguments() -> Options:
    parser = parser_of("bench.pipeline_fill", __doc__)
    for option in fields(Options):
        flag, kind, text = f"--{option.name.replace('_', '-')}", type(option.default), option.metadata["help"]
        metavar = "NAME" if kind is str else "N"
        parser.add_argument(flag, type=kind, default=option.default, metavar=metavar, help=text)
    return Options(**vars(parser.parse_args()))


if __name__ == "__main__":
    options = arguments()
    print(text(options, on_ranks(options.ranks * options.tp, measured, options)))
