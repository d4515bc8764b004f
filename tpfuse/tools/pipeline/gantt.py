"""A picture of schedules: time to the right, a row a rank, one below another on the same scale.  Needs matplotlib."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...pipeline.action import BACKWARD, FORWARD, INPUT, WEIGHT
from ...pipeline.simulator import Timeline
from ..ledger.plots import figure

COLOURS = {FORWARD: "#4c72b0", BACKWARD: "#dd8452", INPUT: "#dd8452", WEIGHT: "#55a868"}
NAMES = {FORWARD: "forward", BACKWARD: "backward (I + W)", WEIGHT: "weight gradients (W)"}
_FEW = 400  # actions: more are not numbered


def draw(timelines: Mapping[str, Timeline], path: Path) -> None:
    """Draws schedules by name; the lighter of two tones is the second stage of a rank, or the second copy."""

    def drawing(fig: Any, axes: Any) -> None:
        longest = max(t.seconds for t in timelines.values())
        for ax, (name, timeline) in zip(axes, timelines.items(), strict=True):
            rows(ax, name, timeline)
            ax.set(xlim=(0, longest))
        axes[-1].set_xlabel("seconds")
        fig.legend(handles=handles(axes[0]), loc="outside upper right", ncols=len(NAMES))

    size = 11, 0.9 + sum(map(height, timelines.values()))
    title = "pipeline schedules: passes by micro-batch, a row a rank"
    figure(path, size, drawing, title=title, rows=len(timelines))


def height(timeline: Timeline) -> float:
    """Returns the inches of a schedule."""
    return 0.7 + 0.17 * len(timeline.events)


def handles(ax: Any) -> list[Any]:
    """Returns the handles of a legend of the colours."""
    return [ax.barh([0], [0], color=COLOURS[kind], label=name) for kind, name in NAMES.items()]


def rows(ax: Any, name: str, timeline: Timeline) -> None:
    """Draws a schedule: a row a rank, the first above."""
    few = sum(map(len, timeline.events)) <= _FEW
    for r, events in enumerate(timeline.events):
        spans: dict[tuple[str, float], list[tuple[float, float]]] = {}  # by colour and tone
        for event in events:
            second = event.action.chain or event.action.stage >= len(timeline.events)
            width = event.end - event.start
            spans.setdefault((COLOURS[event.action.kind], 0.55 if second else 1.0), []).append((event.start, width))
            if few:
                ax.text(event.start + width / 2, r, event.action.micro_batch, ha="center", va="center", size=5)
        for (colour, tone), bars in spans.items():
            ax.broken_barh(bars, (r - 0.45, 0.9), color=colour, alpha=tone, edgecolor="white", linewidth=0.3 * few)
    step = max(1, len(timeline.events) // 16)
    ax.set(ylabel="rank", yticks=range(0, len(timeline.events), step), ylim=(len(timeline.events) - 0.4, -0.6))
    title = f"{name}: {timeline.seconds:.4g} s, {100 * timeline.bubble:.1f} % bubbles"
    ax.set_title(title, loc="left", size=9)
