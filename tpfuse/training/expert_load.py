"""Experts kept equally busy without a loss: a bias of the router's choice, which follows their load.

    loss.backward()
    optimizer.step()
    tpfuse.balance_experts(model, mesh["dp"], rate=1e-3)

Of the rows c_e that chose expert e since the last call, on all ranks and replicas and in all micro-batches:

    b_e += d_e - mean(d)        d_e = rate sign(mean(c) - c_e)      (Wang et al. 2024, arXiv:2408.15664, algorithm 1)

The mean of d, which changes no choice, is taken off so that biases stay small.  Counts are integers: biases have the
same bits however a step is split.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from ..kernels.runtime.errors import check
from ..kernels.runtime.rules import POSITIVE, check_number, described
from ..layers.moe import ParallelMoE
from ..models.model import Model, staged_in
from ..ranks.agreement import Header, agree
from ..ranks.groups import process_group
from ..ranks.messages import attempt, together
from .data_parallel import replica_of
from .foreign.norm import over_groups

_NAME = "balance_experts"


@torch.no_grad()
def balance_experts(
    model: nn.Module, dp: dist.ProcessGroup | DeviceMesh | None, *, rate: float = 1e-3
) -> dict[str, Tensor]:
    """Moves the biases of the routers of ``model`` by ``rate`` towards experts that had few rows.

    Every rank calls it once a step, after the optimizer's step.  ``dp``: the replicas, a one-dimensional DeviceMesh or
    a ProcessGroup; None where there is one.  Returns by the name of each layer how many rows chose each expert since
    the last call, int64 [E], of all ranks and replicas; counts begin at 0 again.

    ValueError on every rank, before anything is changed, for a rate that is not positive, for other rates or layers on
    other ranks, for replicas that are not the model's, and for a model without a :class:`tpfuse.layers.ParallelMoE`
    whose routing is ``biased`` (pipeline stages without one give {}).
    """
    check(isinstance(model, nn.Module), f"{_NAME}: model must be a module, got {described(model)}")
    layers = {name: m for name, m in model.named_modules() if isinstance(m, ParallelMoE) and m.routing.biased}
    known, (replicas, error) = _known_replicas(model), attempt(lambda: process_group(f"{_NAME}: dp", dp, "dp"))
    groups = {"tensor-parallel": next((m.tp.group for m in layers.values()), None)}
    groups["context-parallel"] = next((m.tp.cp.group for m in layers.values() if m.tp.cp is not None), None)
    groups["data-parallel"] = known if known is not None or error else replicas[0]

    def examine() -> None:
        if error is not None:
            raise error
        _check_replicas(model, known, replicas[0])
        check_number(f"{_NAME}: rate", rate, POSITIVE)
        check(
            len(layers) > 0 or staged_in(model) is not None,
            f"{_NAME}: a layer's routing must be biased, as Routing(k, biased=True) is, got none",
        )

    together(examine, groups.values())
    shared = {"rate": rate, "layers": [(name, m.num_experts) for name, m in layers.items()]}
    for axis, group in groups.items():
        agree(group, Header(_NAME, axis=axis), shared)
    if not layers:
        return {}
    loads = [_load(m) for m in layers.values()]
    names = [group.group_name for group in groups.values() if group is not None]
    total = over_groups(torch.cat(loads), names, lambda parts: parts.sum(0))
    counts = dict(zip(layers, total.split([len(load) for load in loads]), strict=True))
    for name, m in layers.items():
        step = rate * (counts[name].double().mean() - counts[name]).sign()
        _add(m.shard("router_bias"), step - step.mean())
        m.load = None
    return counts


def _known_replicas(model: nn.Module) -> dist.ProcessGroup | None:
    """Returns the replicas of DistributedDataParallel, or those that a model was given."""
    for m in model.modules():
        replica = replica_of(m)
        if replica is not None:
            return replica.process_group
        if isinstance(m, Model) and m.groups.dp is not None:
            return m.groups.dp
    return None


def _check_replicas(model: nn.Module, known: dist.ProcessGroup | None, dp: dist.ProcessGroup | None) -> None:
    ours, ranks = _several(known), _several(dp)
    check(known is None or ours == ranks, f"{_NAME}: the model's replicas are ranks {ours}, got dp={ranks}")
    sharded = next((name for name, p in model.named_parameters() if isinstance(p, DTensor)), None)
    check(
        sharded is None or dp is not None, f"{_NAME}: dp must be the replicas, since {sharded} is a DTensor, got None"
    )


def _several(group: dist.ProcessGroup | None) -> list[int]:
    """Returns the ranks of several replicas; [] for one."""
    ranks = [] if group is None else dist.get_process_group_ranks(group)
    return ranks if len(ranks) > 1 else []


def _load(m: ParallelMoE) -> Tensor:
    """Returns the rows of each expert on this rank, of which no other rank counts any."""
    device = m.shard("router").device
    return torch.zeros(m.num_experts, dtype=torch.int64, device=device) if m.load is None else m.load.to(device)


def _add(bias: Tensor, step: Tensor) -> None:
    """bias [E] += step [E], fp64; of a bias that FSDP has sharded this rank's part"""
    if isinstance(bias, DTensor):
        step = distribute_tensor(step, bias.device_mesh, bias.placements, src_data_rank=None)
    bias.add_(step.to(bias.dtype))
