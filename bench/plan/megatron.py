"""Megatron-LM's own layer as entries of a ledger: the calls of a device, with their flops, bytes and messages.

From the text of Shoeybi et al. 2019 (arXiv:1909.08053) and Korthikanti et al. 2022 (arXiv:2205.05198): 16-bit operands;
attention in products, softmax and dropout of their own, each of which reads and writes all scores; bias and gelu in one
kernel, bias, dropout and residual in one; two all-reduces a layer each way, with sequence parallelism an all-gather and
a reduce-scatter in place of each.  The second gather of rows that sequence parallelism makes backward runs beside a
product, and is not counted.  Every op is one pass over its operands.

From the code that was public then (megatron/p2p_communication.py, schedules.py, model/transformer.py,
model/distributed.py, mpu/layers.py and optimizer/optimizer.py of NVIDIA/Megatron-LM): q, k and v are views of one
product, whose bias is added in a pass of its own (torch.nn.functional.linear of three dimensions); backward they are
joined again, and the gradients of q and k are scaled; heads are laid out anew forward alone.  A rank sends and receives
between passes and waits for both, its tp ranks receive a part each and gather it; every micro-batch adds its gradients
to those before, a pass of its own; the replicas of stages sum them after the last; the optimizer copies them to fp32,
scales, measures and clips them before Adam, and copies the weights back.  Since the end of 2021 the sum behind a
column-parallel layer's gradient of inputs runs beside that of the weight: ``overlapped``.
"""

from collections.abc import Iterable
from typing import NamedTuple

from tpfuse.kernels.runtime.errors import check
from tpfuse.models.config.model import ModelConfig
from tpfuse.pipeline.action import BACKWARD, FORWARD, INPUT, WEIGHT
from tpfuse.pipeline.schedules import SCHEDULES
from tpfuse.tools.ledger.aten import COMMUNICATION, ELEMENTWISE, GEMM
from tpfuse.tools.ledger.memory import activation_bytes
from tpfuse.tools.ledger.recorder import Entry, tiles
from tpfuse.tools.plan.cluster import Cluster
from tpfuse.tools.plan.messages import over_tp
from tpfuse.tools.plan.split import GEMM as PRODUCTS
from tpfuse.tools.plan.split import MEMORY, TP, Job, PieceCost, Pieces, Split

E = 2  # bytes of a number
MASK = 1  # of a number's dropout
RECOMPUTE = {"fastest": "none", "smallest": "selective"}  # of a split's saving


class Sizes(NamedTuple):
    """One rank's: ``rows`` of all tp ranks, width, heads and positions, tp, and the ranks that share rows."""

    rows: int
    width: int
    heads: int
    seq: int
    tp: int
    shards: int

    @property
    def tile(self) -> int:
        """The numbers of one activation, of all ranks."""
        return self.rows * self.width

    @property
    def scores(self) -> int:
        return self.rows * self.heads * self.seq // self.tp


class Product(NamedTuple):
    """``batch`` products [M, K] [K, N]."""

    M: int
    N: int
    K: int
    batch: int = 1

    @property
    def call(self) -> Entry:
        M, N, K, batch = self
        read, written = E * batch * (M * K + K * N), E * batch * M * N
        sizes = dict(read=read, written=written, least=read + written, flops=2 * batch * M * N * K)
        return Entry("gemm", GEMM, "", tiles=batch * tiles(M, N), **sizes)

    @property
    def gradients(self) -> list[Entry]:
        """The gradients of both operands."""
        M, N, K, batch = self
        return [Product(M, K, N, batch).call, Product(K, N, M, batch).call]


class Layer(NamedTuple):
    """Calls of a layer; ``core``: of its forward, the part of attention that selective recomputation repeats;
    ``hideable``: messages of backward with the product that may run at the same time."""

    forward: list[Entry]
    core: list[Entry]
    backward: list[Entry]
    hideable: list[tuple[Entry, Entry]]


def _through(op: str, read: int, written: int) -> Entry:
    return Entry(op, ELEMENTWISE, "", read=read, written=written, least=read + written, flops=0)


def _sent(op: str, wire: int) -> Entry:
    return Entry(op, COMMUNICATION, "", read=0, written=0, least=0, flops=0, wire=wire)


def _gather(s: Sizes) -> list[Entry]:
    """Rows in front of a column-parallel product, forward; backward the message behind its gradient."""
    return [_sent("all_gather", E * s.tile * (s.tp - 1) // s.tp)] if s.shards > 1 else []


def _sum(s: Sizes) -> list[Entry]:
    """The message behind a row-parallel product."""
    return [_sent("reduce_scatter" if s.shards > 1 else "all_reduce", E * s.tile)] if s.tp > 1 else []


def layer(s: Sizes) -> Layer:
    """Returns the calls of one layer."""
    h, t, T, p = s.width, s.tp, E * s.tile, s.scores
    per_head, batch = h // s.heads, s.rows // s.seq * s.heads // t
    qkv, project = Product(s.rows, 3 * h // t, h), Product(s.rows, h, h // t)
    fc1, fc2 = Product(s.rows, 4 * h // t, h), Product(s.rows, h, 4 * h // t)
    scores, mixed = Product(s.seq, s.seq, per_head, batch), Product(s.seq, per_head, s.seq, batch)
    norm = _through("layer_norm", T // s.shards, T // s.shards)
    finish = _through("bias_dropout_add", 2 * T // s.shards, (T + MASK * s.tile) // s.shards)
    add_bias, join = (_through(op, 3 * T // t, 3 * T // t) for op in ("bias_add", "cat"))
    permute, scale = (_through(op, T // t, T // t) for op in ("permute", "mul"))
    core = [scores.call, _through("softmax", E * p, E * p), _through("dropout", E * p, (E + MASK) * p), mixed.call]
    gelu = _through("bias_gelu", 4 * T // t, 4 * T // t)
    forward = [
        *(norm, *_gather(s), qkv.call, add_bias, *core, permute, project.call, *_sum(s), finish),
        *(norm, *_gather(s), fc1.call, gelu, fc2.call, *_sum(s), finish),
    ]
    shard = (T // s.shards, s.tile // s.shards)
    ends = [  # of a branch: of dropout, of the bias, of the norm (dx, then its weights) and of the residual's sum
        _through("dropout_backward", shard[0] + MASK * shard[1], shard[0]),
        _through("bias_backward", shard[0], 0),
        _through("norm_backward", 2 * shard[0], shard[0]),
        _through("norm_weights_backward", 2 * shard[0], 0),
        _through("add", 2 * shard[0], shard[0]),
    ]
    of_gelu = [_through("bias_gelu_backward", 8 * T // t, 4 * T // t), _through("bias_backward", 4 * T // t, 0)]
    of_core = [
        *mixed.gradients,
        _through("dropout_backward", (E + MASK) * p, E * p),
        _through("softmax_backward", 2 * E * p, E * p),
        *scores.gradients,
        *(scale, scale, join, _through("bias_backward", 3 * T // t, 0)),
    ]
    # what a gather is forward is a sum backward, and the other way round
    backward = [
        *(*ends, *_gather(s), *fc2.gradients, *of_gelu, *fc1.gradients, *_sum(s)),
        *(*ends, *_gather(s), *project.gradients, *of_core, *qkv.gradients, *_sum(s)),
    ]
    return Layer(forward, core, backward, [(message, p.gradients[1]) for p in (fc1, qkv) for message in _sum(s)])


def head(s: Sizes, vocabulary: int) -> Layer:
    """Returns the calls of the last norm, the logits and their loss in fp32."""
    norm, logits = _through("layer_norm", E * s.tile, E * s.tile), Product(s.rows, vocabulary // s.tp, s.width)
    n = s.rows * vocabulary // s.tp
    loss = [
        _through(op, read * n, written * n)
        for op, read, written in (("cast", 2, 4), ("max", 4, 0), ("sub", 4, 4), ("exp", 4, 4), ("sum", 4, 0))
    ]
    back = [_through("softmax", 4 * n, 4 * n), _through("loss_backward", 4 * n, 4 * n), _through("cast", 4 * n, 2 * n)]
    return Layer([norm, *_gather(s), logits.call, *loss], [], [*back, *logits.gradients, *_sum(s), norm], [])


def embedding(s: Sizes) -> Layer:
    """Returns the calls of the lookup, the sum over the vocabulary's ranks, positions and dropout."""
    T = E * s.tile
    finish = _through("add_dropout", 2 * T // s.shards, (T + MASK * s.tile) // s.shards)
    return Layer([_through("lookup", T, T), *_sum(s), finish], [], [finish, *_gather(s), _through("scatter", T, T)], [])


class MegatronCosts:
    """The pieces of a GPT as Megatron-LM runs them, on a cluster.

    A split's saving "smallest" is selective recomputation, its ``full`` that of whole layers.  ValueError for what
    Megatron-LM of these papers does not do: schedules that split the backward pass, and heads that tp does not divide.
    """

    def __init__(self, cluster: Cluster, *, sequence_parallel: bool, overlapped: bool = False):
        self.cluster, self.sequence_parallel, self.overlapped = cluster, sequence_parallel, overlapped

    def __call__(self, job: Job, split: Split) -> Pieces:
        config, t = job.config, split.tp
        check(not SCHEDULES[split.schedule].split, f"megatron: backward passes are not split, got {split.schedule}")
        check(config.num_heads % t == 0, f"megatron: {config.num_heads} heads are not divisible by tp={t}")
        shards = t if self.sequence_parallel else 1
        rows = split.micro_batch * job.seq
        s = Sizes(rows, config.hidden_size, config.num_heads, job.seq, tp=t, shards=shards)
        block = self._piece(layer(s), job, split, parameters=_block_parameters(config, t))
        vocabulary = config.vocab_size * config.hidden_size / t
        ends = self._piece(embedding(s), job, split, parameters=vocabulary + job.seq * config.hidden_size)
        end = self._piece(head(s, config.vocab_size), job, split, parameters=2 * config.hidden_size)
        end = end._replace(
            saved=E * s.tile / shards + 4 * rows * config.vocab_size / t,
            parameters=end.parameters + (vocabulary if split.pp > 1 else 0),  # a copy of the tied table
        )
        # pipeline ranks of a tp group send a part each, and gather it there (Narayanan et al. 2021, 4.1)
        return Pieces(ends, (block,) * config.num_layers, end, hop_bytes=E * s.tile / t)

    def _piece(self, calls: Layer, job: Job, split: Split, parameters: float) -> PieceCost:
        recomputed = calls.forward if split.full else calls.core if split.saving == "smallest" else []
        if not calls.core:
            recomputed = []  # embedding and head are not recomputed
        micro_batches = job.batch // (split.dp * split.micro_batch)
        sums = [accumulation(parameters)] if micro_batches > 1 else []
        backward = self._seconds([*recomputed, *calls.backward, *sums], job, split)
        for message, product in calls.hideable if self.overlapped else ():
            sent = over_tp(message.op, message.wire, split, self.cluster)
            backward[TP] -= min(sent, self.cluster.device.seconds(product, job.dtype))
        recompute = "full" if split.full else RECOMPUTE[split.saving]
        saved, unsaved = (_saved(job, split, name, self.sequence_parallel) for name in (recompute, "none"))
        return PieceCost(
            {FORWARD: self._seconds(calls.forward, job, split), BACKWARD: backward, INPUT: backward, WEIGHT: {}},
            saved=saved if calls.core else 0.0,
            held=0.0,
            transient=unsaved - saved if calls.core else 0.0,
            parameters=parameters,
        )

    def _seconds(self, calls: Iterable[Entry], job: Job, split: Split) -> dict[str, float]:
        seconds = {PRODUCTS: 0.0, MEMORY: 0.0, TP: 0.0}
        for e in calls:
            if e.kind == COMMUNICATION:
                seconds[TP] += over_tp(e.op, e.wire, split, self.cluster)
            else:
                seconds[PRODUCTS if e.kind == GEMM else MEMORY] += self.cluster.device.seconds(e, job.dtype)
        return seconds


def _saved(job: Job, split: Split, recompute: str, sequence_parallel: bool) -> float:
    return activation_bytes(
        job.config, split.tp, sequence_parallel and split.tp > 1, recompute, seq=job.seq, batch=split.micro_batch
    )


def _block_parameters(config: ModelConfig, tp: int) -> float:
    """Returns the elements of one layer on a rank."""
    return (12 * config.hidden_size**2 + 7 * config.hidden_size) / tp + 6 * config.hidden_size


def accumulation(elements: float) -> Entry:
    """Returns the pass that adds a micro-batch's gradients, of a rank's elements, to those before."""
    return _through("accumulate", 2 * E * round(elements), E * round(elements))


def optimizer(elements: float) -> list[Entry]:
    """Returns the passes of a step of Adam in mixed precision over a rank's elements, of which gradients, weights and
    both moments are fp32: the gradients are copied, scaled, measured and clipped, Adam reads and writes all but them,
    and the 16-bit weights are copied (Narayanan et al. 2021)."""
    n = round(elements)
    passes = dict(copy=(2, 4), scale=(4, 4), norm=(4, 0), clip=(4, 4), adam=(16, 12), weights=(4, 2))
    return [_through(op, read * n, written * n) for op, (read, written) in passes.items()]
