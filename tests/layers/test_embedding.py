"""The embedding with its vocabulary split, sharded and whole; 997 is prime, so the last rank of 4 has 247 rows and the
others 250."""

import pytest
import torch

from tests.common import error, fake_tp
from tests.layers.sharded import Case, sharded_is_whole
from tpfuse.layers import VocabParallelEmbedding

CASE = Case(VocabParallelEmbedding, (997, 6), (24,), (24, 6), x_is="all")


test_sharded_is_whole = sharded_is_whole(dict(vocabulary=CASE))


def test_equal_to_torch():
    """Repeated ids too, whose gradients add up."""
    layer = VocabParallelEmbedding(11, 4)
    ids = torch.tensor([[3, 10, 3], [0, 3, 10]])
    weight = layer.weight.detach().clone().requires_grad_()
    expected = torch.nn.functional.embedding(ids.reshape(-1), weight)
    y, dy = layer(ids), torch.randn(6, 4)
    assert torch.equal(y, expected)
    y.backward(dy), expected.backward(dy)
    assert error(layer.weight.grad, weight.grad) <= 1e-6


def test_an_id_below_zero_is_a_zero_row():
    """As padding is: no value, no gradient."""
    layer = VocabParallelEmbedding(11, 4)
    y = layer(torch.tensor([2, -1, -100]))
    y.sum().backward()
    assert torch.equal(y[0], layer.weight[2]) and not y[1:].any()
    assert layer.weight.grad.sum(1).nonzero().flatten().tolist() == [2]


def test_compile_in_one_graph():
    layer, ids = VocabParallelEmbedding(11, 4), torch.tensor([2, -1, 10])
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(ids), layer(ids))


def test_errors():
    with pytest.raises(ValueError, match="num_embeddings=6 leaves a rank of tensor-parallel size 4 with nothing"):
        VocabParallelEmbedding(6, 4, tp=fake_tp(4))
    with pytest.raises(ValueError, match=r"VocabParallelEmbedding: ids must lie in 0 to 10, got \[11\]"):
        VocabParallelEmbedding(11, 4)(torch.tensor([3, 11]))
