"""Any model at any scale, in one process: the real model on meta tensors, over a process group that is not there.

Forward and backward of one rank run under the ledger; nothing is allocated, computed or sent.  What is counted stands beside the closed
form that it should be.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ..models.config import ModelConfig
from ..parallel import TensorParallel
from .aten import ATTENTION, COMMUNICATION, GEMM
from .layer import build, token_ids, with_layers
from .memory import State, activation_bytes, parameter_count, saved_bytes, state_bytes
from .mfu import model_flops
from .recorder import Ledger
from .shapes import Shape
from .text import Progress, progress, quantity, table

_BUCKETS = [1 << 20, 25 << 20]  # DDP's: the first, and the others


@contextlib.contextmanager
def fake_world(tp: int, dp: int = 1) -> Iterator[dist.DeviceMesh]:
    """A mesh ("dp", "tp") of tp x dp ranks of which this process is rank 0 and the others do not exist.

    ValueError for sizes below 1 or where a process group is there already.
    """
    for name, n in (("tp", tp), ("dp", dp)):
        if n < 1:
            raise ValueError(f"fake_world: {name} must be at least 1, got {n}")
    if dist.is_initialized():
        raise ValueError("fake_world: this process is in a process group already; run the dry run in a process of its own")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tp * dp)
    try:
        yield dist.init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    finally:
        dist.destroy_process_group()


class Plan(NamedTuple):
    """What is to be run.  ``micro_batch`` sequences of ``seq`` on each of ``dp`` replicas of ``tp`` ranks."""

    tp: int = 1
    dp: int = 1
    seq: int = 2048
    micro_batch: int = 1
    sequence_parallel: bool = True
    saving: str = "fastest"
    dtype: torch.dtype = torch.bfloat16
    optimizer: str = "adamw"


class Held(NamedTuple):
    """What one rank holds, and sends over dp once a step.

    ``reduced``: DDP's all-reduces of gradient buckets, calls and bytes sent (a ring sends 2 (dp - 1) / dp of them); ``sharded_wire``: what
    FSDP sends instead (two all-gathers, a reduce-scatter).
    """

    parameters: int
    state: State
    sharded: State
    reduced: tuple[int, int]
    sharded_wire: int


class Work(NamedTuple):
    """What a micro-batch, forward and backward, costs one rank.

    ``saved`` bytes at the end of forward; ``peak``, the most alive at once, parameters and their gradients apart; ``moved`` read and
    written; ``wire`` sent over tp, of which ``messages``: (collective, phase) -> (calls, bytes sent).
    """

    saved: int
    peak: int
    gemm_flops: int
    attention_flops: int
    moved: int
    wire: int
    messages: dict[tuple[str, str], tuple[int, int]]

    @property
    def flops(self) -> int:
        return self.gemm_flops + self.attention_flops


class DryRun(NamedTuple):
    config: ModelConfig
    plan: Plan
    held: Held
    work: Work
    ledger: Ledger


def run(config: ModelConfig, plan: Plan) -> DryRun:
    """Forward and backward of rank 0.  ValueError, with the same words as at run time, for sizes that do not fit."""
    with fake_world(plan.tp, plan.dp) as mesh:
        model = _model(config, plan, mesh)
        return DryRun(config, plan, _held(model, plan), *_work(model, plan))


def _model(config: ModelConfig, plan: Plan, mesh: dist.DeviceMesh) -> nn.Module:
    tp = TensorParallel(mesh["tp"], sequence_parallel=plan.sequence_parallel)
    return build(config, tp=tp, dp=mesh["dp"], saving=plan.saving, dtype=plan.dtype)


def _held(model: nn.Module, plan: Plan) -> Held:
    parameters = list(model.parameters())
    ring = (plan.dp - 1) / plan.dp
    buckets = dist._compute_bucket_assignment_by_size(parameters[::-1], _BUCKETS)[0] if plan.dp > 1 else []
    gradients = sum(p.numel() * p.element_size() for p in parameters)
    states = (state_bytes(model, dp=plan.dp, sharded=sharded, optimizer=plan.optimizer) for sharded in (False, True))
    return Held(sum(p.numel() for p in parameters), *states, (len(buckets), int(2 * ring * gradients)), int(3 * ring * gradients))


def _work(model: nn.Module, plan: Plan) -> tuple[Work, Ledger]:
    ids = token_ids(plan.micro_batch, plan.seq)
    said, count, left = Progress(), len(model.blocks), len(list(model.parameters()))

    def forget_gradient(p: nn.Parameter) -> None:
        nonlocal left
        left -= 1
        said.say(f"dry run: backward, {left} gradients to go")
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(forget_gradient)
    for i, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda *_, i=i: said.say(f"dry run: forward, layer {i + 1} of {count}"))
    with Ledger() as ledger:
        with saved_bytes(model) as saved:
            loss = model(ids, labels=ids).loss
        loss.backward()
    said.done()
    total = ledger.total()
    messages = {
        (op, phase): (row.calls, row.wire) for (op, phase, kind), row in ledger.by("op", "phase", "kind").items() if kind == COMMUNICATION
    }
    flops = ledger.total(kind=GEMM).flops, ledger.total(kind=ATTENTION).flops
    return Work(saved(), ledger.peak, *flops, total.moved, total.wire, messages), ledger


# ---- against the formulas ----


def expected_wire(config: ModelConfig, plan: Plan) -> int:
    """Bytes that a rank sends a micro-batch, row tiles only (vectors, statistics of the loss and tables of positions are small).

    With sequence parallelism: a layer gathers its rows twice and exchanges twice, each way, and gathers two again for the weights'
    gradients; embedding and head add an exchange and a gather each way, and one more gather.  Without: four all-reduces a layer, each an
    exchange and a gather, and one at either end.
    """
    s, R = Shape.of(config), plan.tp
    rows = -(-plan.seq * plan.micro_batch // R)
    tile = (R - 1) * rows * s.D * plan.dtype.itemsize
    return tile * (10 * s.L + 5 if plan.sequence_parallel else 8 * s.L + 4)


def against_formulas(r: DryRun) -> list[tuple[str, float, float, str]]:
    """(what, counted, formula, unit), of one rank."""
    c, plan, work = r.config, r.plan, r.work
    s = Shape.of(c)
    saved = s.L * activation_bytes(
        c, plan.tp, plan.sequence_parallel, plan.saving, seq=plan.seq, batch=plan.micro_batch, element_size=plan.dtype.itemsize
    )
    return [
        ("parameters", r.held.parameters, parameter_count(c, plan.tp), ""),
        ("saved activations (formula: of the layers)", work.saved, saved, "B"),
        ("flops (formula: of the model, all keys)", work.flops, model_flops(c, plan.seq, plan.micro_batch) / plan.tp, "flop"),
        ("sent over tp (formula: of row tiles)", work.wire, expected_wire(c, plan), "B"),
    ]


def memory_table(r: DryRun) -> str:
    """What one rank holds, under DDP and under FSDP."""
    held, work, plan = r.held, r.work, r.plan
    parts = "parameters", "gradients", "optimizer", "buckets", "gathered"
    names = "parameters", "gradients", f"optimizer ({plan.optimizer})", "DDP buckets", "FSDP, whole blocks"
    rows = [(name, *(quantity(getattr(state, part), "B") for state in (held.state, held.sharded))) for name, part in zip(names, parts)]
    rows.append(("activations and temporaries at the peak", *[quantity(work.peak, "B")] * 2))
    rows.append(("peak", *(quantity(state.total + work.peak, "B") for state in (held.state, held.sharded))))
    return table(("memory a rank", "DDP", "FSDP"), rows)


def report(r: DryRun) -> str:
    """For people."""
    c, plan, held, work, s = r.config, r.plan, r.held, r.work, Shape.of(r.config)
    mode = "sequence parallel" if plan.sequence_parallel else "without sequence parallelism"
    dtype = str(plan.dtype).removeprefix("torch.")
    head = (
        f"{s.L} layers, width {s.D}, {s.H} heads, vocabulary {s.V}: {quantity(parameter_count(c))} parameters\n"
        f"tp {plan.tp} x dp {plan.dp} = {plan.tp * plan.dp} ranks, {mode}, saving {plan.saving}, {dtype};"
        f" a rank's forward + backward of {plan.micro_batch} x {plan.seq} tokens"
    )
    rows = [
        (what, quantity(n, unit), quantity(formula, unit), f"{n / formula:.3f}" if formula else "-")
        for what, n, formula, unit in against_formulas(r)
    ]
    counted = table(("a rank's", "counted", "formula", "ratio"), rows)
    rows = [("tp", op, phase, calls, quantity(wire, "B")) for (op, phase), (calls, wire) in work.messages.items()]
    if plan.dp > 1:
        rows.append(("dp", "all_reduce (DDP buckets)", "a step", held.reduced[0], quantity(held.reduced[1], "B")))
        rows.append(("dp", "or FSDP: 2 all_gather, 1 reduce_scatter", "a step", None, quantity(held.sharded_wire, "B")))
    messages = table(("over", "collective", "in", "calls", "sent"), rows) if rows else "no collectives"
    kinds = table(
        ("kind", "flops", "bytes read and written"),
        [
            (kind, *(quantity(n, unit) for n, unit in zip((row.flops, row.moved), ("flop", "B"))))
            for (kind,), row in r.ledger.by("kind").items()
        ],
    )
    return "\n\n".join([head, counted, memory_table(r), messages, kinds])


def as_json(config: ModelConfig, plan: Plan, held: Held, work: Work) -> dict:
    """Plain numbers, of one rank."""
    messages = [dict(op=op, phase=phase, calls=n, bytes=wire) for (op, phase), (n, wire) in work.messages.items()]
    states = {name: getattr(held, name)._asdict() | dict(total=getattr(held, name).total) for name in ("state", "sharded")}
    plan = plan._asdict() | dict(dtype=str(plan.dtype).removeprefix("torch."), ranks=plan.tp * plan.dp)
    return dict(plan=plan, held=held._asdict() | states, work=work._asdict() | dict(messages=messages, flops=work.flops))


# ---- how each cost grows ----


class Point(NamedTuple):
    plan: Plan
    held: Held | None = None
    work: Work | None = None
    error: str = ""

    @property
    def ranks(self) -> int:
        return self.plan.tp * self.plan.dp


def point(config: ModelConfig, plan: Plan) -> Point:
    """The costs of a model of many layers from a run of two and one of three, since every layer adds the same."""
    L = config.num_layers
    with fake_world(plan.tp, plan.dp) as mesh:
        held = _held(_model(config, plan, mesh), plan)
        if L <= 3:
            return Point(plan, held, _work(_model(config, plan, mesh), plan)[0])
        two, three = (_work(_model(with_layers(config, n), plan, mesh), plan)[0] for n in (2, 3))
    line = lambda a, b: a + (L - 2) * (b - a)  # noqa: E731
    messages = {key: tuple(map(line, two.messages[key], three.messages[key])) for key in two.messages}
    return Point(plan, held, Work(*map(line, two[:-1], three[:-1]), messages))


def sweep(config: ModelConfig, plan: Plan, tps: Sequence[int], ranks: Sequence[int]) -> list[Point]:
    """Every tp at every number of ranks it divides; sizes that do not fit are points with the error."""
    points: list[Point] = []
    plans = [plan._replace(tp=tp, dp=n // tp) for tp in tps for n in ranks if n % tp == 0]
    for each in progress(plans, "dry run"):
        try:
            points.append(point(config, each))
        except ValueError as error:
            points.append(Point(each, error=str(error)))
    return points


def sweep_table(points: list[Point]) -> str:
    header = ("tp", "dp", "ranks", "parameters", "DDP state", "FSDP state", "saved", "peak", "flops", "sent over tp", "sent over dp")
    rows = []
    for p in points:
        sizes = p.plan.tp, p.plan.dp, p.ranks
        if p.held is None:
            rows.append((*sizes, *[None] * 8))
            continue
        h, w = p.held, p.work
        cells = [quantity(h.parameters), *(quantity(n, "B") for n in (h.state.total, h.sharded.total, w.saved, w.peak))]
        rows.append((*sizes, *cells, quantity(w.flops, "flop"), quantity(w.wire, "B"), quantity(h.reduced[1], "B")))
    errors = dict.fromkeys(f"tp {p.plan.tp}: {p.error}" for p in points if p.error)
    return "\n".join([table(header, rows), *errors])
