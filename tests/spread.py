"""When each case of a test runs: every day, in the slow phase, or in ``make test-every`` alone.

Every day: a sixth of the cases that are not marked slow.  The slow phase adds what a mistake of one value, or of two
that meet, shows in.  Of a test with three parameters or more: each pair of values, and at least a quarter of the cases.
With two: each value, and at least a third.  With one: up to half of the cases, and all that are marked slow.  The rest
is rare.
"""

import heapq
import itertools
import math
import zlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

DAILY, LATE = 1 / 6, 1 / 2  # of the cases that are not marked, those that run every day, and those that do so or later
LEAST = {2: 1 / 3, 3: 1 / 4}  # of all cases of a test with so many parameters (or more), those that are not rare
MANY = 4  # cases: with no more, none is rare


class Case(NamedTuple):
    """One call of a test."""

    name: str
    values: Mapping[str, Hashable]  # of its parameters
    slow: bool = False  # as its author marked it


def phases(cases: Sequence[Case]) -> list[str]:
    """Returns "day", "slow" or "rare" for each case of one test."""
    independent = factors(cases)
    facts = {case: _facts(case, independent) for case in range(len(cases))}
    marked, unmarked = ([i for i in facts if cases[i].slow is slow] for slow in (True, False))
    key = lambda i: zlib.crc32(cases[i].name.encode())  # spread, and the same in every run
    seen: set[Hashable] = set()
    daily = [i for i, _ in itertools.islice(covering(unmarked, facts, seen, key), math.ceil(DAILY * len(unmarked)))]
    seen = set().union(*(facts[i] for i in daily))
    rest = list(covering([i for i in facts if i not in daily], facts, seen, key))
    half = math.ceil(LATE * len(unmarked)) if len(unmarked) > MANY else len(unmarked)
    count = half + len(marked) - len(daily)
    if len(independent) == 1:
        rest.sort(key=lambda each: not cases[each[0]].slow)
    elif len(cases) > MANY:
        enough = sum(new for _, new in rest)
        least = math.ceil(LEAST[min(len(independent), 3)] * len(cases)) - len(daily)
        count = min(count, max(enough, least))
    late = {i for i, _ in rest[:count]}
    return ["day" if i in daily else "slow" if i in late else "rare" for i in facts]


def factors(cases: Sequence[Case]) -> list[tuple[int, ...]]:
    """Returns the parameters that vary independently, each as a number for the value that each case has of it.

    Parameters that change together are one; one that no two cases share tells them apart alone.
    """
    columns = {}
    for name in dict.fromkeys(itertools.chain.from_iterable(case.values for case in cases)):
        numbers: dict[Hashable, int] = {}
        column = tuple(numbers.setdefault(case.values.get(name), len(numbers)) for case in cases)
        if len(numbers) == len(cases):
            return [column]
        if len(numbers) > 1:
            columns[column] = None
    return list(columns)


def _facts(case: int, independent: list[tuple[int, ...]]) -> frozenset[Hashable]:
    """Returns a case's values, and of three parameters or more their pairs."""
    values = [(i, column[case]) for i, column in enumerate(independent)]
    return frozenset(values if len(values) < 3 else itertools.combinations(values, 2))


def covering(
    cases: Sequence[int], facts: Mapping[int, frozenset[Hashable]], seen: set[Hashable], key
) -> Iterator[tuple[int, bool]]:
    """Yields each case, the one with most facts that are not yet in ``seen`` first, and whether it has any."""
    heap = [(-len(facts[i] - seen), key(i), i) for i in cases]
    heapq.heapify(heap)
    while heap:
        old, spread, i = heapq.heappop(heap)
        new = -len(facts[i] - seen)
        if new > old:  # others had them first
            heapq.heappush(heap, (new, spread, i))
        else:
            seen |= facts[i]
            yield i, new < 0
