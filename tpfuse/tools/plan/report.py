"""A search's plans as text, as numbers, and drawn."""

from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ...pipeline.simulator import Timeline
from ..ledger.mfu import model_flops
from ..ledger.plots import figure
from ..ledger.text import duration, quantity, table
from ..pipeline import gantt
from .search import Fixed, Found
from .split import Job, Split
from .step import STEP_PARTS, Step

TIE = 1.05  # of the best's seconds: what is nearer cannot be told from it
_COLOURS = dict(
    zip(STEP_PARTS, ("#4c72b0", "#8172b3", "#c44e52", "#dd8452", "#ccb974", "#55a868", "#64b5cd"), strict=True)
)
_LEGEND: dict[str, Any] = dict(fontsize=7, frameon=False, columnspacing=1.0)  # above the drawing


class Scale(NamedTuple):
    """What times and bytes are held to: devices, each of ``peak`` flop/s (None: not known) and ``limit`` bytes."""

    devices: int
    peak: float | None
    limit: float


class Planned(NamedTuple):
    """A job's plans; ``fixed``: the fields of Split that were given."""

    job: Job
    scale: Scale
    found: Found
    fixed: Fixed = MappingProxyType({})

    def mfu(self, step: Step) -> float | None:
        """Model flops over the peak of all devices, in %."""
        if self.scale.peak is None:
            return None
        flops = model_flops(self.job.config, self.job.seq, self.job.batch)
        return 100 * flops / (step.seconds * self.scale.devices * self.scale.peak)

    def ties(self, step: Step) -> bool:
        """Whether a step cannot be told from the best."""
        return step.seconds <= TIE * self.found.steps[0].seconds

    def text(self) -> str:
        steps, found = self.found.steps, self.found
        header = "", "split", "micro-batch", "kept", "dp by", "schedule", "a step", *STEP_PARTS, "peak memory", "MFU %"
        rows = []
        for i, step in enumerate(steps):
            mfu = self.mfu(step)
            rows.append(
                (
                    f"{i + 1}{' =' if i and self.ties(step) else ''}",
                    *words(step.split),
                    duration(step.seconds),
                    *(duration(step.parts[part]) if step.parts[part] else "-" for part in STEP_PARTS),
                    quantity(step.peak, "B"),
                    "-" if mfu is None else f"{mfu:.1f}",
                )
            )
        tied = sum(self.ties(step) for step in steps)
        notes = [
            f"= : within {100 * TIE - 100:.0f} % of the best, a tie ({tied} of {len(steps)})",
            f"a rank may hold {quantity(self.scale.limit, 'B')}; {found.looked:,} splits costed, {found.simulated:,}"
            " simulated",
            f"layers of the best, stage by stage: {' '.join(map(str, steps[0].split.layers or ()))}",
        ]
        if not found.complete:
            notes.insert(0, "interrupted: the best so far")
        return "\n".join([table(header, rows), *notes])

    def json(self) -> dict[str, Any]:
        """Returns plain numbers; the first of ``plans`` is what examples/train_gpt.py --plan runs."""
        job = dict(batch=self.job.batch, seq=self.job.seq, dtype=str(self.job.dtype).removeprefix("torch."))
        job |= dict(optimizer=self.job.optimizer, num_layers=self.job.config.num_layers)
        plans = [dict(as_json(step), tie=self.ties(step), mfu_percent=self.mfu(step)) for step in self.found.steps]
        counts = dict(costed=self.found.looked, simulated=self.found.simulated, complete=self.found.complete)
        return dict(job=job, scale=self.scale._asdict(), **counts, plans=plans)


def words(split: Split) -> tuple[str, int, str, str, str]:
    """Returns the cells of a split."""
    kept = f"{split.saving}{', full recompute' if split.full else ''}"
    by = "-" if split.dp == 1 else "FSDP" if split.sharded else "DDP"
    chunks = f" x {split.chunks}" if split.chunks > 1 else ""
    schedule = "-" if split.pp == 1 else f"{split.schedule}{chunks}"
    return f"dp {split.dp} x tp {split.tp} x pp {split.pp}", split.micro_batch, kept, by, schedule


def as_json(step: Step) -> dict[str, Any]:
    """Returns a plan's numbers: fields of Split, seconds by part, and bytes of each place in the pipeline."""
    memory = [dict(m._asdict(), total=m.total) for m in step.memory]
    values = dict(step.split._asdict(), micro_batches=step.micro_batches, seconds=step.seconds, parts=step.parts)
    return values | dict(slowest_rank=step.rank, memory=memory)


def draw(planned: Planned, path: Path, timeline: Timeline | None = None) -> None:
    """Draws the plans' seconds by part, and beside them the bytes of their fullest rank, against the limit; below, the
    passes of the best, where it is a pipeline."""
    steps: Sequence[Step] = planned.found.steps
    heights = [1.5 + 0.4 * len(steps), *([] if timeline is None else [0.6 + gantt.height(timeline)])]

    def drawing(fig: Any, axes: Any) -> None:
        (times, sizes), below = axes[:2], axes[2:]
        names = [f"{i + 1}: {words(s.split)[0]}, {words(s.split)[-1]}" for i, s in enumerate(steps)]
        left = [0.0] * len(steps)
        for part in STEP_PARTS:
            width = [s.parts[part] for s in steps]
            times.barh(names, width, left=left, color=_COLOURS[part], label=part)
            left = [a + b for a, b in zip(left, width, strict=True)]
        times.set(xlabel="seconds a step")
        times.invert_yaxis()
        fullest = [max(s.memory, key=lambda m: m.total) for s in steps]
        state = [m.state / 1e9 for m in fullest]
        sizes.barh(range(len(steps)), state, color="#4c72b0", label="state")
        activations = [m.activations / 1e9 for m in fullest]
        sizes.barh(range(len(steps)), activations, left=state, color="#dd8452", label="activations")
        sizes.axvline(planned.scale.limit / 1e9, color="black", linestyle="--", label="limit")
        sizes.set(xlabel="GB, the fullest rank", yticks=[])
        sizes.invert_yaxis()
        for ax in times, sizes:
            ax.legend(**_LEGEND, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(STEP_PARTS))
        if timeline is not None:
            grid = times.get_gridspec()
            grid.set_height_ratios(heights)
            for ax in below:
                ax.remove()
            _pipeline(fig.add_subplot(grid[1, :]), steps[0], timeline)

    figure(path, (13, sum(heights)), drawing, columns=2, rows=len(heights))


def _pipeline(ax: Any, step: Step, timeline: Timeline) -> None:
    """Draws a plan's passes; a rank is one of each stage's dp x tp."""
    split, _, _, _, schedule = words(step.split)
    gantt.rows(ax, f"passes of plan 1: {split}, {schedule}, {step.micro_batches} micro-batches", timeline)
    ax.set(xlim=(0, timeline.seconds), xlabel="seconds", ylabel="place in the pipeline")
    ax.legend(handles=gantt.handles(ax), **_LEGEND, loc="lower right", bbox_to_anchor=(1, 1), ncols=3)
