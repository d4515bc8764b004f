"""torch's own clipping of parameters that ranks hold slices of, against torch's own on one process."""

import copy
import gc
import inspect
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm, parametrize, prune

import tpfuse
from tests.common import assert_close, error, make_tp
from tests.models.common import batch, default_dtype, whole
from tests.training.foreign.common import Double
from tpfuse import TensorParallel, as_dtensor
from tpfuse.layers.module import local
from tpfuse.models import GPT, GPTConfig

F64, F32 = torch.float64, torch.float32
INF = float("inf")
# two kv heads: on four ranks each is held by two
CONFIG = GPTConfig(
    vocab_size=97,
    max_positions=32,
    hidden_size=48,
    num_layers=1,
    num_heads=12,
    num_kv_heads=2,
    ffn_size=84,
    dropout=0.0,
)


def with_gradients(world, dtype=F64, dp=1, kind="plain"):
    """-> a model after one backward of a batch that is every replica's"""
    mesh = world.mesh(dp, world.size // dp)
    with default_dtype(dtype):
        model = GPT(CONFIG, tp=TensorParallel(mesh["tp"], sequence_parallel=True), dp=mesh["dp"])
    replica = model
    if kind in ("dtensor", "fsdp"):
        as_dtensor(model, mesh)
    if kind in ("fsdp", "plain fsdp"):
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh["dp"])
    if kind == "ddp":
        replica = nn.parallel.DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    replica(**batch(CONFIG), first_sample=0).loss.backward()
    return model


WAYS = {  # of a caller, who has a model and a limit, and gets the norm
    "generator": lambda model, limit, **o: clip_grad_norm_(model.parameters(), limit, **o),
    "list": lambda model, limit, **o: clip_grad_norm_(list(model.parameters()), limit, **o),
    "attribute": lambda model, limit, **o: nn.utils.clip_grad_norm_([*model.parameters()], max_norm=limit, **o),
    "in two": lambda model, limit, **o: in_two(model, limit, **o),
    "detached": lambda model, limit, **o: in_two(model, limit, lambda g: g.detach(), **o),
    "backwards": lambda model, limit, **o: clip_grad_norm_(
        list(model.parameters())[:: 1 - 2 * (limit < 1)], limit, **o
    ),
}


def in_two(model, limit, seen=lambda g: g, norm_type=2.0, **options):
    norm = get_total_norm([seen(p.grad) for p in model.parameters()], norm_type, **options)
    clip_grads_with_norm_(model.parameters(), limit, norm)
    return norm


def clipped(world, calls, dtype, dp, kind):
    """-> of each call the norm, and the full gradients after it"""
    model = with_gradients(world, dtype, dp, kind)
    saved = [local(p.grad).clone() for p in model.parameters()]
    found = []
    for way, limit, options in calls:
        norm = WAYS[way](model, limit, **options)
        found.append((norm, {} if kind == "plain fsdp" else whole(model, grad=True)))
        for p, grad in zip(model.parameters(), saved):
            local(p.grad).copy_(grad)  # in place: torch keeps the meshes of what DTensor ops give from world to world
    return found


CALLS = [
    *((way, 0.05, {}) for way in WAYS),
    ("list", 1e3, {}),
    ("list", 0.01, dict(norm_type=INF)),
    ("list", 0.01, dict(norm_type="inf")),
    ("list", 0.05, dict(norm_type=1)),
    ("in two", 0.05, dict(norm_type=3.5)),
    ("generator", 0.05, dict(foreach=True)),
    ("generator", 0.05, dict(foreach=False, error_if_nonfinite=True)),
]


@pytest.mark.parametrize(
    "R, dp, kind",
    [
        (2, 1, "plain"),
        (4, 2, "fsdp"),
        *(
            pytest.param(4, dp, kind, marks=pytest.mark.slow)
            for dp, kind in ((1, "plain"), (2, "ddp"), (1, "dtensor"), (2, "plain fsdp"))
        ),
    ],
)
def test_every_call_gives_the_norm_over_the_whole_model(ranks, R, dp, kind):
    for dtype in (F64, F32) if kind == "plain" else (F64,):
        exact = ranks(1, clipped, CALLS, dtype, 1, "plain")[0]
        every = ranks(R, clipped, CALLS, dtype, dp, kind)
        for i, (norm, grads) in enumerate(exact):
            for found in every:
                got, scaled = found[i]
                assert got.dim() == 0 and got.dtype == dtype and torch.equal(got, every[0][i][0]), CALLS[i]
                assert error(got, norm) < (1e-10 if dtype == F64 else 1e-6), CALLS[i]
                if scaled:  # a layout of its own where kv heads are held twice
                    names = scaled.keys() & grads.keys()
                    assert len(names) > 10 and len(names) == len(grads) or R == 4
                    assert_close({n: scaled[n] for n in names}, {n: grads[n] for n in names}, dtype)


def unsharded(world):
    """-> the norm of the optimizer's parameters, before and after a forward that leaves the layers unsharded"""
    model = with_gradients(world, F64, 2, "fsdp")
    held = list(model.parameters())
    before = get_total_norm([p.grad for p in held])
    model.eval()
    with torch.no_grad():
        model(**batch(CONFIG))
    assert any(p is not q for p, q in zip(held, model.parameters(), strict=True))
    return before, get_total_norm([p.grad for p in held])


def test_an_unsharded_layer_leaves_an_optimizers_parameters_known(ranks):
    exact = ranks(1, clipped, [("list", 1e9, {})], F64, 1, "plain")[0][0][0]
    for before, after in ranks(4, unsharded):
        assert torch.equal(before, after) and error(after, exact) < 1e-12


def of_one(world):
    """-> norms of single tensors, plain and split, after values were clipped; the gradient of a split one"""
    model = with_gradients(world)
    split = model.blocks[0].mlp.fc1.weight
    split.grad.mul_(1e3)
    clip_grad_value_(split, 0.5)
    norms = [get_total_norm(split.grad), clip_grad_norm_(split, 0.1), get_total_norm(split), get_total_norm([])]
    return norms, whole(model, grad=True)["blocks.0.mlp.fc1.weight"]


def test_one_tensor_and_values(ranks):
    norms, exact = ranks(1, of_one)[0]
    assert exact.norm() <= 0.1 < norms[0]
    for got, grad in ranks(2, of_one):
        assert [error(x, y) < 1e-10 for x, y in zip(got, norms)] == [True] * 4
        assert error(grad, exact) < 1e-10


def nonfinite(world):
    """One rank alone has an infinite element. -> the error, and whether every gradient stayed"""
    model = with_gradients(world)
    if world.rank == 1:
        model.embedding.weight.grad[0, 0] = INF
    before = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="non-finite, so it cannot be clipped") as caught:
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    return str(caught.value), all(map(torch.equal, before, [p.grad for p in model.parameters()]))


def test_an_infinity_on_one_rank_is_torchs_error_on_every_rank(ranks):
    first, other = ranks(2, nonfinite)
    assert first == other and first[1]


def differing(world, how):
    model = with_gradients(world)
    parameters = list(model.parameters())
    if world.rank == 1 and how == "parameters":
        parameters = parameters[2:]
    order = 1.0 if world.rank == 1 and how == "norm_type" else 2.0
    with pytest.raises(ValueError, match="get_total_norm: .* must be the same on every tensor-parallel rank") as caught:
        clip_grad_norm_(parameters, 1.0, order)
    return str(caught.value)


@pytest.mark.parametrize("how, words", [("parameters", "the split parameters"), ("norm_type", "norm_type")])
def test_ranks_that_clip_something_else(ranks, how, words):
    first, other = ranks(2, differing, how)
    assert first == other and words in first


def orders(world):
    model = with_gradients(world)
    for order in (0, -1.0, -INF, float("nan")):
        with pytest.raises(ValueError, match="get_total_norm: norm_type must be more than 0"):
            clip_grad_norm_(model.parameters(), 1.0, order)


def test_a_norm_that_has_no_sum_over_ranks_is_refused(ranks):
    ranks(2, orders)


def variants(world, how):
    """-> the norm of torch's and of ours of the same model, made in some other way"""
    model = GPT(CONFIG, tp=make_tp(world) if world else None).double()
    fc1 = model.blocks[0].mlp.fc1
    if how == "copy":
        model = copy.deepcopy(model)
    if how == "pickle":
        model = pickle.loads(pickle.dumps(model))
    if how == "parametrized":
        parametrize.register_parametrization(fc1, "weight", Double())
    if how == "pruned":
        prune.custom_from_mask(model.input_norm, "weight", torch.ones_like(model.input_norm.weight))  # replicated
    if how == "moved":
        model = model.bfloat16().double()
    model(**batch(CONFIG)).loss.backward()
    deep = nn.ModuleDict({"deep": nn.Sequential(model)})
    ours = None if how == "pruned" else tpfuse.clip_grad_norm_(deep, 1e9)
    return clip_grad_norm_(deep.parameters(), 1e9), ours


@pytest.mark.parametrize("how", ["copy", "pickle", "parametrized", "pruned", "moved"])
def test_models_made_otherwise(ranks, how):
    exact, _ = ranks(1, variants, how)[0]
    for theirs, ours in ranks(2, variants, how):
        assert error(theirs, exact) < 1e-12 and (ours is None or error(ours, exact) < 1e-12)


def plain_beside(world):
    """Of a plain model, in a process with split parameters: bitwise torch's own code -> norms and gradients"""
    kept = with_gradients(world)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3).bfloat16())
    for p in model.parameters():
        p.grad = torch.randn(p.shape).to(p.dtype)
    norms = [get_total_norm([p.grad for p in model.parameters()], order) for order in (2, INF, 0, -INF)]
    norms.append(clip_grad_norm_(model.parameters(), 0.5))
    del kept
    return norms, [p.grad for p in model.parameters()]


def test_a_plain_model_is_clipped_as_ever(ranks):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3).bfloat16())
    for p in model.parameters():
        p.grad = torch.randn(p.shape).to(p.dtype)
    total = inspect.unwrap(get_total_norm)
    norms = [total([p.grad for p in model.parameters()], order) for order in (2, INF, 0, -INF)]
    norms.append(clip_grad_norm_(model.parameters(), 0.5))
    for got, grads in ranks(2, plain_beside):
        assert all(map(torch.equal, got, norms)) and all(map(torch.equal, grads, [p.grad for p in model.parameters()]))


def test_a_compiled_step_of_a_plain_model_has_no_break():
    gc.collect()  # split models of earlier tests: while one lives, a step is another graph
    model = nn.Linear(4, 4)
    model(torch.randn(2, 4)).sum().backward()
    want = get_total_norm([p.grad for p in model.parameters()])
    step = torch.compile(lambda: clip_grad_norm_(model.parameters(), 0.1), fullgraph=True, backend="eager")
    torch.testing.assert_close(step(), want)
