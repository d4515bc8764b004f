"""Orders of a pipeline's actions: complete, possible, and torch's own where torch has them."""

import inspect
from collections import Counter

import pytest
from torch.distributed.pipelining import schedules

from tpfuse.pipeline import SCHEDULES, Action, order, simulate, torch_lists
from tpfuse.pipeline.schedules import WITHOUT_FLUSH

NUMBERS = (1, 1), (1, 4), (2, 2), (2, 4), (3, 6), (4, 4), (4, 8), (4, 16), (8, 16), (6, 12)


def possible(name, ranks, micro_batches):
    try:
        return order(name, ranks, micro_batches)
    except ValueError:
        return None


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_pass_is_made_once_and_on_its_rank(name):
    tried = 0
    for ranks, micro_batches in NUMBERS:
        if (made := possible(name, ranks, micro_batches)) is None:
            continue
        tried += 1
        count = Counter(a for actions in made.actions for a in actions)
        assert set(count.values()) == {1}
        chains = SCHEDULES[name].chains
        for r, actions in enumerate(made.actions):
            assert all(made.ranks[a.chain][a.stage] == r for a in actions)
        for m in range(micro_batches):
            chain = m // (micro_batches // 2) if chains == 2 else 0
            for stage in range(made.stages):
                kinds = {kind for kind in "FBIW" if Action(stage, kind, m, chain) in count}
                assert kinds in ({"F", "B"}, {"F", "I", "W"}), (stage, m, kinds)
                assert SCHEDULES[name].split or kinds == {"F", "B"}
        assert simulate(made, 1, 1, 1).seconds > 0  # no rank waits for ever
    assert tried >= 3


@pytest.mark.parametrize("name", WITHOUT_FLUSH)
@pytest.mark.parametrize("ranks, micro_batches", [(1, 1), (2, 2), (4, 6), (4, 9)])
def test_steps_without_a_flush_follow_each_other(name, ranks, micro_batches):
    """Of three steps in a row, the middle batch's passes are made once, the last of them in the step after its own."""
    made, count = order(name, ranks, micro_batches), Counter()
    for step in range(3):
        for r, actions in enumerate(made.actions):
            assert all(a.stage == r and -micro_batches <= a.micro_batch < micro_batches for a in actions)
            count += Counter(a._replace(micro_batch=a.micro_batch + step * micro_batches) for a in actions)
    for m in range(micro_batches, 2 * micro_batches):
        assert {count[Action(stage, kind, m)] for stage in range(ranks) for kind in "FB"} == {1}


@pytest.mark.parametrize("name", ["interleaved", "zero-bubble"])
def test_stages_a_rank_are_chosen(name):
    made = order(name, 4, 8, chunks=3)
    assert (made.stages, made.chunks, made.ranks) == (12, 3, ((0, 1, 2, 3) * 3,))


def test_a_v_comes_back():
    assert order("zbv", 3, 6).ranks == ((0, 1, 2, 2, 1, 0),)
    assert order("chimera", 4, 4).ranks == ((0, 1, 2, 3), (3, 2, 1, 0))


def test_what_is_read_of_torch_exists():
    for name in (
        "ScheduleInterleaved1F1B",
        "ScheduleInterleavedZeroBubble",
        "ScheduleZBVZeroBubble",
        "ScheduleDualPipeV",
    ):
        assert torch_lists.actions(name, 2, 4, 2), name
        assert "pipeline_order" in inspect.getsource(getattr(schedules, name))
    kinds = {kind.value for kind in schedules._ComputationType}
    assert {"F", "B", "I", "W"} <= kinds


def test_an_action_is_written_as_torch_writes_it():
    assert str(Action(3, "F", 12)) == "3F12" and str(Action(0, "B", 1, 1)) == "0'B1"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (("zb", 4, 8), "schedule must be one of gpipe, 1f1b.*got 'zb'"),
        ((3, 4, 8), "schedule must be one of"),
        (("gpipe", 0, 8), "ranks"),
        (("gpipe", 4, True), "micro_batches"),
        (("gpipe", 4, 2.5), "micro_batches"),
        (("interleaved", 4, 9), "2 rounds, which must divide their number, got micro_batches=9"),
        (("dualpipev", 4, 7), "as many micro-batches as stages, 8, got micro_batches=7"),
        (("2bw", 4, 5), r"needs at least 2 \(ranks - 1\) = 6 micro-batches, .*got micro_batches=5"),
        (("chimera", 3, 4), "even numbers, got ranks=3"),
        (("chimera", 4, 3), "even numbers, got ranks=4 and micro_batches=3"),
    ],
)
def test_what_a_schedule_cannot_do(call, message):
    with pytest.raises(ValueError, match=f"pipeline: .*{message}"):
        order(*call)


@pytest.mark.parametrize(("name", "chunks"), [("gpipe", 2), ("zbv", 3), ("interleaved", 1), ("interleaved", 65)])
def test_stages_a_rank_that_a_schedule_does_not_have(name, chunks):
    with pytest.raises(ValueError, match=f"{name} has .* stages a rank, got {chunks}"):
        order(name, 4, 8, chunks=chunks)


@pytest.mark.parametrize("backward", [0, -1, float("nan"), "2"])
def test_chimera_is_told_a_number(backward):
    with pytest.raises(ValueError, match="backward"):
        order("chimera", 4, 4, backward=backward)
