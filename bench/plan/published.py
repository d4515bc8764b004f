"""Published times against those of the planner's device, cluster, collectives and simulator.

    python -m bench.plan.published

Errors of whole steps stand below every plan (tpfuse/tools/plan/report.py).  No constant is fitted: A100 reaches 75 % of
its GEMM peak, 80 % of its memory's and 230 of 300 GB/s in a ring, V100 50 %, 75 % and 115 of 150 GB/s, a network its
rate (tpfuse/tools/plan/devices.py, cluster.py).  Models are Megatron-LM's own layers (bench/plan/megatron.py), which
the papers measured.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from bench.plan.megatron import E, MegatronCosts, Product, optimizer
from tpfuse.models import GPTConfig
from tpfuse.pipeline import Timeline, Work, demand, order, simulate
from tpfuse.tools.ledger.mfu import PUBLISHED, Published, model_flops
from tpfuse.tools.plan.cluster import preset
from tpfuse.tools.plan.devices import DEVICES
from tpfuse.tools.plan.messages import between_stages, over_dp, over_tp
from tpfuse.tools.plan.report import PredictionErrors
from tpfuse.tools.plan.split import Job, Split

KORTHIKANTI, MEGATRON = "arXiv:2205.05198", "arXiv:1909.08053"
NARAYANAN, TRITON = "arXiv:2104.04473", "triton-lang.org, tutorial 3"
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
        (block, *_) = MegatronCosts(cluster, sequence_parallel=parallel, overlapped=True)(job, split).blocks
        ours = 1e3 * (block.seconds("F") + block.seconds("B"))
        rows.append(Row("table 4", case, "ms", ours=ours, paper=paper))
    return rows


# ---- the same: whole iterations ----

CHUNKS = {"175b": 3, "530b": 3}  # stages a rank, by the interleaved schedule


class Run(NamedTuple):
    """A run of Megatron-LM on A100s, of sequences of 2048; its replicas fill the devices."""

    config: GPTConfig
    devices: int
    batch: int
    tp: int
    pp: int
    chunks: int
    micro_batch: int

    @property
    def split(self) -> Split:
        schedule, dp = "interleaved" if self.chunks > 1 else "1f1b", self.devices // (self.tp * self.pp)
        return Split(dp, self.tp, self.pp, schedule, self.chunks, micro_batch=self.micro_batch)


class Iteration(NamedTuple):
    """A step by the simulator; ``update``: the seconds after the last pass, of replicas' sums and the optimizer."""

    timeline: Timeline
    update: float

    @property
    def seconds(self) -> float:
        return self.timeline.seconds + self.update

    @property
    def without_bubble(self) -> float:
        """If every rank computed as long as the busiest and none waited."""
        return max(self.timeline.busy) + self.update


def step(run: Run, *, full: bool, overlapped: bool) -> Iteration:
    """Returns a step of a run: full recomputation, or selective with sequence parallelism."""
    cluster, split = preset("a100-80gb", run.devices), run.split
    job = Job(run.config, run.batch, 2048, torch.float16)
    split = split._replace(full=full, saving="fastest" if full else "smallest")
    pieces = MegatronCosts(cluster, sequence_parallel=not full, overlapped=overlapped)(job, split)
    actions = order(split.schedule, run.pp, run.batch // (split.dp * run.micro_batch), chunks=run.chunks)
    size = run.config.num_layers // actions.stages
    stages = [pieces.stage(range(i * size, (i + 1) * size)) for i in range(actions.stages)]
    message = float(between_stages(pieces.hop_bytes, split, cluster).max())  # stages fill nodes
    if run.pp > 1 and full:  # with sequence parallelism a rank keeps its part
        message += over_tp("all_gather", pieces.hop_bytes * (run.tp - 1), split, cluster)
    last = len(stages) - 1  # a rank waits for the message in front of a pass
    F = [sum(piece.seconds("F") for piece in stage) + message * (i > 0) for i, stage in enumerate(stages)]
    B = [sum(piece.seconds("B") for piece in stage) + message * (i < last) for i, stage in enumerate(stages)]
    parameters = sum(piece.parameters for stage in stages[:: run.pp] for piece in stage)  # of the rank at the front
    update = sum(cluster.device.seconds(entry, job.dtype) for entry in optimizer(parameters))
    if run.pp > 1:  # else sums run beside the only micro-batch's backward pass, or the last's
        update += over_dp(E * parameters, split, cluster)
    return Iteration(simulate(actions, F, B, 0.0), update)


def iteration(p: Published, *, full: bool) -> Iteration:
    """Returns a step of a row of table 5."""
    micro_batch = 4 if p.name == "22b" else 1
    return step(
        Run(p.config, p.devices, p.batch, p.tp, p.pp, CHUNKS.get(p.name, 1), micro_batch), full=full, overlapped=True
    )


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


# ---- Narayanan et al. 2021: ten sizes, every layer recomputed ----

WEAK_SCALING = (  # billions; heads, width, layers; devices, batch, tp, pp, chunks, micro-batch; TFLOP/s a device
    ("1.7B", 24, 2304, 24, 32, 512, 1, 1, 1, 16, 137),
    ("3.6B", 32, 3072, 30, 64, 512, 2, 1, 1, 16, 138),
    ("7.5B", 32, 4096, 36, 128, 512, 4, 1, 1, 16, 142),
    ("18.4B", 48, 6144, 40, 256, 1024, 8, 1, 1, 8, 135),
    ("39.1B", 64, 8192, 48, 512, 1536, 8, 2, 1, 4, 138),
    ("76.1B", 80, 10240, 60, 1024, 1792, 8, 4, 3, 2, 140),
    ("145.6B", 96, 12288, 80, 1536, 2304, 8, 8, 2, 2, 148),
    ("310.1B", 128, 16384, 96, 1920, 2160, 8, 16, 2, 1, 155),
    ("529.6B", 128, 20480, 105, 2520, 2520, 8, 35, 3, 1, 163),
    ("1008B", 160, 25600, 128, 3072, 3072, 8, 64, 1, 1, 163),
)


def narayanan() -> list[Row]:
    """Table 1; chunks and micro-batches are those of the authors' script, examples/sc21/run_table_1.sh."""
    rows = []
    for name, heads, width, layers, *sizes, paper in WEAK_SCALING:
        config = GPTConfig(vocab_size=51200, max_positions=2048, hidden_size=width, num_layers=layers, num_heads=heads)
        run = Run(config, *sizes)
        # the paper's equation 3: with those of recomputation
        terms = 1 + 2048 / (6 * width) + 51200 / (16 * layers * width)
        flops = 96 * run.batch * 2048 * layers * width**2 * terms
        rate = flops / step(run, full=True, overlapped=False).seconds / run.devices / 1e12
        rows.append(Row("table 1", f"GPT {name}, {run.devices} devices", "TFLOP/s", ours=rate, paper=paper))
    return rows


# ---- cuBLAS on an A100 ----

CUBLAS = {  # M = N = K: TFLOP/s of fp16, as the page of Triton's tutorial printed them
    **{256: 4.10, 384: 12.29, 512: 26.21, 640: 42.67, 768: 63.20, 896: 78.05, 1024: 110.38, 1152: 135.73},
    **{1280: 157.54, 1408: 155.77, 1536: 176.95, 1664: 183.65, 1792: 172.91, 1920: 200.35, 2048: 223.70},
    **{2176: 211.83, 2304: 228.59, 2432: 203.58, 2560: 224.44, 2688: 200.70, 2816: 212.75, 2944: 222.48},
    **{3072: 209.72, 3200: 216.22, 3328: 207.47, 3456: 217.31, 3584: 219.31, 3712: 206.40, 3840: 210.25},
    **{3968: 208.59, 4096: 219.67},
}


def products() -> list[Row]:
    """Products of matrices by size."""
    a100 = DEVICES["a100-80gb"]
    rows = []
    for n, paper in CUBLAS.items():
        call = Product(n, n, n).call
        rate = call.flops / a100.seconds(call, torch.float16) / 1e12
        rows.append(Row("matrix multiplication", f"M = N = K = {n}", "TFLOP/s", ours=rate, paper=paper))
    return rows


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
        passes = optimizer(sum(piece.parameters for piece in parts))
        seconds += sum(cluster.device.seconds(entry, job.dtype) for entry in passes)
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
    "ten sizes": (NARAYANAN, narayanan),
    "products": (TRITON, products),
    "weak scaling": (MEGATRON, weak_scaling),
    "gpipe": (GPIPE, gpipe),
    "pipefisher": (PIPEFISHER, pipefisher),
}


def errors() -> PredictionErrors:
    """Returns the errors of predicted seconds over the whole steps of both of Megatron-LM's papers."""
    seconds = [row.ours / row.paper for p in PUBLISHED for row in of_model(p)[:2]]
    rates = [row.paper / row.ours for row in narayanan()]
    percent = [100 * (ratio - 1) for ratio in seconds + rates]
    return PredictionErrors(len(percent), statistics.mean(percent), min(percent), max(percent))


def report(rows: Sequence[tuple[str, Row]]) -> str:
    """Returns rows, each with its paper, as a table of a page of docs."""
    cells = [
        f"| {source}, {r.table} | {r.case} | {r.unit} | {r.ours:.4g} | {r.paper:.4g} | {r.error:+.1f} % |"
        for source, r in rows
    ]
    return "\n".join(["| from | what | unit | here | paper | error |", "|---|---|---|---|---|---|", *cells])


def main() -> None:
    print(errors())
    print(report([(source, row) for source, make in TABLES.values() for row in make()]))


if __name__ == "__main__":
    main()
