"""What real ranks of a pipeline do in a step, counted: exactly what the dry run of the ledger and the order say.

Spans: tpfuse/pipeline/step.py and tpfuse/tools/ledger/stages.py: real steps are counted where the pipeline stands.
"""

import gc
import math
import weakref
from dataclasses import replace

import pytest
import torch
from torch.utils._pytree import tree_leaves

from tests.pipeline.common import GPT2, MODELS, as_deep, batches, made
from tests.routing import evenly, routed
from tpfuse import TensorParallel
from tpfuse.kernels.experts import router
from tpfuse.pipeline import SCHEDULES, schedule, simulate
from tpfuse.pipeline.schedules import WITHOUT_FLUSH
from tpfuse.tools.ledger import Ledger, Plan
from tpfuse.tools.ledger.dryrun import axis_of
from tpfuse.tools.ledger.recorder import add_up
from tpfuse.tools.ledger.stages import Pipe, run

MICRO_BATCHES = 4
CONFIG = replace(GPT2, vocab_size=96)  # which two ranks share evenly: the dry run is of the first of them
EXPERTS = replace(MODELS["mixtral"], vocab_size=96)


class Kept:
    """A tensor saved for backward, for as long as the graph keeps it."""

    def __init__(self, tensor):
        self.tensor = tensor


def behind(work):
    """The tensors that functions keep in their closures."""
    todo, seen = list(work), set()
    while todo:
        x = todo.pop()
        if isinstance(x, torch.Tensor):
            yield x
        elif id(x) not in seen and isinstance(x, tuple | list) or callable(x) or type(x).__name__ == "cell":
            seen.add(id(x))
            todo += [y for y in gc.get_referents(x) if not isinstance(y, dict | type | str) and id(y) not in seen]


class Watched:
    """A step's actions on this rank: its entries in the ledger by pass, and the bytes kept at the end of each."""

    def __init__(self, patch, pipeline, runtime, ledger):
        model = pipeline.model
        self.pipeline, self.model, self.stages, self.ledger = pipeline, model, runtime._stages, ledger
        self.entries, self.actions, self.bytes = {}, [], []
        self.alive, self.apart = weakref.WeakSet(), [*model.parameters()]
        for stage in self.stages:
            for kind, name in (("F", "forward"), ("B", "backward"), ("W", "backward_weight")):
                method = f"{name}_one_chunk"
                patch.setattr(stage, method, self.watching(stage, kind, getattr(stage, method)))

    def watching(self, stage, kind, method):
        def run(m, *args, **kwargs):
            begin, done = len(self.ledger.entries), "I" if not kwargs.get("full_backward", True) else kind
            if kind == "F":
                self.apart += [x for x in tree_leaves(args[1]["call"].call) if isinstance(x, torch.Tensor)]
            with torch.autograd.graph.saved_tensors_hooks(self.keep, lambda kept: kept.tensor):
                made = method(m, *args, **kwargs)
            self.entries.setdefault(done, []).extend(self.ledger.entries[begin:])
            self.actions.append((stage.chunk.chain, stage.chunk.stage, done, m))
            self.bytes.append(self.count())
            return made

        return run

    def restart(self):
        """Goes on watching what is alive, and forgets what has been counted."""
        self.entries, self.actions, self.bytes = {}, [], []
        self.ledger.entries.clear()

    def keep(self, tensor):
        kept = Kept(tensor)
        self.alive.add(kept)
        return kept

    def count(self):
        waiting = behind(work for stage in self.stages for work in stage.dw_runner.values())
        every = [*(kept.tensor for kept in self.alive), *waiting]
        storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in every}
        versions = [batch.version for batch in getattr(self.pipeline, "_halves", {}).values()]
        leaves = [leaf for version in versions for leaf in version.leaves.values()]
        apart = {x.untyped_storage()._cdata for x in (*self.apart, *leaves)}
        return sum(size for key, size in storages.items() if key not in apart)

    def by_pass(self):
        groups = {}
        for kind, entries in self.entries.items():
            for e in entries:
                if e.flops or e.wire:
                    axis = axis_of(e.group, self.model.tp) if e.group else ""
                    groups.setdefault((kind, e.op, e.kind, axis), []).append(e)
        return {key: add_up(group) for key, group in groups.items()}


def counted(world, layout, name, options, config):
    mesh = world.stages(*layout)
    pp, dp = mesh["pp"], mesh["dp"]
    cp = dict(cp=mesh["cp"], cp_kind=options["cp_kind"]) if len(layout) > 3 else {}
    tp = TensorParallel(mesh["tp"], sequence_parallel=options.get("sequence_parallel", True), overlap="off", **cp)
    given = dict(saving=options.get("saving", "fastest"), recompute="full" if options.get("full") else None)
    stage = pp.get_local_rank(), pp.size(), name
    given |= dict(experts=mesh["dp", "tp"]) if options.get("over_replicas") else {}
    model = made(config, tp=tp, dp=dp if dp.size() > 1 else None, stage=stage, **given)
    pipeline, rows = schedule(model, pp, name, MICRO_BATCHES), slice(0, 8 // dp.size())
    (first, _), (ids, labels) = (
        [t.clamp(max=95).repeat(1, 3)[:, : options["seq"]] for t in batch] for batch in batches(2)
    )
    pipeline.step(first[rows], labels=first[rows])  # which compares the ranks' arguments, and makes the runtime
    (runtime,) = pipeline._runtimes.values()
    with pytest.MonkeyPatch.context() as patch, routed(evenly), Ledger() as ledger:
        count = first[rows].numel() // MICRO_BATCHES // tp.size
        patch.setattr(router, "ROWS", count)  # to whose multiple a CPU fills up the rows of logits: those of a rank
        watched = Watched(patch, pipeline, runtime, ledger)
        if name in WITHOUT_FLUSH:  # whose micro-batches in flight are to be watched from their beginning
            pipeline.step(first[rows], labels=first[rows])
            watched.restart()
        pipeline.step(ids[rows], labels=labels[rows])
    messages = {e.op: ledger.total(op=e.op)[0::5] for e in ledger.entries if e.op in ("send", "recv_", "allreduce_")}
    return watched.by_pass(), watched.actions, watched.bytes, messages


def check(ranks, layout, name, config=CONFIG, **options):
    pp, dp, *cp, tp = layout
    config, options = as_deep(config, pp), dict(seq=12) | options
    plan = Plan(tp=tp, dp=dp, cp=math.prod(cp), micro_batch=8 // dp // MICRO_BATCHES, dtype=torch.float32, **options)
    predicted = run(config, plan, Pipe(pp, name, MICRO_BATCHES))
    every = ranks(math.prod(layout), counted, layout, name, options, config)
    for rank, (by_pass, actions, kept, messages) in enumerate(every):
        said = predicted[rank // math.prod(layout[1:])]
        number = lambda n: n % (2 * MICRO_BATCHES) if name in WITHOUT_FLUSH else n  # of batches in turn
        assert actions == [(a.chain, a.stage, a.kind, number(a.micro_batch)) for a in said.actions]
        assert by_pass == said.step  # calls, bytes read and written and sent, flops, of each op in each pass
        assert kept == said.alive
        sums = {}
        for m in said.messages:
            if m.over not in ("tp", "cp"):
                op = m.op.split(" ")[0]
                calls, size = sums.get(op, (0, 0))
                sums[op] = calls + m.calls, size + m.bytes
        assert messages["send"] == sums["send"] and messages["allreduce_"] == sums["all_reduce"]
        assert messages["recv_"][1] == 0  # is none of what this rank sends
    assert sum(m["recv_"][0] for *_, m in every) == sum(m["send"][0] for *_, m in every)
    return predicted


DAILY = {((2, 1, 1), "1f1b"), ((2, 1, 1), "zbv"), ((2, 1, 1), "chimera")}
LAYOUTS = (2, 1, 1), (4, 1, 1), (2, 2, 2)


@pytest.mark.parametrize(
    "layout, name",
    [
        pytest.param(layout, name, marks=[] if (layout, name) in DAILY else pytest.mark.slow, id=f"{layout}-{name}")
        for layout in LAYOUTS
        for name in SCHEDULES
        if not (name == "dualpipev" and layout[0] == 4)  # needs a micro-batch a stage
        and (layout != (2, 2, 2) or name in ("1f1b", "zbv", "chimera"))  # one stage a rank, two, two chains
    ],
)
def test_real_ranks_do_what_the_dry_run_says(ranks, layout, name):
    predicted = check(ranks, layout, name)
    if name in ("gpipe", "1f1b"):  # of one stage a rank, that B frees: so many micro-batches in flight
        in_flight = simulate(predicted[0].order, 1.0, 1.0, 1.0).in_flight
        for rank, n in zip(predicted, in_flight, strict=True):
            (work,) = rank.stages.values()
            assert max(rank.alive) == n * work.saved > 0


@pytest.mark.parametrize("layout", [(2, 1, 1), pytest.param((2, 2, 2), marks=pytest.mark.slow)], ids=str)
def test_a_step_amid_others_of_two_versions(ranks, layout):
    check(ranks, layout, "2bw")


@pytest.mark.slow
@pytest.mark.parametrize("options", [dict(saving="smallest"), dict(full=True), dict(sequence_parallel=False)])
def test_with_other_options(ranks, options):
    check(ranks, (2, 1, 2), "zbv", **options)


@pytest.mark.parametrize("kind, name", [("heads", "1f1b"), pytest.param("keys", "zbv", marks=pytest.mark.slow)])
def test_pieces_of_sequences(ranks, kind, name):
    config = replace(CONFIG, max_positions=32)  # each of the 16 chunks of "keys" has scores
    for rank in check(ranks, (2, 1, 2, 1), name, config, cp_kind=kind, seq=32):
        assert sum(m.bytes for m in rank.messages if m.over == "cp") > 0


@pytest.mark.parametrize("name", ["1f1b", pytest.param("zero-bubble", marks=pytest.mark.slow)])
def test_experts_that_have_as_many_rows(ranks, name):
    check(ranks, (2, 1, 2), name, EXPERTS)


@pytest.mark.parametrize("layout", [(2, 2, 1), pytest.param((2, 2, 2), marks=pytest.mark.slow)], ids=str)
def test_experts_over_replicas(ranks, layout):
    """Whose gradients no replica sums again."""
    shared, alone = (check(ranks, layout, "1f1b", EXPERTS, over_replicas=over)[0] for over in (True, False))
    summed = [next(m.bytes for m in r.messages if m.op == "all_reduce (gradients)") for r in (shared, alone)]
    assert summed[0] < summed[1] and shared.parameters < alone.parameters


def held_on(world):
    """The bytes that torch's stages would keep of every micro-batch: of messages received and of outputs sent."""
    mesh = world.stages(2, 1, 1)["pp"]
    model = made(CONFIG, stage=(mesh.get_local_rank(), 2))
    pipeline = schedule(model, mesh, "1f1b", MICRO_BATCHES)
    ids = torch.zeros(8, 12, dtype=torch.int64)
    pipeline.step(ids, labels=ids)
    (runtime,) = pipeline._runtimes.values()
    (stage,) = runtime._stages
    messages = [m for each in (stage.args_recv_info, stage.grad_recv_info) for some in each.values() for m in some]
    buffers = [getattr(m, "buffer", None) for m in messages]
    return len(buffers), [x for x in buffers if x is not None], stage._sent, stage._sent_back, len(stage.fwd_cache)


def test_no_message_outlives_the_step(ranks):
    for count, *rest in ranks(2, held_on):
        assert count >= MICRO_BATCHES and rest == [[], {}, [], 0]
