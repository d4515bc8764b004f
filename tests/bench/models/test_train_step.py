"""The bench of a training step: every provider has the same outputs, of each kind of block."""

import json
import sys

import pytest

from bench import measured
from bench.models import train_step

TINY = "--width 96 --heads 2 --seq 16 --batch 2 --layers 1 --rounds 2 --dtype fp32 --attention-dropout 0"


@pytest.mark.slow
def test_a_tiny_run(tmp_path, capsys, monkeypatch):
    path = tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", ["train_step", *TINY.split(), "--json", str(path)])
    train_step.main()
    result = json.loads(path.read_text())
    providers = {"tpfuse fastest", "tpfuse smallest", "DTensor TP+SP", "one process"}
    for kind in train_step.KINDS:
        errors = {row["provider"]: row["max_error"] for row in result["rows"] if row["kind"] == kind}
        assert providers <= errors.keys() and max(errors.values()) < 1e-5, (kind, errors)
    text = measured.train_step([result])
    assert "| llama | fp32 | 0 | tpfuse fastest |" in text and "| gpt2 | fp32 | 0 | DTensor TP+SP | 1.00" in text
    assert "| llama | fp32 | 0 | one process |" in capsys.readouterr().out
