"""The path of each layer's messages, and the reason."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..kernels.runtime.errors import check
from ..layers import ParallelAttention, ParallelMLP, ParallelMoE, RowParallelLinear, VocabParallelEmbedding
from ..layers.cross_attention import KeyValue
from ..layers.expert_sizes import ExpertSizes
from ..layers.linear import ColumnProjection
from ..layers.module import local
from ..models.head import LMHead
from ..models.model import Model
from ..parallel import TensorParallel
from ..pipeline.placement import held_by
from ..pipeline.schedules import placement
from ..sequence_parallel.choice import Measured, OverlapSizes, form_of, hidden, measured, most_rounds, sizes
from ..sequence_parallel.context import HeadSplit
from ..sequence_parallel.forms import plain
from ..sequence_parallel.forms.leafwise import Leafwise
from ..training.data_parallel import bucket_count, limits, replica_of
from .ledger.context import PieceExchange

_MOST_ROWS = 1 << 24


class Path(NamedTuple):
    """One op of one layer; of a pipeline's stage what it sends to other ranks; the mean of the gradients over replicas.

    ``bytes`` and ``messages`` are sent by this rank, forward and backward: under sequence parallelism all of them,
    without it those that can hide (the sum of dx), those of a stage, and those of a step over the replicas (a ring's).
    Of experts they are all, in a block with saving="fastest", where every rank's have as many rows.
    """

    layer: str
    op: str
    path: str  # "plain", "leaves" or "pairwise"
    weight: tuple[int, ...]  # a rank's; () of a stage and of replicas
    rows: int | None
    bytes: int | None
    messages: int | None
    reason: str


class Paths(list[Path]):
    """Prints as a table."""

    def __repr__(self) -> str:
        head = ("layer", "op", "path", "rows", "weight", "MB sent", "messages", "reason")
        text = lambda value: "" if value is None else str(value)
        sizes = lambda p: (
            text(p.rows),
            "x".join(map(str, p.weight)),
            "" if p.bytes is None else f"{p.bytes / 1e6:.2f}",
        )
        lines = [head, *((p.layer, p.op, p.path, *sizes(p), text(p.messages), p.reason) for p in self)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(head) - 1)]
        return "\n".join(
            "  ".join([*(cell.ljust(w) for cell, w in zip(line, widths)), line[-1]]).rstrip() for line in lines
        )


class _Call(NamedTuple):
    """The rows of a call, and the dtype of activations; None: the weight's."""

    rows: int | None
    dtype: torch.dtype | None

    def dtype_of(self, weight: Tensor) -> torch.dtype:
        return self.dtype or weight.dtype


def explain(model: nn.Module, rows: int | None = None, *, dtype: torch.dtype | None = None) -> Paths:
    """Lists everything in a model that exchanges rows, and what averages its gradients under DistributedDataParallel:
    the path its messages take, sizes, bytes and the reason.  It prints as a table.

    ``rows`` is M = positions x samples of a call, not of the sequence that cross-attention reads.  Without it a path
    that depends on rows is named with the least that it takes. ``dtype`` is that of the activations: the weight's
    unless given (under autocast, its dtype).
    ValueError for ``rows`` below 1.
    """
    check(rows is None or rows > 0, f"explain: rows must be positive, got {rows}")
    call = _Call(rows, dtype)
    sends = _sends(model, rows, call.dtype_of(next(model.parameters())))
    return Paths([*_layers(model, call), *sends, *_averages(model)])


def _layers(model: nn.Module, call: _Call) -> Iterator[Path]:
    """Yields the paths of layers; an MLP's two GEMMs are one op, and so are an attention layer's two projections, but
    not over pieces of sequences."""
    inside: set[nn.Module] = set()
    tables = {m.num_embeddings: m.weight for m in model.modules() if isinstance(m, VocabParallelEmbedding)}
    for name, module in model.named_modules():
        if module in inside:
            continue
        if isinstance(module, ParallelMLP):
            inside |= {module.fc1, module.fc2}
            yield _path(name, "gather_mlp_exchange", module.fc1.flat()[0], module.tp, call=call)
        elif isinstance(module, ParallelMoE):
            yield _experts(name, module, call)
        elif isinstance(module, ParallelAttention) and module.tp.cp is not None:
            yield _piece(name, module, call)
        elif isinstance(module, ParallelAttention) and module.in_one and module.tp.sequence_parallel:
            inside |= {module.qkv, module.out}
            weight = module.qkv.flat()[0]
            columns = len(weight) + module.out.weight.shape[1]
            yield _path(name, "gather_attention_exchange", weight, module.tp, call=call, columns=columns)
        elif isinstance(module, ColumnProjection):
            of_memory = isinstance(module, KeyValue)  # whose rows are those of another sequence
            of_rows = call._replace(rows=None) if of_memory else call
            yield _path(name, "gather_linear", module.flat()[0], module.tp, call=of_rows)
        elif isinstance(module, RowParallelLinear):
            yield _path(name, "linear_exchange", local(module.weight), module.tp, call=call)
        elif isinstance(module, LMHead):
            untied = getattr(module, "weight", None)
            weight = local(tables[module.vocab_size] if untied is None else untied)
            yield _path(name, "gather_linear", weight, module.tp, call=call, columns=module.columns)
        elif isinstance(module, VocabParallelEmbedding):
            columns = module.tp.slice_size(module.num_embeddings)
            yield _path(name, "embedding", local(module.weight), module.tp, call=call, columns=columns)


def _sends(model: nn.Module, rows: int | None, dtype: torch.dtype) -> Iterator[Path]:
    """Yields the messages of a model's pipeline stages to other ranks, of a micro-batch of ``rows``."""
    if not isinstance(model, Model) or (place := model.stages.place) is None:
        return
    chains, tp = placement(place.schedule, place.ranks, held_by(place)), model.tp
    for chain, stage in ((c.chain, c.stage) for c in model.stages.chunks):
        ends = {"h": stage + 1, "its input's gradient": stage - 1}
        ranks = {tensor: chains[chain][i] for tensor, i in ends.items() if 0 <= i < len(chains[chain])}
        sent = [f"{tensor} to rank {rank}" for tensor, rank in ranks.items() if rank != place.rank]
        size = None if rows is None else -(-rows // tp.row_shards) * model.config.hidden_size * dtype.itemsize
        yield Path(
            layer=f"stage {stage}" + (f" of chain {chain}" if len(chains) > 1 else ""),
            op="send",
            path="plain",
            weight=(),
            rows=rows,
            bytes=None if size is None else size * len(sent),
            messages=None if size is None else len(sent),
            reason=", ".join(sent) or "both neighbours are on this rank",
        )


def _averages(model: nn.Module) -> Iterator[Path]:
    """Yields the messages of DistributedDataParallel in a step, and its settings."""
    replica = replica_of(model)
    if replica is None:
        return
    named = replica.module.named_parameters()
    parameters = [p for name, p in named if p.requires_grad and name not in replica.parameters_to_ignore]
    size, caps = replica.process_group.size(), limits(replica)
    gradients = "views of them" if replica.gradient_as_bucket_view else "copied into them"
    lead = f", the first of {caps[0] / 2**20:g}" if len(caps) > 1 else ""
    yield Path(
        layer="data parallel",
        op="all_reduce",
        path="plain",
        weight=(),
        rows=None,
        bytes=2 * (size - 1) * sum(p.numel() * p.element_size() for p in parameters) // size,
        messages=bucket_count(parameters, caps),
        reason=f"{size} replicas, buckets of {round(caps[-1] / 2**20, 3):g} MiB{lead}, gradients {gradients}",
    )


def _path(name: str, op: str, weight: Tensor, tp: TensorParallel, *, call: _Call, columns: int | None = None) -> Path:
    """Returns the path of rows that a GEMM reads or makes; weight [N, D] flat, ``columns``: N, if ranks have different
    ones."""
    rows, dtype, shape = call.rows, call.dtype_of(weight), (columns or len(weight), weight.shape[1])
    sizes_of = lambda rows: sizes(op, rows, shape, dtype=dtype, device=weight.device, tp=tp)
    sent = None if rows is None else sizes_of(rows)
    form = form_of(op, rows or 1, shape, dtype=dtype, device=weight.device, tp=tp)
    path = "plain" if form is plain else "leaves" if isinstance(form, Leafwise) else "pairwise"
    reason, least = _reason(op, tp, sent, sizes_of)
    bytes, messages = (None, None) if sent is None else sent[:2]
    path = path if least is None else "auto"
    return Path(name, op, path, shape, rows=rows, bytes=bytes, messages=messages, reason=reason)


def _experts(name: str, layer: ParallelMoE, call: _Call) -> Path:
    """Returns the exchanges of rows and what is beside them; without sequence parallelism results are collected, and
    gradients of rows, m D elements each to each peer.  Over replicas, whose rows are not known here, nothing is
    counted."""
    fc1 = local(layer.shard("fc1")).flatten(1, 2)  # [E / R, 2 F, D]
    tp, k, rows, weight, element = layer.tp, layer.routing.k, call.rows, tuple(fc1.shape), call.dtype_of(fc1).itemsize
    shared = "" if layer.shape.shared_size is None else f" and a shared one of width {layer.shape.shared_size}"
    several = f"{k} of {layer.num_experts} experts a row{shared}: exchanges of uneven parts, nothing overlaps"
    replicas = layer.experts.replicas
    several += f", over {replicas} replicas" * (replicas > 1)
    reason, bytes, messages = several if layer.experts.size > 1 else "one rank: no messages", None, None
    if rows is not None and replicas == 1:
        m, collected = (rows + -rows % tp.all_leaves) // tp.size, 2 * (tp.size > tp.row_shards) * (tp.size - 1)
        sizes = ExpertSizes(layer.shape, m, tp.size, element)
        bytes = round(sizes.wire()) + collected * m * layer.width * element
        messages = sizes.messages() + collected
    return Path(name, "routed_experts", "plain", weight, rows=rows, bytes=bytes, messages=messages, reason=reason)


def _piece(name: str, layer: ParallelAttention, call: _Call) -> Path:
    """Returns attention's exchanges over context-parallel ranks, of the rows of a piece."""
    tp, rows, weight = layer.tp, call.rows, local(layer.out.weight)
    dtype, split = call.dtype_of(weight), HeadSplit(layer.groups, layer.heads_per_group - 2, tp.cp_size)
    kind = "keys" if tp.cp_kind == "keys" else "heads"
    if not split.divides:
        reason = f"keys: heads cannot be divided by {split.ranks}"
    else:
        compared = (
            f"{split.heads} query heads a kv head and {split.copies} copies of it against 2 x {split.ranks} ranks"
        )
        reason = f"{kind}: {compared}, of which {split.cheaper} sends less"
    sent = PieceExchange(split, layer.head_width, rows or 0, kind, element=dtype.itemsize)
    path, rounds, why = _rounds(split, tp.cp, weight.device, dtype) if kind == "heads" else ("plain", 1, "")
    bytes, messages = (None, None) if rows is None else (sum(sent.wire), rounds * sum(sent.messages))
    return Path(name, "attend_pieces", path, (), rows=rows, bytes=bytes, messages=messages, reason=reason + why)


def _rounds(
    split: HeadSplit, cp: TensorParallel | None, device: torch.device, dtype: torch.dtype
) -> tuple[str, int, str]:
    """Returns the path of exchanged heads, the most rounds they take on it, and the reason."""
    assert cp is not None
    most = most_rounds(split.groups * split.copies // cp.size, cp)
    undecided = _no_choice(cp, cp.one_machine and device.type == "cpu", measured(device, dtype, cp.size))
    if cp.overlap == "auto" and undecided is not None:
        return "plain", 1, f"; {undecided}"
    if most == 1:
        return "plain", 1, f"; {undecided}" if cp.overlap == "off" else "; a rank has one kv head"
    when = "" if undecided is not None else " where attention of a call hides more than it costs"
    return "auto" if undecided is None else "pairwise", most, f"; {most} rounds travel under attention{when}"


def _reason(
    op: str, tp: TensorParallel, sent: OverlapSizes | None, sizes_of: Callable[[int], OverlapSizes]
) -> tuple[str, int | None]:
    """Returns the reason and, if the path depends on rows that are not known, the least that overlap; ``sent`` are the
    sizes of a call, and ``sizes_of(rows)`` those of another."""
    if tp.size == 1:
        return "one rank: no messages", None
    if op == "embedding":
        return "no GEMM to hide under", None
    if tp.bitwise is not None:
        tiles = "" if tp.batch_invariant is None else f", tiles of {tp.batch_invariant} rows"
        return f"bitwise={tp.bitwise}: sums by leaves{tiles}, nothing overlaps", None
    if hidden(op, tp).gemms == 0:
        return "without sequence parallelism nothing of it overlaps", None
    undecided = _no_choice(tp, sizes_of(1).copied, sizes_of(1).measured)
    if undecided is not None:
        return undecided, None
    if sent is None:
        least = next((1 << i for i in range(_MOST_ROWS.bit_length()) if sizes_of(1 << i).wins), None)
        if least is None:
            return "no number of rows is worth it", None
        return f"pairwise from about {least} rows, plain below", least
    communication, computation, cost = (1e3 * seconds for seconds in sent.seconds)
    compared = ">" if sent.wins else "<="
    gain = f"hides min({communication:.2f} ms of messages, {computation:.2f} of GEMMs)"
    return f"{gain} {compared} its cost of {cost:.2f} ms", None


def _no_choice(tp: TensorParallel, copied: bool, rates: Measured | None) -> str | None:
    """Returns the reason why sizes do not decide whether messages overlap; None if they do."""
    if tp.overlap != "auto":
        return f"overlap={tp.overlap!r}"
    if copied:
        return "one machine: messages are copies by the cores that multiply"
    if rates is None:
        return "nobody measured this device, dtype and number of ranks (bench.overlap --write)"
    return None
