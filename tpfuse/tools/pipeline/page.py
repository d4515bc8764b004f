"""Timelines of pipelines as a page of HTML that runs the clock itself: one file, which asks nothing of the network.

The page holds each order's actions and the seconds of each stage's passes.  Sliders make passes and messages faster or
slower, and choose among numbers of micro-batches; the script runs the same clock as :mod:`tpfuse.pipeline.simulator`,
to the bit.  The script and its looks are timeline.html.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ...pipeline.action import FORWARD, INPUT, WEIGHT
from ...pipeline.schedules import WITHOUT_FLUSH, Order, begun
from .. import html
from ..html import Json

TEMPLATE = Path(__file__).with_name("timeline.html")
PASSES = FORWARD, INPUT, WEIGHT


class Case(NamedTuple):
    """A pipeline that a page shows.

    ``orders``: by number of micro-batches.  ``seconds``: of each stage's F, I and W, as of
    :func:`tpfuse.pipeline.simulator.simulate`.  ``messages``: seconds from a rank to the next that can be chosen, as
    many in every case; ``links[i][j]``: the share of them that one from rank i to rank j takes (none: all of it).
    ``parts``: seconds of a whole step by part; ``memory``: bytes of each rank by part.
    """

    name: str
    orders: Mapping[int, Order]
    seconds: Mapping[str, Sequence[float]]
    messages: Sequence[float]
    links: Sequence[Sequence[float]] = ()
    parts: Mapping[str, float] = {}
    memory: Sequence[Mapping[str, float]] = ()

    def json(self) -> Json:
        return dict(
            name=self.name,
            orders={count: _order(order) for count, order in self.orders.items()},
            seconds=[list(self.seconds[kind]) for kind in PASSES],
            messages=list(self.messages),
            links=[list(row) for row in self.links],
            parts=dict(self.parts),
            memory=[dict(rank) for rank in self.memory],
        )


class Opening(NamedTuple):
    """The state that a page opens in: its ``title`` and a sentence ``about`` it, a number of micro-batches (None: each
    case has one), the index among ``messages``, the names of cases that are ``selected`` to show their passes, and
    ``limit``, the bytes that a rank may hold."""

    title: str
    about: str
    micro_batches: int | None
    message: int
    selected: Sequence[str]
    limit: float | None = None


def render(cases: Sequence[Case], opening: Opening, command: str, *, advice: str = "") -> str:
    """Returns the page.  ValueError, which names ``command`` and gives ``advice``, where it would be too large."""
    counts = sorted({count for case in cases for count in case.orders})
    data = opening._asdict() | dict(cases=[case.json() for case in cases], counts=counts)
    return html.render(TEMPLATE, data, command, advice=advice)


def _order(order: Order) -> Json:
    return dict(
        actions=[" ".join(map(str, actions)) for actions in order.actions],
        ranks=order.ranks,
        begun=[len(begun(actions)) for actions in order.actions],
        chunks=order.chunks,
        copies=order.copies,
        flush=order.schedule not in WITHOUT_FLUSH,
    )
