"""The error of a step that has failures a rank names it and its stages; tests/examples/test_train_gpt_pipeline.py kills
one."""

import pytest
import torch.distributed as dist

from tpfuse.pipeline import failures, order


def of_a_step(world, broken):
    """What is raised where a step fails and messages to ``broken`` ranks of the world do."""
    mesh = world.stages(2, 2, 1)
    first, made = RuntimeError("Connection closed by peer"), order("zbv", 2, 4)

    def isend(x, *, group, group_dst, tag):
        if dist.get_global_rank(group, group_dst) in broken:
            raise RuntimeError("Connection closed by peer")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError) as caught:
        patch.setattr(dist, "isend", isend)
        with failures.naming_lost_ranks(made, mesh["pp"].get_group(), mesh["dp"].get_group()):
            raise first
    return f"{caught.value}", caught.value is first


def test_who_is_lost_is_named(ranks):
    """Ranks 0 and 1 are the replicas of one stage, as are 2 and 3."""
    one, replica, _, far = ranks(4, of_a_step, [2])
    assert one[0] == (
        "pipeline zbv, rank 0, which holds stages 0 and 3: rank 2, which holds stages 1 and 2, has ended or has come to"
        " no such message in time: Connection closed by peer"
    )
    assert "rank 2, a replica of stages 1 and 2, has ended" in far[0] and replica[1]


def test_an_error_of_another_kind_stays_as_it_is(ranks):
    assert ranks(4, of_a_step, []) == [("Connection closed by peer", True)] * 4
