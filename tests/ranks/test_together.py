"""An error on one rank is an error on every rank: the same message, the same kind."""

import errno

import pytest

from tpfuse.ranks.together import gather, together

FULL = OSError(errno.ENOSPC, "No space left on device", "model.safetensors")
ERRORS = [
    (ValueError("n_head is 0"), ValueError, "n_head is 0"),
    (FULL, OSError, str(FULL)),
    (KeyError("r"), RuntimeError, "KeyError: 'r'"),
]


def act(world, failing, error):
    def action():
        if world.rank == failing:
            raise error
        return world.rank

    try:
        return together(action, (world.group,))
    except Exception as e:
        return e


@pytest.mark.parametrize("error, kind, message", ERRORS, ids=lambda x: type(x).__name__)
def test_an_error_on_one_rank_is_one_on_all(ranks, error, kind, message):
    mine, *others = ranks(3, act, 0, error)
    assert type(mine) is type(error) and str(mine) == str(error)
    assert [(type(e), str(e)) for e in others] == [(kind, message)] * 2


def test_without_an_error_each_has_its_own_result(ranks):
    assert ranks(3, act, None, None) == [0, 1, 2]


def gathered(world):
    return gather(world.rank, world.group)


def test_gathered_by_rank(ranks):
    assert ranks(3, gathered) == [[0, 1, 2]] * 3
