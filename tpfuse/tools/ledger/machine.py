"""This machine's speeds: alpha + flops / rate + bytes / bandwidth for each op and collective.

Attention has a term for its scores too, collectives none for flops.  :func:`calibrate` measures them in about a minute,
on CPU processes of one thread each.  Small models run under the timing ledger, as many at once as a world has ranks,
since ranks of one machine share its memory and perhaps its cores; alone, and split over some of the ranks, since a
collective takes as long as it takes inside a step, where one rank waits for another.  The lines are fitted to relative
errors, and then to whole steps: stretched alike, and with an overhead for each op (autograd, Python).
"""

import functools
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
from torch.distributed.device_mesh import init_device_mesh

from ...kernels.runtime.errors import check
from ...kernels.runtime.rules import COUNT, check_number
from ...models import GPT, GPTConfig
from ...models.files.disk import write_whole
from ...parallel import TensorParallel
from .aten import COMMUNICATION, KINDS
from .layer import default_dtype
from .processes import check_count, on_ranks
from .recorder import Entry, Ledger
from .text import duration, progress, quantity, table

VERSION = 2
DEFAULT = Path.home() / ".cache" / "tpfuse" / "machine.json"
WORLDS = 1, 2, 4


class Line(NamedTuple):
    """Seconds of a call: alpha + flops per_flop + bytes per_byte + scores per_score."""

    alpha: float
    per_flop: float
    per_byte: float
    per_score: float = 0.0

    def seconds(self, flops: float, moved: float, scores: float = 0) -> float:
        return self.alpha + flops * self.per_flop + moved * self.per_byte + scores * self.per_score


_ALIKE = {"exchange_rows": "all_to_all"}  # collectives of models with experts, which calibrate does not run


class Speeds(NamedTuple):
    """The speeds of ranks that run at once.

    ``ops`` by name and by kind, ``messages`` by collective and the ranks in it (bytes that a rank sends), ``overhead``
    seconds per op.
    """

    ops: dict[str, Line]
    messages: dict[str, Line]
    overhead: float

    def message(self, collective: str, ranks: int) -> Line | None:
        """Returns the line among so many ranks, or else the most below that were measured; of an uneven exchange that
        of an even one."""
        collective = _ALIKE.get(collective, collective)
        sizes = (int(name.split(" of ")[1]) for name in self.messages if name.startswith(f"{collective} of "))
        nearest = max((size for size in sizes if size <= ranks), default=None)
        return None if nearest is None else self.messages[f"{collective} of {nearest}"]


class Machine(NamedTuple):
    """``tables``: by dtype, then by how many ranks ran at once."""

    cores: int
    tables: dict[str, dict[int, Speeds]]

    def table(self, dtype: torch.dtype, ranks: int) -> tuple[Speeds, float]:
        """Returns the table for ``ranks`` at once, and a factor for its seconds.

        The factor is above 1 where cores are shared more than was measured.  ValueError for a dtype that was not
        calibrated.
        """
        name = str(dtype).removeprefix("torch.")
        if name not in self.tables:
            raise ValueError(
                f"machine: {name} was not calibrated, only {', '.join(self.tables)}; run python -m tpfuse calibrate"
                f" --dtype {name}"
            )
        worlds = self.tables[name]
        nearest = max((w for w in worlds if w <= ranks), default=min(worlds))
        shared = lambda n: max(1.0, n / self.cores)
        return worlds[nearest], shared(ranks) / shared(nearest)

    def json(self) -> dict[str, object]:
        """Returns plain values, of which :meth:`save` makes a file."""
        tables = {
            dtype: {str(w): table._asdict() for w, table in worlds.items()} for dtype, worlds in self.tables.items()
        }
        return dict(version=VERSION, cores=self.cores, tables=tables)

    def save(self, path: Path) -> None:
        """Writes a file that :meth:`load` reads, whole or not at all; a device is written as it is."""
        text = json.dumps(self.json(), indent=1)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            path.write_text(text)
        else:
            write_whole(path.resolve(), text.encode())

    @classmethod
    def load(cls, path: Path) -> "Machine":
        """Reads a file that :meth:`save` wrote; ValueError where there is none, and for another version's or any other
        contents."""
        if not path.is_file():
            raise ValueError(f"machine: {path} does not exist; python -m tpfuse calibrate makes it in about a minute")
        again = "run python -m tpfuse calibrate again"
        try:
            values = json.loads(path.read_text())
            version, machine = values["version"], None
            if version == VERSION:
                lines = lambda group: {name: Line(*map(float, numbers)) for name, numbers in group.items()}
                read = lambda t: Speeds(lines(t["ops"]), lines(t["messages"]), float(t["overhead"]))
                table = lambda worlds: {int(w): read(t) for w, t in worlds.items()}
                tables = {dtype: table(worlds) for dtype, worlds in values["tables"].items()}
                check_number("cores", values["cores"], COUNT)
                check(bool(tables) and all(tables.values()), "tables must not be empty")
                machine = cls(values["cores"], tables)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"machine: {path} is not what calibrate writes ({error!r}); {again}") from None
        if machine is None:
            raise ValueError(f"machine: {path} is of version {version}, not {VERSION}; {again}")
        return machine

    def __str__(self) -> str:
        rate = lambda slope, unit: quantity(1 / slope, unit) if slope else "-"
        rows = []
        for dtype, worlds in self.tables.items():
            for w, t in worlds.items():
                lines = {kind: t.ops[kind] for kind in KINDS if kind in t.ops} | t.messages
                for name, c in lines.items():
                    rates = rate(c.per_flop, "flop/s"), rate(c.per_score, "/s"), rate(c.per_byte, "B/s")
                    rows.append((name, dtype, w, duration(c.alpha), *rates))
                rows.append(("overhead of an op", dtype, w, duration(t.overhead), "-", "-", "-"))
        return table(("all ops of a kind", "dtype", "ranks at once", "alpha", "rate", "scores", "bandwidth"), rows)


# ---- measuring ----


class Size(NamedTuple):
    width: int
    heads: int
    seq: int
    batch: int


SIZES = [  # the first ENOUGH span them all, and the others come where there is time
    Size(128, 4, 128, 1),
    Size(512, 8, 256, 2),
    Size(256, 8, 256, 4),
    Size(768, 12, 256, 1),
    Size(384, 12, 128, 4),
    Size(128, 2, 256, 2),
    Size(384, 6, 256, 4),
    Size(192, 6, 128, 4),
    Size(512, 8, 512, 1),
]
ENOUGH = 4
MESSAGES = [1 << n for n in range(10, 24, 2)]  # bytes a rank holds


def calibrate(
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    worlds: Sequence[int] = WORLDS,
    *,
    seconds: float = 60.0,
    sizes: Sequence[Size] = SIZES,
) -> Machine:
    """Measures this machine, in about ``seconds``; ``worlds`` are the numbers of ranks that run at once.

    ValueError, before anything is measured, for more ranks than this machine's processes may be.
    """
    check_count("calibrate", max(worlds))
    tables: dict[str, dict[int, Speeds]] = {}
    runs = list(itertools.product(dtypes, worlds))
    budget = seconds / len(runs)
    for dtype, world in progress(runs, "calibrating", long=True):
        left = max(budget - 12, 0.5)  # starting processes takes some seconds, and some sizes are measured in any case
        samples = on_ranks(world, functools.partial(_measure, dtype, left, sizes))
        tables.setdefault(str(dtype).removeprefix("torch."), {})[world] = _fit_all(*samples)
    return Machine(os.cpu_count() or 1, tables)


Sample = tuple[float, float, float, float]  # flops, bytes, scores, seconds
Step = tuple[list[tuple[str, float, float, float]], float]  # (key, flops, bytes, scores) of its ops, seconds in all


def key(e: Entry) -> str:
    """Returns the name that an op is measured under."""
    return f"{e.op} + dropout" if e.drops else e.op


def _measure(
    dtype: torch.dtype, seconds: float, sizes: Sequence[Size]
) -> tuple[dict[str, list[Sample]], dict[str, list[Sample]], list[Step]]:
    """Measures on every rank at once.

    Returns samples by op and by kind, samples by collective and ranks, and whole steps of models that are not split.
    """
    began = time.perf_counter()
    ops: dict[str, list[Sample]] = {}
    messages: dict[str, list[Sample]] = (
        {f"all_reduce of {dist.get_world_size()}": _all_reduces()} if dist.get_world_size() > 1 else {}
    )
    steps: list[Step] = []
    groups = _groups()
    cases = [
        (size, split, dropout)
        for size in sizes
        for split, dropout in [(1, 0.0), *((s, 0.1) for s in groups)]
        if size.heads % split == 0
    ]
    for i, (size, split, dropout) in enumerate(cases):
        left = seconds - (time.perf_counter() - began)
        if _agreed(left < 0) and i >= ENOUGH * (1 + len(groups)):
            break
        step = _step(size, dtype, dropout=dropout, tp=groups[split])
        step()
        entries, walls = _repeat(step, max(0.0, left) / (len(cases) - i))
        typical = _typical(entries)
        sent: dict[tuple[str, int], list[float]] = {}
        for e, t in zip(entries[0], typical):
            if e.kind == COMMUNICATION:
                sent.setdefault((f"{e.op} of {split}", e.wire), []).append(t)
            else:
                for name in (key(e), e.kind):
                    ops.setdefault(name, []).append((e.flops, e.moved, e.scores, t))
        for (name, wire), times in sent.items():
            messages.setdefault(name, []).append((0, wire, 0, statistics.mean(times)))
        if split == 1:
            steps.append(([(key(e), e.flops, e.moved, e.scores) for e in entries[0]], statistics.median(walls)))
    return ops, messages, steps


def _groups() -> dict[int, TensorParallel | None]:
    """Returns a group of every tensor-parallel size that divides this world: neighbours, every rank in one of each."""
    world = dist.get_world_size()
    groups: dict[int, TensorParallel | None] = {1: None}
    for size in range(2, world + 1):
        if world % size == 0:
            mesh = init_device_mesh("cpu", (world // size, size), mesh_dim_names=("dp", "tp"))
            groups[size] = TensorParallel(mesh["tp"], sequence_parallel=True, overlap="off")
    return groups


def _agreed(over: bool) -> bool:
    """Returns True on all ranks where it is over on one: they start each size and stop together."""
    any_over = torch.tensor(float(over))
    dist.all_reduce(any_over, op=dist.ReduceOp.MAX)
    return bool(any_over)


def _step(size: Size, dtype: torch.dtype, *, dropout: float, tp: TensorParallel | None) -> Callable[[], None]:
    """Returns a function that runs forward, backward and AdamW of a one-layer model."""
    config = GPTConfig(
        vocab_size=4 * size.width,
        max_positions=size.seq,
        hidden_size=size.width,
        num_layers=1,
        num_heads=size.heads,
        dropout=dropout,
        attention_dropout=dropout,
        embedding_dropout=dropout,
    )
    with default_dtype(dtype):
        model = GPT(config, tp=tp)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(config.vocab_size, (size.batch, size.seq), generator=torch.Generator().manual_seed(0))

    def step() -> None:
        model(ids, labels=ids, step=0, first_sample=0).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _repeat(step: Callable[[], None], seconds: float) -> tuple[list[list[Entry]], list[float]]:
    """Runs with the timing ledger and without in turn, at least twice each.

    Returns the entries, and the seconds of the runs without.
    """
    entries: list[list[Entry]] = []
    walls: list[float] = []
    began = time.perf_counter()
    while len(walls) < 2 or not _agreed(time.perf_counter() - began >= seconds):
        with Ledger(timed=True) as ledger:
            step()
        entries.append(ledger.entries)
        start = time.perf_counter()
        step()
        walls.append(time.perf_counter() - start)
    return entries, walls


def _typical(runs: list[list[Entry]]) -> list[float]:
    """Returns the seconds of each op over the runs.

    They are the mean where pauses are the rule (shared cores, waiting for another rank), else the median.
    """
    shared = dist.get_world_size() > (os.cpu_count() or 1)
    pick = lambda e: statistics.mean if shared or e.kind == COMMUNICATION else statistics.median
    return [pick(calls[0])([e.seconds for e in calls]) for calls in zip(*runs)]


def _all_reduces(rounds: int = 10) -> list[Sample]:
    """Measures all-reduces of this whole world, as DDP's: nothing runs beside them."""
    samples: list[Sample] = []
    for size in MESSAGES:
        x, times = torch.zeros(size // 4), []
        for _ in range(rounds + 2):
            start = time.perf_counter()
            dist.all_reduce(x)
            times.append(time.perf_counter() - start)
        sent = 2 * size * (dist.get_world_size() - 1) / dist.get_world_size()
        samples.append((0, sent, 0, statistics.median(times[2:])))
    return samples


# ---- fitting ----


def _fit_all(ops: dict[str, list[Sample]], messages: dict[str, list[Sample]], steps: list[Step]) -> Speeds:
    lines = {name: fit(samples) for name, samples in ops.items()}
    totals: list[Sample] = [
        (sum(lines[name].seconds(*sizes) for name, *sizes in calls), len(calls), 0, wall) for calls, wall in steps
    ]
    _, stretch, overhead, _ = fit(totals, terms=(1, 2))
    stretch = stretch or statistics.median(wall / seconds for seconds, _, _, wall in totals)
    stretched = {name: Line(*(stretch * part for part in line)) for name, line in lines.items()}
    return Speeds(stretched, {name: fit(samples) for name, samples in messages.items()}, overhead)


def fit(samples: list[Sample], terms: Sequence[int] = (0, 1, 2, 3)) -> Line:
    """Returns the line with no negative part whose squared relative errors are least, of those with any ``terms``."""
    table = np.array(samples, dtype=float)
    x = np.column_stack([np.ones(len(table)), table[:, :3]]) / table[:, 3:]
    scale = np.maximum(np.abs(x).max(0), 1e-300)
    best, line = np.inf, np.array([statistics.median(t for *_, t in samples), 0.0, 0.0, 0.0])
    for columns in (list(c) for n in range(1, len(terms) + 1) for c in itertools.combinations(terms, n)):
        solved = np.linalg.lstsq(x[:, columns] / scale[columns], np.ones(len(table)), rcond=None)[0] / scale[columns]
        error = float(np.square(x[:, columns] @ solved - 1).sum())
        if (solved >= 0).all() and error < best * 0.999:
            best, line = error, np.zeros(4)
            line[columns] = solved
    return Line(*map(float, line))
