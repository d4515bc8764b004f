"""Replicas under torch's DistributedDataParallel (Li et al. 2020, arXiv:2006.15704), with the settings that suit this
library's models, and an error for what would go wrong in silence.

The gradients lie in the buckets that DDP sends: no second copy of them is held, and none is made.
"""

import gc
import weakref
from collections.abc import Iterable
from typing import overload

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from ..kernels.runtime.errors import check
from ..kernels.runtime.processor import order_of_sums
from ..kernels.runtime.rules import COUNT, NOT_NEGATIVE, check_number, listed
from ..layers.shards import named_specs
from ..models.model import Model, staged_in
from ..parallel import TensorParallel, resolve
from ..pipeline.trees import GradientTrees, forget_micro_batches
from ..ranks.agreement import Header, agree
from ..ranks.groups import process_group
from ..ranks.messages import together
from .calls import CallRecord, record_calls
from .foreign.groups import WRAPPED, dtensor_error, error_of
from .foreign.replica_shards import over_replicas
from .micro_batches import MicroBatchReplica

BUCKETS = [1 << 20, 25 << 20]  # bytes: torch's own, of the first gradients that are ready and of the others
_NAME = "data_parallel"
_IGNORED = "_ddp_params_and_buffers_to_ignore"  # attribute of a module, by which DDP leaves parameters out
_replicas: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[DistributedDataParallel]]" = weakref.WeakKeyDictionary()


@overload
def data_parallel(
    model: nn.Module,
    dp: dist.ProcessGroup | DeviceMesh,
    *,
    bucket_cap_mb: float | None = None,
    bitwise_micro_batches: None = None,
) -> DistributedDataParallel: ...
@overload
def data_parallel(
    model: nn.Module, dp: dist.ProcessGroup | DeviceMesh | None, *, bitwise_micro_batches: int
) -> MicroBatchReplica: ...
def data_parallel(
    model: nn.Module,
    dp: dist.ProcessGroup | DeviceMesh | None,
    *,
    bucket_cap_mb: float | None = None,
    bitwise_micro_batches: int | None = None,
) -> DistributedDataParallel | MicroBatchReplica:
    """Returns a model under DistributedDataParallel, which averages its gradients over the replicas during backward.

        replica = tpfuse.data_parallel(model, mesh["dp"])
        replica(ids, labels=ids).loss.backward()

    ``dp``: the replicas, a one-dimensional DeviceMesh or a ProcessGroup.  ``bucket_cap_mb``: MiB of gradients a
    message; 0 sends each parameter's alone, None is torch's 25 with a first message of 1.

    Gradients are views of the buckets (``gradient_as_bucket_view``), which saves their copy, a gradient's bytes for
    each parameter.  Parameters and buffers become those of replica 0 now; buffers are not sent again.  Every trainable
    parameter takes part in every loss: torch raises a RuntimeError at the next forward otherwise.  What decides the
    calls of a step (how many, modes, autocast, seed and step, dropout, dtypes) is compared where the backward pass of
    the last one begins: ValueError on every rank, before a gradient of that pass is made.

    Experts that are divided among the replicas (``GPT(experts=)``) are left out: each backward pass, also one under
    ``no_sync``, leaves the sum over all replicas' rows divided by the number of replicas, as the average of the others.

    ``bitwise_micro_batches``: the number K of micro-batches in a step, a power of two that the replicas divide.  The
    gradient is the mean of all K, added as a binary tree, the same bits at every number of replicas; then a
    :class:`MicroBatchReplica` comes back, which is called K / replicas times a step, and ``dp`` may be None for one
    process.  A model with ``TensorParallel(bitwise=V)`` then has the same bits at every (dp, tp).  FSDP2 may have
    divided it over ``dp``, with a ``reduce_dtype`` that is the parameters'.

    All ranks call it.  ValueError on every rank, before anything is changed, for a ``dp`` that is not the model's or
    in which ranks hold different slices; for a model that is under DistributedDataParallel, MainGrad, or, without
    ``bitwise_micro_batches`` or in part, FSDP; for one that holds pipeline stages, has no trainable parameter, is on
    the meta device, or has a BatchNorm layer whose statistics would be each replica's own; for experts over other
    replicas, or with ``bitwise_micro_batches``; and where replicas have different parameters or settings.
    """
    check(isinstance(model, nn.Module), f"{_NAME}: model must be a module, got {type(model).__name__}")
    if dp is None and bitwise_micro_batches is not None:
        _check_micro_batches(bitwise_micro_batches, 1, bucket_cap_mb)
        _check(model, None, bucket_cap_mb, shards=True)
        _check_experts(model, None, bitwise_micro_batches)
        return MicroBatchReplica(model, GradientTrees(model, bitwise_micro_batches, None))
    group = process_group(f"{_NAME}: dp", dp, "dp", optional=False)
    assert group is not None
    groups = [*_split_over(model), group]

    def examine() -> None:
        if bitwise_micro_batches is not None:
            _check_micro_batches(bitwise_micro_batches, group.size(), bucket_cap_mb)
        _check(model, group, bucket_cap_mb, shards=bitwise_micro_batches is not None)
        _check_experts(model, group, bitwise_micro_batches)

    together(examine, groups)
    trained = [(name, p.dtype, tuple(p.shape)) for name, p in model.named_parameters() if p.requires_grad]
    shared = {"trainable parameters": trained, "bucket_cap_mb": bucket_cap_mb}
    shared |= {"bitwise_micro_batches": bitwise_micro_batches}
    shared |= {} if bitwise_micro_batches is None else order_of_sums()
    together(lambda: agree(group, Header(_NAME, axis="data-parallel"), shared), groups)
    if bitwise_micro_batches is not None:
        shared_tensors = [x.detach() for x in (*model.parameters(), *model.buffers()) if not isinstance(x, DTensor)]
        for tensor in shared_tensors:
            elements = tensor.contiguous()  # in one order on every replica; a message is of memory
            dist.broadcast(elements, group=group, group_src=0)
            if elements is not tensor:
                tensor.copy_(elements)
        return MicroBatchReplica(model, _trees(model, bitwise_micro_batches // group.size(), group))
    forget_micro_batches(model)
    left_out = {*getattr(model, _IGNORED, ()), *(name for name, _, tp in _parameters(model) if tp.replicas > 1)}
    if left_out:
        setattr(model, _IGNORED, left_out)
    cap = None if bucket_cap_mb is None else max(bucket_cap_mb, 2**-20)  # a byte: torch 2.11 takes no 0
    replica = DistributedDataParallel(model, process_group=group, bucket_cap_mb=cap, gradient_as_bucket_view=True)
    replica.broadcast_buffers = False  # from here on: by the argument they would not be made equal now either
    _replicas[model] = weakref.ref(replica)
    record_calls(replica, CallRecord(_NAME, group))
    return replica


def _check_micro_batches(count: int, replicas: int, bucket_cap_mb: float | None) -> None:
    name = f"{_NAME}: bitwise_micro_batches"
    check_number(name, count, COUNT)
    check(count & (count - 1) == 0, f"{name} must be a power of two, got {count}")
    check(count % replicas == 0, f"{name}={count} is not divisible by {replicas} replicas")
    check(bucket_cap_mb is None, f"{name} has messages of its own; leave bucket_cap_mb off, got {bucket_cap_mb}")


def replica_of(model: nn.Module) -> DistributedDataParallel | None:
    """Returns the DistributedDataParallel that a model is, or that :func:`data_parallel` has put it under."""
    if isinstance(model, DistributedDataParallel):
        return model
    reference = _replicas.get(model)
    return None if reference is None else reference()


def limits(replica: DistributedDataParallel) -> list[int]:
    """Returns the most bytes of its buckets: of each, or of the first and of the others."""
    return BUCKETS if replica.bucket_bytes_cap_default else [replica.bucket_bytes_cap]


def bucket_count(parameters: Iterable[Tensor], caps: list[int]) -> int:
    """Returns how many buckets the gradients of parameters, in the model's order, fill."""
    backwards = list(parameters)[::-1]
    return len(dist._compute_bucket_assignment_by_size(backwards, caps)[0])


def under_ddp(model: nn.Module) -> bool:
    """Returns whether a living DistributedDataParallel holds the model, which has no attribute that says so."""

    def held() -> bool:
        wrappers = [x for x in gc.get_objects() if issubclass(type(x), DistributedDataParallel)]
        wrappers = [x for x in wrappers if "_modules" in vars(x)]  # one whose constructor has failed has none
        return any(part is model for wrapper in wrappers for part in wrapper.modules())

    if not held():
        return False
    gc.collect()  # of those that nobody holds any more
    return held()


def _split_over(model: nn.Module) -> list[dist.ProcessGroup]:
    """Returns the groups of ranks that make the model's calls, in one order on all of them."""
    ranks = {tp for *_, tp in named_specs(model) if tp.replicas == 1}
    return [resolve(name) for name in sorted({tp.call_group_name for tp in ranks if tp.call_group_name})]


def _parameters(model: nn.Module) -> list[tuple[str, nn.Parameter, TensorParallel]]:
    """Returns (name, parameter, ranks that it is split over) of every parameter."""
    return [(name, p, tp) for (name, p), (*_, tp) in zip(model.named_parameters(), named_specs(model), strict=True)]


def _is_sharded(model: nn.Module) -> bool:
    """Returns whether FSDP2 shards a part of the model."""
    from torch.distributed.fsdp import FSDPModule  # slow to import

    return any(isinstance(part, FSDPModule) for part in model.modules())


def _trees(model: nn.Module, local: int, group: dist.ProcessGroup) -> GradientTrees:
    """Returns the trees of ``local`` micro-batches on each replica: of whole gradients, or of FSDP2's shards."""
    if not _is_sharded(model):
        return GradientTrees(model, local, group)
    from .sharded_trees import ShardedTrees  # as FSDP2 is slow to import

    return ShardedTrees(model, local, group)


def _check(
    model: nn.Module, group: dist.ProcessGroup | None, bucket_cap_mb: float | None, *, shards: bool = False
) -> None:
    """ValueError for a model that cannot be replicated; ``shards``: whether FSDP2 may have divided it."""
    from torch.distributed.fsdp import FullyShardedDataParallel  # slow to import

    name = f"{_NAME}: {type(model).__name__}"
    if bucket_cap_mb is not None:
        check_number(f"{_NAME}: bucket_cap_mb", bucket_cap_mb, NOT_NEGATIVE)
    wrapped = any(isinstance(part, DistributedDataParallel) for part in model.modules()) or under_ddp(model)
    check(not wrapped, f"{name} is under DistributedDataParallel already; wrap it once")
    flattened = any(isinstance(part, FullyShardedDataParallel) for part in model.modules())
    sharded = _is_sharded(model)
    check(
        not flattened and (shards or not sharded),
        f"{name} is under FSDP, which averages the gradients itself; leave {_NAME} off",
    )
    check(group is not None or not sharded, f"{name} is under FSDP, so dp must be its replicas, got None")
    _check_parameters(name, model, group if sharded else None)
    check(
        staged_in(model) is None,
        f"{name} holds pipeline stages, whose split backward passes DistributedDataParallel does not see; give the"
        " model dp=mesh['dp'], and the pipeline's step sums over the replicas",
    )
    for path, part in model.named_modules():
        unsynchronised = (
            isinstance(part, _BatchNorm) and part.track_running_stats and not isinstance(part, nn.SyncBatchNorm)
        )
        check(
            not unsynchronised,
            f"{_NAME}: {path} keeps statistics of its replica's rows alone; use nn.SyncBatchNorm, or"
            " track_running_stats=False",
        )
    if group is not None:
        _check_group(model, group)


def _check_experts(model: nn.Module, group: dist.ProcessGroup | None, micro_batches: int | None) -> None:
    """ValueError for experts that are divided among other replicas than those of the group, or in a tree of sums."""
    ranks = [] if group is None else dist.get_process_group_ranks(group)
    for name, _, tp in _parameters(model):
        if tp.replicas > 1:
            check(
                tp.replica_ranks == ranks,
                f"{_NAME}: {name} is divided among replicas {tp.replica_ranks}, and dp here is {ranks}; pass the"
                " mesh['dp'] of that mesh",
            )
            check(
                micro_batches is None,
                f"{_NAME}: bitwise_micro_batches={micro_batches} is not built for experts over replicas, as {name}",
            )


def _check_parameters(name: str, model: nn.Module, shards: dist.ProcessGroup | None) -> None:
    """``shards``: the replicas over which FSDP2 divides each trainable parameter; None where it divides none."""
    parameters = dict(model.named_parameters())
    if shards is None:
        error = dtensor_error(name, parameters.items())
        check(error is None, f"{error}")
    else:
        others = [path for path, p, tp in _parameters(model) if p.requires_grad and not _is_over(p, tp, shards)]
        check(
            not others,
            f"{name}: fully_shard does not divide {listed(others)} over just the replicas"
            f" {dist.get_process_group_ranks(shards)}; call it on the whole model too, with mesh=mesh['dp']",
        )
    meta = [path for path, p in parameters.items() if p.is_meta]
    check(not meta, f"{name}: {listed(meta)} is on the meta device; give the model its values first")
    check(
        any(p.requires_grad for p in parameters.values()), f"{name} has no trainable parameter, so nothing to average"
    )


def _is_over(p: nn.Parameter, tp: TensorParallel, group: dist.ProcessGroup) -> bool:
    """Returns whether FSDP2 divides a parameter over just these replicas."""
    if not isinstance(p, DTensor):
        return False
    axes = [(dist.get_process_group_ranks(g), placement.is_replicate()) for g, placement in over_replicas(p, tp)]
    return axes == ([] if group.size() == 1 else [(dist.get_process_group_ranks(group), False)])


def _check_group(model: nn.Module, group: dist.ProcessGroup) -> None:
    """ValueError for a group that is not of the model's replicas."""
    averaged = [(name, p) for name, p, tp in _parameters(model) if tp.replicas == 1]
    tool = WRAPPED._replace(parameters=lambda _: averaged, dtensors=True)  # _check_parameters has looked for them
    error = error_of(tool, dict(module=model, process_group=group))
    check(error is None, f"{_NAME}: {error}")
    ranks, dp = dist.get_process_group_ranks(group), model.groups.dp if isinstance(model, Model) else None
    replicas = ranks if dp is None else dist.get_process_group_ranks(dp)
    check(
        replicas == ranks,
        f"{_NAME}: {type(model).__name__} was given dp={replicas}, by which it numbers samples, and dp here is {ranks};"
        " pass the same mesh['dp'] to both",
    )
