"""A card's ceilings, and the least time that they leave."""

import pytest
import torch

from tests.tools.bench.common import CARD, CPU
from tpfuse.tools.bench.roofline import measure_card


def test_the_floor_is_the_larger_of_two_times():
    assert CARD.floor("bf16", 10**12, 0) == pytest.approx(1.0)
    assert CARD.floor("bf16", 10**12, 2 * 10**14) == pytest.approx(2.0)
    assert CARD.floor("fp32", 10**12, 2 * 10**14) == pytest.approx(20.0)


def test_a_card_is_measured():
    card = measure_card(CPU, {"fp32": torch.float32}, copy_mib=1, side=16)
    assert card.copy_gbs > 0 and card.matrix_tflops["fp32"] > 0 and card.name
