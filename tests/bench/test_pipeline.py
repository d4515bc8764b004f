"""The bench of pipelines: a tiny run of it, and its tables."""

import json

import pytest

from bench import documents, measured
from bench.pipeline import arguments
from bench.pipeline.__main__ import main

ROW = dict(provider="tpfuse", schedule="1f1b", speed=[0.9, 1.0, 1.1], bubble=0.27, saved_bytes=2**21)
SLEPT = dict(seconds=1.0, spread=[1.0, 1.2], simulated=0.98, difference=0.02, bubble=0.3, simulated_bubble=0.28)
RESULT = dict(rows=[ROW], sleeping=dict(rows=[dict(SLEPT, schedule=name) for name in ("1f1b", "zbv")]))


def test_tables():
    assert measured.pipeline([RESULT]).splitlines()[2] == "| 1f1b | tpfuse | 1.00 (0.90 to 1.10) | 27.0 | 2.0 |"
    slept = measured.sleeping(RESULT).splitlines()[2]
    assert slept == "| 1f1b | 1.000 (1.200) | 0.980 | +2.0 % | 30.0 | 28.0 |"
    assert measured.sleeping_in_short(RESULT).endswith(" | 30.0 % / 30.0 %; 2.0 % |")
    assert "not measured yet" in measured.pipeline([])
    assert all("not measured yet" in table({}) for table in (measured.sleeping, measured.sleeping_in_short))


@pytest.mark.parametrize("part", measured.short())
def test_the_readmes_row_is_what_the_results_say(part):
    """After a new result: python -m bench.measured"""
    text = measured.README.read_text()
    assert documents.replaced(text, measured.COMMAND, part, measured.short()[part]) == text


def test_help_and_sizes(capsys):
    said = {"--help": "about five minutes", "--layers=6": "a multiple of twice --ranks=4, got 6"}
    for argument, words in said.items():
        with pytest.raises(SystemExit):
            arguments([argument])
        assert words in "".join(capsys.readouterr())


@pytest.mark.slow
def test_a_tiny_run(tmp_path, capsys):
    path = tmp_path / "result.json"
    sizes = "--ranks 2 --layers 4 --micro-batches 4 --batch 4 --seq 16 --width 32 --heads 2"
    main([*sizes.split(), "--rounds", "2", "--sleep", "0.002", "--sleep-rounds", "1", "--json", str(path)])
    result = json.loads(path.read_text())
    trained = {(row["provider"], row["schedule"]) for row in result["rows"]}
    assert len(trained) == 13 and ("torch", "chimera") not in trained
    losses = [row["loss"] for row in result["rows"]]
    assert losses == pytest.approx(losses[:1] * 13, rel=1e-5)  # the same weights, in fp32
    assert all(row["saved_bytes"] > 0 for row in result["rows"])
    assert len(result["sleeping"]["rows"]) == 8 and result["sleeping"]["overhead"] >= 0
    assert all(row["simulated"] > 0 for row in result["sleeping"]["rows"])
    assert measured.sleeping(result) in capsys.readouterr().out
