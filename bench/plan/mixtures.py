"""Alpa's mixtures of experts (Zheng et al. 2022, arXiv:2201.12023): parameters, found plans, and how throughput grows.

    python -m bench.plan.mixtures

Models, batch and found plans are those of the paper's repository (alpa-projects/alpa, suite_manual_moe.py and
suite_auto_moe.py), the machines those of its text: nodes of eight V100 of 16 GB, NVLink inside, and one network card of
25 Gbit/s a node.  No constant is fitted.

A found plan has stages of n ranks, each with samples of its own, which divide the experts among them: experts over
replicas inside pipeline stages.  Every block is recomputed; an element takes 8 bytes, as fp32 weights, their 16-bit
copy and 16-bit gradients do under a factored optimizer.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from bench.plan.published import Row, report
from tpfuse.models import GPTConfig
from tpfuse.pipeline.clock import Array
from tpfuse.tools.ledger import model_flops, parameter_count
from tpfuse.tools.plan.cluster import BETWEEN, INSIDE, LINKS, NODE, RING, Cluster, Level
from tpfuse.tools.plan.costs import CostModel, cost_model
from tpfuse.tools.plan.devices import DEVICES
from tpfuse.tools.plan.search import search
from tpfuse.tools.plan.spans import SpanCache
from tpfuse.tools.plan.split import Job, Split
from tpfuse.tools.plan.step import StepEstimate

ALPA = "arXiv:2201.12023"
CARD = 25e9 / 8  # bytes a second of a node's network card, each way
BATCH = SEQ = 1024


class FoundPlan(NamedTuple):
    """The plan that the paper's search found on so many devices: stages of alike layers, and micro-batches.

    ``petaflops``: the throughput of figure 7b, read off the picture to 0.05; None: not read.
    """

    devices: int
    stages: int
    micro_batches: int
    petaflops: float | None = None


class Mixture(NamedTuple):
    """A model, by the name that the repository gives it, billions of parameters; its width, layers and experts."""

    billions: float
    width: int
    layers: int
    experts: int
    plan: FoundPlan | None = None

    @property
    def config(self) -> GPTConfig:
        """Experts in every other layer.  An MLP of two matrices and eight times the width has as many elements as a
        gated one of 16/3 of it, tpfuse's experts; to a multiple of 16, so that ranks divide it."""
        return GPTConfig(
            vocab_size=32000, max_positions=SEQ, hidden_size=self.width, num_layers=self.layers, num_heads=16,
            ffn_size=16 * round(self.width / 3), gated=True, activation="silu", mlp_bias=False, dropout=0.0,
            attention_dropout=0.0, embedding_dropout=0.0, num_experts=self.experts, experts_per_token=2,
            mlp_layers=tuple(range(0, self.layers, 2)),
        )  # fmt: skip

    @property
    def job(self) -> Job:
        return Job(self.config, BATCH, SEQ, torch.float16)

    def rate(self, step: StepEstimate) -> float:
        """Returns PFLOP/s, of model flops."""
        return model_flops(self.config, SEQ, BATCH) / step.seconds / 1e15


MIXTURES = (
    Mixture(0.38, 768, 8, 8),
    Mixture(0.69, 768, 8, 16),
    Mixture(1.3, 768, 16, 16, FoundPlan(4, 2, 32)),
    Mixture(2.4, 1024, 16, 16, FoundPlan(8, 2, 32, 0.36)),
    Mixture(7.1, 1280, 16, 32),
    Mixture(10, 1536, 16, 32, FoundPlan(16, 2, 16, 0.72)),
    Mixture(27, 2048, 16, 48, FoundPlan(32, 8, 128, 1.23)),
    Mixture(70, 2048, 32, 64, FoundPlan(64, 8, 64, 2.33)),
    Mixture(140, 2048, 32, 128),
)
FOUND = [m for m in MIXTURES if m.plan]
SMALLEST = 8  # devices of which the others' rates are multiples


def parameters() -> list[Row]:
    """Parameters, beside the size in the model's name."""
    case = "parameters, width {0.width}, {0.layers} layers, {0.experts} experts"
    return [
        Row("mixtures", case.format(m), "billions", ours=parameter_count(m.config) / 1e9, paper=m.billions)
        for m in MIXTURES
    ]


# ---- costs ----


def cluster(devices: int) -> Cluster:
    """Returns so many V100; a device's share of its node's card is an eighth."""
    levels = [Level(min(devices, NODE), RING * LINKS["v100"].inside, INSIDE)]
    if devices > NODE:
        levels.append(Level(devices, CARD / NODE, BETWEEN))
    return Cluster(DEVICES["v100"]._replace(memory=16e9), devices, tuple(levels))


def staged_costs(machines: Cluster) -> CostModel:
    """Returns the cost model of such stages; the ranks of a stage that are in one node share its card."""

    def hops(split: Split, size: float) -> Array:
        ranks = split.dp * split.tp
        inside, outside = INSIDE + size / machines.levels[0].bandwidth, BETWEEN + size * min(ranks, NODE) / CARD
        seconds = np.where(machines.joining_levels(split.pp, ranks) == 0, inside, outside)
        return np.where(np.eye(split.pp, dtype=bool), 0.0, seconds)

    return cost_model(machines)._replace(hops=hops)


def fastest(m: Mixture, costs: CostModel, fixed: Mapping[str, Any], cache: SpanCache) -> StepEstimate:
    """Returns the fastest plan of a model whose blocks are recomputed, with the values of ``fixed``."""
    assert m.plan is not None
    alike = dict(schedule="1f1b", saving="fastest", full=True, cp=1)
    return search(m.job, m.plan.devices, costs, fixed=alike | fixed, keep=1, cache=cache).steps[0]


# ---- plans ----


class Placed(NamedTuple):
    """A model's found plan, the fastest of its form, and the found plan if messages between stages took no time."""

    mixture: Mixture
    published: StepEstimate
    best: StepEstimate
    free: StepEstimate

    @property
    def behind(self) -> float:
        """Seconds of the found plan's step beyond the best one's, in %."""
        return 100 * (self.published.seconds / self.best.seconds - 1)


def place(m: Mixture) -> Placed:
    """Costs the found plan, and searches all numbers of stages and micro-batches."""
    assert m.plan is not None
    devices, stages, count, _ = m.plan
    costs, cache = staged_costs(cluster(devices)), SpanCache()
    alike, dp = dict(tp=1, sharded=False), devices // stages
    found = dict(dp=dp, micro_batch=BATCH // count // dp, layers=(m.layers // stages,) * stages, over_replicas=dp > 1)
    published, best = (fastest(m, costs, alike | fixed, cache) for fixed in (found, {}))
    at_once = costs._replace(hops=lambda split, size: np.zeros((split.pp, split.pp)))
    return Placed(m, published, best, free=fastest(m, at_once, alike | found, cache))


def line(placed: Placed) -> str:
    """Returns a row of the table in the docs."""
    m = placed.mixture
    published, best = (_text(step.split) for step in (placed.published, placed.best))
    return f"| {m.billions:g}B on {placed.published.split.ranks} | {published} | {placed.behind:+.1f} % | {best} |"


def _text(split: Split) -> str:
    return f"{split.pp} x {split.dp} ranks, micro-batch {split.micro_batch} a rank"


def throughput(plans: list[Placed]) -> list[Row]:
    """Figure 7b: the rates of found plans, as shares of as many times the rate of the smallest, of which the figure's
    line is 2.91 PFLOP/s at 64."""
    rows, linear = [], linear_rate(plans)
    for p in plans:
        plan = p.mixture.plan
        if plan and plan.petaflops and plan.devices > SMALLEST:
            share, paper = 100 / plan.devices / linear, 100 * plan.petaflops / plan.devices / (2.91 / 64)
            for case, step in (
                ("found plan", p.published),
                ("the same, if messages between stages took no time", p.free),
            ):
                row = Row("figure 7b", f"{case}, {plan.devices}", "% of linear", share * p.mixture.rate(step), paper)
                rows.append(row)
    return rows


def linear_rate(plans: list[Placed]) -> float:
    """Returns PFLOP/s of a device in the found plan of the fewest devices that the figure was read at."""
    (rate,) = (p.mixture.rate(p.published) for p in plans if p.published.split.ranks == SMALLEST)
    return rate / SMALLEST


def without_stages(m: Mixture, linear: float) -> float:
    """Returns the rate of the fastest plan of tpfuse's own without stages, in % of linear scaling; ``linear``: the
    PFLOP/s of a device."""
    assert m.plan is not None
    costs = cost_model(cluster(m.plan.devices))
    return 100 * m.rate(fastest(m, costs, dict(pp=1), SpanCache())) / m.plan.devices / linear


HEAD = "| model | the found plan | behind the best | the best |\n|---|---|---|---|"


def main() -> None:
    plans = [place(m) for m in FOUND]
    print(report([(ALPA, row) for row in [*parameters(), *throughput(plans)]]))
    print("\n".join(["", HEAD, *map(line, plans), ""]))
    for m in FOUND:
        if m.plan and m.plan.devices in (16, 32):
            share = without_stages(m, linear_rate(plans))
            print(f"{m.billions:g}B on {m.plan.devices} without stages: {share:.0f} % of linear")


if __name__ == "__main__":
    main()
