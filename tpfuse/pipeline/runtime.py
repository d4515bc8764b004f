"""torch.distributed.pipelining's runtime over any order of actions, and its stages over a model's chunks.

The runtime that takes a list of actions is private in torch (2.11 to 2.15); only this file and torch_lists.py, which
reads its lists, know it.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import ReplicateModule
from torch.distributed.pipelining import PipelineStage, schedules

from ..kernels.runtime.errors import check
from ..kernels.runtime.rules import described
from .action import BACKWARD, FORWARD, INPUT, KINDS, WEIGHT
from .clock import OrderArrays
from .placement import Chunk
from .schedules import Order

_OF = {kind.value: kind for kind in schedules._ComputationType}
# by kind of pass: the send after it, the receive it matches, and the offset of the receiving stage
_SENT = {FORWARD: ("SEND_F", "RECV_F", 1), BACKWARD: ("SEND_B", "RECV_B", -1), INPUT: ("SEND_B", "RECV_B", -1)}

Passes = list[tuple[Chunk, str, float]]  # a stage's pass of a kind, and the seconds that it took
Around = Callable[[str, int], contextlib.AbstractContextManager[None]]


class Shapes(NamedTuple):
    """Tensors on the meta device: one sent between stages, and the input of the first."""

    rows: Tensor
    tokens: Tensor


class ChunkStage(PipelineStage):
    """A stage of torch's runtime that is a chunk of a model.

    Stages of the second chain are numbered from ``stages`` + 1 on: the gap keeps the last of one chain and the first of
    the other from being neighbours.

    A message takes memory from when its receive is posted until it is used, and the output that was sent until its
    gradient arrives; torch's stages keep all of both, of every micro-batch, for as long as they live.
    """

    def __init__(
        self,
        chunk: Chunk,
        run: Callable[..., Tensor],
        shapes: Shapes,
        *,
        device: torch.device,
        group: dist.ProcessGroup,
        build: Callable[[], Callable[[], None]] | None,
        around: "Around" = lambda kind, micro_batch: contextlib.nullcontext(),
    ):
        """``build`` returns a function that makes the weight gradients deferred by the latest backward pass.  Each pass
        runs in ``around(its kind, the micro-batch's number)``."""
        rows, self.around = shapes.rows, around
        self.chunk, self.run, self.rows = chunk, run, rows
        self.passes: Passes | None = None
        self._sent: dict[int, list[dist.Work]] = {}  # outputs, by micro-batch
        self._sent_back: list[dist.Work] = []
        loss = torch.promote_types(rows.dtype, torch.float32)  # torch 2.11 compares the dtype
        ends = torch.empty((), dtype=loss, device="meta", requires_grad=True)
        super().__init__(
            nn.Module(),  # run() is the stage; the runtime looks for DDP and FSDP on this module
            number(chunk),
            2 * chunk.stages + 1,
            device,
            input_args=(shapes.tokens,) if chunk.is_first else (rows,),
            output_args=(ends,) if chunk.is_last else (rows,),
            group=group,
            dw_builder=build,
        )

    @property
    def is_first(self) -> bool:
        return self.chunk.is_first

    @property
    def is_last(self) -> bool:
        return self.chunk.is_last

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Leaves out messages of torch 2.11 from this rank to itself, where two neighbours are: gloo has none."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    # ---- messages ----

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        inputs = super()._prepare_forward_infra(*args, **kwargs)
        if not self.is_first:
            self._place(self.args_recv_info.values(), None)
        return inputs

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        gradients = super()._prepare_backward_infra(*args, **kwargs)
        self._place(self.grad_recv_info.values(), None)
        return gradients

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._place([self.args_recv_info[fwd_chunk_id]], self.rows)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self._place([self.grad_recv_info[bwd_chunk_id]], self.rows)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _place(self, messages: Iterable[Any], template: Tensor | None) -> None:
        """Gives each message a tensor to be received into; with None, frees it."""
        for message in itertools.chain.from_iterable(messages):
            message.buffer = (
                None if template is None else torch.empty_like(template, device=self.device, requires_grad=False)
            )

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor]:
        message: Any
        (message,) = self.args_recv_info[fwd_chunk_id]
        x, message.buffer = message.buffer, None
        return (x.requires_grad_(self.has_backward),)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor]:
        (message,) = self.grad_recv_info[bwd_chunk_id]
        gradient, message.buffer = message.buffer, None
        return (gradient,)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends at once, and returns no op for the runtime to send or to keep."""
        self._sent[fwd_chunk_id] = schedules._batch_p2p(super().get_fwd_send_ops(fwd_chunk_id))
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends the gradient of a stage's input, like :meth:`get_fwd_send_ops`."""
        self._sent_back += schedules._batch_p2p(super().get_bwd_send_ops(bwd_chunk_id))
        return []

    def end_sending(self) -> None:
        """Waits for what is still being sent."""
        for messages in (*self._sent.values(), self._sent_back):
            schedules._wait_batch_p2p(messages)
        self._sent, self._sent_back = {}, []

    def clear_runtime_states(self) -> None:
        """Ends a step: waits for what is still being sent, and keeps nothing."""
        self.end_sending()
        self.fwd_cache.clear()

    # ---- passes ----

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        output = self.run(self.chunk, None if self.chunk.is_first else args[0], kwargs["call"].call)
        check(
            self.chunk.is_last or (output.shape, output.dtype) == (self.rows.shape, self.rows.dtype),
            f"pipeline: stages send {self.rows.dtype} {tuple(self.rows.shape)}, and a layer or a hook of stage"
            f" {self.chunk.stage} made {described(output)}",
        )
        return output

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._clocked(FORWARD), self.around(FORWARD, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        schedules._wait_batch_p2p(self._sent.pop(bwd_chunk_id, []))  # long over: its gradient is here
        kind = BACKWARD if kwargs["full_backward"] else INPUT
        with self._clocked(kind), self.around(kind, bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        with self._clocked(WEIGHT), self.around(WEIGHT, bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    @contextlib.contextmanager
    def _clocked(self, kind: str) -> Iterator[None]:
        begin = self._now()
        yield
        if self.passes is not None:
            self.passes.append((self.chunk, kind, self._now() - begin))

    def _now(self) -> float:
        if self.passes is not None and self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()


def number(chunk: Chunk) -> int:
    """Returns the index by which torch's runtime knows a stage."""
    return chunk.chain * (chunk.stages + 1) + chunk.stage


class _Opaque:
    """Wraps a call so that torch looks for no tensors in it."""

    def __init__(self, call: Any):
        self.call = call


class Runtime(schedules._PipelineScheduleRuntime):
    """torch's runtime over the actions of an order.

    The loss of each micro-batch is kept by its number: of two chains each has its own last stage.  Without ``backward``
    only forward passes are run.  ``batches``: those that may be in flight at a time.
    """

    def __init__(self, stages: list[ChunkStage], order: Order, *, backward: bool, batches: int = 1):
        count = batches * order.micro_batches
        super().__init__(stages, count, loss_fn=lambda output, target: output, scale_grads=False)
        self.order, offset = order, order.stages + 1
        self.stage_index_to_group_rank = {
            c * offset + i: rank for c, ranks in enumerate(order.ranks) for i, rank in enumerate(ranks)
        }
        self._has_backward = backward
        for stage in stages:
            stage.stage_index_to_group_rank = self.stage_index_to_group_rank
            stage.has_backward = backward
        passes = tuple(tuple(a for a in actions if backward or a.kind == FORWARD) for actions in order.actions)
        self._set_lists(_with_messages(order._replace(actions=passes)))
        self.losses: dict[int, Tensor] = {}

    def _set_lists(self, lists: dict[int, list[Any]]) -> None:
        """Sets what a step runs: each rank's passes and messages."""
        self.pipeline_order_with_comms = dict(lists)
        self._actions = lists[self.rank]

    def run(self, calls: Sequence[Any], announce: Callable[[int], None], passes: Passes | None) -> dict[int, Tensor]:
        """Runs a step, one call of the model a micro-batch; returns the losses made on this rank, by micro-batch.

        ``announce(place)`` is called before the pass at each index, and after the final one.  ``passes`` collects
        their seconds.
        """
        for stage in self._stages:
            stage.passes = passes  # type: ignore[attr-defined]
        self.pipeline_order_with_comms[self.rank] = _Announced(self._actions, announce)
        tokens, kwargs = [(call.inputs.tokens,) for call in calls], [dict(call=_Opaque(call)) for call in calls]
        self._step_microbatches(tokens, kwargs, [None] * len(calls), return_outputs=False)
        for stage in self._stages:
            self._end(stage)
        losses, self.losses = self.losses, {}
        return {m: loss.detach() for m, loss in losses.items()}

    def _end(self, stage: Any) -> None:
        stage.clear_runtime_states()

    def _maybe_compute_loss(self, stage: Any, output: Any, target_mbs: Any, mb_index: Any, *target_args: Any) -> None:
        if stage.is_last:
            self.losses[mb_index] = output

    def _maybe_get_loss(self, stage: Any, mb_index: Any) -> Any:
        return self.losses.get(mb_index) if stage.is_last else None

    def _update_losses(self, stages: Any, losses: Any) -> None:
        pass


class ContinuedRuntime(Runtime):
    """torch's runtime over steps that end with micro-batches in flight, under a schedule without a flush.

    Micro-batch j of batch t, counted from 0, has the number (t mod 2) m + j there.  A message is received in the step
    in which it is sent.
    """

    def __init__(self, stages: list[ChunkStage], order: Order):
        super().__init__(stages, order, backward=True, batches=2)
        self._passes: dict[tuple[bool, bool, int], dict[int, list[Any]]] = {}

    def run_batches(
        self, previous: Sequence[Any] | None, batch: Sequence[Any] | None, number: int
    ) -> dict[int, Tensor]:
        """Runs what a step has of the ``previous`` batch and of ``batch``, which is number ``number``.

        Both are calls of the model, one a micro-batch; without ``previous`` nothing is in flight, without ``batch``
        nothing is afterwards.

        Returns losses made on this rank, by micro-batch; those of the batch before are below 0.
        """
        m, (calls, other) = self.order.micro_batches, (batch or previous, previous or batch)
        assert calls is not None and other is not None
        key = previous is not None, batch is not None, number % 2
        if key not in self._passes:
            self._passes[key] = self._numbered(*key)
        self._set_lists(self._passes[key])
        halves = (calls, other) if number % 2 == 0 else (other, calls)
        losses = self.run([*halves[0], *halves[1]], lambda place: None, None)
        return {(n - number * m + m) % (2 * m) - m: loss for n, loss in losses.items()}

    def _numbered(self, previous: bool, batch: bool, parity: int) -> dict[int, list[Any]]:
        m = self.order.micro_batches
        runs = lambda a: batch if a.micro_batch >= 0 else previous
        passes = tuple(tuple(filter(runs, actions)) for actions in self.order.actions)
        number = lambda n: (n + parity * m) % (2 * m)
        lists = _with_messages(self.order._replace(actions=passes))
        return {r: [a._replace(microbatch_index=number(a.microbatch_index)) for a in row] for r, row in lists.items()}

    def _end(self, stage: Any) -> None:
        stage.end_sending()


class _Announced(list[Any]):
    """Actions that call ``announce`` with the index of each pass, once the previous pass has run and its messages are
    on their way; only in the first iteration, as torch reads the list again to report an error."""

    def __init__(self, actions: Sequence[Any], announce: Callable[[int], None]):
        super().__init__(actions)
        self.announce: Callable[[int], None] | None = announce

    def __iter__(self) -> Iterator[Any]:
        announce, self.announce, place = self.announce, None, 0
        for action in super().__iter__():
            if announce is not None and action.computation_type.value in KINDS:
                announce(place)
                place += 1
            yield action
        if announce is not None:
            announce(place)


def _with_messages(order: Order) -> dict[int, list[Any]]:
    """Returns each rank's passes with the messages between ranks: a receive is placed when its sender has sent."""
    arrays, offset = OrderArrays.of(order), order.stages + 1
    actions = list(itertools.chain.from_iterable(order.actions))
    todo = [list(reversed(range(begin, end))) for begin, end in itertools.pairwise(arrays.begins)]
    lists: dict[int, list[Any]] = {r: [] for r in range(len(todo))}
    sent = [False] * (len(actions) + 1) + [True]  # behind the actions: one that never ends, and (at -1) no message
    while any(todo):
        moved = False
        for r, left in enumerate(todo):
            while left and sent[arrays.adjacent[left[-1]]]:
                i = left.pop()
                sent[i] = moved = True
                stage, kind, m, chain = actions[i]
                lists[r].append(_torch_action(chain * offset + stage, kind, m))
                if kind in _SENT:
                    send, receive, step = _SENT[kind]
                    neighbour = stage + step
                    if 0 <= neighbour < order.stages and (peer := order.ranks[chain][neighbour]) != r:
                        lists[r].append(_torch_action(chain * offset + stage, send, m))
                        lists[peer].append(_torch_action(chain * offset + neighbour, receive, m))
        if not moved:
            raise ValueError(f"pipeline: the order of {order.schedule} ends in a deadlock")
    return lists


def _torch_action(stage: int, kind: str, micro_batch: int) -> Any:
    return schedules._Action(stage, _OF[kind], micro_batch)


# ---- FSDP2 ----


def initialize(root: Any) -> None:
    """Makes an FSDP2 module the root of those inside, before one of them is called and would become a root itself."""
    root._get_fsdp_state()._lazy_init()


def end_backward(root: Any) -> None:
    """Runs what FSDP2 runs after a backward pass, for gradients made outside one."""
    root._get_fsdp_state()._root_post_backward_final_callback()


def sum_into_shards(root: Any) -> None:
    """Sums the unsharded gradients over the replicas into the shards, and frees the whole parameters."""
    PipelineStage.perform_reduce_grad(SimpleNamespace(submod=root), 1)  # type: ignore[arg-type]


def is_replicated(module: nn.Module) -> bool:
    """Returns True if FSDP2 replicates a module's parameters and shards none."""
    return isinstance(module, ReplicateModule)
