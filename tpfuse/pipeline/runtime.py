"""torch.distributed.pipelining's runtime over any order of actions, and its stages over a model's chunks.

The runtime that takes a list of actions is private in torch (2.11 to 2.15): beside theirs.py, which reads its lists,
this is the one file that knows it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from ..kernels.runtime.errors import check
from ..kernels.runtime.rules import described
from .action import BACKWARD, FORWARD, INPUT, Action
from .order import Order
from .placement import Chunk

_OF = {kind.value: kind for kind in schedules._ComputationType}
# the message behind a pass, the one that takes it, and which stage that is of
_SENT = {FORWARD: ("SEND_F", "RECV_F", 1), BACKWARD: ("SEND_B", "RECV_B", -1), INPUT: ("SEND_B", "RECV_B", -1)}


class ChunkStage(PipelineStage):
    """A stage of torch's runtime that is a chunk of a model.

    Stages of the second chain are numbered from ``stages`` + 1 on: the gap keeps the last of one chain and the first of
    the other from being neighbours.
    """

    def __init__(
        self,
        module: nn.Module,
        chunk: Chunk,
        run: Callable[..., Tensor],
        *,
        device: torch.device,
        group: dist.ProcessGroup,
        rows: Tensor,
        tokens: Tensor,
        build: Callable[[], Callable[[], None]] | None,
    ):
        """``rows`` and ``tokens``: what is sent between stages, and what enters the first, on the meta device.

        ``build`` returns what makes the gradients of weights that the last backward pass has handed over.
        """
        self.chunk, self.run, self.rows = chunk, run, rows
        ends = torch.empty((), device="meta", requires_grad=True)
        super().__init__(
            module,
            number(chunk),
            2 * chunk.stages + 1,
            device,
            input_args=(tokens,) if chunk.first else (rows,),
            output_args=(ends,) if chunk.last else (rows,),
            group=group,
            dw_builder=build,
        )

    @property
    def is_first(self) -> bool:
        return self.chunk.first

    @property
    def is_last(self) -> bool:
        return self.chunk.last

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Leaves out messages of torch 2.11 from this rank to itself, where two neighbours are: gloo has none."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        made = self.run(self.chunk, None if self.chunk.first else args[0], kwargs["call"].call)
        check(
            self.chunk.last or (made.shape, made.dtype) == (self.rows.shape, self.rows.dtype),
            f"pipeline: stages send {self.rows.dtype} {tuple(self.rows.shape)}, and a layer or a hook of stage"
            f" {self.chunk.stage} made {described(made)}",
        )
        return made


def number(chunk: Chunk) -> int:
    """Returns the index by which torch's runtime knows a stage."""
    return chunk.chain * (chunk.stages + 1) + chunk.stage


class _Opaque:
    """A call, in a form in which torch looks for no tensors."""

    def __init__(self, call: Any):
        self.call = call


class Runtime(schedules._PipelineScheduleRuntime):
    """torch's runtime over the actions of an order.

    The loss of each micro-batch is kept by its number: of two chains each has its own last stage.  Without ``backward``
    only forward passes are run.
    """

    def __init__(self, stages: list[ChunkStage], order: Order, *, backward: bool):
        super().__init__(stages, order.micro_batches, loss_fn=lambda output, target: output, scale_grads=False)
        offset = order.stages + 1
        self.stage_index_to_group_rank = {
            c * offset + i: rank for c, ranks in enumerate(order.ranks) for i, rank in enumerate(ranks)
        }
        self._has_backward = backward
        for stage in stages:
            stage.stage_index_to_group_rank = self.stage_index_to_group_rank
            stage.has_backward = backward
        passes = [[a for a in actions if backward or a.kind == FORWARD] for actions in order.actions]
        self.pipeline_order_with_comms = _with_messages(order, passes, offset)
        self.losses: dict[int, Tensor] = {}

    def run(self, calls: Sequence[Any]) -> dict[int, Tensor]:
        """Runs a step, a call of the model's a micro-batch -> the losses that are made on this rank, by micro-batch."""
        for stage in self._stages:
            stage.clear_runtime_states()
        tokens, kwargs = [(call.inputs.tokens,) for call in calls], [dict(call=_Opaque(call)) for call in calls]
        self._step_microbatches(tokens, kwargs, [None] * len(calls), return_outputs=False)
        made, self.losses = self.losses, {}
        return {m: loss.detach() for m, loss in made.items()}

    def _maybe_compute_loss(self, stage: Any, output: Any, target_mbs: Any, mb_index: Any, *rest: Any) -> None:
        if stage.is_last:
            self.losses[mb_index] = output

    def _maybe_get_loss(self, stage: Any, mb_index: Any) -> Any:
        return self.losses.get(mb_index) if stage.is_last else None

    def _update_losses(self, stages: Any, losses: Any) -> None:
        pass


def _with_messages(order: Order, passes: Sequence[Sequence[Action]], offset: int) -> dict[int, list[Any]]:
    """Returns each rank's passes with the messages between ranks: a receive stands where its sender has sent."""
    todo = [list(reversed(actions)) for actions in passes]
    made: dict[int, list[Any]] = {r: [] for r in range(len(todo))}
    done: set[Action] = set()
    while any(todo):
        moved = False
        for r, actions in enumerate(todo):
            while actions and _ready(order, actions[-1], done):
                action = actions.pop()
                done.add(action)
                moved = True
                stage, kind, m, chain = action
                made[r].append(_theirs(chain * offset + stage, kind, m))
                if kind in _SENT:
                    send, receive, way = _SENT[kind]
                    other = stage + way
                    if 0 <= other < order.stages and (peer := order.ranks[chain][other]) != r:
                        made[r].append(_theirs(chain * offset + stage, send, m))
                        made[peer].append(_theirs(chain * offset + other, receive, m))
        if not moved:
            raise ValueError(f"pipeline: the order of {order.schedule} ends in a deadlock")
    return made


def _ready(order: Order, action: Action, done: set[Action]) -> bool:
    stage, kind, m, chain = action
    if kind == FORWARD:
        return stage == 0 or Action(stage - 1, FORWARD, m, chain) in done
    if kind in (BACKWARD, INPUT):
        above = (Action(stage + 1, way, m, chain) for way in (BACKWARD, INPUT))
        return stage == order.stages - 1 or any(a in done for a in above)
    return True


def _theirs(stage: int, kind: str, micro_batch: int) -> Any:
    return schedules._Action(stage, _OF[kind], micro_batch)
