"""Binary trees of leaves: any node computed elsewhere gives the same bits, each rounded to the leaves' dtype."""

import pytest
import torch

from tpfuse.kernels.norm.core import reduce_parts
from tpfuse.kernels.runtime.leaves import TreeSum, cut, split_columns, tree, tree_of_new


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_nodes_of_any_number_of_ranks(ranks, dtype):
    leaves = torch.randn(8, 100, dtype=torch.float64).to(dtype)
    nodes = torch.stack([tree(part) for part in leaves.chunk(ranks)])
    assert torch.equal(tree(nodes), tree(leaves))
    assert tree(leaves).dtype == dtype


def test_rank_order_is_another_sum():
    leaves = torch.randn(8, 100)
    assert not torch.equal(reduce_parts(leaves), tree(leaves))
    pairs = torch.stack([tree(part) for part in leaves.chunk(4)])
    assert not torch.equal(reduce_parts(pairs), tree(leaves))


def test_every_node_is_rounded():
    """In bf16 1 + 2^-8 is 1, a tie to even, and 2^-8 + 2^-8 is exact: the root is 1 + 2^-7, where fp32 has 3 x 2^-8."""
    leaves = torch.tensor([1.0, 2.0**-8, 2.0**-8, 2.0**-8])
    assert tree(leaves.bfloat16()).item() == 1 + 2.0**-7 and tree(leaves).item() == 1 + 3 * 2.0**-8


@pytest.mark.parametrize("count, left", [(3, 2), (6, 4), (7, 4), (9, 8)])
def test_a_number_of_leaves_that_is_no_power_of_two(count, left):
    """The left subtree is the largest that is full."""
    leaves = torch.randn(count, 100).bfloat16()
    assert torch.equal(tree(leaves), tree(leaves[:left]) + tree(leaves[left:]))


def test_no_leaves():
    with pytest.raises(ValueError, match="tree: there must be a leaf at least, got none"):
        tree([])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2, 4, 16])
def test_leaves_that_come_one_by_one(count, dtype):
    leaves = torch.randn(count, 100).to(dtype)
    assert torch.equal(tree_of_new(leaf.clone() for leaf in leaves), tree(leaves))
    total = TreeSum()
    for index in torch.randperm(count).tolist():
        total.add(leaves[index].clone(), index)
    assert torch.equal(total.total(), tree(leaves))


@pytest.mark.parametrize("count", [0, 3, 6])
def test_a_count_that_ends_within_a_node(count):
    total = TreeSum()
    for _ in range(count):
        total.add(torch.ones(1))
    with pytest.raises(ValueError, match=f"must be a power of two, got {count}"):
        total.total()


def test_leaves_are_contiguous():
    x = torch.randn(6, 8)
    assert all(piece.is_contiguous() for piece in (*cut("op", x, 1, 4), *split_columns(x, 3)))
    assert [piece.shape[1] for piece in split_columns(x, 3)] == [3, 3, 2]
    with pytest.raises(ValueError, match="op: 8 elements of dimension 1 are not divisible by 3 leaves"):
        cut("op", x, 1, 3)
