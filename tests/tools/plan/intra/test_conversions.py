"""Bytes of a change of layout: the table against DTensor's redistribution over gloo, forward and backward."""

import itertools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.tools.plan.intra.dtensors import Sent, all_to_all, gradients, laid_out, placements, walked
from tpfuse.plan import ALL_REDUCE, Link
from tpfuse.plan import seconds as seconds_of
from tpfuse.tools.plan.intra.conversions import COLLECTIVES, STEPS, Conversions, Mesh
from tpfuse.tools.plan.intra.graph import Tensor
from tpfuse.tools.plan.intra.signatures import BATCH, FORKED, PARTIAL, REPLICATE, SEQUENCE, SHARDS, TYPES, WIDTH

SHAPE = 4, 8, 12
LINK = Link(1e-6, 1e9, overhead=1e-7)
TENSOR = Tensor(*SHAPE, size=8 * 4 * 8 * 12)
OUTPUTS = [kind for kind in TYPES if kind != FORKED]
INPUTS = [kind for kind in TYPES if kind != PARTIAL]


def conversions(sizes, tensor=TENSOR):
    return Conversions(Mesh(sizes, (LINK,) * len(sizes)), tensor)


def converted(world, sizes, pairs, own_autograd):
    """Correctness of values and gradients, and the bytes sent, of each pair of layouts.

    ``own_autograd``: by DTensor's own autograd.
    """
    mesh, results = init_device_mesh("cpu", sizes), []
    tensor, grad = torch.randn(2, *SHAPE, dtype=torch.float64)
    paths = conversions(sizes)
    with all_to_all():
        for start, end in pairs:
            x = laid_out(tensor, mesh, placements(start)).requires_grad_()
            above = laid_out(grad, mesh, gradients(end))
            with Sent(sizes[0]) as sent:
                y = x.redistribute(mesh, placements(end)) if own_autograd else walked(x, paths.path(start, end))
                y.backward(above)
            fine = list(y.placements) == placements(end) and list(x.grad.placements) == gradients(start)
            close = [torch.allclose(a.full_tensor(), b, atol=1e-12) for a, b in ((y, tensor), (x.grad, grad))]
            results.append((fine and all(close), sent.bytes))
    return results


def check(ranks, sizes, pairs, own_autograd=False):
    paths = conversions(sizes)
    for results in ranks(torch.Size(sizes).numel(), converted, sizes, pairs, own_autograd):
        for (start, end), (right, sent) in zip(pairs, results):
            assert right, (start, end)
            assert sent == pytest.approx(paths.sent[paths.index[start], paths.index[end]]), (start, end)


@pytest.mark.parametrize("n", [2, 4])
def test_every_step_sends_what_the_table_says(ranks, n):
    steps = [((a,), (b,)) for a, b in STEPS]
    check(ranks, (n,), steps, own_autograd=True)
    assert set(STEPS) == {
        *((PARTIAL, x) for x in (REPLICATE, *SHARDS)),
        *((REPLICATE, x) for x in (FORKED, *SHARDS)),
        *((a, b) for a in SHARDS for b in (REPLICATE, FORKED)),
        *itertools.permutations(SHARDS, 2),
    }


@pytest.mark.slow
@pytest.mark.parametrize("part", [pytest.param(part, marks=[pytest.mark.rare] * (part > 0)) for part in range(6)])
def test_on_two_axes(ranks, part):
    """All 625 conversions from a layout that an op leaves to one that an op reads, one in six of them in the slow
    phase."""
    pairs = list(itertools.product(itertools.product(OUTPUTS, repeat=2), itertools.product(INPUTS, repeat=2)))
    check(ranks, (2, 2), pairs[part::6])


def gathered(world):
    """The bytes of DTensor's own Shard(1) -> Shard(2)."""
    mesh = init_device_mesh("cpu", (world.size,))
    x = laid_out(torch.randn(SHAPE, dtype=torch.float64), mesh, placements((SEQUENCE,)))
    with Sent(world.size) as sent:
        x.redistribute(mesh, placements((WIDTH,)))
    return sent.bytes, sent.names


def test_dtensor_itself_gathers_on_cpus(ranks):
    """Why these tests exchange: n times the bytes of an all-to-all, which the table has."""
    sent, names = ranks(4, gathered)[0]
    one_way = conversions((4,)).sent[TYPES.index(SEQUENCE), TYPES.index(WIDTH)] / 2
    assert (sent, names) == (4 * one_way, ["all_gather_into_tensor"])


def test_a_collectives_seconds():
    for n in (2, 3, 8):
        ring = seconds_of(ALL_REDUCE["ring"], n, 1e6, LINK)
        halves = [seconds_of(COLLECTIVES[name], n, 1e6, LINK) for name in ("all-gather", "reduce-scatter")]
        assert sum(halves) == pytest.approx(ring)
    assert seconds_of(COLLECTIVES["all-to-all"], 4, 1e6, LINK) == pytest.approx(1e-6 + 3e-7 + 3 * 1e6 / 16 / 1e9)


def test_longer_ways_are_sequences_of_steps():
    paths = conversions((4,))
    steps = paths.path((PARTIAL,), (FORKED,))  # by any shard, or by Replicate: the same bytes
    assert len(steps) == 2 and sum(s.sent for s in steps) == pytest.approx(4 * 3 / 4 * TENSOR.size)
    assert paths.path((BATCH,), (BATCH,)) == []
    with pytest.raises(ValueError, match="no tensor goes from"):
        paths.path((FORKED,), (REPLICATE,))


def test_the_other_axis_makes_messages_smaller():
    paths = conversions((2, 2))
    one = paths.path((PARTIAL, BATCH), (SEQUENCE, BATCH))
    assert [s.sent for s in one] == [2 * TENSOR.size / 2 / 2]
    pays = paths.path((PARTIAL, PARTIAL), (SEQUENCE, WIDTH))  # the second axis pays for half of the tensor
    assert [s.sent for s in pays] == [TENSOR.size, TENSOR.size / 2]


def test_where_two_axes_shard_one_dimension_the_first_is_the_outer():
    paths = conversions((2, 2))
    inner = paths.path((BATCH, PARTIAL), (BATCH, BATCH))
    assert [s.axis for s in inner] == [1]
    outer = paths.path((PARTIAL, BATCH), (BATCH, BATCH))  # the inner axis moves aside
    assert [s.axis for s in outer] == [1, 0, 1]


def test_layouts_that_are_uneven_are_left_out():
    paths = conversions((4,), TENSOR._replace(batch=1, units=2))
    assert [layout for (layout,) in paths.layouts] == [SEQUENCE, REPLICATE, FORKED, PARTIAL]


@pytest.mark.parametrize(
    "mesh, message",
    [
        (Mesh((8, 1), (LINK, LINK)), "one or two axes of at least 2 ranks, got 8x1"),
        (Mesh((2, 2, 2), (LINK,) * 3), "got 2x2x2"),
        (Mesh((2, 2), (LINK,)), "a mesh of 2 axes needs a link for each, got 1"),
        (Mesh((2,), (Link(0.0, 0.0),)), "a link needs"),
    ],
)
def test_meshes_that_are_none(mesh, message):
    with pytest.raises(ValueError, match=message):
        mesh.checked()
