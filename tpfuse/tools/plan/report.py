"""The plans that a search ranked: as text, as JSON, and drawn."""

from pathlib import Path
from typing import Any, NamedTuple

from ...pipeline.schedules import Order
from ...pipeline.simulator import Timeline
from ..ledger.mfu import model_flops
from ..ledger.plots import figure, legend
from ..ledger.text import duration, quantity, scale, table
from ..pipeline import gantt, page
from .cluster import Cluster
from .costs import CostModel
from .devices import Device
from .search import Fixed, SearchResult
from .spans import SpanCache
from .split import Job, Split
from .step import STEP_PARTS, Load, StepEstimate

TIE = 1.05  # of the best's seconds: plans nearer than that are not distinguishable


class PredictionErrors(NamedTuple):
    """Predicted over published seconds of so many ``steps``, less 1, in %: their mean and extremes."""

    steps: int
    mean: float
    least: float
    most: float

    def __str__(self) -> str:
        return (
            f"{self.steps} published steps of Megatron-LM on A100 are predicted with errors of {self.mean:+.1f} %"
            f" in the mean, {self.least:+.1f} to {self.most:+.1f} %"
        )


PUBLISHED = PredictionErrors(18, mean=-0.9, least=-7.2, most=7.8)  # as bench/plan/published.py prints them
_COLOURS = "#4c72b0", "#8172b3", "#c44e52", "#dd8452", "#ccb974", "#55a868", "#64b5cd", "#937860"  # of STEP_PARTS


class Plans(NamedTuple):
    """The fastest plans of a job on a cluster; ``costs``, ``fixed``, ``cache``: as of the search."""

    job: Job
    cluster: Cluster
    costs: CostModel
    result: SearchResult
    fixed: Fixed
    cache: SpanCache

    @property
    def steps(self) -> list[StepEstimate]:
        """The plans, the fastest at the front."""
        return self.result.steps

    @property
    def peak(self) -> float | None:
        """Flop/s of a device at the job's dtype; None where unknown."""
        device = self.cluster.device
        return device.peak.get(str(self.job.dtype).removeprefix("torch.")) if isinstance(device, Device) else None

    def mfu(self, step: StepEstimate) -> float | None:
        """Returns model flops over the peak of all devices, in %; None where the peak is unknown."""
        if self.peak is None:
            return None
        flops = model_flops(self.job.config, self.job.seq, self.job.batch)
        return 100 * flops / (step.seconds * self.cluster.devices * self.peak)

    def ties(self, step: StepEstimate) -> bool:
        """Returns whether a step is too near to the best to be told from it."""
        return step.seconds <= TIE * self.steps[0].seconds

    def text(self) -> str:
        steps, result = self.steps, self.result
        header = "", "split", "micro-batch", "kept", "dp by", "schedule", "a step", *STEP_PARTS, "peak memory", "MFU %"
        rows = []
        for i, step in enumerate(steps):
            mfu = self.mfu(step)
            rows.append(
                (
                    f"{i + 1}{' =' if i and self.ties(step) else ''}",
                    *cells(step.split),
                    duration(step.seconds),
                    *(duration(step.parts[part]) if step.parts[part] else "-" for part in STEP_PARTS),
                    quantity(step.peak, "B"),
                    "-" if mfu is None else f"{mfu:.1f}",
                )
            )
        tied = sum(self.ties(step) for step in steps)
        notes = [
            f"= : within {100 * TIE - 100:.0f} % of the best, a tie ({tied} of {len(steps)})",
            f"a rank may hold {quantity(self.costs.limit, 'B')}; {result.costed:,} splits costed, {result.simulated:,}"
            " simulated",
            f"layers of the best, stage by stage: {' '.join(map(str, steps[0].split.layers or ()))}",
        ]
        if isinstance(self.cluster.device, Device):
            notes.append(str(PUBLISHED))
        if not result.complete:
            notes.insert(0, "interrupted: the best so far")
        return "\n".join([table(header, rows), *notes])

    def json(self) -> dict[str, object]:
        """Returns plain numbers; examples/train_gpt.py --plan runs the first of ``plans``."""
        job = dict(batch=self.job.batch, seq=self.job.seq, dtype=str(self.job.dtype).removeprefix("torch."))
        job |= dict(optimizer=self.job.optimizer, num_layers=self.job.config.num_layers)
        plans = [dict(as_json(step), tie=self.ties(step), mfu_percent=self.mfu(step)) for step in self.steps]
        counts = dict(costed=self.result.costed, simulated=self.result.simulated, complete=self.result.complete)
        scale: dict[str, object] = dict(devices=self.cluster.devices, peak=self.peak, limit=self.costs.limit)
        if isinstance(self.cluster.device, Device):
            scale["published_errors_percent"] = PUBLISHED._asdict()
        return dict(job=job, scale=scale) | counts | dict(plans=plans)

    def load(self, step: StepEstimate) -> Load:
        """Returns the work of each pipeline rank of a plan."""
        return Load(self.job, step.split, self.costs, self.cache.spans(self.job, step.split, self.costs.pieces))

    def timeline(self) -> Timeline | None:
        """Returns when the passes of the best plan run; None where it is no pipeline."""
        best = self.steps[0]
        return None if best.split.pp == 1 else self.load(best).timeline()


def cells(split: Split) -> tuple[str, int, str, str, str]:
    """Returns a split's cells of the table: mesh, micro-batch, saved activations, data parallelism, schedule."""
    saving = f"{split.saving}{', full recompute' if split.full else ''}"
    replicas = "FSDP" if split.sharded else "-" if split.dp == 1 else "DDP"
    replicas += ", experts over dp x tp" if split.over_replicas else ""
    chunks = f" x {split.chunks}" if split.chunks > 1 else ""
    schedule = "-" if split.pp == 1 else f"{split.schedule}{chunks}"
    return split.mesh, split.micro_batch, saving, replicas, schedule


def label(split: Split) -> str:
    """Returns a split's cells in one line, without those that it has none of."""
    mesh, micro_batch, *others = cells(split)
    return ", ".join([mesh, f"micro-batch {micro_batch}", *(cell for cell in others if cell != "-")])


def as_json(step: StepEstimate) -> dict[str, object]:
    """Returns a plan's numbers: fields of Split, seconds by part, and bytes of each pipeline rank."""
    memory = [dict(m._asdict(), total=m.total) for m in step.memory]
    values = dict(step.split._asdict(), micro_batches=step.micro_batches, seconds=step.seconds, parts=step.parts)
    return values | dict(slowest_rank=step.rank, memory=memory)


def page_of(plans: Plans) -> str:
    """Returns a page of the plans' seconds by part, the bytes of their fullest rank, and the passes of pipelines."""
    cases = []
    for i, step in enumerate(plans.steps):
        orders, passes = dict[int, Order](), {kind: list[float]() for kind in page.PASSES}
        links = list[list[float]]()
        if step.split.pp > 1:
            load = plans.load(step)
            orders, passes = {step.micro_batches: load.order()}, dict(zip(page.PASSES, load.passes, strict=True))
            links = (load.hops / (step.hop or 1.0)).tolist()
        memory = [dict(state=m.state, activations=m.activations) for m in step.memory]
        name, messages = f"{i + 1}: {label(step.split)}", [times * step.hop for times in (0, 1 / 2, 1, 2, 4, 8)]
        cases.append(page.Case(name, orders, passes, messages, links=links, parts=step.parts, memory=memory))
    about = (
        f"{_title(plans)}, as the planner costs them. Sliders run the clock of passes alone, without sums and optimizer"
        " after the last; a backward pass that is whole counts as gradients of inputs."
    )
    selected = [case.name for case in cases if case.orders][:1] or [cases[0].name]
    opening = page.Opening("Plans", about, None, message=2, selected=selected, limit=plans.costs.limit)
    return page.render(cases, opening, "plan")


def _title(plans: Plans) -> str:
    job, cluster = plans.job, plans.cluster
    size = f"Batch {job.batch} x {job.seq} on {cluster.devices} x {cluster.device.name}"
    return f"{size}: the {len(plans.steps)} fastest plans"


def draw(plans: Plans, path: Path) -> None:
    """Draws the plans' seconds by part, the bytes of their fullest rank against the limit, and the passes of the best,
    where it is a pipeline."""
    steps, timeline = plans.steps, plans.timeline()
    heights = [1.5 + 0.4 * len(steps), *([] if timeline is None else [0.6 + gantt.height(timeline)])]

    def drawing(fig: Any, axes: Any) -> None:
        (times, sizes), below = axes[:2], axes[2:]
        names = [f"{i + 1}: {label(s.split)}" for i, s in enumerate(steps)]
        left = [0.0] * len(steps)
        factor, unit = scale(max(s.seconds for s in steps), "s")
        for part, colour in zip(STEP_PARTS, _COLOURS, strict=True):
            width = [s.parts[part] / factor for s in steps]
            times.barh(names, width, left=left, color=colour, label=part)
            left = [a + b for a, b in zip(left, width, strict=True)]
        times.set(xlabel=f"{unit} a step")
        times.invert_yaxis()
        fullest = [max(s.memory, key=lambda m: m.total) for s in steps]
        state = [m.state / 1e9 for m in fullest]
        sizes.barh(range(len(steps)), state, color="#8c8c8c", label="state")
        activations = [m.activations / 1e9 for m in fullest]
        sizes.barh(range(len(steps)), activations, left=state, color="#d3b8a6", label="activations")
        sizes.axvline(plans.costs.limit / 1e9, color="black", linestyle="--", label="limit")
        sizes.set(xlabel="GB, the fullest rank", yticks=[])
        sizes.invert_yaxis()
        for ax in times, sizes:
            legend(ax)
        if timeline is not None:
            grid = times.get_gridspec()
            grid.set_height_ratios(heights)
            for ax in below:
                ax.remove()
            _pipeline(fig.add_subplot(grid[1, :]), steps[0], timeline)

    figure(path, (15, 0.3 + sum(heights)), drawing, title=_title(plans), columns=2, rows=len(heights))


def _pipeline(ax: Any, step: StepEstimate, timeline: Timeline) -> None:
    """Draws a plan's passes; a row is one of each stage's dp x tp ranks."""
    schedule = cells(step.split)[-1]
    gantt.rows(ax, f"passes of plan 1: {step.split.mesh}, {schedule}, {step.micro_batches} micro-batches", timeline)
    ax.set(xlim=(0, timeline.seconds), xlabel="seconds", ylabel="pipeline rank")
    legend(ax, corner="lower right", handles=gantt.handles(ax))
