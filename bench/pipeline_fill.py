"""How often Shampoo's inverse roots are made anew in a pipeline's bubbles, and how often they could be at most.

    pip install pytorch_optimizer
    python -m bench.pipeline_fill --schedule 1f1b --ranks 4 --micro-batches 8

Trains a small GPT over pipeline stages on gloo processes of one thread with pytorch_optimizer's ScalableShampoo, which
adds to its statistics in every step.  Its own refresh of the inverse roots is switched off; each matrix's is a piece of
work in the bubbles instead (Osawa et al. 2022, arXiv:2211.14133), by the seconds that passes and pieces were
measured to take.  The same pieces run before the same steps must give the same losses, bit for bit.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import tpfuse
from tpfuse.models import GPT, GPTConfig
from tpfuse.pipeline import Filling, Pipeline, Work, demand, fill, schedule
from tpfuse.ranks.messages import gather
from tpfuse.tools.ledger.processes import on_ranks

NEVER = 1 << 30  # steps
SEQ, ROWS = 64, 2  # of a micro-batch


def _option(default: Any, words: str) -> Any:
    return field(default=default, metadata=dict(help=f"{words} (default {default})"))


@dataclass(frozen=True)
class Asked:
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

    def __init__(self, asked: Asked):
        from pytorch_optimizer import ScalableShampoo

        mesh = init_device_mesh("cpu", (asked.ranks, asked.tp), mesh_dim_names=("pp", "tp"))
        sizes = dict(vocab_size=256, max_positions=SEQ, hidden_size=asked.hidden, num_layers=asked.layers, num_heads=4)
        config = GPTConfig(**sizes, tie_embeddings=False)  # two copies would be refreshed in different steps
        stage = mesh["pp"].get_local_rank(), asked.ranks, asked.schedule
        model = GPT(config, tp=tpfuse.TensorParallel(mesh["tp"]), stage=stage, seed=0).train()
        self.asked, self.at, self.refreshed = asked, 0, dict[int, list[int]]()
        self.pipeline: Pipeline = schedule(model, mesh["pp"], asked.schedule, asked.micro_batches)
        self.optimizer = ScalableShampoo(
            model.parameters(),
            lr=0.01,
            start_preconditioning_step=1,
            preconditioning_compute_steps=NEVER,
            block_size=asked.hidden,
            use_svd=True,
        )

    def step(self) -> float:
        """Returns the loss."""
        generator = torch.Generator().manual_seed(self.at)
        ids = torch.randint(256, (self.asked.micro_batches * ROWS, SEQ), generator=generator)
        loss = self.pipeline.step(ids, labels=ids, step=self.at).item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.at += 1
        return loss

    def timeline(self) -> Any:
        ids = torch.randint(256, (self.asked.micro_batches * ROWS, SEQ), generator=torch.Generator().manual_seed(0))
        made = self.pipeline.measure(ids, labels=ids, step=0)
        self.optimizer.zero_grad()
        return made

    def roots(self) -> list[Callable[[], None]]:
        """Returns what makes each inverse root of this rank's parameters."""
        every = [state["pre_conditioner"] for state in self.optimizer.state.values()]
        return [_root(each, i) for each in every for i in range(len(each.statistics))]

    def work(self, measured: list[list[float]]) -> list[Work]:
        """The pieces of all ranks, of which this one's can be run; ``measured``: their seconds, by rank."""
        own, made = self.roots(), []
        here = self.pipeline.group.rank()
        for rank, seconds in enumerate(measured):
            for i, each in enumerate(seconds):
                run = self._refresh(i, own[i]) if rank == here else None
                made.append(Work(rank, each, run=run))
        return made

    def _refresh(self, number: int, root: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            root()
            self.refreshed.setdefault(number, []).append(self.at)

        return run

    def seconds(self) -> list[list[float]]:
        """Returns what each rank's pieces take: the median of those of one size, the mean of tensor-parallel ranks."""
        every = [state["pre_conditioner"] for state in self.optimizer.state.values()]
        sizes = [len(matrix) for each in every for matrix in each.statistics]
        times: dict[int, list[float]] = {}
        for size, root in zip(sizes, self.roots()):
            begin = time.perf_counter()
            root()
            times.setdefault(size, []).append(time.perf_counter() - begin)
        own = torch.tensor([statistics.median(times[size]) for size in sizes], dtype=torch.float64)
        if self.asked.tp > 1:
            dist.all_reduce(own, group=self.pipeline.model.tp.group)
        return gather((own / self.asked.tp).tolist(), self.pipeline.group)


def _root(roots: Any, i: int) -> Callable[[], None]:
    from pytorch_optimizer.optimizer.utils.matrix import compute_power_svd

    def run() -> None:
        roots.pre_conditioners[i] = compute_power_svd(roots.statistics[i], roots.exponent_for_pre_conditioner)

    return run


def train(run: Run, filling: Filling, steps: int, where: str) -> tuple[list[float], float]:
    """Returns the losses of ``steps`` and their median seconds, with refreshes "in bubbles", "before" or "never"."""
    run.pipeline.fill(filling if where == "in bubbles" else None)
    losses, times = [], []
    own = filling.placed[run.pipeline.group.rank()]
    for i in range(steps):
        dist.barrier()
        begin = time.perf_counter()
        if where == "before":
            for placed in own:
                if placed.step == i % filling.steps:
                    filling.work[placed.number].run()
        losses.append(run.step())
        dist.barrier()
        times.append(time.perf_counter() - begin)
    return losses, statistics.median(times)


def measured(asked: Asked) -> dict[str, Any]:
    """On every rank: one plan, and three runs by it."""
    torch.manual_seed(0)
    warm = Run(asked)
    warm.step()
    warm.step()
    plan, found = None, {}
    for where in ("in bubbles", "before", "never"):
        run = Run(asked)
        run.step()  # the optimizer's statistics are made in its first step
        if plan is None:
            plan = warm.timeline(), warm.seconds()
        timeline, seconds = plan
        work = run.work(seconds)
        filling = fill(timeline, work)
        steps = asked.cycles * filling.steps
        run.refreshed.clear()
        losses, each = train(run, filling, steps, where)
        found[where] = losses, each, dict(run.refreshed)
    made = found["in bubbles"][2]
    apart = [b - a for at in made.values() for a, b in zip(at, at[1:])]
    counts = {len(at) for at in made.values()}
    return dict(
        bubble=timeline.bubble,
        pieces=len(work),
        work=sum(piece.seconds for piece in work) / (timeline.seconds * asked.ranks),
        demand=demand(timeline, work),
        planned=filling.steps,
        reached=sorted({x for xs in gather(apart, dist.group.WORLD) for x in xs}),
        refreshes=sorted({x for xs in gather(counts, dist.group.WORLD) for x in xs}),
        same=found["in bubbles"][0] == found["before"][0],
        differs=found["in bubbles"][0] != found["never"][0],
        seconds={where: each for where, (_, each, _) in found.items()},
    )


def text(asked: Asked, found: dict[str, Any]) -> str:
    base = found["seconds"]["never"]
    more = {where: f"{100 * (each / base - 1):+.1f} %" for where, each in found["seconds"].items()}
    return "\n".join(
        (
            f"{asked.schedule}, {asked.ranks} stages x tp {asked.tp}, {asked.micro_batches} micro-batches:"
            f" {100 * found['bubble']:.1f} % bubbles; {found['pieces']} roots, {100 * found['work']:.1f} % of a step",
            f"refresh interval: at least {found['demand']:.2f} steps of bubbles; planned {found['planned']},"
            f" reached {', '.join(map(str, found['reached']))}; each root made {found['refreshes']} times",
            f"losses: those of the same refreshes before the steps, bit for bit: {found['same']};"
            f" those without refreshes: {not found['differs']}",
            f"a step beside one without refreshes: in bubbles {more['in bubbles']}, before it {more['before']}",
        )
    )


def arguments() -> Asked:
    parser = argparse.ArgumentParser(
        prog="python -m bench.pipeline_fill", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for each in fields(Asked):
        kind = type(each.default)
        words = dict(metavar="NAME" if kind is str else "N", help=each.metadata["help"])
        parser.add_argument(f"--{each.name.replace('_', '-')}", type=kind, default=each.default, **words)
    return Asked(**vars(parser.parse_args()))


if __name__ == "__main__":
    asked = arguments()
    print(text(asked, on_ranks(asked.ranks * asked.tp, measured, asked)))
