"""Every Python block of the README runs, in order, in one process, in a fresh directory."""

import json
import pathlib
import re

import pytest
import torch
import torch.distributed as dist

from bench import support

README = pathlib.Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)


def test_the_readme_has_its_examples():
    assert len(BLOCKS) == 7


def test_readme_blocks_run(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    small = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64)  # the real vocabulary, of which the text is
    transformers.GPT2LMHeadModel(small).save_pretrained("path/to/gpt2")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        names = {}
        for block in BLOCKS:
            exec(compile(block, "README.md", "exec"), names)
    finally:
        dist.destroy_process_group()
    assert names["tokens"].shape == (1, 11)
    assert (tmp_path / "path/to/out/model.safetensors").is_file() and (tmp_path / "checkpoints/latest").is_file()
    assert (tmp_path / "path/to/adapter/adapter_config.json").is_file() and (tmp_path / "path/to/merged/config.json").is_file()
    assert torch.isfinite(names["loss"]) and names["out"].logits.shape == (1, 3, 50257)


def test_the_table_of_what_is_supported_is_the_one_that_was_measured():
    results = json.loads(support.RESULTS.read_text())
    assert support.parts(README.read_text())[1] == support.table(results)
    assert all(cell["error"] <= 1e-10 for features in results.values() for cell in features.values())
    assert "not tested" not in support.table(results)


def test_a_report_becomes_a_table(tmp_path):
    """Of several numbers of a cell the largest, of all R; no table where a test failed."""
    noted = [["llama", "logits", 2, 3e-15], ["llama", "logits", 4, 1e-15], ["bert", "saved and loaded", 1, 0.0]]
    properties = "".join(f"<property name='parity' value='{json.dumps(n)}'/>" for n in noted)
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuites><testcase name='a'><properties>{properties}</properties></testcase></testsuites>")
    found = support.read(report)
    assert found["llama"] == {"logits": {"error": 3e-15, "R": [2, 4]}}
    lines = support.table(found).splitlines()
    assert lines[2] == "| logits | not tested | 3e-15 | not tested | not tested | not tested | not tested |"
    assert lines[-1].endswith("| equal |") and "| – |" in lines[-3]
    report.write_text("<testsuites><testcase name='a'><failure/></testcase></testsuites>")
    with pytest.raises(ValueError, match="a failed"):
        support.read(report)
