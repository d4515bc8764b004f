"""A picture of schedules: time to the right, a row a rank, one below another on the same scale.  Needs matplotlib."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..ledger.plots import figure
from .action import BACKWARD, FORWARD, INPUT, WEIGHT
from .simulator import Timeline

COLOURS = {FORWARD: "#4c72b0", BACKWARD: "#dd8452", INPUT: "#dd8452", WEIGHT: "#55a868"}
NAMES = {FORWARD: "forward", BACKWARD: "backward (I + W)", WEIGHT: "weight gradients (W)"}
_FEW = 400  # actions: more are not numbered


def draw(timelines: Mapping[str, Timeline], path: Path) -> None:
    """Draws schedules by name; the lighter of two tones is the second stage of a rank, or the second copy."""

    def drawing(fig: Any, axes: Any) -> None:
        longest = max(t.seconds for t in timelines.values())
        for ax, (name, timeline) in zip(axes, timelines.items(), strict=True):
            _rows(ax, timeline)
            ax.set(xlim=(0, longest), ylabel="rank", yticks=range(len(timeline.events)))
            ax.set_title(f"{name}: {timeline.seconds:.4g} s, {100 * timeline.bubble:.1f} % bubbles", loc="left", size=9)
            ax.invert_yaxis()
        axes[-1].set_xlabel("seconds")
        patches = [axes[0].barh([0], [0], color=COLOURS[kind], label=words) for kind, words in NAMES.items()]
        fig.legend(handles=patches, loc="outside upper right", ncols=len(patches))

    ranks = max(len(t.events) for t in timelines.values())
    figure(path, (11, 0.6 + len(timelines) * (0.7 + 0.17 * ranks)), drawing, rows=len(timelines))


def _rows(ax: Any, timeline: Timeline) -> None:
    few = sum(map(len, timeline.events)) <= _FEW
    for r, events in enumerate(timeline.events):
        for event in events:
            second = event.action.chain or event.action.stage >= len(timeline.events)
            width = event.end - event.start
            colour = dict(color=COLOURS[event.action.kind], alpha=0.55 if second else 1.0)
            ax.barh(r, width, left=event.start, height=0.9, edgecolor="white", linewidth=0.3, **colour)
            if few:
                ax.text(event.start + width / 2, r, event.action.micro_batch, ha="center", va="center", size=5)
