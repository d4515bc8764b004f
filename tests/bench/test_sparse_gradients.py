"""The benches of gradients over slow links: tiny runs of them, and their tables."""

import json

import pytest

from bench import documents
from bench.sparse_gradients import arguments, links, page, training

OVER = dict(dense=[1] * 3, TopkA=[0.2, 0.25, 0.3])
ROW = dict(ranks=2, gbit=0.1, seconds=dict(dense=1.2, TopkA=0.3), over_dense=OVER)
LOG = [dict(step=1, loss=5.0, bytes_sent=100), dict(step=2, loss=4.0, bytes_sent=10), dict(step=2, held_out_bits=2.1)]
DENSE = [dict(step=1, loss=5.0), dict(step=2, loss=4.0), dict(step=2, held_out_bits=2.0)]


def test_a_table_of_links():
    made = page.links(dict(rows=[ROW, ROW | dict(gbit=0.0)])).splitlines()
    assert made[0] == "| replicas | Gbit/s | dense, ms | TopkA |" and made[1] == "|---|---|---|---|"
    assert made[2] == "| 2 | 0.1 | 1200 | 0.25 (0.20 to 0.30) |" and made[3].startswith("| 2 | unshaped |")
    assert "not measured yet" in page.links({})


def test_a_table_of_runs(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [training.row_of("dense", DENSE, 100), training.row_of("1 %", LOG, 100)]
    assert [row["held_out"] for row in rows] == [[[2, 2.0, 200]], [[2, 2.1, 110]]]
    made = page.training(dict(rows=rows, steps=2)).splitlines()
    assert "held out after 2 steps" in made[0]
    assert made[2:] == ["| dense | 2.000 | +0.0 % | 0 | 0.000 |", "| 1 % | 2.100 | +5.0 % | 0 | 0.000 |"]
    page.plot(dict(rows=rows), tmp_path / "x.svg")
    assert (tmp_path / "x.svg").stat().st_size > 0 and "not measured yet" in page.training({})


@pytest.mark.parametrize("part", page.parts())
def test_the_tables_are_what_the_results_say(part):
    """After a new result: python -m bench.sparse_gradients.page"""
    text = page.PAGE.read_text()
    assert documents.replaced(text, page.COMMAND, part, page.parts()[part]) == text


def test_too_few_rounds_are_refused(capsys):
    with pytest.raises(SystemExit):
        arguments(["--rounds", "1"])
    assert "--rounds must be at least 2, for quartiles, got 1" in capsys.readouterr().err


@pytest.mark.slow
def test_a_tiny_run_over_links(tmp_path, capfd):
    path = tmp_path / "rows.json"
    sizes = "--width 32 --layers 1 --heads 2 --seq 16 --batch 1 --rounds 2 --ranks 2 --rate 1 0"
    links.main([*sizes.split(), "--json", str(path)])
    rows = json.loads(path.read_text())["rows"]
    said = capfd.readouterr()
    gbit = [0.0] if "no shaped link" in said.err else [1.0, 0.0]
    assert [(row["ranks"], row["gbit"]) for row in rows] == [(2, rate) for rate in gbit]
    names = ["dense", "bf16", "fp16", "PowerSGD, rank 1", "TopkA", "Ok-Topk"]
    assert all(list(row["seconds"]) == names and min(row["seconds"].values()) > 0 for row in rows)
    assert page.links(dict(rows=rows)) in said.out


@pytest.mark.slow
def test_a_tiny_run_of_training(tmp_path, capsys, monkeypatch):
    pytest.importorskip("tqdm")
    path = tmp_path / "rows.json"
    tiny = {"width": 32, "layers": 1, "heads": 2, "seq": 32, "max-mb": 0.03, "prompt": "x"}
    monkeypatch.setattr(training, "MODEL", tiny)
    training.main(["--steps", "20", "--every", "10", "--json", str(path)])
    result = json.loads(path.read_text())
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == list(training.SETTINGS) and page.training(result) in capsys.readouterr().out
    assert all([step for step, *_ in row["held_out"]] == [10, 20] for row in rows.values())
    assert rows["dense"]["bytes"] == 20 * rows["dense"]["bytes_a_step"]
    assert rows["1 %"]["bytes"] < rows["dense"]["bytes"]
    assert 5 * rows["1 %"]["bytes_a_step"] < rows["dense"]["bytes_a_step"]
