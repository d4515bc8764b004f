"""Published times against those of the planner's device, cluster, collectives and simulator.

    python -m bench.plan.published

No constant is fitted: A100 reaches 75 % of its GEMM peak, 80 % of its memory's and 230 of 300 GB/s in a ring, V100 50
%, 75 % and 115 of 150 GB/s, a network its rate (tpfuse/tools/plan/devices.py, cluster.py).  Models are Megatron-LM's
own layers (bench/plan/megatron.py), which the papers measured.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from bench.plan.megatron import MegatronCosts, optimizer
from tpfuse.models import GPTConfig
from tpfuse.pipeline import Timeline, Work, demand, order, simulate
from tpfuse.tools.ledger.mfu import PUBLISHED, Published, model_flops
from tpfuse.tools.plan.cluster import preset
from tpfuse.tools.plan.messages import between_stages
from tpfuse.tools.plan.split import Job, Split

KORTHIKANTI, MEGATRON = "arXiv:2205.05198", "arXiv:1909.08053"
GPIPE, PIPEFISHER = "arXiv:1811.06965", "arXiv:2211.14133"


class Row(NamedTuple):
    """A number of a paper, and ours."""

    table: str
    case: str
    unit: str
    ours: float
    paper: float

    @property
    def error(self) -> float:
        """Error of ours, in %."""
        return 100 * (self.ours / self.paper - 1)


# ---- Korthikanti et al. 2022: one layer of 22B, micro-batch 4, tp 8 ----

LAYER = (  # case, sequence parallel, split, milliseconds forward and backward
    ("no recomputation", False, Split(tp=8, micro_batch=4), 19.6),
    ("sequence parallel", True, Split(tp=8, micro_batch=4), 19.0),
    ("full recomputation", False, Split(tp=8, micro_batch=4, full=True), 27.2),
    ("selective", False, Split(tp=8, micro_batch=4, saving="smallest"), 20.9),
    ("selective, sequence parallel", True, Split(tp=8, micro_batch=4, saving="smallest"), 20.3),
)


def one_layer() -> list[Row]:
    """Table 4."""
    cluster, job = preset("a100-80gb", 8), Job(PUBLISHED[0].config, 4, 2048, torch.float16)
    rows = []
    for case, parallel, split, paper in LAYER:
        (block, *_) = MegatronCosts(cluster, sequence_parallel=parallel)(job, split).blocks
        ours = 1e3 * (block.seconds("F") + block.seconds("B"))
        rows.append(Row("table 4", case, "ms", ours=ours, paper=paper))
    return rows


# ---- the same: whole iterations ----

CHUNKS = {"175b": 3, "530b": 3}  # stages a rank, by the interleaved schedule


class Iteration(NamedTuple):
    """A step by the simulator; ``update``: the optimizer's seconds."""

    timeline: Timeline
    update: float

    @property
    def seconds(self) -> float:
        return self.timeline.seconds + self.update

    @property
    def without_bubble(self) -> float:
        """If every rank computed as long as the busiest and none waited."""
        return max(self.timeline.busy) + self.update


def iteration(p: Published, *, full: bool) -> Iteration:
    """Returns a step of a row of table 5: full recomputation, or selective with sequence parallelism."""
    cluster, chunks = preset("a100-80gb", p.devices), CHUNKS.get(p.name, 1)
    micro = 4 if p.name == "22b" else 1
    schedule = "interleaved" if chunks > 1 else "1f1b"
    job = Job(p.config, p.batch, 2048, torch.float16)
    split = Split(tp=p.tp, pp=p.pp, schedule=schedule, chunks=chunks, micro_batch=micro)
    split = split._replace(full=full, saving="fastest" if full else "smallest")
    pieces = MegatronCosts(cluster, sequence_parallel=not full)(job, split)
    actions = order(schedule, p.pp, p.batch // micro, chunks=chunks)
    size = p.layers // actions.stages
    stages = [pieces.stage(range(i * size, (i + 1) * size)) for i in range(actions.stages)]
    F, B = ([sum(piece.seconds(kind) for piece in stage) for stage in stages] for kind in "FB")
    timeline = simulate(actions, F, B, 0.0, communication=between_stages(pieces.hop_bytes, split, cluster))
    parameters = sum(piece.parameters for stage in stages[:: p.pp] for piece in stage)  # of the rank at the front
    update = cluster.device.seconds(optimizer(parameters), job.dtype)
    return Iteration(timeline, update)


def of_model(p: Published) -> list[Row]:
    """Rows of one model."""
    full, selective = iteration(p, full=True), iteration(p, full=False)
    rows = [
        Row("table 5", f"GPT {p.name}, full recomputation", "s", ours=full.seconds, paper=p.full_seconds),
        Row("table 5", f"GPT {p.name}, selective, sequence parallel", "s", ours=selective.seconds, paper=p.seconds),
    ]
    if p.name == "1t":
        case, ours = "GPT 1t, the same, if no rank waited", selective.without_bubble
        rows.append(Row("table 5", case, "s", ours=ours, paper=p.seconds))
    return rows


def iterations() -> list[Row]:
    """Table 5."""
    return [row for p in PUBLISHED for row in of_model(p)]


# ---- Shoeybi et al. 2019: weak scaling over tp ----

WEAK = (  # hidden, heads, layers, tp, share of linear scaling in %
    (1536, 16, 40, 1, 100.0),
    (1920, 20, 54, 2, 95.0),
    (2304, 24, 64, 4, 82.0),
    (3072, 32, 72, 8, 77.0),
)


def weak_scaling() -> list[Row]:
    """Figure 5, model parallel: batch 8, 1024 positions, every layer recomputed."""
    rows, base = [], 0.0
    for hidden, heads, layers, tp, paper in WEAK:
        config = GPTConfig(vocab_size=51200, max_positions=1024, hidden_size=hidden, num_layers=layers, num_heads=heads)
        job, cluster = Job(config, 8, 1024, torch.float16), preset("v100", 8)
        pieces = MegatronCosts(cluster, sequence_parallel=False)(job, Split(tp=tp, micro_batch=8, full=True))
        parts = pieces.stage(range(layers))
        seconds = sum(piece.seconds(kind) for piece in parts for kind in "FB")
        seconds += cluster.device.seconds(optimizer(sum(piece.parameters for piece in parts)), job.dtype)
        rate = model_flops(config, 1024, 8) / tp / seconds
        base = base or rate
        rows.append(Row("figure 5", f"V100, tp {tp}", "% of linear", ours=100 * rate / base, paper=paper))
    return rows


# ---- pipelines whose passes are known ----


def gpipe() -> list[Row]:
    """Table 2 of Huang et al. 2018: Transformer-48 over K accelerators, over K = 2 with one micro-batch."""

    def seconds(ranks: int, micro_batches: int) -> float:
        share = 1 / (ranks * micro_batches)
        return simulate(order("gpipe", ranks, micro_batches), share, share, share).seconds

    speed = lambda ranks: seconds(2, 1) / seconds(ranks, 32)
    return [
        Row("table 2", f"K = {k}, M = 32", "times", ours=speed(k), paper=paper)
        for k, paper in ((2, 1.8), (4, 3.4), (8, 6.3))
    ]


FORWARD, BACKWARD = 16.1, 26.9  # ms of a stage, which the paper's two times at D = 4 say: two equations
CURVATURE, INVERSION = 43.8, 126.0  # ms of a micro-batch and of a stage, which its two shares of work at D = 4 say
STEPS = (  # D = N; 1F1B: ms, bubble in %, work over bubble; Chimera: the same
    (4, (301.4, 42.9, 2.33), (226.1, 23.8, 5.58)),
    (8, (645.8, 46.7, 1.58), (506.1, 32.0, 2.94)),
    (16, (1334.7, 48.4, 1.27), (1066.2, 35.4, 2.18)),
)


def pipefisher() -> list[Row]:
    """Osawa et al. 2022: BERT-Large on P100, D stages and as many micro-batches: a step, how much of it is waited, and
    K-FAC's work over that."""
    rows = []
    for depth, *papers in STEPS:
        for schedule, paper in zip(("1f1b", "chimera"), papers, strict=True):
            actions = order(schedule, depth, depth, backward=BACKWARD / FORWARD)
            timeline = simulate(actions, FORWARD, BACKWARD / 2, BACKWARD / 2)
            work = [Work(rank, depth * CURVATURE + INVERSION) for rank in range(depth)]
            ours = timeline.seconds, 100 * timeline.bubble, demand(timeline, work)
            for quantity, unit, value, published in zip(
                ("step", "bubble", "work"), ("ms", "%", "bubbles"), ours, paper
            ):
                case = f"{quantity} of {schedule}, D = N = {depth}"
                rows.append(Row("schedules", case, unit, ours=value, paper=published))
    return rows


TABLES: dict[str, tuple[str, Callable[[], list[Row]]]] = {
    "one layer": (KORTHIKANTI, one_layer),
    "iterations": (KORTHIKANTI, iterations),
    "weak scaling": (MEGATRON, weak_scaling),
    "gpipe": (GPIPE, gpipe),
    "pipefisher": (PIPEFISHER, pipefisher),
}


def report(rows: Sequence[tuple[str, Row]]) -> str:
    """Returns rows, each with its paper, as a table of a page of docs."""
    cells = [
        f"| {source}, {r.table} | {r.case} | {r.unit} | {r.ours:.4g} | {r.paper:.4g} | {r.error:+.1f} % |"
        for source, r in rows
    ]
    return "\n".join(["| from | what | unit | here | paper | error |", "|---|---|---|---|---|---|", *cells])


def main() -> None:
    print(report([(source, row) for source, make in TABLES.values() for row in make()]))


if __name__ == "__main__":
    main()
