"""The bench of DistributedDataParallel's settings: its figures, its tables and a tiny run."""

import json

import pytest

from bench import documents
from bench.ddp import BUCKETS, arguments, page, run
from bench.ddp.__main__ import main

TIMES = {name: [1.0, 1.0, 1.0] for name in BUCKETS} | {"no overlap": [1.5] * 3, "compute": [0.9, 0.9, 0.9]}
TIMES |= {"5 MiB": [0.8, 0.8, 0.9], "forward": [0.6] * 3, "messages": [0.5] * 3}
TIMES |= {name: [1.1, 1.2, 1.3] for name in page.CHANGES if name not in TIMES}


def row(**others):
    return dict(ranks=2, gbit=1.0) | run.figures(TIMES) | others


def test_figures():
    found = run.figures(TIMES)
    assert found["seconds"]["static graph"] == pytest.approx([1.15, 1.2, 1.25])
    assert found["over"]["5 MiB"] == pytest.approx([0.8, 0.8, 0.85])
    assert found["saved"][1] == pytest.approx(1 / 3) and found["hidden"][1] == pytest.approx(1 - 0.1 / 0.5)
    assert found["can_hide"][1] == pytest.approx(0.3 / 0.5) and found["over_least"][1] == pytest.approx(1 / 1.1)


def test_tables():
    rows = dict(rows=[row(), row(gbit=0.0, ranks=4)])
    lines = page.settings([rows]).splitlines()
    assert lines[0] == "| in place of 25 MiB | 2 replicas, 1 Gbit/s | 4 replicas, one machine |"
    assert [line.split(" | ")[0] for line in lines[2:]] == [f"| {name}" for name in page.CHANGES]
    assert lines[4] == "| 5 MiB | 0.80 (0.80 to 0.85) | 0.80 (0.80 to 0.85) |"
    shown = page.overlap([rows]).splitlines()[2]
    assert shown.startswith(
        "| not said | 2 | 1 Gbit/s | 1000 | 1500 | 900 | 500 | 33 (33 to 33) | 80 (80 to 80) | 60 (60 to 60) |"
    )
    assert shown.endswith("| 5 MiB: 0.80 (0.80 to 0.85) |")
    one = dict(rows=rows["rows"][:1])
    assert page.settings([rows, one]).splitlines()[4].endswith("| 0.80 (0.80 to 0.85) | not measured yet |")


def test_buckets_that_are_no_faster_in_a_quarter_of_the_rounds_are_not_the_fastest():
    over = {name: [1.0, 1.0, 1.0] for name in BUCKETS}
    assert page.fastest(dict(over=over | {"5 MiB": [0.8, 0.9, 1.1]})) == "25 MiB"


@pytest.mark.parametrize("part", page.parts([]))
def test_the_document_is_what_the_results_say(part):
    """After a new result: python -m bench.ddp.page"""
    text, made = page.PAGE.read_text(), page.parts(page.of_kinds("ddp"))
    assert documents.replaced(text, page.COMMAND, part, made[part]) == text
    assert "not measured yet" in page.parts([])[part]


def test_picture(tmp_path):
    page.draw(dict(rows=[row(), row(ranks=4)]), tmp_path / "ddp.png")
    assert (tmp_path / "ddp.png").stat().st_size > 0


def test_too_few_rounds(capsys):
    with pytest.raises(SystemExit):
        arguments(["--rounds", "1"])
    assert "--rounds must be at least 2, for quartiles, got 1" in capsys.readouterr().err


@pytest.mark.slow
def test_a_tiny_run(tmp_path, capsys):
    sizes = "--ranks 2 --rate 0 --rounds 2 --width 64 --layers 1 --heads 2 --seq 16"
    main([*sizes.split(), "--json", str(tmp_path / "rows.json")])
    result = json.loads((tmp_path / "rows.json").read_text())
    (found,) = result["rows"]
    assert (found["ranks"], found["gbit"]) == (2, 0.0)
    assert set(found["seconds"]) == set(TIMES) and all(low > 0 for low, *_ in found["seconds"].values())
    assert page.overlap([result]) in capsys.readouterr().out
