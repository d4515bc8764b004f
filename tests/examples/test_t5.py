"""An encoder and decoder of one's own: transformers' logits and gradients at every split."""

import pytest

from tests.examples.launch import ok
from tests.examples.test_vit import largest

pytest.importorskip("transformers")


@pytest.mark.slow
@pytest.mark.parametrize("procs", [0, 2, pytest.param(4, marks=pytest.mark.rare)])
def test_the_numbers_are_those_of_transformers(procs):
    assert largest(ok("t5.py", procs=procs)) <= 1e-10
