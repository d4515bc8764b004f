"""Gradients that are one step late over stages, against one process with the same delay: losses, gradients, weights, in
fp64 with dropout on; bits; what is refused."""

import functools
from dataclasses import replace

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from tests.models.common import default_dtype
from tests.pipeline.common import (
    F64,
    GPT2,
    MODELS,
    ROWS,
    SEQ,
    adapted,
    batches,
    check_said,
    errors,
    made,
    mine,
    place,
    said,
)
from tests.planted import Mistaken
from tpfuse import (
    DelayedGradients,
    MainGrad,
    TensorParallel,
    WholeMatrices,
    clip_grad_norm_,
    data_parallel,
    param_groups,
)
from tpfuse.kernels.runtime.leaves import tree
from tpfuse.layers import ExpertBalance
from tpfuse.layers.shards import named_specs
from tpfuse.pipeline import fill, order, schedule, simulate

STEPS = 4


def delayed_in_one_process(world, config, lora, **options):
    """The definition, without the library's: weights change by the gradient of the batch before."""
    with default_dtype(F64):
        model = adapted(made(config, **options), lora)
        optimizer = torch.optim.AdamW(param_groups(model, weight_decay=0.1), lr=1e-2)
        losses, waiting, history = [], {}, []
        for ids, labels in batches(STEPS):
            loss = model(ids, labels=labels).loss
            loss.backward()
            losses.append(loss.item())
            gradients = {p: p.grad for p in model.parameters()}
            history.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
            for p in model.parameters():
                p.grad = waiting.get(p)
            waiting = gradients
            clip_grad_norm_(model, 0.5)
            optimizer.step()
            optimizer.zero_grad()
        return losses, history, {name: p.detach() for name, p in model.named_parameters()}


def over_stages(world, layout, config, lora, exact, sequence_parallel=False, over_replicas=False, **options):
    mesh = world.stages(*layout)
    losses, history, weights = exact
    with default_dtype(F64):
        tp = TensorParallel(mesh["tp"], sequence_parallel=sequence_parallel)
        model = adapted(made(config, tp=tp, **place(mesh, "2bw", over_replicas), **options), lora)
        pipeline, rows = schedule(model, mesh["pp"], "2bw", ROWS // mesh["dp"].size()), mine(mesh)
        optimizer = torch.optim.AdamW(param_groups(model, weight_decay=0.1), lr=1e-2)
        found, worst = [], 0.0
        for t, (ids, labels) in enumerate(batches(STEPS)):
            found.append(pipeline.step(ids[rows], labels=labels[rows]))
            if t == 0:
                assert all(p.grad is None for p in model.parameters())
            else:
                worst = max(worst, errors(model, history[t - 1]))
            clip_grad_norm_(model, 0.5)
            optimizer.step()
            optimizer.zero_grad()
        found.append(pipeline.drain())
        worst = max(worst, errors(model, history[-1]), errors(model, weights, lambda p: p.detach()))
        assert found[0] is None
        return [x.item() for x in found[1:]], worst


EXACT = {}


def exact_of(ranks, config=GPT2, lora=False, **options):
    key = repr((config, lora, options))
    if key not in EXACT:
        EXACT[key] = ranks(1, functools.partial(delayed_in_one_process, **options), config, lora)[0]
    return EXACT[key]


def check(ranks, layout, config=GPT2, lora=False, **options):
    exact = exact_of(ranks, config, lora, **{key: options[key] for key in ("balance",) if key in options})
    pp, dp, tp = layout
    for losses, worst in ranks(pp * dp * tp, functools.partial(over_stages, **options), layout, config, lora, exact):
        assert losses == pytest.approx(exact[0], rel=1e-9)
        assert worst < 1e-9


LAYOUTS = [(2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 1)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout(ranks, layout):
    check(ranks, layout)


@pytest.mark.parametrize("kind", ["llama", "bert", "untied"])
def test_every_kind_of_model(ranks, kind):
    check(ranks, (2, 1, 1), MODELS[kind])


@pytest.mark.slow
def test_adapters_over_ranks_of_a_stage(ranks):
    check(ranks, (2, 1, 2), MODELS["llama"], lora=True, sequence_parallel=True)


@pytest.mark.slow
def test_experts_over_replicas(ranks):
    check(ranks, (2, 2, 1), MODELS["mixtral"], over_replicas=True)


@pytest.mark.slow
def test_losses_of_balance_and_recompute(ranks):
    check(ranks, (2, 1, 1), MODELS["mixtral"], balance=ExpertBalance("sequence", 0.5, 0.1), recompute="full")


def forgets_to_keep(right, version):
    """The optimizer then changes the weights of the batch in flight."""


def test_one_version_of_the_weights_would_show(ranks):
    exact = exact_of(ranks)
    spoilt = Mistaken(over_stages, "tpfuse.pipeline.versions.Version.keep", forgets_to_keep)
    for losses, worst in ranks(2, spoilt, (2, 1, 1), GPT2, False, exact):
        assert losses[0] == pytest.approx(exact[0][0], rel=1e-9)  # no optimizer has changed anything yet
        assert worst > 1e-4 and losses != pytest.approx(exact[0], rel=1e-6)


# ---- the same bits ----


def trained_in_fp32(mesh, name, muon):
    """Losses and weights under 2bw, or under a schedule with a flush and DelayedGradients."""
    model = made(GPT2, stage=(mesh["pp"].get_local_rank(), 2, name))
    pipeline = schedule(model, mesh["pp"], name, ROWS)
    delayed = None if name == "2bw" else DelayedGradients(model)
    matrices = WholeMatrices(model.blocks)
    optimizers = [torch.optim.AdamW(matrices.others(model) if muon else model.parameters(), lr=1e-2)]
    if muon:
        optimizers.append(torch.optim.Muon(matrices.parameters(), lr=0.02))
        optimizers[1].register_step_pre_hook(matrices.gather_gradients)
    losses = []
    for ids, labels in batches(STEPS):
        loss = pipeline.step(ids, labels=labels)
        losses.append(loss if delayed is None else delayed.swap(loss))
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    losses.append((pipeline if delayed is None else delayed).drain())
    return [loss.item() for loss in losses[1:]], [p.detach().clone() for p in model.parameters()]


def both(world, muon):
    mesh = world.stages(2, 1, 1)
    (losses, weights), (exact, right) = (trained_in_fp32(mesh, name, muon) for name in ("2bw", "1f1b"))
    return losses == exact, all(map(torch.equal, weights, right))


@pytest.mark.parametrize("muon", [False, True], ids=["adamw", "muon"])
def test_bits_are_those_of_a_flush_with_the_same_delay(ranks, muon):
    """Muon steps on matrices in the parameters' memory, of which every step makes another."""
    assert ranks(2, both, muon) == [(True, True)] * 2


K, SAMPLES = 4, 2  # micro-batches of all replicas


def bitwise(world, layout):
    torch.set_num_threads(1)
    mesh, one = world.stages(*layout), world.size == 1
    tp = TensorParallel(mesh["tp"], sequence_parallel=layout[2] > 1, bitwise=4)
    model = made(GPT2, tp=tp, **({} if one else place(mesh, "2bw")))
    if one:
        replica, delayed = data_parallel(model, None, bitwise_micro_batches=K), DelayedGradients(model)
    else:
        delayed = schedule(model, mesh["pp"], "2bw", K // mesh["dp"].size(), bitwise=True)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step, (ids, _) in enumerate(batches(3)):
        if one:
            replica.zero_grad()
            parts = []
            for i, micro in enumerate(ids.split(SAMPLES)):
                options = dict(step=step, first_sample=i * SAMPLES, loss_normalizer=float(SAMPLES * (SEQ - 1)))
                loss = replica(micro, labels=micro, **options).loss
                loss.backward()
                parts.append(loss.detach())
            losses.append(delayed.swap(tree(parts) / K))
        else:
            losses.append(delayed.step(ids[mine(mesh)], labels=ids[mine(mesh)], step=step))
        optimizer.step()
        optimizer.zero_grad()
    losses.append(delayed.drain())
    weights = {n: (s.local(t), p.detach()) for n, p, s, t in named_specs(model)}
    return [x.item() for x in losses[1:]], weights


@pytest.mark.parametrize("layout", [(2, 1, 2), (2, 2, 1)], ids=str)
def test_bits_are_those_of_one_process(ranks, layout):
    ((exact, right),) = ranks(1, bitwise, (1, 1, 1))
    for losses, weights in ranks(4, bitwise, layout):
        assert losses == exact
        assert all(torch.equal(p, right[name][1][part]) for name, (part, p) in weights.items())


# ---- between steps ----


def between(world):
    """Evaluation on the weights as they are, batches of another length, gradients that are not zeroed."""
    mesh = world.stages(2, 1, 1)["pp"]
    with default_dtype(F64):
        whole, model = made(GPT2).eval(), made(GPT2, stage=(mesh.get_local_rank(), 2, "2bw")).eval()
        pipeline, found = schedule(model, mesh, "2bw", 4), []
        (ids, labels), (second, targets), (third, _) = batches(3)
        assert pipeline.drain() is None
        assert pipeline.step(ids, labels=labels, step=0) is None
        with torch.no_grad():
            for m in (whole, model):
                for p in m.parameters():
                    p.mul_(1.01)
        found.append(pipeline.evaluate(second, labels=targets) - whole(second, labels=targets).loss)
        short = said(lambda: pipeline.step(third[:, :8], labels=third[:, :8]))
        with torch.no_grad():
            for p in whole.parameters():
                p.div_(1.01)
        exact = whole(ids, labels=labels).loss
        exact.backward()
        with torch.no_grad():  # and save or drain may be called in this mode
            found.append(pipeline.drain() - exact.detach())
        gradients = {name: p.grad.clone() for name, p in whole.named_parameters()}
        worst = errors(model, gradients)
        assert pipeline.step(third[:, :8], labels=third[:, :8]) is None
        before = [p.grad.clone() for p in model.parameters()]
        pipeline.drain()
        added = all(not torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))
        return [abs(x.item()) for x in found], worst, short, added


def test_between_steps(ranks):
    for found, worst, short, added in ranks(2, between):
        assert max(found) < 1e-12 and worst < 1e-9 and added
        assert "must be as those in flight, 2 x 12 tokens in torch.float64, got 2 x 8 tokens" in short


def failed(world):
    """A step that fails drops both batches: the next one is a first one."""
    mesh = world.stages(1, 2, 1)
    model = made(GPT2, stage=(0, 1, "2bw"), dp=mesh["dp"])
    pipeline = schedule(model, mesh["pp"], "2bw", 4)
    (ids, labels), *_ = batches(1)
    step = lambda: pipeline.step(ids[mine(mesh)], labels=labels[mine(mesh)], step=0)
    step()
    first = step().item()
    hook = model.input_norm.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(RuntimeError, match="failed to run forward"):
        step()
    hook.remove()
    return step(), step().item() == first, pipeline.drain().item() == first, pipeline.drain()


@pytest.mark.slow
def test_a_step_that_fails_leaves_nothing_in_flight(ranks):
    assert ranks(2, failed) == [(None, True, True, None)] * 2


def head_alone(world):
    mesh = world.stages(2, 1, 1)["pp"]
    with default_dtype(F64):
        config = replace(GPT2, tie_embeddings=False)
        whole, model = made(config), made(config, stage=(mesh.get_local_rank(), 2, "2bw"))
        for m in (whole, model):
            m.requires_grad_(False)
            if m.head is not None:
                m.head.requires_grad_(True)
        ((ids, labels),) = batches(1)
        whole(ids, labels=labels, step=0, first_sample=0).loss.backward()
        pipeline = schedule(model, mesh, "2bw", 4)
        pipeline.step(ids, labels=labels, step=0)
        norm = clip_grad_norm_(model, 1.0).item()
        pipeline.drain()
        return norm, errors(model, {key: p.grad for key, p in whole.named_parameters()})


def test_a_stage_may_be_frozen(ranks):
    for norm, worst in ranks(2, head_alone):
        assert norm == 0.0 and worst < 1e-9


# ---- what is refused ----


def refusals(world):
    mesh = world.stages(2, 1, 1)
    pp, (ids, labels) = mesh["pp"], next(batches(1))
    staged = lambda config=GPT2: made(config, stage=(pp.get_local_rank(), 2, "2bw"))
    train = lambda model, name="2bw", m=4: schedule(model, pp, name, m)
    pipeline = train(staged())
    half, compiled, late = staged().to(torch.bfloat16), staged(), staged()
    main = MainGrad(half, mesh["dp"])
    compiled.compile()
    later, flying = train(late), staged()
    in_flight = train(flying)
    in_flight.step(ids, labels=labels)
    late.compile()
    filling = fill(simulate(order("1f1b", 2, 4), 1.0, 1.0, 1.0), [])
    tries = {
        "pipedream": lambda: train(staged(), "pipedream"),
        "stage": lambda: made(GPT2, stage=(pp.get_local_rank(), 2, "pipedream")),
        "few": lambda: train(staged(), m=1),
        "main": lambda: train(half),
        "compiled": lambda: train(compiled),
        "compiled later": lambda: later.step(ids, labels=labels),
        "bias": lambda: train(staged(replace(MODELS["mixtral"], router_bias=True))),
        "measure": lambda: pipeline.measure(ids, labels=labels),
        "fill": lambda: pipeline.fill(filling),
        "labels": lambda: pipeline.step(ids),
        "in flight": lambda: train(flying),
    }
    found = {key: said(attempt) for key, attempt in tries.items()}
    main.zero()
    in_flight.drain()
    return found


WORDS = {
    "pipedream": "pipedream is simulated, not built: its delay depends on the stage; use 2bw",
    "stage": "stage's schedule must be one of gpipe",
    "few": "2bw over 2 ranks needs at least 2 (ranks - 1) = 2 micro-batches",
    "main": "2bw beside MainGrad is not built",
    "compiled": "2bw of a compiled module is not built",
    "compiled later": "2bw of a compiled module is not built",
    "bias": "2bw of a router with a bias is not built",
    "measure": "measure is of bubbles, and without a flush there are none",
    "fill": "fill is of bubbles, and without a flush there are none",
    "labels": "needs labels, on every rank",
    "in flight": "2bw: gradients of this model wait in a DelayedPipeline; call its drain() before",
}


def test_what_is_refused_says_why_on_every_rank(ranks):
    check_said(ranks(2, refusals), WORDS)


def sharded(world):
    mesh = world.stages(1, 2, 1)
    model = made(GPT2, stage=(0, 1, "2bw"), dp=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return said(lambda: schedule(model, mesh["pp"], "2bw", 4))


def test_over_fsdp_is_refused(ranks):
    assert all("2bw over FSDP2 is not built" in words for words in ranks(2, sharded))
