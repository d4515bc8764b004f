"""What this machine can do: for each op alpha + flops / rate + bytes / bandwidth, for each collective alpha + bytes / bandwidth.

:func:`calibrate` measures it in about a minute, on CPU processes of one thread each: small models run under the timing ledger, as many at
once as a world has ranks, since ranks of one machine share its memory and perhaps its cores.  The lines are fitted to relative errors,
and then to whole steps: stretched alike, and with an overhead for each op (autograd, Python).
"""

import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ..collectives import all_gather, all_to_all
from ..models import GPT, GPTConfig
from ..parallel import TensorParallel
from ._processes import on_ranks
from .aten import COMMUNICATION, KINDS
from .layer import default_dtype
from .recorder import Entry, Ledger
from .text import duration, progress, quantity, table

VERSION = 1
DEFAULT = Path.home() / ".cache" / "tpfuse" / "machine.json"
WORLDS = 1, 2, 4


class Line(NamedTuple):
    """Seconds of a call: alpha + flops per_flop + bytes per_byte."""

    alpha: float
    per_flop: float
    per_byte: float

    def seconds(self, flops: float, moved: float) -> float:
        return self.alpha + flops * self.per_flop + moved * self.per_byte


class Table(NamedTuple):
    """Of ranks that run at once: ``ops`` by name and by kind, ``messages`` by collective (bytes that a rank sends), ``overhead`` seconds
    an op."""

    ops: dict[str, Line]
    messages: dict[str, Line]
    overhead: float


class Machine(NamedTuple):
    """``tables``: by dtype, then by how many ranks ran at once."""

    cores: int
    tables: dict[str, dict[int, Table]]

    def table(self, dtype: torch.dtype, ranks: int) -> tuple[Table, float]:
        """The table for ``ranks`` at once, and what its seconds are to be multiplied by where cores are shared more than was measured.

        ValueError for a dtype that was not calibrated.
        """
        name = str(dtype).removeprefix("torch.")
        if name not in self.tables:
            raise ValueError(
                f"machine: {name} was not calibrated, only {', '.join(self.tables)}; run python -m tpfuse calibrate --dtype {name}"
            )
        worlds = self.tables[name]
        nearest = max((w for w in worlds if w <= ranks), default=min(worlds))
        shared = lambda n: max(1.0, n / self.cores)  # noqa: E731
        return worlds[nearest], shared(ranks) / shared(nearest)

    def save(self, path: Path) -> None:
        tables = {dtype: {str(w): table._asdict() for w, table in worlds.items()} for dtype, worlds in self.tables.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(dict(version=VERSION, cores=self.cores, tables=tables), indent=1))

    @classmethod
    def load(cls, path: Path) -> "Machine":
        """ValueError where there is none or it is another version's."""
        if not path.is_file():
            raise ValueError(f"machine: {path} does not exist; python -m tpfuse calibrate makes it in about a minute")
        try:
            values = json.loads(path.read_text())
            if values["version"] != VERSION:
                raise ValueError(f"machine: {path} is of version {values['version']}, not {VERSION}; run python -m tpfuse calibrate again")
            lines = lambda group: {name: Line(*numbers) for name, numbers in group.items()}  # noqa: E731
            read = lambda t: Table(lines(t["ops"]), lines(t["messages"]), t["overhead"])  # noqa: E731
            tables = {dtype: {int(w): read(t) for w, t in worlds.items()} for dtype, worlds in values["tables"].items()}
            return cls(values["cores"], tables)
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"machine: {path} is not what calibrate writes ({error!r}); run python -m tpfuse calibrate again") from None

    def __str__(self) -> str:
        rate = lambda slope, unit: quantity(1 / slope, unit) if slope else "-"  # noqa: E731
        rows = []
        for dtype, worlds in self.tables.items():
            for w, t in worlds.items():
                lines = {kind: t.ops[kind] for kind in KINDS if kind in t.ops} | t.messages
                rows += [(n, dtype, w, duration(c.alpha), rate(c.per_flop, "flop/s"), rate(c.per_byte, "B/s")) for n, c in lines.items()]
                rows.append(("overhead of an op", dtype, w, duration(t.overhead), "-", "-"))
        return table(("all ops of a kind", "dtype", "ranks at once", "alpha", "rate", "bandwidth"), rows)


# ---- measuring ----


SIZES = [  # width, heads, positions, batch; the first ENOUGH span them all, and the others come where there is time
    (128, 4, 128, 1),
    (512, 8, 256, 2),
    (256, 4, 256, 2),
    (768, 12, 256, 1),
    (384, 12, 128, 4),
    (128, 2, 256, 2),
    (384, 6, 256, 4),
    (192, 6, 128, 4),
    (512, 8, 512, 1),
]
ENOUGH = 4
MESSAGES = [1 << n for n in range(10, 24, 2)]  # bytes a rank holds


def calibrate(
    dtypes: Sequence[torch.dtype] = (torch.float32,), worlds: Sequence[int] = WORLDS, *, seconds: float = 60.0, sizes: Sequence = SIZES
) -> Machine:
    """Measures this machine, in about ``seconds``."""
    tables: dict[str, dict[int, Table]] = {}
    runs = list(itertools.product(dtypes, worlds))
    budget = seconds / len(runs)
    for dtype, world in progress(runs, "calibrating", long=True):
        samples = on_ranks(world, _measure, dtype, max(budget - 6, 0.5), sizes)  # starting processes takes some seconds
        tables.setdefault(str(dtype).removeprefix("torch."), {})[world] = _fit_all(*samples)
    return Machine(os.cpu_count() or 1, tables)


Sample = tuple[float, float, float]  # flops, bytes, seconds
Step = tuple[list[tuple[str, float, float]], float]  # (key, flops, bytes) of its ops, seconds in all


def key(e: Entry) -> str:
    return f"{e.op} + dropout" if e.drops else e.op


def _measure(dtype: torch.dtype, seconds: float, sizes: Sequence) -> tuple[dict[str, list[Sample]], dict[str, list[Sample]], list[Step]]:
    """On every rank at once -> samples by op and by kind, samples by collective, whole steps."""
    deadline = time.perf_counter() + 0.75 * seconds
    ops: dict[str, list[Sample]] = {}
    steps: list[Step] = []
    for i, (width, heads, seq, batch) in enumerate(sizes):
        if _agreed(time.perf_counter() > deadline) and i >= ENOUGH:
            break
        for dropout in (0.0, 0.1):
            step = _step(width, heads, seq, batch, dropout, dtype)
            step()
            share = max(0.0, deadline - time.perf_counter()) / (2 * len(sizes))
            entries, walls = _repeat(step, share)
            mean = _typical([[e.seconds for e in run] for run in entries])
            for e, t in zip(entries[0], mean):
                if e.kind != COMMUNICATION:
                    for name in (key(e), e.kind):
                        ops.setdefault(name, []).append((e.flops, e.moved, t))
            steps.append(([(key(e), e.flops, e.moved) for e in entries[0]], statistics.median(walls)))
    return ops, _messages(), steps


def _agreed(over: bool) -> bool:
    """Whether it is over on any rank: they start each size and stop together, so that as many run at once throughout."""
    found = torch.tensor(float(over))
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found)


def _step(width: int, heads: int, seq: int, batch: int, dropout: float, dtype: torch.dtype) -> Callable[[], None]:
    """Forward, backward and AdamW of a one-layer model of this process alone."""
    rates = dict.fromkeys(("dropout", "attention_dropout", "embedding_dropout"), dropout)
    config = GPTConfig(vocab_size=4 * width, max_positions=seq, hidden_size=width, num_layers=1, num_heads=heads, **rates)
    with default_dtype(dtype):
        model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(config.vocab_size, (batch, seq))

    def step() -> None:
        model(ids, labels=ids, step=0, first_sample=0).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _repeat(step: Callable[[], None], seconds: float) -> tuple[list[list[Entry]], list[float]]:
    """Runs with the timing ledger and without in turn, at least twice each -> entries, seconds of the runs without."""
    entries, walls = [], []
    began = time.perf_counter()
    while len(walls) < 2 or time.perf_counter() - began < seconds:
        with Ledger(timed=True) as ledger:
            step()
        entries.append(ledger.entries)
        start = time.perf_counter()
        step()
        walls.append(time.perf_counter() - start)
    return entries, walls


def _typical(runs: list[list[float]]) -> list[float]:
    """Of each op over the runs: the mean where cores are shared and a pause is the rule, else the median."""
    pick = statistics.mean if dist.get_world_size() > (os.cpu_count() or 1) else statistics.median
    return [pick(times) for times in zip(*runs)]


def _messages(rounds: int = 10) -> dict[str, list[Sample]]:
    """Seconds of a collective by the bytes that a rank sends, of this whole world."""
    world = dist.get_world_size()
    if world == 1:
        return {}
    tp = TensorParallel(dist.group.WORLD)
    kinds = {
        "all_gather": lambda x: all_gather(x, world, tp.group_name),
        "all_to_all": lambda x: all_to_all(x.view(world, -1), tp.group_name),
        "all_reduce": lambda x: dist.all_reduce(x),
    }
    samples: dict[str, list[Sample]] = {}
    for name, run in kinds.items():
        for size in MESSAGES:
            x = torch.zeros(size // 4)
            sent = size * (world - 1) if name == "all_gather" else size * (world - 1) / world * (2 if name == "all_reduce" else 1)
            times = []
            for _ in range(rounds + 2):
                start = time.perf_counter()
                run(x)
                times.append(time.perf_counter() - start)
            samples.setdefault(name, []).append((0, sent, statistics.median(times[2:])))
    return samples


# ---- fitting ----


def _fit_all(ops: dict[str, list[Sample]], messages: dict[str, list[Sample]], steps: list[Step]) -> Table:
    lines = {name: fit(samples) for name, samples in ops.items()}
    whole = [(sum(lines[name].seconds(flops, moved) for name, flops, moved in calls), len(calls), wall) for calls, wall in steps]
    _, stretch, overhead = fit(whole, terms=(1, 2))
    stretch = stretch or statistics.median(wall / seconds for seconds, _, wall in whole)
    stretched = {name: Line(*(stretch * part for part in line)) for name, line in lines.items()}
    return Table(stretched, {name: fit(samples) for name, samples in messages.items()}, overhead)


def fit(samples: list[Sample], terms: Sequence[int] = (0, 1, 2)) -> Line:
    """The line with no negative part whose squared relative errors are least: the best of those with any of its ``terms``."""
    table = np.array(samples, dtype=float)
    x = np.column_stack([np.ones(len(table)), table[:, 0], table[:, 1]]) / table[:, 2:]
    scale = np.maximum(np.abs(x).max(0), 1e-300)
    best, line = np.inf, np.array([statistics.median(t for *_, t in samples), 0.0, 0.0])
    for columns in map(list, itertools.chain.from_iterable(itertools.combinations(terms, n) for n in range(1, len(terms) + 1))):
        solved = np.linalg.lstsq(x[:, columns] / scale[columns], np.ones(len(table)), rcond=None)[0] / scale[columns]
        error = float(np.square(x[:, columns] @ solved - 1).sum())
        if (solved >= 0).all() and error < best * 0.999:
            best, line = error, np.zeros(3)
            line[columns] = solved
    return Line(*map(float, line))
