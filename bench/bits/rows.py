"""Two steps of each kind of model, and tokens, at every layout against one process."""

import argparse
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from bench.bits import BATCH, NEW_TOKENS, SEQ, STEPS, V
from bench.bits.kinds import LAYOUTS, MakeKind
from tpfuse import TensorParallel
from tpfuse.models import GPT
from tpfuse.tools.bits.command import random_batches
from tpfuse.tools.bits.layouts import COLUMNS, Layout, LayoutBits, compare, first_ranks
from tpfuse.tools.ledger.text import table
from tpfuse.tools.options import DTYPES


class Row(NamedTuple):
    """A layout of a kind: ``counts`` are the tensors that are equal, and all, by columns."""

    kind: str
    dtype: str
    saving: str
    layout: Layout
    counts: dict[str, tuple[int, int]]
    difference: str

    @property
    def same(self) -> bool:
        return all(equal == count for equal, count in self.counts.values())


def rows(args: argparse.Namespace) -> list[Row]:
    """Runs on every rank of four; the first one's rows are those of all layouts."""
    result = []
    for kind in args.kind:
        for dtype in args.dtype:
            for saving in args.saving:
                make = MakeKind(kind, DTYPES[dtype], saving)
                layouts = compare(make, random_batches(make.config, BATCH, SEQ, STEPS), LAYOUTS, V)
                tokens = _tokens(make)
                result += [Row(kind, dtype, saving, x.layout, *_numbers(x, tokens)) for x in layouts]
    return result


def _numbers(x: LayoutBits, tokens: dict[Layout, torch.Tensor]) -> tuple[dict[str, tuple[int, int]], str]:
    counts, row = x.counts(), x.first_difference
    if x.layout in tokens:
        equal = tokens[x.layout] == tokens[Layout(1)]
        counts["tokens"] = int(equal.sum()), equal.numel()
    return counts, "" if row is None else str(row)


def _tokens(make: MakeKind) -> dict[Layout, torch.Tensor]:
    """Returns greedy continuations at the layouts that this rank is in, and of one process; encoders have none."""
    groups = {n: first_ranks(n) for n in (2, 4)}
    tokens = {}
    for layout in (Layout(1), *LAYOUTS):
        if layout.size == 1 or dist.get_rank() < layout.size:
            tp = TensorParallel(groups.get(layout.size), sequence_parallel=layout.sequence_parallel, bitwise=V)
            model: Any = make(tp).eval()
            if isinstance(model, GPT):
                prompt = torch.arange(2 * 3).view(2, 3) % model.config.vocab_size
                tokens[layout] = model.generate(prompt, max_new_tokens=NEW_TOKENS)
    return tokens


def text(result: list[Row]) -> str:
    """Returns the table."""
    head = "kind", "dtype", "saving", "layout", *COLUMNS, "tokens", "first that differs"
    number = lambda row, name: "{}/{}".format(*row.counts[name]) if name in row.counts else ""
    lines = [
        (r.kind, r.dtype, r.saving, r.layout, *(number(r, name) for name in (*COLUMNS, "tokens")), r.difference)
        for r in result
    ]
    return f"{table(head, lines)}\n{sum(row.same for row in result)} of {len(result)} layouts have the same bits"
