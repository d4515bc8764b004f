"""The bench of second-order optimizers in bubbles: a tiny run of it, and its table."""

import math

import pytest

from bench import documents
from bench.second_order import curves, page


def row(name, bits, **fields):
    runs = [dict(rate=1e-3, held_out=[[2, 3.0], [4, bits]], optimizer=0.01), dict(rate=2e-3, held_out=[[4, 9.0]])]
    return dict(name=name, runs=runs, seconds=0.09, work=0.0, steps=1, demand=0.0) | fields


def test_a_table(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [row("AdamW", 2.5), row("K-FAC", 2.25, work=0.06, steps=3, demand=2.5), row("Shampoo", 2.75, work=0.1)]
    table = page.table_of(dict(rows=rows)).splitlines()
    assert table[2] == "| AdamW | 0.001 | 2.500 |  |  | 10 | 100 |  | 0.4 |"
    assert table[3] == "| K-FAC | 0.001 | 2.250 | 2.50 | 3 | 10 | 100 | 120 | 0.4 |"
    assert table[4].endswith("| 200 | not reached |")
    page.plot(dict(rows=rows), tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 0 and "not measured yet" in page.table_of({})


def test_the_table_is_what_the_result_says():
    """After a new result: python -m bench.second_order.page"""
    text, part = page.PAGE.read_text(), "second order"
    assert documents.replaced(text, page.COMMAND, part, page.parts()[part]) == text


@pytest.mark.parametrize(
    ("best", "most", "rates"),
    [(1.0, 8, [1, 2, 0.5]), (4.0, 8, [1, 2, 4, 8]), (0.5, 8, [1, 2, 0.5, 0.25]), (64.0, 3, [1, 2, 4])],
)
def test_the_best_rate_lies_between_two_that_are_worse(best, most, rates):
    bits = lambda rate: abs(math.log2(rate / best))
    runs = curves.at_rates(1.0, most, lambda rate: dict(rate=rate, held_out=[[1, 0.0], [2, bits(rate)]]))
    assert [run["rate"] for run in runs] == rates


@pytest.mark.slow
def test_a_tiny_run(ranks):
    pytest.importorskip("pytorch_optimizer")
    for found in ranks(curves.RANKS, tiny):
        assert [name for name, *_ in found] == list(curves.FIRST)
        assert all(len(held_out) == 1 and seconds > 0 for _, held_out, seconds in found)


def tiny(world):
    options = curves.Options(steps=3, interval=3, schedule="gpipe", rates=1)
    rows = [(name, curves.trained(options, name, 1e-3, curves.planned(options, name))) for name in curves.FIRST]
    return [(name, result["held_out"], result["optimizer"]) for name, result in rows]
