"""Any model at any scale, in one process: the real model on meta tensors, over a process group that does not exist.

Forward and backward of one rank run under the ledger; nothing is allocated, computed or sent.  Counted numbers stand
beside their closed forms.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...collectives import reduced_bytes
from ...kernels.runtime.errors import check
from ...layers.expert_ranks import flat_group
from ...layers.expert_sizes import ExpertSizes
from ...layers.shapes import MoEShape
from ...layers.shards import same_on_replicas
from ...models.config.model import ModelConfig
from ...models.model import Model
from ...parallel import TensorParallel, piece_of
from ...pipeline.placement import Stage
from ...sequence_parallel.assumed import assumed_imbalance
from ...sequence_parallel.context import HeadSplit
from ...training.data_parallel import BUCKETS, bucket_count
from .aten import ATTENTION, COMMUNICATION, GEMM
from .context import PieceBlock
from .layer import build, layer_kinds, token_ids, with_layers
from .memory import WHOLE, StateBytes, activation_bytes, parameter_count, saved_bytes, state_bytes
from .mfu import model_flops
from .recorder import Ledger
from .shapes import Shape, check_imbalance, layers_by_mlp
from .text import Progress, progress, quantity, table

MOST_RANKS = 1 << 15  # a mesh takes 0.2 ms a rank


@contextlib.contextmanager
def fake_world(tp: int, dp: int = 1, pp: int = 1, stage: int = 0, *, cp: int = 1) -> Iterator[DeviceMesh]:
    """Makes a mesh ("pp", "dp", "cp", "tp") of ranks of which this process is the first of ``stage``, a place on "pp",
    and the others do not exist.

    ValueError for sizes below 1, for more than MOST_RANKS, or where a process group exists already.
    """
    for name, n in (("tp", tp), ("cp", cp), ("dp", dp), ("pp", pp)):
        if n < 1:
            raise ValueError(f"fake_world: {name} must be at least 1, got {n}")
    ranks = tp * cp * dp * pp
    if ranks > MOST_RANKS:
        raise ValueError(f"fake_world: there must be at most {MOST_RANKS:,} ranks, got {ranks:,}")
    if dist.is_initialized():
        raise ValueError(
            "fake_world: this process is in a process group already; run the dry run in a process of its own"
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    of_stage = dp * cp * tp
    dist.init_process_group("fake", store=FakeStore(), rank=stage * of_stage, world_size=pp * of_stage)
    try:
        yield init_device_mesh("cpu", (pp, dp, cp, tp), mesh_dim_names=("pp", "dp", "cp", "tp"))
    finally:
        dist.destroy_process_group()


class Plan(NamedTuple):
    """A run: ``micro_batch`` sequences of ``seq`` on each of ``dp`` replicas of ``cp`` x ``tp`` ranks.

    ``full``: recompute="full", of each block the input is kept.  ``imbalance``: the rank that is run is the one whose
    experts have the most rows, so many times the mean of the ranks'; 1: all have as many.  ``over_replicas``: experts
    are divided among the ranks of all replicas, ``experts=mesh["dp", "tp"]`` of a model.  ``cp``: the ranks that hold
    pieces of each sequence; ``cp_kind``: what they exchange (:class:`tpfuse.TensorParallel`).
    """

    tp: int = 1
    dp: int = 1
    seq: int = 2048
    micro_batch: int = 1
    sequence_parallel: bool = True
    saving: str = "fastest"
    dtype: torch.dtype = torch.bfloat16
    optimizer: str = "adamw"
    full: bool = False
    imbalance: float = 1.0
    over_replicas: bool = False
    cp: int = 1
    cp_kind: str = "auto"

    @property
    def ranks(self) -> int:
        return self.tp * self.cp * self.dp

    @property
    def axes(self) -> str:
        """The sizes in words; cp with its kind, where there is one."""
        cp = f" x cp {self.cp} ({self.cp_kind})" if self.cp > 1 else ""
        return f"tp {self.tp}{cp} x dp {self.dp}"

    def settled(self, config: ModelConfig) -> "Plan":
        """Returns the plan with the kind that a model takes for "auto"."""
        if self.cp == 1 or self.cp_kind != "auto":
            return self
        split = HeadSplit.of(config.num_heads, config.kv_heads, tp=self.tp, ranks=self.cp)
        return self._replace(cp_kind=split.cheaper)

    @property
    def piece(self) -> int:
        """Positions of a rank's piece of a sequence; the last may be padding."""
        return piece_of(self.seq, self.cp, self.cp_kind if self.cp > 1 else "heads")

    @property
    def replicas(self) -> int:
        """The number of ranks that have the same part of the weights, which FSDP2 divides among them: dp x cp."""
        return self.dp * self.cp

    @property
    def expert_replicas(self) -> int:
        """How many replicas divide the experts among their ranks."""
        return self.dp if self.over_replicas else 1


class RankMemory(NamedTuple):
    """Bytes that one rank holds, and those that it sends over dp once per step.

    ``state``: under DDP; ``viewed``: under tpfuse.data_parallel; ``sharded``: under FSDP2, over dp x cp;
    None for an optimizer of whole matrices.
    ``reduced``: DDP's all-reduces of gradient buckets, calls and bytes sent (a ring sends 2 (dp - 1) / dp of them);
    ``sharded_wire``: bytes that FSDP sends instead (two all-gathers, a reduce-scatter).
    """

    parameters: int
    state: StateBytes
    viewed: StateBytes
    sharded: StateBytes | None
    reduced: tuple[int, int]
    sharded_wire: int

    @property
    def states(self) -> dict[str, StateBytes]:
        """Returns the bytes of each state, by the name of what keeps the replicas alike."""
        every = {"DDP": self.state, "data_parallel": self.viewed, "FSDP": self.sharded}
        return {name: state for name, state in every.items() if state is not None}


class MicroBatchCost(NamedTuple):
    """Costs of a micro-batch, forward and backward, on one rank.

    ``saved``: bytes at the end of forward.  ``peak``: the most alive at once, parameters and their gradients apart.
    ``moved``: bytes read and written.  ``wire``: bytes sent over tp, ``cp_wire``: over cp, by ``messages``: ("tp" or
    "cp", collective, phase) -> (calls, bytes sent).
    """

    saved: int
    peak: int
    gemm_flops: int
    attention_flops: int
    moved: int
    wire: int
    cp_wire: int
    messages: dict[tuple[str, str, str], tuple[int, int]]

    @property
    def flops(self) -> int:
        return self.gemm_flops + self.attention_flops


class DryRun(NamedTuple):
    """A dry run's results; the plan has the ``cp_kind`` that was run where "auto" was asked for."""

    config: ModelConfig
    plan: Plan
    held: RankMemory
    work: MicroBatchCost
    ledger: Ledger


def run(config: ModelConfig, plan: Plan) -> DryRun:
    """Runs forward and backward of rank 0.  ValueError, as at run time, for sizes that cannot be split, and for an
    imbalance that the ranks cannot have."""
    with fake_world(plan.tp, plan.dp, cp=plan.cp) as mesh:
        model = planned_model(config, plan, mesh)
        plan = plan._replace(cp_kind=model.tp.cp_kind)
        return DryRun(config, plan, held_by(model, plan), *_work(model, plan))


def planned_model(config: ModelConfig, plan: Plan, mesh: DeviceMesh, stage: Stage | None = None) -> Model:
    """Returns the model of a plan, or a rank's stages, on the meta device."""
    check_experts(config, plan)
    tp = ranks_of(plan, mesh)
    # given as what expert_ranks returns: ranks of a fake world cannot tell their numbers to one another
    experts = TensorParallel.over_replicas(flat_group(mesh["dp", "tp"]), tp) if plan.expert_replicas > 1 else None
    return build(
        config, tp=tp, dp=mesh["dp"], experts=experts, saving=plan.saving, full=plan.full, dtype=plan.dtype, stage=stage
    )


def check_experts(config: ModelConfig, plan: Plan) -> None:
    """Raises ValueError where a plan's ranks cannot have a model's experts, or an imbalance of them."""
    check_imbalance("dry run", config, plan.imbalance, plan.tp, replicas=plan.expert_replicas)
    check(
        plan.cp == 1 or not plan.over_replicas,
        f"dry run: experts over replicas are not built for cp=, got cp={plan.cp}; leave one of them off",
    )


def ranks_of(plan: Plan, mesh: DeviceMesh, *, overlap: str = "auto") -> TensorParallel:
    """Returns the tensor-parallel ranks of a plan, and those that hold pieces of its sequences, on a mesh with "cp" and
    "tp"."""
    return TensorParallel(
        mesh["tp"],
        sequence_parallel=plan.sequence_parallel,
        overlap=overlap,
        cp=mesh["cp"] if plan.cp > 1 else None,
        cp_kind=plan.cp_kind,
    )


def axis_of(group: str, tp: TensorParallel) -> str:
    """Returns the axis that a collective among the ranks of a model's ``group`` is over, "cp" or else "tp"."""
    return "cp" if tp.cp is not None and group == tp.cp.group_name else "tp"


def held_by(model: Model, plan: Plan) -> RankMemory:
    """Returns the memory of this rank's part of a model."""
    averaged: list[Tensor] = [*same_on_replicas(model)]
    ring = lambda n: (n - 1) / n
    buckets = bucket_count(averaged, BUCKETS) if plan.dp > 1 else 0
    state = functools.partial(state_bytes, model, dp=plan.dp, optimizer=plan.optimizer)
    gradients = sum(p.nbytes for p in averaged)
    return RankMemory(
        parameters=sum(p.numel() for p in model.parameters()),
        state=state(),
        viewed=state(bucket_views=True),
        sharded=None if plan.optimizer in WHOLE else state(dp=plan.replicas, sharded=True),
        reduced=(buckets, int(2 * ring(plan.dp) * gradients)),
        sharded_wire=int(3 * ring(plan.replicas) * gradients),
    )


def _work(model: Model, plan: Plan) -> tuple[MicroBatchCost, Ledger]:
    ids = token_ids(plan.micro_batch, plan.seq)
    progress, count, left = Progress(), len(model.blocks), len(list(model.parameters()))

    def forget_gradient(p: Tensor) -> None:
        nonlocal left
        left -= 1
        progress.update(f"dry run: backward, {left} gradients to go")
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(forget_gradient)
    for i, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda *_, i=i: progress.update(f"dry run: forward, layer {i + 1} of {count}"))
    with Ledger() as ledger, assumed_imbalance(plan.imbalance):
        with saved_bytes(model) as saved:
            loss = model(ids, labels=ids).loss
        loss.backward()
    progress.clear()
    total, messages = ledger.total(), dict[tuple[str, str, str], tuple[int, int]]()
    for (op, phase, kind, group), row in ledger.sums("op", "phase", "kind", "group").items():
        if kind == COMMUNICATION:
            key = axis_of(group, model.tp), op, phase
            calls, wire = messages.get(key, (0, 0))
            messages[key] = calls + row.calls, wire + row.wire
    cp_wire = sum(wire for (over, *_), (_, wire) in messages.items() if over == "cp")
    work = MicroBatchCost(
        saved=saved(),
        peak=ledger.peak,
        gemm_flops=ledger.total(kind=GEMM).flops,
        attention_flops=ledger.total(kind=ATTENTION).flops,
        moved=total.moved,
        wire=total.wire - cp_wire,
        cp_wire=cp_wire,
        messages=messages,
    )
    return work, ledger


# ---- against the formulas ----


def layer_bytes(config: ModelConfig, plan: Plan, layer: int | None = None) -> float:
    """Returns the bytes that one layer saves for backward on one rank, in closed form (:func:`activation_bytes`)."""
    plan = plan.settled(config)
    more = 0 if plan.full or plan.cp == 1 else piece_block(config, plan, layer).attention.saved
    return more + activation_bytes(
        config, plan.tp, plan.sequence_parallel, plan.saving, full=plan.full, seq=plan.piece, batch=plan.micro_batch,
        element_size=plan.dtype.itemsize, imbalance=plan.imbalance, replicas=plan.expert_replicas, layer=layer,
    )  # fmt: skip


def saved_formula(config: ModelConfig, plan: Plan) -> float:
    """Returns the bytes that all layers save for backward on one rank, in closed form."""
    return sum(len(layers) * layer_bytes(config, plan, layers[0]) for layers in layers_by_mlp(config).values())


def measured_layer(config: ModelConfig, plan: Plan, layer: int = 0) -> int:
    """Returns the bytes that one more layer like ``layer`` saves on one rank, in the real model on meta tensors."""
    ids = token_ids(plan.micro_batch, plan.seq)

    def saved_with(layers: int) -> int:
        model = planned_model(with_layers(config, layers, like=layer), plan, mesh)
        with saved_bytes(model) as saved, assumed_imbalance(plan.imbalance):
            model(ids, labels=ids)
        return saved()

    with fake_world(plan.tp, plan.dp, cp=plan.cp) as mesh:
        return saved_with(2) - saved_with(1)


def expected_wire(config: ModelConfig, plan: Plan) -> int:
    """Returns the bytes that a rank sends per micro-batch, of row tiles and of rows to experts only.

    Vectors, statistics of the loss and tables of positions are small.  With sequence parallelism a layer gathers its
    rows twice and exchanges twice, each way, and gathers two again for the weights' gradients; embedding and head add
    an exchange and a gather each way, and one more gather.  Without it there are four all-reduces per layer, and one
    at either end.  Experts send rows in place of one of the two gathers, exchanges and gathers again, or without
    sequence parallelism in place of exchanges (tpfuse/layers/expert_sizes.py).  Blocks that are recomputed send what
    forward sends again.
    """
    R, D, e = plan.tp, config.hidden_size, plan.dtype.itemsize
    rows, whole = -(-plan.piece * plan.micro_batch // R), plan.piece * plan.micro_batch
    tile = (R - 1) * rows * D * e
    both = 2 * tile if plan.sequence_parallel else reduced_bytes(whole * D, e, R)  # an exchange and a gather
    pairs, tiles, experts = 2, int(plan.sequence_parallel), 0.0
    for s in Shape.kinds(config):
        branches = 2 if s.experts is None else 1
        pairs += s.L * branches * (2 + plan.full)
        if plan.sequence_parallel:
            tiles += s.L * branches
        if s.experts is not None:
            tiles += 0 if plan.sequence_parallel else s.L * (2 + plan.full)
            sizes = _expert_sizes(s.experts, rows, plan)
            experts += s.L * sizes.wire(kept=plan.saving == "fastest", recomputed=plan.full)
    return pairs * both + tiles * tile + round(experts)


def expected_cp_wire(config: ModelConfig, plan: Plan) -> int:
    """Returns the bytes that a rank sends over cp per micro-batch: of blocks (:class:`.context.PieceBlock`), and of the
    gradients of embedding and head, of which norms and vectors are small."""
    if plan.cp == 1:
        return 0
    table = -(-config.vocab_size // plan.tp) * config.hidden_size
    wire = 2 * reduced_bytes(table, plan.dtype.itemsize, plan.cp)
    for layers in layers_by_mlp(config).values():
        wire += len(layers) * piece_block(config, plan, layers[0]).wire(recomputed=plan.full)
    return wire


def piece_block(config: ModelConfig, plan: Plan, layer: int | None = None) -> PieceBlock:
    """Returns a layer's block on one of the ranks that hold pieces of the sequences."""
    plan = plan.settled(config)
    rows, element = plan.piece * plan.micro_batch, plan.dtype.itemsize
    return PieceBlock.of(config, tp=plan.tp, rows=rows, ranks=plan.cp, kind=plan.cp_kind, element=element, layer=layer)


def _expert_sizes(shape: MoEShape, rows: float, plan: Plan) -> ExpertSizes:
    """Returns the sizes of experts on a rank that has so many rows of its own."""
    ranks, element = plan.tp * plan.expert_replicas, plan.dtype.itemsize
    return ExpertSizes(shape, rows, ranks, element, imbalance=plan.imbalance, replicas=plan.expert_replicas)


def against_formulas(r: DryRun) -> list[tuple[str, float, float, str]]:
    """Returns (name, counted, formula, unit) of one rank's costs."""
    c, plan, work = r.config, r.plan, r.work
    flops = model_flops(c, plan.seq, plan.micro_batch) / (plan.tp * plan.cp)
    for s in Shape.kinds(c):
        if s.experts is not None:
            sizes = _expert_sizes(s.experts, plan.piece * plan.micro_batch / plan.tp, plan)
            flops += 3 * s.L * (sizes.flops() - sizes._replace(imbalance=1).flops())
    rows: list[tuple[str, float, float, str]] = [
        ("parameters", r.held.parameters, parameter_count(c, plan.tp, replicas=plan.expert_replicas), ""),
        ("saved activations (formula: of the layers)", work.saved, saved_formula(c, plan), "B"),
        ("flops (formula: of the model, all keys)", work.flops, flops, "flop"),
        ("sent over tp (formula: of row tiles)", work.wire, expected_wire(c, plan), "B"),
    ]
    if plan.cp > 1:
        rows.append(
            ("sent over cp (formula: of blocks, embedding, head)", work.cp_wire, expected_cp_wire(c, plan), "B")
        )
    return rows


def memory_table(r: DryRun) -> str:
    """Returns a table of one rank's memory, under DDP, tpfuse.data_parallel and FSDP."""
    held, work, plan = r.held, r.work, r.plan
    states = held.states.values()
    parts = "parameters", "gradients", "optimizer", "buckets", "gathered"
    names = "parameters", "gradients", f"optimizer ({plan.optimizer})", "DDP buckets", "FSDP, whole blocks"
    rows = [(name, *(quantity(getattr(state, part), "B") for state in states)) for name, part in zip(names, parts)]
    rows.append(("activations and temporaries at the peak", *[quantity(work.peak, "B")] * len(states)))
    if gathered := piece_block(r.config, plan).attention.gathered:
        rows.append(("of these keys and values, gathered", *[quantity(gathered, "B")] * len(states)))
    rows.append(("peak", *(quantity(state.total + work.peak, "B") for state in states)))
    return table(("memory a rank", *held.states), rows)


_RATIOS = """Counted is what the model on meta tensors does, formula the closed form of papers; a ratio is no error.
- saved above 1: what embedding and head save, which the formula leaves out: most in few layers of a large vocabulary
- flops below 1: keys that a causal mask or a window hides, which the formula computes; above 1: blocks computed
  again, kv heads that several ranks have
- sent above 1: vectors, statistics of the loss and tables of positions beside the tiles: most in few, narrow rows"""


def report(r: DryRun) -> str:
    c, plan, held, work = r.config, r.plan, r.held, r.work
    mode = "sequence parallel" if plan.sequence_parallel else "without sequence parallelism"
    dtype, saving = str(plan.dtype).removeprefix("torch."), "blocks' inputs" if plan.full else plan.saving
    head = (
        f"{c.num_layers} layers, width {c.hidden_size}, {c.num_heads} heads, vocabulary {c.vocab_size}:"
        f" {quantity(parameter_count(c))} parameters\n"
        f"{plan.axes} = {plan.ranks} ranks, {mode},"
        f"{' experts over replicas,' if plan.over_replicas else ''} saving {saving}, {dtype};"
        f" a rank's forward + backward of {plan.micro_batch} x {plan.seq} tokens"
    )
    numbers = [
        (name, quantity(n, unit), quantity(formula, unit), f"{n / formula:.3f}" if formula else "-")
        for name, n, formula, unit in against_formulas(r)
    ]
    counted = table(("a rank's", "counted", "formula", "ratio"), numbers) + f"\n{_RATIOS}"
    rows: list[tuple[object, ...]] = [
        (*key, calls, quantity(wire, "B")) for key, (calls, wire) in work.messages.items()
    ]
    if plan.dp > 1:
        rows.append(("dp", "all_reduce (DDP buckets)", "a step", held.reduced[0], quantity(held.reduced[1], "B")))
    if plan.dp > 1 and held.sharded is not None:
        rows.append(("dp", "or FSDP: 2 all_gather, 1 reduce_scatter", "a step", None, quantity(held.sharded_wire, "B")))
    messages = table(("over", "collective", "in", "calls", "sent"), rows) if rows else "no collectives"
    kinds = table(
        ("kind", "flops", "bytes read and written"),
        [
            (kind, *(quantity(n, unit) for n, unit in zip((row.flops, row.moved), ("flop", "B"))))
            for (kind,), row in r.ledger.sums("kind").items()
        ],
    )
    return "\n\n".join([head, counted, memory_table(r), messages, kinds])


def as_json(plan: Plan, held: RankMemory, work: MicroBatchCost) -> dict[str, Any]:
    messages = [
        dict(over=over, op=op, phase=phase, calls=calls, bytes=wire)
        for (over, op, phase), (calls, wire) in work.messages.items()
    ]
    states = {
        name: getattr(held, name)._asdict() | dict(total=getattr(held, name).total)
        for name in ("state", "viewed", "sharded")
        if getattr(held, name) is not None
    }
    planned = plan._asdict() | dict(dtype=str(plan.dtype).removeprefix("torch."), ranks=plan.ranks)
    return dict(
        plan=planned, held=held._asdict() | states, work=work._asdict() | dict(messages=messages, flops=work.flops)
    )


# ---- how each cost grows ----


class Point(NamedTuple):
    """One size of a sweep: its costs, or the error."""

    plan: Plan
    held: RankMemory | None = None
    work: MicroBatchCost | None = None
    error: str = ""


def point(config: ModelConfig, plan: Plan) -> Point:
    """Returns the costs of a model of many layers, from a run of two and one of three: every layer adds the same.

    Where layers are not alike, all of them run.
    """
    L = config.num_layers
    with fake_world(plan.tp, plan.dp, cp=plan.cp) as mesh:
        held = held_by(planned_model(config, plan, mesh), plan)
        if L <= 3 or len(set(layer_kinds(config))) > 1:
            return Point(plan, held, _work(planned_model(config, plan, mesh), plan)[0])
        two, three = (_work(planned_model(with_layers(config, n), plan, mesh), plan)[0] for n in (2, 3))
    line = lambda a, b: a + (L - 2) * (b - a)
    messages = {}
    for key, (calls, wire) in two.messages.items():
        messages[key] = line(calls, three.messages[key][0]), line(wire, three.messages[key][1])
    numbers = {
        name: line(getattr(two, name), getattr(three, name)) for name in MicroBatchCost._fields if name != "messages"
    }
    return Point(plan, held, MicroBatchCost(**numbers, messages=messages))


def sweep(config: ModelConfig, plan: Plan, tps: Sequence[int], ranks: Sequence[int]) -> list[Point]:
    """Runs every tp at every number of ranks it divides; sizes that cannot be split are points with the error."""
    points: list[Point] = []
    plans = [plan._replace(tp=tp, dp=n // tp) for tp in tps for n in ranks if n % tp == 0]
    for sized in progress(plans, "dry run"):
        try:
            points.append(point(config, sized))
        except ValueError as error:
            points.append(Point(sized, error=str(error)))
    return points


def sweep_table(points: list[Point]) -> str:
    costs = "parameters", "DDP state", "FSDP state", "saved", "peak", "flops", "sent over tp", "sent over dp"
    rows: list[tuple[object, ...]] = []
    for p in points:
        sizes = p.plan.tp, p.plan.dp, p.plan.ranks
        if p.held is None or p.work is None:
            rows.append((*sizes, *[None] * len(costs)))
            continue
        h, w = p.held, p.work
        sharded = None if h.sharded is None else quantity(h.sharded.total, "B")
        state, *activations = (quantity(n, "B") for n in (h.state.total, w.saved, w.peak))
        cells = quantity(h.parameters), state, sharded, *activations
        rows.append((*sizes, *cells, quantity(w.flops, "flop"), quantity(w.wire, "B"), quantity(h.reduced[1], "B")))
    errors = dict.fromkeys(f"tp {p.plan.tp}: {p.error}" for p in points if p.error)
    return "\n".join([table(("tp", "dp", "ranks", *costs), rows), *errors])
