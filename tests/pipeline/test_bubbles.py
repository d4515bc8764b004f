"""Work in bubbles: none moves the pipeline, all is done, and no sooner than what it needs."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpfuse.pipeline import SCHEDULES, Action, Work, demand, fill, order, simulate
from tpfuse.pipeline.simulator import Event, Timeline

F, B, CURVATURE, INVERSION = 16.1, 26.9, 43.8, 126.0  # ms a layer, BERT-Large on P100 (arXiv:2211.14133)


def timeline(name="1f1b", D=4, N=4):
    return simulate(order(name, D, N, backward=B / F), F, B / 2, B / 2)


def kfac(t, pieces):
    """Curvature of every micro-batch after its backward pass, and inverses after all of it; each in ``pieces``."""
    work = []
    for r, events in enumerate(t.events):
        first = len(work)
        for e in events:
            if e.action.kind == "B":
                work += [Work(r, CURVATURE / pieces, (e.action,))] * pieces
        every = tuple(range(first, len(work)))
        work += [Work(r, INVERSION / pieces, every)] * pieces
    return work


@pytest.mark.parametrize(
    ("name", "ratios"), [("1f1b", (2.33, 1.58, 1.27)), ("chimera", (5.58, 2.94, 2.18))], ids=["1f1b", "chimera"]
)
def test_work_over_bubbles_as_published(name, ratios):
    for D, ratio in zip((4, 8, 16), ratios, strict=True):
        t = timeline(name, D, D)
        work = [Work(r, D * CURVATURE + INVERSION) for r in range(D)]
        assert demand(t, work) == pytest.approx(ratio, rel=0.01)


@pytest.mark.parametrize("name", ["1f1b", "chimera", "gpipe"])
def test_kfac_is_refreshed_within_a_step_of_the_least(name):
    t = timeline(name, 4, 4)
    work = kfac(t, pieces=64)
    filled = fill(t, work)
    assert math.ceil(demand(t, work)) <= filled.steps <= math.ceil(demand(t, work)) + 1
    assert 0 <= filled.bubble < t.bubble
    check(t, work, filled)


def check(t, work, filled):
    period, ends = t.seconds, {e.action: e.end for events in t.events for e in events}
    placed = {p.number: p for row in filled.placed for p in row}
    assert sorted(placed) == list(range(len(work)))
    for n, p in placed.items():
        ends[n] = p.step * period + p.end
    for r, row in enumerate(filled.placed):
        for p in row:
            assert work[p.number].rank == r
            assert p.end - p.start == pytest.approx(work[p.number].seconds)
            events = t.events[r]
            assert p.start >= (events[p.place - 1].end if p.place else 0)
            assert p.end <= (events[p.place].start if p.place < len(events) else period)
            assert all(p.step * period + p.start >= ends[a] - 1e-6 for a in work[p.number].after)
        spans = [(p.step * period + p.start, p.step * period + p.end) for p in row]
        assert all(a[1] <= b[0] + 1e-9 for a, b in zip(spans, spans[1:], strict=False))


@settings(max_examples=40, deadline=None)
@given(name=st.sampled_from(sorted(SCHEDULES)), data=st.data())
def test_any_work_is_placed_where_nothing_else_is(name, data):
    t = simulate(order(name, 4, 8), 1.0, 1.0, 1.0, communication=0.3)
    actions = [[e.action for e in events] for events in t.events]
    longest = [max(b.start - a.end for a, b in zip(events, events[1:], strict=False)) for events in t.events]
    work = []
    for n in range(data.draw(st.integers(1, 12))):
        rank = data.draw(st.integers(0, 3))
        after = [data.draw(st.sampled_from(actions[data.draw(st.integers(0, 3))]))]
        after += [data.draw(st.integers(0, n - 1))] if n else []
        work.append(Work(rank, data.draw(st.floats(0.01, 1)) * max(longest[rank], 0.01), tuple(after)))
    check(t, work, fill(t, work))


def test_a_deed_comes_with_its_work():
    done = []
    work = [Work(0, 1.0, run=lambda: done.append("curvature"))]
    (p,) = fill(timeline(), work).placed[0]
    work[p.number].run()
    assert done == ["curvature"]


@pytest.mark.parametrize(
    ("work", "message"),
    [
        ([Work(4, 1.0)], "work 0 is of rank 4, and there are 4"),
        ([Work(0, 0.0)], "seconds of work 0"),
        ([Work(0, 1e6)], "work 0 takes 1e\\+06 s, and the longest bubble of rank 0 .* s: cut it"),
        ([Work(0, 1.0, (1,)), Work(0, 1.0)], "work 0 needs 1, which is neither"),
        ([Work(0, 1.0, (Action(9, "F", 0),))], "work 0 needs 9F0"),
    ],
)
def test_work_that_cannot_be_placed(work, message):
    with pytest.raises(ValueError, match=f"fill: {message}"):
        fill(timeline(), work)


def test_work_as_long_as_its_bubble():
    """Whose end is rounded up beyond that of the bubble."""
    pair = order("gpipe", 1, 1)
    begin, end = 0.5 + 3 * 2**-53, 1.5 + 3 * 2**-52
    assert begin + (end - begin) > end
    events = tuple(Event(a, *span) for a, span in zip(*pair.actions, ((0.0, begin), (end, end + 1)), strict=True))
    ((placed,),) = fill(Timeline(pair, (events,)), [Work(0, end - begin)]).placed
    assert (placed.step, placed.start, placed.end) == (0, begin, end)


def test_without_bubbles_nothing_fits():
    t = simulate(order("gpipe", 1, 4), 1, 1, 1)
    assert demand(t, [Work(0, 1.0)]) == math.inf
    with pytest.raises(ValueError, match="longest bubble of rank 0 0 s"):
        fill(t, [Work(0, 1.0)])
