"""The layouts of a block: which are the fastest, against every one there is, and run as DTensors."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.tools.ledger.test_context import GROUPED, model_of
from tests.tools.plan.intra import blocks
from tpfuse.plan import Link
from tpfuse.tools.ledger.presets import load_config
from tpfuse.tools.plan.intra.conversions import Mesh
from tpfuse.tools.plan.intra.coordinate_descent import descent
from tpfuse.tools.plan.intra.graph import stack
from tpfuse.tools.plan.intra.milp import exact, least_memory
from tpfuse.tools.plan.intra.result import Result, candidates, difference, explain, runs_as
from tpfuse.tools.plan.intra.signatures import BATCH, FORKED, PARTIAL, SEQUENCE, WIDTH
from tpfuse.tools.plan.intra.space import PARTS, Rates, Space
from tpfuse.tools.plan.split import Job, Split

A100 = Rates(0.75 * 312e12, 0.8 * 2.04e12)
NEAR, FAR = Link(1e-6, 230e9), Link(1e-6, 25e9)


def of(model="gpt-22b", sizes=(8,), batch=1, blocks=1, rates=A100):
    links = (NEAR,) if len(sizes) == 1 else (FAR, NEAR)
    return Space(stack(Job(load_config(model), batch, 2048, optimizer="adamw-fp32"), blocks), Mesh(sizes, links), rates)


def limited(space, limit):
    return space.problem._replace(limit=limit)


def all_choices(problem):
    """Seconds and memory of all choices, in arrays with a dimension for each node."""
    n = len(problem.seconds)
    along = lambda values, *dims: values.reshape([values.shape[dims.index(d)] if d in dims else 1 for d in range(n)])
    seconds = sum(along(s, k) for k, s in enumerate(problem.seconds))
    for e in problem.edges:
        values = e.seconds if e.source < e.to else e.seconds.T
        seconds = seconds + along(values, *sorted((e.source, e.to)))
    memory = sum(along(m, k) for k, m in enumerate(problem.memory))
    return np.broadcast_arrays(seconds, memory)


def brute(problem):
    """Seconds of the fastest choice."""
    seconds, memory = all_choices(problem)
    seconds = np.where(memory <= problem.limit * (1 + 1e-9), seconds, np.inf)
    return float(seconds.min())


MEGATRON = [
    ("norm 1", SEQUENCE, SEQUENCE),
    ("qkv", FORKED, WIDTH),
    ("attention", WIDTH, WIDTH),
    ("out", WIDTH, PARTIAL),
    ("add 1", SEQUENCE, SEQUENCE),
    ("norm 2", SEQUENCE, SEQUENCE),
    ("fc 1", FORKED, WIDTH),
    ("activation", WIDTH, WIDTH),
    ("fc 2", WIDTH, PARTIAL),
    ("add 2", SEQUENCE, SEQUENCE),
]


def axis(result, k=0):
    return [(c.op, c.input[k], c.output[k]) for c in result.ops]


@pytest.mark.parametrize("model", ["gpt-22b", "gpt3-175b", "llama3-70b", "llama3-8b"])
@pytest.mark.parametrize("micro_batches", [1, 64])
def test_with_all_weights_split_it_is_megatron(model, micro_batches):
    """Korthikanti et al. 2022 (arXiv:2205.05198): column, heads, row, column, row; norms and adds on rows' shards."""
    space = of(model, rates=A100._replace(micro_batches=micro_batches))
    problem = limited(space, least_memory(space.problem))
    solution = exact(problem)
    result = Result.of(space, solution)
    assert axis(result) == MEGATRON and solution.pick == space.nearest(space.megatron([0]))
    matrices = sum(op.weights for op in space.graph.ops if op.kind == "linear")
    vectors = sum(op.weights for op in space.graph.ops if op.kind == "norm")
    assert solution.memory == pytest.approx((matrices / 8 + vectors) * space.graph.state)
    h = space.graph.ops[0].output.size
    assert sum(p.sent for p in result.conversions) == pytest.approx(8 * 7 / 8 * h)  # four gathers, four scatters
    assert solution.seconds == pytest.approx(brute(problem))


@pytest.mark.parametrize("kind", blocks.CONFIGS)
def test_megatrons_layouts_of_any_wiring(kind):
    """Columns at the start of a branch, rows at its end; where all weights are split it is the fastest."""
    space = blocks.space(kind, (4,), flops=A100.flops, bytes=A100.bytes)
    pick = space.nearest(space.megatron([0]))
    assert space.exactly(pick, space.megatron([0]))
    problem = limited(space, least_memory(space.problem))
    solution, megatron = exact(problem), problem.solution(pick)
    assert megatron.memory == solution.memory and solution.seconds == pytest.approx(brute(problem))
    linear = {op.name: s for op, s in zip(space.graph.ops, space.chosen(megatron)) if op.kind == "linear"}
    assert {name: s.weight for name, s in linear.items()} == {
        "qkv": ("Shard(0)",), "out": ("Shard(1)",), "fc 1": ("Shard(0)",), "fc 2": ("Shard(1)",)
    }  # fmt: skip


def test_with_more_memory_it_is_not():
    """Weights' gradients summed once in 8 micro-batches: heads go to rows by all-to-all (as in DeepSpeed-Ulysses,
    Jacobs et al. 2023, arXiv:2309.14509) before an out-projection that every rank has whole; in 64, qkv too."""
    spaces = {n: of(rates=A100._replace(micro_batches=n)) for n in (1, 8, 64)}
    results = {n: Result.of(space, exact(space.problem)) for n, space in spaces.items()}
    assert axis(results[1]) == MEGATRON and math.prod(map(len, spaces[1].strategies)) == 55_296
    changed = {
        n: {c.op for c, m in zip(r.ops, MEGATRON) if (c.op, *c.input, *c.output) != m} for n, r in results.items()
    }
    assert changed == {1: set(), 8: {"out"}, 64: {"qkv", "out", "fc 1", "activation", "fc 2"}}
    back = [p for p in results[8].conversions if p.source == "attention"]
    assert [p.forward for p in back] == [("all-to-all (0)",)] and results[8].ops[3].output == (SEQUENCE,)
    for n, sp in spaces.items():
        assert results[n].seconds == pytest.approx(brute(sp.problem), rel=1e-9)


def test_batches_where_there_are_enough():
    space = of(batch=8)
    result = Result.of(space, exact(space.problem))
    assert axis(result)[:6] == [(name, BATCH, BATCH) for name, *_ in MEGATRON[:6]]
    assert result.seconds == pytest.approx(brute(space.problem), rel=1e-9)


@pytest.mark.parametrize("share", [0.126, 0.2, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("batch", [1, 8])
def test_descent_finds_the_best_of_one_axis(batch, share):
    space = of(batch=batch, rates=A100._replace(micro_batches=16))
    problem = limited(space, share * sum(float(m.max()) for m in space.problem.memory))
    best = exact(problem)
    assert descent(problem, space.starts()).seconds == pytest.approx(best.seconds, rel=1e-9)
    assert best.seconds == pytest.approx(brute(problem), rel=1e-9)


@pytest.mark.parametrize("share", [1 / 32, 1 / 16, 1 / 8, 1.0])
def test_on_two_axes_descent_comes_near(share):
    space = of(sizes=(4, 8), batch=4)
    limit = max(share * sum(float(m.max()) for m in space.problem.memory), least_memory(space.problem))
    problem = limited(space, limit)
    best, near = exact(problem), descent(problem, space.starts())
    megatron = [problem.solution(space.nearest(space.megatron(axes))) for axes in ([0], [1], [0, 1])]
    assert best.seconds <= near.seconds * (1 + 1e-9) and near.seconds <= best.seconds * 1.005
    assert all(best.seconds < m.seconds for m in megatron if problem.allows(m.memory))


def test_too_little_memory():
    space = of()
    with pytest.raises(
        ValueError, match=r"no layout fits in 1,000,000 bytes; the least that would do is 43,505,418,240"
    ):
        exact(limited(space, 1e6))
    with pytest.raises(ValueError, match=r"no descent of 4 fits in 1,000,000 bytes; the nearest holds 43,505,418,240"):
        descent(limited(space, 1e6), space.starts())
    assert exact(limited(space, 43_505_418_240)).memory == 43_505_418_240


def test_the_parts_of_a_result():
    space = of(sizes=(4, 8), batch=4)
    solution = exact(space.problem)
    result = Result.of(space, solution)
    assert list(result.parts) == list(PARTS) and sum(result.parts.values()) == pytest.approx(solution.seconds)
    assert sum(c.seconds for c in result.ops) + sum(p.seconds for p in result.conversions) == pytest.approx(
        solution.seconds
    )
    assert sum(c.memory for c in result.ops) == pytest.approx(solution.memory) == pytest.approx(result.memory)
    assert result.json()["ops"][1]["weight"] == space.chosen(solution)[1].weight
    assert "all-gather" in result.text() and "Shard(0), Shard(1)" in result.text()


def test_what_other_layouts_would_cost():
    """Each row of the table is what the whole costs when that op alone has that layout."""
    space = of(sizes=(2, 4), batch=4)
    solution = exact(space.problem)
    for k, op in enumerate(space.graph.ops):
        rows = [c for c in candidates(space, solution) if c.op == op.name]
        best = next(c for c in rows if c.chosen)
        assert best is min(rows, key=lambda c: c.seconds) or best.seconds == pytest.approx(rows[0].seconds)
        for row in rows:
            changed = (*solution.pick[:k], space.strategies[k].index(row.strategy), *solution.pick[k + 1 :])
            assert space.problem.solution(changed).seconds - solution.seconds == pytest.approx(
                row.seconds - best.seconds
            )
    second = exact(space.problem, [solution.pick])
    assert second.pick != solution.pick and second.seconds >= solution.seconds
    changed = difference(space, solution, second)
    assert changed and difference(space, solution, solution) == ""
    assert len([line for line in explain(space, solution).splitlines() if line.startswith("*")]) == 10


# ---- run ----


def ran(world, kind, sizes, pick):
    sp = blocks.space(kind, sizes)
    return blocks.planned(init_device_mesh("cpu", sizes), sp, kind, sp.problem.solution(pick))


@pytest.mark.skipif(torch.__version__ < "2.13", reason="an older DTensor does not flatten a split dimension")
@pytest.mark.parametrize(
    "kind, sizes, random",
    [
        *((kind, (2,), 1 + (kind == "gpt")) for kind in ("gpt", "bert", "neox", "gemma", "olmo")),
        pytest.param("llama", (4,), 2, marks=pytest.mark.slow),
        pytest.param("gpt", (2, 2), 1, marks=pytest.mark.slow),
    ],
)
def test_blocks_in_their_layouts(ranks, kind, sizes, random):
    """Output, gradients and bytes sent of a whole block: in the fastest layouts, in Megatron's and in random ones."""
    sp = blocks.space(kind, sizes)
    rng = np.random.default_rng(0)
    picks = [exact(sp.problem).pick, exact(limited(sp, least_memory(sp.problem))).pick]
    picks += [sp.nearest(sp.megatron(range(len(sizes))))]
    picks += [tuple(int(rng.integers(len(op))) for op in sp.strategies) for _ in range(random)]
    for pick in picks:
        for declared, error, sent in ranks(math.prod(sizes), ran, kind, sizes, pick):
            assert declared and error < 1e-11, pick
            assert sent == pytest.approx(Result.of(sp, sp.problem.solution(pick)).sent), pick


# ---- refusals ----


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: of(rates=Rates(0.0, 1.0)), "rates and micro_batches must be above 0"),
        (lambda: of(sizes=(1,)), "at least 2 ranks, got 1"),
    ],
)
def test_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.slow
def test_six_blocks_on_two_axes():
    """Too many for any other check: descent comes within half a percent."""
    space = of(sizes=(4, 8), batch=4, blocks=6)
    problem = limited(space, 0.1251 * sum(float(m.max()) for m in space.problem.memory))
    one = of(sizes=(4, 8), batch=4)
    single = exact(limited(one, 0.1251 * sum(float(m.max()) for m in one.problem.memory)))
    best = exact(problem)
    assert problem.variables == 12036 and best.seconds <= 6 * single.seconds * (1 + 1e-9)
    assert descent(problem, space.starts()).seconds <= best.seconds * 1.005


# ---- what the library runs ----


def test_a_plan_of_pieces_runs_as_context_parallelism(ranks):
    """Of one sequence longer than weights are wide.  Real ranks send what the plan says, to the byte: heads, and sums
    of gradients."""
    job = Job(replace(GROUPED, max_positions=512), 1, 512, torch.float32)
    space = Space(stack(job), Mesh((2,), (Link(1e-7, 1e9),)), Rates(flops=1e10, bytes=1e9))
    best = exact(space.problem)
    split = space.split(best)
    assert split == Split(cp=2, cp_kind="heads") and descent(space.problem, space.starts()).pick == best.pick
    sent = Result.of(space, best).sent
    for (one, *_), (two, *_) in ranks(2, model_of, job.config, split.plan(job)):
        assert two[0] - one[0] == sent > 0
    assert runs_as(space, best) == (
        'TensorParallel(mesh["tp"], sequence_parallel=True, cp=mesh["cp"], cp_kind="heads") on a mesh of dp 1, cp 2,'
        " tp 1"
    )


@pytest.mark.parametrize("schemes", [("dp",), ("cp",), ("tp",), ("dp", "cp"), ("dp", "tp"), ("tp", "tp")])
def test_what_the_library_runs_is_named(schemes):
    space = of("gpt-22b", sizes=(2, 4)[-len(schemes) :], batch=4)
    solution = space.problem.solution(space.nearest(space.schemed(schemes)))
    sizes = {name: math.prod(n for n, s in zip(space.mesh.sizes, schemes) if s == name) for name in ("dp", "cp", "tp")}
    assert space.split(solution) == Split(**sizes, cp_kind="heads")
    assert f"dp {sizes['dp']}, cp {sizes['cp']}, tp {sizes['tp']}" in runs_as(space, solution)


def test_what_the_library_does_not_run_is_said():
    """An out-projection that every rank has whole, behind heads of attention."""
    space = of(rates=A100._replace(micro_batches=8))
    best = exact(space.problem)
    assert space.split(best) is None and runs_as(space, best) == "not built: out on axis 0, else tp"


def test_two_axes_keep_their_order():
    """Of rows cp is the outer axis, and tp of heads: DTensor has one order, so that a change takes three exchanges,
    where the library makes one."""
    space = of("gpt-22b", sizes=(2, 4))
    result = Result.of(space, space.problem.solution(space.nearest(space.schemed(("cp", "tp")))))
    steps = {(c.source, c.to): c.forward for c in result.conversions}
    assert len(steps["qkv", "attention"]) == len(steps["attention", "out"]) == 3
