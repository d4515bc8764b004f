"""A process keeps the memory of a step: the system counts pages, in processes of their own."""

import os
import platform
import subprocess
import sys

import pytest

SETTINGS = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD"}
STEPS = """
import resource
import torch
from tpfuse.models import GPT, GPTConfig
torch.set_num_threads(1)
model = GPT(GPTConfig(vocab_size=256, hidden_size=256, num_layers=2, num_heads=4, max_positions=128), seed=0)
ids = torch.randint(256, (2, 128))
def pages():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for i in range(13):
    if i == 3:
        before = pages()
    model(ids, labels=ids).loss.backward()
print((pages() - before) / 10)
"""


def _pages(**environment: str) -> float:
    """Returns the pages that a training step takes from the system."""
    run = subprocess.run(
        [sys.executable, "-c", STEPS], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    return float(run.stdout)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the thresholds are glibc's")
@pytest.mark.skipif(bool(SETTINGS & {*os.environ}), reason="a user's settings stay")
def test_a_step_takes_few_pages_anew():
    assert _pages() < 100
    assert _pages(MALLOC_TRIM_THRESHOLD_="131072", MALLOC_MMAP_THRESHOLD_="131072") > 300
