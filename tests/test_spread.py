"""Every value, or pair of values, of a test's parameters is in a case of the slow suite or the everyday one."""

import itertools

import pytest

from tests.spread import Case, factors, phases


def product(slow=lambda values: False, **parameters):
    cases = (dict(zip(parameters, values)) for values in itertools.product(*parameters.values()))
    return [Case("-".join(map(str, case.values())), case, slow(case)) for case in cases]


def seen(cases, *names):
    """Combinations of these parameters' values that run in a phase of the two."""
    chosen = (case for case, phase in zip(cases, phases(cases)) if phase != "rare")
    return {tuple(case.values[name] for name in names) for case in chosen}


SIZES = dict(a=range(4), b=range(3), c=range(2), d=range(5))


@pytest.mark.parametrize("slow", [lambda case: False, lambda case: True, lambda case: case["a"] > 0])
def test_every_pair_of_three_parameters_and_more(slow):
    cases = product(slow, **SIZES)
    for pair in itertools.combinations(SIZES, 2):
        assert seen(cases, *pair) == set(itertools.product(*(SIZES[name] for name in pair))), pair
    assert phases(cases).count("rare") == len(cases) * 3 // 4


def test_a_mistake_of_a_pair_is_caught_where_a_random_quarter_misses_it():
    """A mistake in one of 20 pairs: of as many cases by chance, a part has none of them."""
    cases = product(lambda case: True, **SIZES)
    chosen = [case for case, phase in zip(cases, phases(cases)) if phase != "rare"]
    caught = lambda some, a, d: any((case.values["a"], case.values["d"]) == (a, d) for case in some)
    pairs = list(itertools.product(SIZES["a"], SIZES["d"]))
    assert all(caught(chosen, *pair) for pair in pairs)
    assert not all(caught(cases[: len(chosen)], *pair) for pair in pairs)


def test_every_value_of_two_parameters_and_a_third_of_the_cases():
    cases = product(lambda case: True, name=range(15), sp=(True, False))
    assert seen(cases, "name") == {(i,) for i in range(15)} and seen(cases, "sp") == {(True,), (False,)}
    assert phases(cases).count("slow") == 15
    assert phases(product(lambda case: True, a=range(6), b=range(6))).count("slow") == 12


def test_one_parameter():
    """A sixth every day, half in all; all that are marked slow."""
    assert sorted(phases(product(name=range(8)))) == ["day"] * 2 + ["rare"] * 4 + ["slow"] * 2
    cases = product(lambda case: case["name"] >= 4, name=range(9))
    assert phases(cases)[4:] == ["slow"] * 5 and sorted(phases(cases)[:4]) == ["day"] + ["slow"] * 3
    assert phases(product(name=range(1))) == ["day"] and "rare" not in phases(product(name=range(4)))


def test_parameters_that_change_together_are_one():
    lists = [Case(str(i), dict(a=i % 3, b="abc"[i % 3], constant=1)) for i in range(6)]
    assert factors(lists) == [(0, 1, 2, 0, 1, 2)]
    assert factors([Case(str(i), dict(a=i % 2, message=i)) for i in range(4)]) == [(0, 1, 2, 3)]
