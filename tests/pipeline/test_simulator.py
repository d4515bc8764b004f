"""The clock: published shares of bubbles, and rules that hold for any times."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpfuse.pipeline import SCHEDULES, Order, order, simulate
from tpfuse.pipeline.action import Action

LIKE_1F1B = {"gpipe", "1f1b"}


def bubbles(name, ranks, micro_batches, F=1.0, I=1.0, W=1.0):  # noqa: E741
    """Percent; the times are of all layers of a rank."""
    made = order(name, ranks, micro_batches, backward=(I + W) / F)
    c = made.chunks
    return 100 * simulate(made, F / c, I / c, W / c).bubble


@pytest.mark.parametrize(("ranks", "micro_batches"), [(4, 8), (8, 16), (2, 8), (5, 10)])
def test_bubbles_by_their_formulas(ranks, micro_batches):
    """(p - 1) / (v m + p - 1); of split schedules, with F = I = W and two stages a rank, (p - 1) / (6 m + p - 1)."""
    p, m = ranks, micro_batches
    for name in LIKE_1F1B:
        assert bubbles(name, p, m) == pytest.approx(100 * (p - 1) / (m + p - 1), abs=1e-9)
    assert bubbles("interleaved", p, m) == pytest.approx(100 * (p - 1) / (2 * m + p - 1), abs=1e-9)
    for name in ("zero-bubble", "zbv", "dualpipev"):
        assert bubbles(name, p, m) == pytest.approx(100 * (p - 1) / (6 * m + p - 1), abs=1e-9)


@pytest.mark.parametrize(
    ("name", "at_4_8", "at_8_16"),
    [("1f1b", 27.3, 30.4), ("interleaved", 15.8, 17.9), ("zero-bubble", 5.9, 6.8), ("zbv", 5.9, 6.8)],
)
def test_bubbles_as_published(name, at_4_8, at_8_16):
    assert (round(bubbles(name, 4, 8), 1), round(bubbles(name, 8, 16), 1)) == (at_4_8, at_8_16)


@pytest.mark.parametrize(("D", "N"), [(4, 4), (8, 8), (4, 8), (8, 16), (16, 16), (2, 4)])
def test_chimera(D, N):
    """(D - 2) / (2 N + D - 2) where a backward pass takes as long as a forward pass (arXiv:2107.06925, table 2)."""
    assert bubbles("chimera", D, N, 1, 0.5, 0.5) == pytest.approx(100 * (D - 2) / (2 * N + D - 2), abs=1e-9)


@pytest.mark.parametrize(("N", "percent"), [(4, 25.0), (8, 17.2)])
def test_chimera_whose_backward_passes_take_twice_as_long(N, percent):
    assert round(bubbles("chimera", 4, N), 1) == percent


@pytest.mark.parametrize(
    ("D", "plain", "chimera"), [(4, (301.4, 42.9), (226.1, 23.8)), (8, (645.8, 46.7), (506.1, 32.0))]
)
def test_steps_of_bert_large(D, plain, chimera):
    """Milliseconds and bubbles of BERT-Large on P100, D = N (arXiv:2211.14133), from 16.1 and 26.9 ms a layer pass."""
    for name, (ms, percent) in {"1f1b": plain, "chimera": chimera}.items():
        timeline = simulate(order(name, D, D, backward=26.9 / 16.1), 16.1, 26.9 / 2, 26.9 / 2)
        assert timeline.seconds == pytest.approx(ms, rel=0.003)
        assert 100 * timeline.bubble == pytest.approx(percent, abs=0.1)


def test_what_is_in_flight():
    peaks = {name: simulate(order(name, 4, 8), 1, 1, 1).in_flight for name in SCHEDULES}
    assert peaks["gpipe"] == (8, 8, 8, 8) and peaks["1f1b"] == (4, 3, 2, 1)
    assert peaks["zbv"] == (8, 8, 8, 8)  # of half a rank's layers each: those of 1F1B's first rank
    assert peaks["interleaved"] == (11, 9, 7, 5)


times = st.floats(0.01, 10)


@given(ranks=st.integers(1, 6), more=st.integers(0, 8), seconds=st.tuples(times, times, times), share=st.floats(0, 1))
def test_without_a_flush_nobody_waits(ranks, more, seconds, share):
    """Nor for a message that takes no longer than a pass; under PipeDream a step is longer by those on its way."""
    (F, I, W), m = seconds, max(1, 2 * (ranks - 1)) + more  # noqa: E741
    communication = share * min(F, I + W)
    t = simulate(order("2bw", ranks, m), F, I, W, communication=communication)
    assert t.seconds == pytest.approx(m * (F + I + W)) and abs(t.bubble) < 1e-9
    assert t.in_flight == tuple(2 * (ranks - r) - 1 for r in range(ranks))
    at_once = simulate(order("pipedream", ranks, m), F, I, W)
    assert abs(at_once.bubble) < 1e-9 and at_once.in_flight == tuple(range(ranks, 0, -1))


def test_a_step_of_pipedream_waits_for_messages():
    assert simulate(order("pipedream", 4, 64), 1, 1, 1, communication=0.5).bubble > 0.1


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(SCHEDULES)),
    numbers=st.sampled_from([(2, 4), (4, 8), (4, 12), (6, 12)]),
    seconds=st.tuples(times, times, times),
    message=st.floats(0, 5),
    data=st.data(),
)
def test_a_timeline_is_one_that_could_happen(name, numbers, seconds, message, data):
    made, ranks = order(name, *numbers), range(numbers[0])
    communication = [[message * (1 + (3 * i + j) % 4) if i != j else 0.0 for j in ranks] for i in ranks]
    F, I, W = ([s * data.draw(st.floats(0.5, 2)) for _ in range(made.stages)] for s in seconds)  # noqa: E741
    t = simulate(made, F, I, W, communication=communication)
    cost = {"F": F, "I": I, "W": W, "B": [i + w for i, w in zip(I, W, strict=True)]}
    ends = {e.action: e for events in t.events for e in events}
    for r, events in enumerate(t.events):
        assert [e.action for e in events] == list(made.actions[r])
        assert all(a.end <= b.start for a, b in zip(events, events[1:], strict=False))
    for action, e in ends.items():
        stage, kind, m, chain = action
        assert e.end - e.start == pytest.approx(cost[kind][stage])
        before = {"F": [(stage - 1, "F")], "W": [(stage, "I")]}.get(
            kind, [(stage, "F"), (stage + 1, "B"), (stage + 1, "I")]
        )
        for s, k in before:
            needed = ends.get(Action(s, k, m, chain))
            if needed is not None:
                sender, receiver = made.ranks[chain][s], made.ranks[chain][stage]
                assert e.start >= needed.end + communication[sender][receiver] - 1e-9
    assert t.seconds >= max(t.busy) - 1e-9
    longest_chain = sum(F) + sum(I)  # of one micro-batch, down and up
    assert t.seconds >= longest_chain - 1e-9


def test_ranks_that_wait_for_ever():
    first, second = (Action(0, "B", 0), Action(0, "F", 0)), (Action(1, "F", 0), Action(1, "B", 0))
    with pytest.raises(ValueError, match="of mine ends in a deadlock: rank 0 for 0B0, rank 1 for 1F0"):
        simulate(Order("mine", 1, (first, second), ((0, 1),)), 1, 1, 1)


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        (dict(F=-1), "simulate: F must"),
        (dict(I=[1, 2]), "simulate: I must be a number, or one for each of 4 stages, got 2"),
        (dict(W=float("nan")), "simulate: W must"),
        (dict(communication=float("inf")), "simulate: communication must"),
        (
            dict(communication=[[0] * 4] * 3),
            r"communication must be a number, or 4 lists of 4, got lengths",
        ),
        (dict(communication=[[-1] * 4] * 4), "simulate: communication must"),
        (dict(overhead=-1), "simulate: overhead must"),
    ],
)
def test_times_are_checked(given_, message):
    with pytest.raises(ValueError, match=message):
        simulate(order("1f1b", 4, 8), **(dict(F=1, I=1, W=1) | given_))


def test_an_overhead_is_of_every_action():
    made = order("1f1b", 2, 2)
    assert simulate(made, 1, 1, 1, overhead=0.5).seconds == simulate(made, 1.5, 1.25, 1.25).seconds
