"""Units of text and of pictures."""

import pytest

from tpfuse.tools.ledger.text import scale


@pytest.mark.parametrize(
    "largest, unit, expected",
    [
        (0.004, "s", (1e-3, "ms")),
        (2.5, "s", (1, "s")),
        (3e-5, "s", (1e-6, "us")),
        (3.3e8, "B", (1e6, "MB")),
        (12, "B", (1, "B")),
        (0, "s", (1, "s")),
        (74.0, "", (1, "")),
    ],
)
def test_the_unit_of_an_axis(largest, unit, expected):
    assert scale(largest, unit) == expected
