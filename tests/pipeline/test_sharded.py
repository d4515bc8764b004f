"""FSDP2 over the replicas of pipeline stages against one process: losses, norms, gradients; what is gathered, when."""

from collections import Counter

import pytest
import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models.common import default_dtype
from tests.pipeline.common import F64, GPT2, MODELS, ROWS, batches, cases, check_curve, errors, made, mine, place, said
from tpfuse import TensorParallel, as_dtensor
from tpfuse.pipeline import SCHEDULES, schedule


def sharded(mesh, name, config=GPT2, *, whole=True, how=None, over_replicas=False, **options):
    """This rank's stages, made with ``how``: blocks sharded over the replicas, and with ``whole`` the rest too."""
    model = made(config, tp=TensorParallel(mesh["tp"]), **place(mesh, name, over_replicas), **(how or {}))
    if mesh["tp"].size() > 1 or over_replicas:
        as_dtensor(model, mesh["tp"])
    for block in model.blocks:
        if block is not None:
            fully_shard(block, mesh=mesh["dp"], **options)
    if whole:
        fully_shard(model, mesh=mesh["dp"], **options)
    return model


def staged(mesh, name, config, **options):
    return sharded(mesh, name, config, **options), None


EVERY = [*(((2, 2, 1), name) for name in SCHEDULES), ((2, 2, 2), "zbv"), ((2, 2, 2), "chimera")]
DAILY = {((2, 2, 1), "zbv")}


def check(ranks, layout, name, config=GPT2, **options):
    for curve in check_curve(ranks, staged, layout, name, config, **options):
        assert not options.get("whole", True) or layout[2] > 1 or curve.share < 0.51


@pytest.mark.parametrize("layout, name", cases(DAILY, EVERY))
def test_every_schedule_gives_one_processs_curve(ranks, layout, name):
    check(ranks, layout, name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "bert", "mixtral"])
def test_every_kind_of_model(ranks, kind):
    check(ranks, (2, 2, 1), "zbv", MODELS[kind])


@pytest.mark.slow
def test_experts_over_replicas(ranks):
    check_curve(ranks, staged, (2, 2, 1), "zbv", MODELS["mixtral"], over_replicas=True)


@pytest.mark.slow
def test_blocks_alone(ranks):
    check(ranks, (2, 2, 1), "zbv", whole=False)


@pytest.mark.slow
@pytest.mark.parametrize("how", [dict(saving="smallest"), dict(recompute="full")], ids=["smallest", "full"])
def test_beside_other_features(ranks, how):
    check(ranks, (2, 2, 1), "zbv", MODELS["llama"], how=how)


def counted(world, name):
    """Two steps whose gradients add up, and an evaluation -> the error against one process, the messages over the
    replicas of the second step, the groups that FSDP2 holds, and whether everything is sharded again."""
    mesh = world.stages(2, 2, 1)
    with default_dtype(F64):
        whole, model = made(GPT2), sharded(mesh, name)
        pipeline, rows = schedule(model, mesh["pp"], name, ROWS // 2), mine(mesh)
        every = list(batches(2))
        for step, (ids, labels) in enumerate(every):
            whole(ids, labels=labels, step=step, first_sample=0).loss.backward()
        pipeline.step(every[0][0][rows], labels=every[0][1][rows], step=0)
        with Messages() as messages:
            pipeline.step(every[1][0][rows], labels=every[1][1][rows], step=1)
        grads = [p.grad.to_local().clone() for p in model.parameters()]
        loss = pipeline.evaluate(every[0][0][rows], labels=every[0][1][rows], step=0)
        assert loss.item() == pytest.approx(whole(every[0][0], labels=every[0][1], step=0, first_sample=0).loss.item())
        assert all(torch.equal(p.grad.to_local(), g) for p, g in zip(model.parameters(), grads, strict=True))
        error = errors(model, {key: p.grad for key, p in whole.named_parameters()})
        inner = {p for block in model.blocks if block is not None for p in block.parameters()}
        groups = sum(isinstance(block, FSDPModule) for block in model.blocks)
        groups += any(p not in inner for p in model.parameters())  # a rank may have nothing but blocks
        return error, dict(messages.seen), groups, all(isinstance(p, DTensor) for p in model.parameters())


class Messages(TorchDispatchMode):
    """Counts the messages by which FSDP2 gathers and reduces."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("_allgather_base_", "_reduce_scatter_base_"):
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["1f1b", pytest.param("zbv", marks=pytest.mark.slow)])
def test_a_step_gathers_and_reduces_each_group_once(ranks, name):
    for error, seen, groups, again in ranks(4, counted, name):
        assert error < 1e-9 and again
        assert seen == {"_allgather_base_": groups, "_reduce_scatter_base_": groups}


def failed(world):
    """The error of a step's gradients after one that fails in its first forward pass."""
    mesh = world.stages(1, 2, 1)
    with default_dtype(F64):
        whole, model = made(GPT2), sharded(mesh, "1f1b")
        pipeline = schedule(model, mesh["pp"], "1f1b", 4)
        ((ids, labels),) = batches(1)
        hook = model.blocks[3].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(RuntimeError, match="failed to run forward"):
            pipeline.step(ids[mine(mesh)], labels=labels[mine(mesh)], step=0)
        hook.remove()
        assert all(isinstance(p, DTensor) and p.grad is None for p in model.parameters())
        pipeline.step(ids[mine(mesh)], labels=labels[mine(mesh)], step=0)
        whole(ids, labels=labels, step=0, first_sample=0).loss.backward()
        return errors(model, {key: p.grad for key, p in whole.named_parameters()})


@pytest.mark.slow
def test_a_step_after_one_that_has_failed(ranks):
    assert max(ranks(2, failed)) < 1e-9


def mixed(world, name):
    """The largest error of gradients in fp32 of 16-bit passes, and that of one process whose gradients are 16-bit."""
    mesh = world.stages(2, 2, 1)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ((ids, labels),) = batches(1)
    with default_dtype(F64):
        exact = made(GPT2)
        exact(ids, labels=labels, step=0, first_sample=0).loss.backward()
    first = {key: p.grad for key, p in exact.named_parameters()}
    whole, model = made(GPT2).to(torch.bfloat16), sharded(mesh, name, mp_policy=policy)
    whole(ids, labels=labels, step=0, first_sample=0).loss.backward()
    schedule(model, mesh["pp"], name, 4).step(ids[mine(mesh)], labels=labels[mine(mesh)], step=0)
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    return errors(model, first), errors(whole, first)


@pytest.mark.slow
def test_mixed_precision(ranks):
    for error, own in ranks(4, mixed, "zbv"):
        assert error < 2 * own


def refusals(world):
    mesh = world.stages(2, 2, 1)
    pp, dp = mesh["pp"], mesh["dp"]
    options = dict(stage=(pp.get_local_rank(), 2))
    tries = {
        "no dp": fully_shard(made(GPT2, **options), mesh=dp),
        "other ranks": fully_shard(made(GPT2, dp=dp, **options), mesh=pp),
    }
    return {key: said(lambda model=model: schedule(model, pp, "1f1b", 4)) for key, model in tries.items()}


def test_other_replicas_are_refused(ranks):
    for found in ranks(4, refusals):
        assert all("is sharded over ranks that are not the model's replicas" in words for words in found.values())
