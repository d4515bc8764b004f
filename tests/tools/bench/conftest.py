import functools

import pytest

import tpfuse.tools.bench.command as program
from tpfuse.tools.bench.roofline import measure_card


@pytest.fixture
def small_card(monkeypatch):
    """The card is measured in milliseconds."""
    monkeypatch.setattr(program, "measure_card", functools.partial(measure_card, copy_mib=1, side=16))
