"""A step of training over a pipeline: micro-batches through the stages of a model, all gradients complete at the end,
one loss on every rank."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ..agreement import Agreement, Asked
from ..kernels.runtime.deferred import WeightGradients
from ..kernels.runtime.errors import check
from ..kernels.runtime.main_grad import refuse
from ..kernels.runtime.rules import check_number, whole
from ..parallel import resolve
from .order import SCHEDULES, Order, order
from .placement import Chunk, Stage, held_by
from .runtime import ChunkStage, Runtime


class Pipeline:
    """Runs steps of a staged model; made by :func:`schedule`."""

    def __init__(self, model: Any, group: dist.ProcessGroup, made: Order):
        self.model, self.group, self.order = model, group, made
        self.splits = SCHEDULES[made.schedule].split
        self.store = WeightGradients()
        self._runtimes: dict[tuple[Any, ...], Runtime] = {}
        self._agreement = Agreement(Asked(f"pipeline {made.schedule}", axis="pipeline"), every=False)

    def step(self, input_ids: Tensor | None = None, **arguments: Any) -> Tensor:
        """Forward and backward over a batch; each rank gives the same arguments, those of the model's own call.

        Samples are cut into micro-batches along the first dimension; packed documents are one micro-batch a row, with a
        list of ``cu_seqlens``, one of each.  Afterwards ``.grad`` holds the gradient of the mean loss over the whole
        batch, of all data-parallel replicas where the model was given ``dp``: dropout's masks and the loss are those of
        one process.  Returns that loss, a scalar, the same on every rank.

        ValueError on every rank, before anything is sent, for arguments that the model does not take, a batch that
        cannot be cut evenly, and labels that are missing.
        """
        return self._run(dict(arguments, input_ids=input_ids), backward=True)

    @torch.no_grad()
    def evaluate(self, input_ids: Tensor | None = None, **arguments: Any) -> Tensor:
        """Returns the loss of a batch, the same on every rank; nothing is kept for backward."""
        return self._run(dict(arguments, input_ids=input_ids), backward=False)

    def _run(self, arguments: dict[str, Any], *, backward: bool) -> Tensor:
        model, count = self.model, self.order.micro_batches
        check(
            not backward or torch.is_grad_enabled(),
            f"pipeline {self.order.schedule}: step makes gradients, and they are disabled; call evaluate",
        )
        self._agreement(self.group, arguments, {"training": model.training, "backward": backward}, dict)
        micro = model.micro_batches(count, arguments)
        if backward:
            refuse(model.parameters(), "pipeline: a MainGrad over pipeline stages is not built; train without one")
        runtime = self._runtime(micro[0])
        losses = runtime.run([(inputs.tokens, dict(inputs=inputs)) for inputs in micro], backward=backward)
        if backward:
            self._complete()
        model.counted(arguments)
        return self._total(losses, micro[0])

    def _runtime(self, inputs: Any) -> Runtime:
        """Returns the runtime of a batch's shapes: what is sent has the same in every step."""
        (batch, seq), model = inputs.shape, self.model
        key = batch, seq, inputs.tokens.device, torch.get_autocast_dtype(inputs.tokens.device.type)
        if key not in self._runtimes:
            rows = -(-batch * seq // model.tp.row_shards)
            dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
            sent = torch.empty(rows, model.config.hidden_size, dtype=dtype, device="meta", requires_grad=True)
            given: dict[str, Any] = dict(device=inputs.tokens.device, group=self.group)
            given |= dict(rows=sent, tokens=torch.empty_like(inputs.tokens, device="meta"))
            given |= dict(build=self.store.take if self.splits else None)
            stages = [ChunkStage(model, chunk, self._chunk, **given) for chunk in model.chunks]
            self._runtimes[key] = Runtime(stages, self.order)
        return self._runtimes[key]

    def _chunk(self, chunk: Chunk, x: Tensor | None, *, inputs: Any) -> Tensor:
        if not self.splits:
            return self.model.run_chunk(chunk, x, inputs)
        with self.store.deferring():
            return self.model.run_chunk(chunk, x, inputs)

    # ---- gradients that more than one rank holds ----

    def _complete(self) -> None:
        for peer, parameters in self._shared():
            _sum_with(peer, parameters, self.group)
        dp = self.model.dp_group_name
        if dp is not None and (group := resolve(dp)).size() > 1:
            for p in self.model.parameters():
                if p.requires_grad:
                    dist.all_reduce(_gradient(p), group=group)

    def _shared(self) -> list[tuple[int, list[nn.Parameter]]]:
        """Returns the rank that has copies of parameters, and which: all in a second chain, or a tied embedding."""
        rank, size, model = self.group.rank(), self.group.size(), self.model
        copied = [p for name, p in model.named_parameters() if model.copies_of(name) == 2]
        return [(size - 1 - rank, copied)] if copied else []

    def _total(self, losses: dict[int, Tensor], inputs: Any) -> Tensor:
        """Returns the sum of all micro-batches' losses in their order, over the replicas too."""
        device = inputs.tokens.device
        dtype = torch.float64 if next(self.model.parameters()).dtype == torch.float64 else torch.float32
        every = torch.zeros(self.order.micro_batches, dtype=dtype, device=device)
        for m, loss in losses.items():
            every[m] = loss.to(dtype)
        dist.all_reduce(every, group=self.group)
        if (dp := self.model.dp_group_name) is not None:
            dist.all_reduce(every, group=resolve(dp))
        return every.sum()


def schedule(
    model: Any, mesh: DeviceMesh | dist.ProcessGroup, name: str, micro_batches: int, *, backward: float = 2.0
) -> Pipeline:
    """Returns what trains a staged model over the ranks of ``mesh`` in ``micro_batches``; each rank of it calls this.

    ``name``: one of ``SCHEDULES``, that of the model's stage or another whose stages are placed alike.  ``backward``:
    as in :func:`order`.  ValueError for a model without stages, one under DistributedDataParallel, stages that are not
    those of the schedule or of this rank, and numbers that the schedule cannot do.
    """
    check(
        not isinstance(model, DistributedDataParallel),
        "pipeline: DistributedDataParallel does not see gradients that a split backward pass makes later; give the"
        " model dp=mesh['dp'], and step sums them over the replicas",
    )
    check(
        not any(isinstance(module, FSDPModule) for module in model.modules()),
        "pipeline: fully_shard over pipeline stages is not built; give the model dp=mesh['dp'], and step sums its"
        " gradients over the replicas",
    )
    stage: Stage | None = getattr(model, "stage", None)
    if stage is None:
        raise ValueError(
            f"pipeline: {type(model).__name__} has no stages; make it with stage=(mesh['pp'].get_local_rank(),"
            f" mesh['pp'].size(), {name!r})"
        )
    group = mesh.get_group() if isinstance(mesh, DeviceMesh) else mesh
    check_number("pipeline: micro_batches", micro_batches, whole())
    here = group.rank(), group.size()
    check(
        here == (stage.rank, stage.ranks),
        f"pipeline: the model was made for rank {stage.rank} of {stage.ranks}, and this is rank {here[0]} of {here[1]}",
    )
    made = order(name, group.size(), micro_batches, chunks=_chunks(name, stage), backward=backward)
    own = {(c, i) for c, ranks in enumerate(made.ranks) for i, rank in enumerate(ranks) if rank == group.rank()}
    held = {(chunk.chain, chunk.stage) for chunk in model.chunks}
    check(
        own == held and made.stages == model.chunks[0].stages,
        f"pipeline: {name} needs other stages on a rank than {stage.schedule}; make the model with stage=({stage.rank},"
        f" {stage.ranks}, {name!r})",
    )
    model.pp_group_name = group.group_name
    return Pipeline(model, group, made)


def _chunks(name: str, stage: Stage) -> int | None:
    held = held_by(stage)
    return held if name in SCHEDULES and held in SCHEDULES[name].chunks else None


def _gradient(p: nn.Parameter) -> Tensor:
    if p.grad is None:
        p.grad = torch.zeros_like(p)
    return p.grad


def _sum_with(peer: int, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Adds the gradients of a peer's copies to these: the same bits on both, for the sum of two has no order."""
    grads = [_gradient(p) for p in parameters if p.requires_grad]
    theirs = [torch.empty_like(g) for g in grads]
    ops = [dist.P2POp(dist.isend, g.contiguous(), group=group, group_peer=peer) for g in grads]
    ops += [dist.P2POp(dist.irecv, x, group=group, group_peer=peer) for x in theirs]
    for message in dist.batch_isend_irecv(ops) if ops else []:
        message.wait()
    for g, x in zip(grads, theirs, strict=True):
        g.add_(x)
