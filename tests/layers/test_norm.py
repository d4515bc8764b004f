"""LayerNorm and RMSNorm on a sequence shard, sharded and whole, and against torch's."""

import re

import pytest
import torch

from tests.common import assert_close, make_tp
from tests.layers.sharded import Case, assert_seen, build, data, reference, sharded_is_whole, step, unsummed
from tpfuse.layers import LayerNorm, RMSNorm, TransformerBlock

CASES = {
    "layer": Case(LayerNorm, (10,), (8, 10), (8, 10)),
    "layer, no bias": Case(LayerNorm, (10, 1e-6, False), (8, 10), (8, 10)),
    "rms": Case(RMSNorm, (10,), (8, 10), (8, 10)),
    "gemma rms": Case(RMSNorm, (10,), (8, 10), (8, 10), options=dict(kind="gemma_rms")),
    "3 dimensions": Case(LayerNorm, (10,), (8, 3, 10), (8, 3, 10)),
}


test_sharded_is_whole = sharded_is_whole(CASES)


def test_a_gradient_of_one_shard_only_is_seen(ranks):
    """The classic: under sequence parallelism the norm's gradients left unsummed."""
    assert_seen(ranks, CASES["layer"], "tpfuse.layers.norm.replicated", unsummed, "weight")


def without_leaves(right, *args, leaves, **options):
    return right(*args, **options)


def test_a_sum_by_no_tree_is_seen(ranks):
    """Rows of another order of sums: right to rounding, and not to the bit."""
    assert_seen(ranks, CASES["layer"], "tpfuse.layers.norm.layer_norm", without_leaves, "weight", torch.float32)


@pytest.mark.parametrize("shape, rule", [((4, 8), "an integer"), (8.0, "an integer"), (-3, "at least 0")])
def test_a_width_that_is_none(shape, rule):
    with pytest.raises(ValueError, match=re.escape(f"LayerNorm: a size of weight must be {rule}, got {shape!r}")):
        LayerNorm(shape)


@pytest.mark.parametrize("name, theirs", [("layer", torch.nn.LayerNorm), ("rms", torch.nn.RMSNorm)])
def test_equal_to_torch(name, theirs):
    case = CASES[name]
    ours = build(case, None, torch.float64)
    theirs = theirs(10, eps=ours.eps, dtype=torch.float64)
    theirs.load_state_dict(ours.state_dict())
    x, dy = data(case, torch.float64)
    exact = reference(theirs, x, dy, dict(theirs.named_parameters()))
    assert_close(step(ours, case, x, dy), exact, torch.float64)


def _summed_in_fp32(world):
    """Each rank's share of beta's gradient is 256 on rank 0 and 1 on the others, in bf16."""
    layer = LayerNorm(4, tp=make_tp(world), dtype=torch.bfloat16)
    layer(torch.randn(1, 4, dtype=torch.bfloat16)).backward(
        torch.full((1, 4), 256.0 if world.rank == 0 else 1.0, dtype=torch.bfloat16)
    )
    return layer.bias.grad


def test_bf16_gradients_are_summed_in_fp32(ranks):
    for db in ranks(4, _summed_in_fp32):
        assert db.dtype == torch.bfloat16 and db.tolist() == [260.0] * 4


def test_a_block_of_gemma_norms():
    """Weights that start at 0 give what an RMSNorm's give that are larger by 1."""
    gemma, rms = (TransformerBlock(16, 2, norm=kind, bias=False) for kind in ("gemma_rms", "rms"))
    assert (gemma.input_norm.weight == 0).all() and (rms.input_norm.weight == 1).all()
    rms.load_state_dict({name: w + 1 if "norm" in name else w for name, w in gemma.state_dict().items()})
    x, wrong = torch.randn(6, 16), gemma.state_dict()
    torch.testing.assert_close(gemma(x, batch=2), rms(x, batch=2))
    rms.load_state_dict(wrong)
    assert (gemma(x, batch=2) - rms(x, batch=2)).abs().max() > 1e-2
