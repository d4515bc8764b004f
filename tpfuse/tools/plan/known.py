"""What searches over one model share: its pieces as arrays, costed once."""

from typing import Any

from ...pipeline.schedules import SCHEDULES
from .spans import Spans
from .split import Costs, Job, Split


class Known:
    """The pieces of one model as arrays, which all searches over the same costs share, whatever its batch."""

    def __init__(self) -> None:
        self._spans: dict[tuple[Any, ...], Spans | ValueError] = {}

    def spans(self, job: Job, split: Split, costs: Costs) -> Spans:
        """Returns the pieces of a split; ValueError where the model cannot be split so."""
        # Without a pipeline, and under some schedules, both ends are on one rank, which a tied embedding is on once.
        schedule = SCHEDULES[split.schedule]
        together = split.pp == 1 or schedule.v or schedule.chains > 1
        key = split.tp, split.micro_batch, split.saving, split.full, schedule.split, together, split.pp == 1
        if key not in self._spans:
            try:
                self._spans[key] = Spans(costs(job, split), split=schedule.split)
            except ValueError as error:
                self._spans[key] = error
        found = self._spans[key]
        if isinstance(found, ValueError):
            raise found
        return found
