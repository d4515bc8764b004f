"""The real runtime with stages that sleep a stated time in place of computing, beside the simulator.

Sleeping takes no core, so four ranks wait for each other on two cores as they would on four devices.  Two constants of
the simulator are measured in the same run, without any schedule: ``overhead``, what an action takes beside its sleep,
by a pipeline of one rank; ``communication``, half of a message's way to a neighbour and back.  A step's time is that of
the fastest: what else runs on the machine makes a rank wake up late, never early.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tpfuse.pipeline import Chunk, Order, WeightGradients, order, simulate
from tpfuse.pipeline.runtime import ChunkStage, ContinuedRuntime, Runtime, Shapes
from tpfuse.pipeline.schedules import EVERY, TRAINED, WITHOUT_FLUSH

ROWS = torch.empty(64, 64, device="meta").requires_grad_()  # what is sent


class Passes(NamedTuple):
    """Seconds of a stage's."""

    F: float
    I: float  # noqa: E741
    W: float


class _Sleep(torch.autograd.Function):
    """F seconds forward, I backward, and W with them or, where there is a store, when its work is run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: Passes, store: WeightGradients | None) -> Tensor:
        ctx.seconds, ctx.store = seconds, store
        time.sleep(seconds.F)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        if ctx.store is None:
            time.sleep(ctx.seconds.I + ctx.seconds.W)
        else:
            time.sleep(ctx.seconds.I)
            ctx.store.add(lambda: time.sleep(ctx.seconds.W), ())
        return dy.clone(), None, None


def steps(order: Order, group: dist.ProcessGroup, seconds: Sequence[Passes]) -> Callable[[], Any]:
    """Returns a function that runs a step of this rank, whose passes sleep ``seconds`` of their stage.

    Without a flush it goes on with what the step before has left in flight.
    """
    store = WeightGradients() if EVERY[order.schedule].split else None

    def run(chunk: Chunk, x: Tensor | None, call: Any) -> Tensor:
        x = torch.zeros(ROWS.shape).requires_grad_() if x is None else x
        y: Tensor = _Sleep.apply(x, seconds[chunk.stage], store)
        return y.sum() if chunk.is_last else y

    chunks = [
        Chunk(i, order.stages, range(0), c)
        for c, ranks in enumerate(order.ranks)
        for i, rank in enumerate(ranks)
        if rank == group.rank()
    ]
    shapes = Shapes(ROWS, torch.zeros(1, 1, dtype=torch.int64, device="meta"))
    device, build = torch.device("cpu"), None if store is None else store.take
    stages = [ChunkStage(c, run, shapes, device=device, group=group, build=build) for c in chunks]
    calls = [SimpleNamespace(inputs=SimpleNamespace(tokens=torch.zeros(1, 1, dtype=torch.int64)))] * order.micro_batches
    if order.schedule in WITHOUT_FLUSH:
        continued, numbers = ContinuedRuntime(stages, order), itertools.count()

        def step_in_flight() -> None:
            number = next(numbers)
            continued.run_batches(calls if number else None, calls, number)

        return step_in_flight
    runtime = Runtime(stages, order, backward=True)
    return lambda: runtime.run(calls, lambda place: None, None)


def alike(order: Order, seconds: float) -> list[Passes]:
    """Returns stages of which a rank's take ``seconds`` together, for F, I and W each."""
    return [Passes(*[seconds / order.chunks] * 3)] * order.stages


def step(run: Callable[[], Any]) -> float:
    """Returns the seconds of a step from a common start; the slowest rank counts."""
    dist.barrier()
    begin = time.perf_counter()
    run()
    return slowest(time.perf_counter() - begin)


def slowest(seconds: float) -> float:
    both = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    return float(both)


def overhead(micro_batches: int, seconds: float, rounds: int) -> float:
    """Returns what an action takes beside its sleep: the median over steps of pipelines of one rank each."""
    groups = [dist.new_group([r]) for r in range(dist.get_world_size())]
    alone = steps(order("1f1b", 1, micro_batches), groups[dist.get_rank()], [Passes(*[seconds] * 3)])
    times = [step(alone) for _ in range(rounds + 1)][1:]
    return max(0.0, (statistics.median(times) - 3 * seconds * micro_batches) / (2 * micro_batches))


def communication(rounds: int) -> float:
    """Returns half the seconds of a message there and back between neighbours."""
    x, peer, times = torch.zeros(ROWS.shape), dist.get_rank() ^ 1, []
    for _ in range(10 * rounds + 1):
        dist.barrier()
        begin = time.perf_counter()
        for transfer in (dist.send, dist.recv) if dist.get_rank() % 2 == 0 else (dist.recv, dist.send):
            transfer(x, peer)
        times.append(slowest(time.perf_counter() - begin) / 2)
    return statistics.median(times[1:])


def measure(micro_batches: int, seconds: float, rounds: int, say: Any) -> dict[str, Any]:
    """Runs every schedule in turn, ``rounds`` times; the fastest step counts.

    ``seconds`` are those of F, of I and of W of all of a rank's layers.
    """
    size, rows = dist.get_world_size(), []
    say("sleeping stages: what an action and a message take")
    constants = dict(overhead=overhead(micro_batches, seconds, rounds), communication=communication(rounds))
    orders = {name: order(name, size, micro_batches) for name in TRAINED}
    runs = {name: steps(plan, dist.group.WORLD, alike(plan, seconds)) for name, plan in orders.items()}
    times: dict[str, list[float]] = {name: [] for name in orders}
    for i in range(rounds + 1):
        for name, run in runs.items():
            say(f"sleeping stages: round {i} of {rounds}, {name}")
            taken = step(run)
            times[name] += [taken] if i else []  # the first makes connections, and fills a pipeline without a flush
    for name, plan in orders.items():
        timeline = simulate(plan, *[seconds / plan.chunks] * 3, **constants)
        taken, asleep = min(times[name]), 3 * seconds * micro_batches
        rows.append(
            dict(
                schedule=name,
                seconds=taken,
                spread=[min(times[name]), max(times[name])],
                simulated=timeline.seconds,
                difference=taken / timeline.seconds - 1,
                bubble=1 - asleep / taken,
                simulated_bubble=1 - asleep / timeline.seconds,
            )
        )
    return dict(rows=rows, **constants)
