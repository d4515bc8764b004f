"""Every Python block of the README runs, in order, in one process, in a fresh directory."""

import pathlib
import re

import pytest
import torch
import torch.distributed as dist

README = pathlib.Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)


def test_the_readme_has_its_examples():
    assert len(BLOCKS) == 4


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
    assert torch.isfinite(names["loss"])
