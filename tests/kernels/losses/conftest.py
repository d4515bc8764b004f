"""Chunks of the vocabulary small enough for tests, on the CPU and in the launchers."""

import importlib

import pytest

from tpfuse.kernels.losses import linear_triton as K

module = importlib.import_module("tpfuse.kernels.losses.linear")


@pytest.fixture
def small_chunks(monkeypatch):
    """Of 128 columns, however few the rows."""
    for where, name, value in ((module, "ELEMENTS", 1), (K, "ELEMENTS", 1), (K, "LEAST_COLUMNS", 128)):
        monkeypatch.setattr(where, name, value)
