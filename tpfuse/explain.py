"""Which path each layer's messages take, and why."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from .kernels._op import check
from .layers import ColumnParallelLinear, ParallelAttention, ParallelMLP, RowParallelLinear, VocabParallelEmbedding
from .layers._module import local
from .models.head import LMHead
from .parallel import TensorParallel
from .sequence_parallel._choice import REPLICATED, Sizes, sizes

_MOST_ROWS = 1 << 24


class Path(NamedTuple):
    """One op of one layer.  ``bytes`` and ``messages`` leave this rank, forward and backward: under sequence parallelism all there are,
    without it those that can hide (the sum of dx)."""

    layer: str
    op: str
    path: str  # "plain" or "pairwise"
    weight: tuple[int, int]  # a rank's
    rows: int | None
    bytes: int | None
    messages: int | None
    reason: str


class Paths(list[Path]):
    """Prints as a table."""

    def __repr__(self) -> str:
        head = ("layer", "op", "path", "rows", "weight", "MB sent", "messages", "reason")
        shown = lambda value: "" if value is None else str(value)
        sizes = lambda p: (shown(p.rows), "x".join(map(str, p.weight)), _mb(p.bytes), shown(p.messages))
        lines = [head, *((p.layer, p.op, p.path, *sizes(p), p.reason) for p in self)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(head) - 1)]
        return "\n".join("  ".join([*(cell.ljust(w) for cell, w in zip(line, widths)), line[-1]]).rstrip() for line in lines)


def explain(model: nn.Module, rows: int | None = None, *, dtype: torch.dtype | None = None) -> Paths:
    """For everything in a model that exchanges rows: the path its messages take, sizes, bytes and the reason; printed, a table.

    ``rows`` is M = positions x samples of a call.  Without it a path that depends on rows is named with the least that it takes.
    ``dtype`` is that of the activations: the weight's unless given (under autocast, its dtype).  ValueError for ``rows`` below 1.
    """
    check(rows is None or rows > 0, f"explain: rows must be positive, got {rows}")
    return Paths(_path(*layer, rows, dtype) for layer in _layers(model))


def _layers(model: nn.Module):
    """(name, op, weight [N, D] flat, tp, N where ranks have different ones) of all that exchange rows; an MLP's two GEMMs are one, and
    an attention layer's two projections."""
    inside: set[nn.Module] = set()
    tables = {m.num_embeddings: m.weight for m in model.modules() if isinstance(m, VocabParallelEmbedding)}
    for name, module in model.named_modules():
        if module in inside:
            continue
        if isinstance(module, ParallelMLP):
            inside |= {module.fc1, module.fc2}
            yield name, "gather_mlp_exchange", module.fc1.flat()[0], module.tp, None
        elif isinstance(module, ParallelAttention) and module.in_one and module.tp.sequence_parallel:
            inside |= {module.qkv, module.out}
            weight = module.qkv.flat()[0]
            yield name, "gather_attention_exchange", weight, module.tp, len(weight) + module.out.weight.shape[1]
        elif isinstance(module, ColumnParallelLinear):
            yield name, "gather_linear", module.flat()[0], module.tp, None
        elif isinstance(module, RowParallelLinear):
            yield name, "linear_exchange", local(module.weight), module.tp, None
        elif isinstance(module, LMHead):
            weight = getattr(module, "weight", None)
            yield name, "gather_linear", local(tables[module.vocab_size] if weight is None else weight), module.tp, module.columns
        elif isinstance(module, VocabParallelEmbedding):
            yield name, "embedding", local(module.weight), module.tp, -(-module.num_embeddings // module.tp.size)


def _path(name: str, op: str, weight: Tensor, tp: TensorParallel, columns: int | None, rows: int | None, dtype: torch.dtype | None) -> Path:
    shape, dtype = (columns or len(weight), weight.shape[1]), dtype or weight.dtype
    at = lambda rows: sizes(op, rows, shape, dtype, weight.device, tp)
    found = None if rows is None else at(rows)
    path, reason = _verdict(op, tp, found, at)
    return Path(name, op, path, shape, rows, None if found is None else found.bytes, None if found is None else found.messages, reason)


def _verdict(op: str, tp: TensorParallel, found: Sizes | None, at) -> tuple[str, str]:
    if tp.size == 1:
        return "plain", "one rank: no messages"
    if op == "embedding":
        return "plain", "no GEMM to hide under"
    if not tp.sequence_parallel and REPLICATED[op].gemms == 0:
        return "plain", "without sequence parallelism nothing of it overlaps"
    if tp.overlap != "auto":
        return ("plain" if tp.overlap == "off" else "pairwise"), f"overlap={tp.overlap!r}"
    if at(1).copied:
        return "plain", "one machine: messages are copies by the cores that multiply"
    if at(1).measured is None:
        return "plain", "nobody measured this device, dtype and number of ranks (bench.overlap --write)"
    if found is None:
        least = next((1 << i for i in range(_MOST_ROWS.bit_length()) if at(1 << i).wins), None)
        return ("plain", "no number of rows is worth it") if least is None else ("auto", f"pairwise from about {least} rows, plain below")
    communication, computation, cost = (1e3 * seconds for seconds in found.seconds)
    compared = ">" if found.wins else "<="
    reason = f"hides min({communication:.2f} ms of messages, {computation:.2f} of GEMMs) {compared} its cost of {cost:.2f} ms"
    return "pairwise" if found.wins else "plain", reason


def _mb(count: int | None) -> str:
    return "" if count is None else f"{count / 1e6:.2f}"
