"""tpfuse.replicated: plain torch modules on row shards have the gradients of one process, whatever is done."""

import copy
import functools
import io
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import tpfuse
from tests.common import Recorder, assert_close, assert_equal, make_tp, my_rows
from tpfuse import TensorParallel
from tpfuse.layers import ColumnParallelLinear, TransformerBlock, VocabParallelHead

F64 = torch.float64
M, D = 16, 8


class Tied(nn.Module):
    """One weight under two names; and a part that holds another part's parameter."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


class Attends(nn.Module):
    """Takes its projection's weight without calling it, as MultiheadAttention does."""

    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(D, 2)

    def forward(self, x):
        return self.inner(x[None], x[None], x[None], need_weights=False)[0][0]


class Recurs(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.LSTM(D, D)

    def forward(self, x):
        return self.inner(x[None])[0][0]  # each row is a sequence of its own


class Deep(nn.Module):
    """Calls a part twice, and one that is replicated itself."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear, self.own = nn.LayerNorm(D), nn.Linear(D, D), nn.Sequential(nn.Linear(D, D), nn.GELU())
        self.scale = nn.Parameter(torch.full((D,), 0.5))

    def forward(self, x):
        return self.own(self.linear(self.norm(x))) * self.scale + self.linear(x)


class Tokens(nn.Module):
    """A table, of which each rank uses other rows, and a part that nobody uses: it has no gradient, as in torch."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(D, D)
        self.idle = nn.Linear(D, D)

    def forward(self, x):
        return x + self.table(x.argmax(-1))


MODULES = {
    "linear": lambda: nn.Linear(D, D),
    "norm": lambda: nn.LayerNorm(D),
    "sequential": lambda: nn.Sequential(nn.Linear(D, D), nn.RMSNorm(D), nn.SiLU(), nn.Linear(D, D, bias=False)),
    "tied": Tied,
    "attention": Attends,
    "lstm": Recurs,
    "deep": Deep,
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(D, D)),
    "embedding": Tokens,
}


class Model(nn.Module):
    """A plain module between two parallel layers."""

    def __init__(self, name, tp):
        super().__init__()
        torch.manual_seed(3)
        self.tp = tp
        self.enter = TransformerBlock(D, 4, tp=tp, dtype=F64)
        self.plain = MODULES[name]().double()
        self.leave = TransformerBlock(D, 4, tp=tp, dtype=F64)

    def forward(self, x):
        return self.leave(self.plain(self.enter(x, batch=2)), batch=2)


def model_of(name, tp, complete=True) -> Model:
    model = Model(name, tp)
    if complete:
        assert tpfuse.replicated(model.plain, tp) is model.plain
    return model


def whole_x():
    return torch.randn(M, D, generator=torch.Generator().manual_seed(5), dtype=F64)


def grads_of(model, prefix="plain"):
    """Of the plain module: None where there is none."""
    found = {name: p.grad for name, p in model.named_parameters() if name.startswith(prefix)}
    return {name: torch.zeros(1, dtype=F64) - 1 if grad is None else grad.clone() for name, grad in found.items()}


def backward(model, call=None):
    y = (call or model)(my_rows(whole_x(), model.tp))
    (y * my_rows(whole_x().roll(1), model.tp)).sum().backward()
    return grads_of(model)


@functools.cache
def exact(name):
    return backward(Model(name, TensorParallel()))


def partial(world, name):
    model = model_of(name, make_tp(world), complete=False)
    with pytest.raises(ValueError):  # it is seen, and named: test_partial.py
        backward(model)
    return grads_of(model)


def test_without_it_they_are_partial(ranks):
    """Its worth: the same model, not told."""
    first, second = ranks(2, partial, "linear")
    want = exact("linear")
    assert not torch.allclose(first["plain.weight"], want["plain.weight"], rtol=1e-2)
    torch.testing.assert_close(first["plain.weight"] + second["plain.weight"], want["plain.weight"])


# ---- whatever is done with the module ----


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def emptied(model):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.to_empty(device="cpu").load_state_dict(state)
    return model


def after_a_failed_call(model):
    with pytest.raises(RuntimeError):
        model.plain(torch.zeros(2, D + 1, dtype=F64))
    return model


def recomputed(model, x, *, reentrant):
    return checkpoint(model, x.clone().requires_grad_(), use_reentrant=reentrant)


def compiled(model, x):
    torch._dynamo.reset()
    one_graph = torch.__version__ >= "2.13"  # an older Dynamo breaks its graph where the copies are taken out
    return torch.compile(model, backend="aot_eager", fullgraph=one_graph)(x)


CHANGES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved_and_loaded,
    "to_empty": emptied,
    "failed call": after_a_failed_call,
}
CALLS = {
    "recomputed": functools.partial(recomputed, reentrant=False),
    "recomputed, reentrant": functools.partial(recomputed, reentrant=True),
    "compiled": compiled,
}


def treated(world, name, treatment=None):
    """Gradients of a model that is changed, or called, in a way of torch's."""
    model = CHANGES.get(treatment, lambda model: model)(model_of(name, make_tp(world)))
    return backward(model, functools.partial(CALLS[treatment], model) if treatment in CALLS else model)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("R", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_gradients_are_complete(ranks, R, name):
    first, *others = ranks(R, treated, name)
    assert_close(first, exact(name), F64)
    for grads in others:
        assert_equal(grads, first)


@pytest.mark.parametrize(
    "treatment, name",
    [
        *((treatment, "deep") for treatment in (*CHANGES, *CALLS) if treatment != "compiled"),
        *(pytest.param("compiled", name, marks=pytest.mark.slow) for name in ("deep", "tied")),
    ],
)
def test_they_stay_complete(ranks, treatment, name):
    for grads in ranks(2, treated, name, treatment):
        assert_close(grads, exact(name), F64)


def stays(world):
    """Its type, names, parameters and attributes; a second call is harmless; parts of it may be told too."""
    tp = make_tp(world)
    model = Model("deep", tp)
    before = {name: id(p) for name, p in model.named_parameters()}
    names, kinds = list(model.state_dict()), [type(m) for m in model.modules()]
    for module in (model.plain.own, model.plain, model.plain, model.plain.linear):
        tpfuse.replicated(module, tp)
    grads = backward(model)
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert list(model.state_dict()) == names and [type(m) for m in model.modules()] == kinds
    assert all("weight" not in m.__dict__ for m in model.modules())
    return grads


def test_the_module_stays_what_it_is(ranks):
    for grads in ranks(2, stays):
        assert_close(grads, exact("deep"), F64)


def parallel(world, how):
    """Two replicas with half of the samples each: the sum over both is the whole's."""
    mesh = world.mesh(2, 2)
    tp = TensorParallel(mesh["tp"], sequence_parallel=True)
    model = model_of("deep", tp)
    if how == "ddp":
        wrapped = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    else:
        tpfuse.as_dtensor(model, mesh)
        for part in (model.enter, model.plain, model.leave, model) if how == "each" else (model,):
            fully_shard(part, mesh=mesh["dp"])
        wrapped = model
    rows = lambda t: my_rows(t.unflatten(0, (-1, 2))[:, [world.rank // 2] * 2].flatten(0, 1), tp)
    y = wrapped(rows(whole_x()))
    (y * rows(whole_x().roll(1))).sum().backward()
    full = lambda g: g.full_tensor() if hasattr(g, "full_tensor") else g
    return {name: full(p.grad) for name, p in model.named_parameters() if name.startswith("plain")}


@pytest.mark.parametrize("how", ["ddp", "root", "each"])
def test_under_ddp_and_fsdp(ranks, how):
    """Each replica has one of the two samples twice; the mean over replicas is the whole's gradient."""
    for grads in ranks(4, parallel, how):
        assert_close(grads, exact("deep"), F64)


def shards_a_part(world):
    mesh = world.mesh(1, 2)
    model = model_of("deep", TensorParallel(mesh["tp"], sequence_parallel=True))
    tpfuse.as_dtensor(model, mesh)
    fully_shard(model.plain.linear, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    with pytest.raises(ValueError) as error:
        backward(model)
    return str(error.value)


def test_fully_shard_of_a_part_is_refused(ranks):
    for words in ranks(2, shards_a_part):
        assert "replicated: weight is sharded over" in words and "fully_shard the replicated module" in words


# ---- messages ----


def messages(world, frozen):
    model = model_of("sequential", make_tp(world))
    backward(model)
    model.plain[0].requires_grad_(not frozen)
    x = my_rows(whole_x(), model.tp).requires_grad_()
    y = model.plain(x)
    with Recorder() as seen:
        y.sum().backward()
    return seen.messages()


@pytest.mark.parametrize("frozen, numbers", [(False, 2 * D * D + 2 * D + 4), (True, D * D + D + 2)])
def test_gradients_travel_as_one_message(ranks, frozen, numbers):
    """One flag each says whether there is a gradient."""
    for sent in ranks(2, messages, frozen):
        assert sent == [("all_gather", (numbers,), F64)]


def idle(world, sp):
    tp = make_tp(world, sp)
    linear, x = tpfuse.replicated(nn.Linear(D, D), tp), torch.ones(2, D)
    with Recorder() as seen:
        linear(x).sum().backward()
        with torch.no_grad():
            linear(x)
    return seen.messages(), linear.weight.grad


def test_nothing_is_sent_without_sequence_parallelism_or_at_size_1(ranks):
    for sent, grad in ranks(2, idle, False) + ranks(1, idle, True):
        assert sent == [] and (grad == 2).all()


def test_a_hook_that_fails_before_it_is_the_only_error(recwarn):
    def fail(module, args):
        raise RuntimeError("a hook's own error")

    module = nn.Linear(D, D)
    module.register_forward_pre_hook(fail)
    tpfuse.replicated(module, TensorParallel())
    with pytest.raises(RuntimeError, match="a hook's own error"):
        module(torch.randn(2, D))
    assert not recwarn.list


# ---- what is refused ----


def test_what_is_refused():
    tp = TensorParallel()
    head = VocabParallelHead(D, 32, tp=tp)
    shard = nn.Linear(D, 32, bias=False)
    shard.weight = head.weight
    with pytest.raises(ValueError, match="replicated: Linear.weight is this rank's shard"):
        tpfuse.replicated(shard, tp)
    with pytest.raises(ValueError, match="replicated: ColumnParallelLinear is parallel already"):
        tpfuse.replicated(ColumnParallelLinear(D, D, tp=tp), tp)
    with pytest.raises(ValueError, match="replicated: weight is not initialised; run the module before"):
        tpfuse.replicated(nn.LazyLinear(D), tp)
    with pytest.raises(ValueError, match="replicated: weight is complex"):
        tpfuse.replicated(nn.Linear(D, D, dtype=torch.complex64), tp)
    twice = tpfuse.replicated(nn.Linear(D, D), tp)
    with pytest.raises(ValueError, match="replicated: Linear is replicated over"):
        tpfuse.replicated(twice, TensorParallel(sequence_parallel=True))
