"""schedule(model, mesh, name, micro_batches): checks a staged model, and returns what trains it."""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ..kernels.runtime.errors import check
from ..kernels.runtime.main_grad import main_grads
from ..kernels.runtime.rules import check_number, integer
from ..ranks.agreement import Header, agree_over, raise_everywhere
from ..ranks.groups import process_group
from .delayed import DelayedPipeline, check_delayed
from .placement import Stage, held_by
from .schedules import EVERY, TRAINED, WITHOUT_FLUSH, Order, order
from .sharded import Shards, check_sharded
from .step import Pipeline


def schedule(
    model: Any,
    mesh: DeviceMesh | dist.ProcessGroup,
    name: str,
    micro_batches: int,
    *,
    backward: float = 2.0,
    bitwise: bool = False,
) -> Pipeline:
    """Returns a :class:`Pipeline` that trains a staged model over ``mesh`` in ``micro_batches``; every rank calls this.

    ``name``: one of ``SCHEDULES`` or "2bw", that of the model's stage or another with the same placement.  Under "2bw"
    a step makes the gradients of the batch before.  ``backward``: as in :func:`order`.

    ``bitwise``: gradients are added as binary trees over the K micro-batches of all replicas, K a power of two, and so
    are losses; both uses of a tied weight have a tree each.  A model with ``TensorParallel(bitwise=V)`` then has the
    same bits at every (pp, dp, tp), and under every schedule but "chimera", as from ``data_parallel(model, dp,
    bitwise_micro_batches=K)`` with the micro-batches' losses over the same ``loss_normalizer``.

    ValueError for a model without stages, one under DistributedDataParallel, stages that are not those
    of the schedule or of this rank, and numbers that the schedule cannot run.
    """
    check(
        not isinstance(model, DistributedDataParallel),
        "pipeline: DistributedDataParallel does not see gradients that a split backward pass makes later; give the"
        " model dp=mesh['dp'], and step sums them over the replicas",
    )
    stages = getattr(model, "stages", None)
    stage: Stage | None = getattr(stages, "place", None)
    if stage is None:
        raise ValueError(
            f"pipeline: {type(model).__name__} has no stages; make it with stage=(mesh['pp'].get_local_rank(),"
            f" mesh['pp'].size(), {name!r})"
        )
    group = process_group("pipeline: mesh", mesh, "pp", optional=False)
    assert group is not None
    _agree(model, group, dict(name=name, micro_batches=micro_batches, backward=backward, bitwise=bitwise))
    check(
        name in TRAINED or name not in EVERY,
        f"pipeline: {name} is simulated, not built: its delay depends on the stage; use 2bw, whose delay is one step",
    )
    check_sharded(model)
    check_number("pipeline: micro_batches", micro_batches, integer())
    rank, ranks = group.rank(), group.size()
    other = f"pipeline: the model was made for rank {stage.rank} of {stage.ranks}, and this is rank {rank} of {ranks}"
    error = None if (rank, ranks) == (stage.rank, stage.ranks) else ValueError(other)
    raise_everywhere(error, [group] if ranks > 1 else [], call="pipeline.schedule")
    actions = order(name, ranks, micro_batches, chunks=_chunks(name, stage), backward=backward)
    stages = {(c, i) for c, chain in enumerate(actions.ranks) for i, holder in enumerate(chain) if holder == rank}
    held = {(chunk.chain, chunk.stage) for chunk in model.stages.chunks}
    check(
        stages == held and actions.stages == model.stages.chunks[0].stages,
        f"pipeline: {name} needs other stages on a rank than {stage.schedule}; make the model with stage=({stage.rank},"
        f" {stage.ranks}, {name!r})",
    )
    if bitwise:
        _check_trees(model, actions)
    if name in WITHOUT_FLUSH:
        check_delayed(model, name)
    model.groups.pp_name = group.group_name
    kind = DelayedPipeline if name in WITHOUT_FLUSH else Pipeline
    return kind(model, group, actions, bitwise=bitwise)


def _check_trees(model: Any, order: Order) -> None:
    name, dp = f"pipeline {order.schedule}: bitwise", model.groups.dp
    count = order.micro_batches * (1 if dp is None else dp.size())
    check(
        EVERY[order.schedule].chains == 1,
        f"{name} is not built for two copies of a stage, each with a part of the micro-batches; use another schedule",
    )
    check(count & (count - 1) == 0, f"{name}: micro_batches times replicas must be a power of two, got {count}")
    check(
        not (Shards(model).modules or main_grads(model.parameters())),
        f"{name} sums over the replicas itself; leave off FSDP2, whose order is that of its rings, and MainGrad, which"
        " adds micro-batches one after another",
    )
    check(
        model.groups.experts.replicas == 1,
        f"{name} is not built for experts over replicas, whose gradients each replica adds as its rows come",
    )
    balance = getattr(model, "balance", None)
    check(balance is None, f"{name} is not built beside balance={balance}, whose parts are added stage by stage")


def _agree(model: Any, group: dist.ProcessGroup, arguments: Mapping[str, Any]) -> None:
    """Compares over every axis what a schedule is made of, and the model, which stages could not before."""
    stage: Stage = model.stages.place
    shared = model._shared | dict(stage=f"one of {stage.ranks} of {stage.schedule}")
    groups = {model.tp.call_axis: model.tp.call_group, "data-parallel": model.groups.dp, "pipeline": group}
    agree_over([(ranks, Header("pipeline", axis=axis)) for axis, ranks in groups.items()], shared | arguments)


def _chunks(name: str, stage: Stage) -> int | None:
    held = held_by(stage)
    return held if name in EVERY and held in EVERY[name].chunks else None
