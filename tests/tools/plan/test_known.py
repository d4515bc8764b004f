"""What searches share."""

import pytest

from tests.tools.plan import fake
from tpfuse.tools.plan.known import Known
from tpfuse.tools.plan.search import search
from tpfuse.tools.plan.split import Split


class Asked(fake.Costs):
    """Costs that note what they were asked."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def __call__(self, job, split):
        self.asked.append((split.tp, split.micro_batch, split.saving, split.full))
        return super().__call__(job, split)


def test_a_second_search_asks_only_for_what_is_new():
    costs, known = Asked(), Known()
    first = search(fake.job(4, 8), 4, fake.means(costs), known=known)
    asked = list(costs.asked)
    again = search(fake.job(4, 8), 4, fake.means(costs, hop=0.1), known=known)
    assert costs.asked == asked and [s.split for s in again.steps] != []
    alone = search(fake.job(4, 8), 4, fake.means(costs, hop=0.1))
    assert [s.seconds for s in again.steps] == [s.seconds for s in alone.steps] != [s.seconds for s in first.steps]
    assert len(costs.asked) > len(asked)


def test_a_split_that_the_model_cannot_do_is_asked_for_once():
    costs, known = Asked(), Known()
    for _ in range(2):
        with pytest.raises(ValueError, match="four heads cannot be split"):
            known.spans(fake.job(), Split(tp=8), costs)
    assert len(costs.asked) == 1
