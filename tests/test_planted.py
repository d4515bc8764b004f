"""The fixture that plants mistakes: they are seen, however the op is called, and gone afterwards."""

import functools

import pytest
import torch

from tests.common import Recorder
from tests.planted import Mistaken, doubled, planted, scaled
from tpfuse.kernels.runtime.op import OPS
from tpfuse.kernels.runtime.philox import Mask

X, W = torch.arange(12.0).view(3, 4), torch.ones(2, 4)
LINEAR = "linear_fwd"


def linear():
    """The op, called directly and through the dispatcher."""
    with torch.no_grad():
        direct = OPS[LINEAR](X, W, None, "none")[0]
    with Recorder():
        dispatched = OPS[LINEAR](X, W, None, "none")[0]
    return direct, dispatched


def test_an_op_is_wrong_while_the_mistake_stands():
    right, again = linear()
    assert torch.equal(right, again)
    with planted(LINEAR, doubled):
        assert all(torch.equal(y, 2 * right) for y in linear())
        with planted(LINEAR, doubled):  # on top
            assert all(torch.equal(y, 4 * right) for y in linear())
        assert torch.equal(OPS[LINEAR].reference(X, W, None, "none")[0], right)
    assert all(torch.equal(y, right) for y in linear())


@pytest.mark.parametrize("_", range(2))
def test_the_fixture_leaves_nothing_to_the_next_test(request, _):
    right = linear()[0]
    assert torch.equal(right, X @ W.T)
    request.getfixturevalue("planted")(LINEAR, functools.partial(scaled, 3.0))
    assert all(torch.equal(y, 3 * right) for y in linear())


def test_a_method_is_wrong(planted):
    assert Mask.__module__ == "tpfuse.kernels.runtime.philox"
    planted("tpfuse.kernels.runtime.op.Op.pack", lambda right, self, flat: (self.name, right(self, flat)))
    assert OPS[LINEAR].pack((1, 2)) == (LINEAR, (1, 2))


def _linear(world):
    return linear()[0]


def test_in_the_processes_of_the_pool(ranks):
    right = linear()[0]
    assert all(torch.equal(y, 2 * right) for y in ranks(2, Mistaken(_linear, LINEAR, doubled)))
    one = ranks(2, Mistaken(_linear, LINEAR, doubled, rank=1))
    assert torch.equal(one[0], right) and torch.equal(one[1], 2 * right)
    assert all(torch.equal(y, right) for y in ranks(2, _linear))
