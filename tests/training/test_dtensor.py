"""Parameters as DTensors: the same memory, the same names; FSDP2 and DDP give what one process gives."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.common import assert_close, assert_equal, make_tp
from tests.models.common import GPT_CONFIG, STEP_CONFIG, Training, batch, default_dtype, results, whole
from tpfuse import (
    TensorParallel,
    WholeMatrices,
    as_dtensor,
    init_weights,
    load_checkpoint,
    param_groups,
    replicated,
    save_checkpoint,
)
from tpfuse.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, VocabParallelHead
from tpfuse.layers.shards import named_specs
from tpfuse.models import GPT

F64 = torch.float64


def viewed(world):
    mesh = world.mesh(1, world.size)
    model = GPT(GPT_CONFIG, tp=TensorParallel(mesh["tp"]))
    plain = {name: (p.data_ptr(), p.shape) for name, p in model.named_parameters()}
    values, keys, specs = (
        whole(model),
        list(model.state_dict()),
        dict((name, spec) for name, _, spec, _ in named_specs(model)),
    )
    model.input_norm.weight.requires_grad_(False)
    assert as_dtensor(model, mesh) is model  # a mesh with a dimension "tp"; mesh["tp"] alone below
    assert list(model.state_dict()) == keys and list(dict(model.named_parameters())) == list(plain)
    for name, p in model.named_parameters():
        assert isinstance(p, torch.nn.Parameter) and isinstance(p, DTensor)
        assert (p.to_local().data_ptr(), p.to_local().shape) == plain[name]  # zero-copy
        assert p.shape == specs[name].shape and p.requires_grad == (name != "input_norm.weight")
        assert p.placements == ((Replicate() if specs[name].dim is None else Shard(specs[name].dim)),)
    assert (
        sum(p.placements[0].is_shard() for p in model.parameters()) == 1 + 2 * 6
    )  # the vocabulary; qkv, out.weight, fc1, fc2.weight
    assert_equal({name: p.full_tensor().detach() for name, p in model.named_parameters()}, values)
    return True


@pytest.mark.parametrize("R", [1, 2, 4])
def test_it_is_a_view(ranks, R):
    assert all(ranks(R, viewed))


def steps(world, kind, dp, sp, micro):
    """-> loss and full gradients of one step."""
    training = Training(world, dp, sp, kind)
    loss = training.backward(0, micro)
    if kind == "fsdp":
        assert all(isinstance(p.grad, DTensor) for p in training.model.parameters())
    if kind == "fsdp" and dp > 1:  # every parameter is split over dp
        total = sum(p.to_local().numel() for p in training.model.parameters())
        assert total < 0.6 * sum(
            p.numel() for p in GPT(STEP_CONFIG, tp=training.model.tp, dp=training.mesh["dp"]).parameters()
        )
    return {"loss": loss} | whole(training.model, grad=True)


@pytest.mark.parametrize(
    "kind, R, dp, sp, micro",
    [
        ("dtensor", 2, 1, True, 1),
        ("dtensor", 4, 1, False, 1),
        ("fsdp", 4, 2, True, 1),  # (dp, tp) = (2, 2)
        ("fsdp", 4, 2, False, 1),
        ("fsdp", 2, 2, False, 1),  # (2, 1)
        ("ddp", 2, 2, False, 1),
        ("ddp", 4, 2, True, 3),  # no_sync for two of three micro-batches
    ],
)
def test_loss_and_gradients_are_those_of_one_process(ranks, kind, R, dp, sp, micro):
    exact = ranks(1, steps, "ddp", 1, False, 1)[0]
    for got in ranks(R, steps, kind, dp, sp, micro):
        assert_close(got, exact, F64)


def unsynced(world):
    """Every micro-batch under no_sync: the replicas keep gradients of their own."""
    training = Training(world, 2)
    with training.replica.no_sync():
        training.backward(0)
    return training.model.input_norm.weight.grad


def test_without_the_sum_over_dp_it_would_show(ranks):
    first, second = ranks(2, unsynced)
    exact = ranks(1, steps, "ddp", 1, False, 1)[0]["input_norm.weight"]
    assert not torch.allclose(first, second) and not torch.allclose(first, exact)
    torch.testing.assert_close((first + second) / 2, exact)


def ddp_twice(world):
    """DDP takes the model as it is: plain parameters, no buffers, all used."""
    mesh = world.mesh(2, 1)
    model = GPT(GPT_CONFIG, tp=TensorParallel(mesh["tp"]), dp=mesh["dp"])
    replica = torch.nn.parallel.DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    call = batch(GPT_CONFIG, seed=world.rank)
    losses = []
    for _ in range(2):  # a parameter without a gradient is an error the second time
        loss = replica(**call).loss
        loss.backward()
        losses.append(loss.item())
    return losses, int(model.step), whole(model, grad=True)


def test_ddp_with_the_models_own_counter_and_samples(ranks):
    (first, step, grads), (second, _, others) = ranks(2, ddp_twice)
    assert step == 2 and first[0] != first[1] and first != second
    assert_equal(grads, others)


def refused(world):
    model, found = GPT(GPT_CONFIG, tp=make_tp(world)), []
    for mesh in (init_device_mesh("cpu", (world.size, 1), mesh_dim_names=("a", "b")), world.mesh(world.size, 1)):
        with pytest.raises(ValueError) as caught:
            as_dtensor(model, mesh)
        found.append(str(caught.value))
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    with pytest.raises(ValueError) as caught:
        as_dtensor(torch.nn.Linear(2, 2), world.mesh(1, world.size))
    return [*found, str(caught.value)]


def test_a_mesh_that_does_not_fit(ranks):
    for unnamed, small, plain in ranks(2, refused):
        assert "as_dtensor: a mesh of 2 dimensions must have one named 'tp'" in unnamed
        assert small == "as_dtensor: embedding.weight is split over 2 ranks, and the mesh has 1"
        assert plain == "as_dtensor: weight is of a module without tp (see tpfuse.replicated), and the mesh has 2"


def test_one_process_without_a_group(ranks):
    assert ranks(1, one_process)[0]


def one_process(world):
    model, other = (GPT(GPT_CONFIG, tp=TensorParallel(world.mesh(1, 1)["tp"])) for _ in range(2))
    as_dtensor(other, world.mesh(1, 1)["tp"])
    assert_equal(results(other, batch(GPT_CONFIG)), results(model, batch(GPT_CONFIG)))
    return True


# ---- calls in a wrong order ----


def early_optimizers(world):
    """-> the errors of a step of optimizers that were made before as_dtensor."""
    model = GPT(GPT_CONFIG, tp=make_tp(world))
    matrices = WholeMatrices(model.blocks)
    early = torch.optim.AdamW(model.parameters(), lr=0.1), torch.optim.SGD(matrices.parameters(), lr=0.1)
    other = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    as_dtensor(model, world.mesh(1, world.size))
    before = whole(model)
    model(**batch(GPT_CONFIG)).loss.backward()
    errors = []
    for optimizer in early:
        with pytest.raises(ValueError) as caught:
            optimizer.step()
        errors.append(str(caught.value))
    assert_equal(whole(model), before)
    other.step()
    torch.optim.AdamW(model.parameters(), lr=0.1).step()
    assert any((x != before[name]).any() for name, x in whole(model).items())
    return errors


@pytest.mark.parametrize("R", [1, 2])
def test_the_step_of_an_optimizer_made_before_is_refused(ranks, R):
    """It would train parameters that no module has any more."""
    for errors in ranks(R, early_optimizers):
        for name, count, message in zip(("AdamW", "SGD"), (28, 8), errors, strict=True):
            assert message.startswith(f"{name}.step: {count} of its parameters were dropped by as_dtensor,")


def called_again(world):
    mesh, errors = world.mesh(1, world.size), []
    for wrap in (as_dtensor, lambda model, mesh: fully_shard(model, mesh=mesh["dp"])):
        model = GPT(GPT_CONFIG, tp=TensorParallel(mesh["tp"]))
        wrap(model, mesh)
        parameters = list(model.parameters())
        with pytest.raises(ValueError) as caught:
            as_dtensor(model, mesh)
        assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
        errors.append(str(caught.value))
    return errors


def test_a_model_of_dtensors_is_refused(ranks):
    """Made by as_dtensor, or by fully_shard."""
    for message in sum(ranks(2, called_again), []):
        assert message.startswith("as_dtensor: embedding.weight, ")
        assert message.endswith("is a DTensor already; call as_dtensor once, before fully_shard")


# ---- modules that share a parameter ----


class Tied(torch.nn.Module):
    """A head with the embedding's weight, and two plain linear layers with one weight."""

    def __init__(self, tp):
        super().__init__()
        self.embedding = VocabParallelEmbedding(16, 8, tp=tp)
        self.enter, self.leave = (replicated(torch.nn.Linear(8, 8), tp) for _ in range(2))
        self.head = VocabParallelHead(8, 16, tp=tp)
        self.head.weight, self.leave.weight = self.embedding.weight, self.enter.weight

    def forward(self, ids):
        return self.head.loss(self.leave(self.enter(self.embedding(ids[:-1])).relu()), ids[1:].flatten())


def tied_steps(world, dp, kind):
    """-> losses, norms and weights of three steps."""
    mesh = world.mesh(dp, world.size // dp)
    with default_dtype(F64):
        model = init_weights(Tied(TensorParallel(mesh["tp"])), seed=0)
        torch.manual_seed(0)
        for p in (model.enter.weight, model.enter.bias, model.leave.bias):
            torch.nn.init.normal_(p, std=0.3)
    if kind != "plain":
        as_dtensor(model, mesh)
    if kind == "fsdp":
        fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    results = []
    for step in range(3):
        ids = torch.randint(16, (9, 4), generator=torch.Generator().manual_seed(step))
        loss = model(ids.chunk(dp, 1)[mesh["dp"].get_local_rank()])
        loss.backward()
        loss = loss.detach() / dp
        torch.distributed.all_reduce(loss, group=mesh["dp"].get_group())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        results += [loss, norm.full_tensor() if isinstance(norm, DTensor) else norm]
        optimizer.step()
        optimizer.zero_grad()
    assert model.head.weight is model.embedding.weight and model.leave.weight is model.enter.weight
    assert {"embedding.weight", "head.weight", "leave.weight"} < model.state_dict().keys()
    return {str(i): x for i, x in enumerate(results)} | whole(model)


@pytest.mark.parametrize("R, dp, kind", [(2, 1, "dtensor"), (2, 1, "fsdp"), (4, 2, "fsdp")])
def test_a_shared_parameter_stays_one(ranks, R, dp, kind):
    exact = ranks(1, tied_steps, 1, "plain")[0]
    assert len(exact) == 6 + 4
    for got in ranks(R, tied_steps, dp, kind):
        assert_close(got, exact, F64)


def shared_slices(world):
    """One tensor [4, 8], for a column-parallel layer half of the rows, for a row-parallel one half of the columns."""
    tp = make_tp(world)
    model = torch.nn.Sequential(ColumnParallelLinear(8, 8, tp=tp), RowParallelLinear(16, 4, tp=tp))
    model[1].weight = model[0].weight
    with pytest.raises(ValueError) as caught:
        as_dtensor(model, world.mesh(1, world.size))
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    return str(caught.value)


def test_a_slice_of_two_wholes_is_refused(ranks):
    for message in ranks(2, shared_slices):
        assert message.startswith(
            "as_dtensor: 0.weight, 1.weight are one tensor, which is a slice of different wholes:"
        )


# ---- FSDP2 ----


class Sharded(Training):
    """A GPT over DTensors, sharded by fully_shard with any options over any data-parallel mesh."""

    def __init__(self, mesh, dtype=F64, **options):
        self.mesh, self.dp = mesh, mesh.size() // mesh["tp"].size()
        dims = tuple(name for name in mesh.mesh_dim_names if name != "tp")
        with default_dtype(dtype):
            self.model = GPT(STEP_CONFIG, tp=TensorParallel(mesh["tp"]), dp=mesh[dims[0]])
        as_dtensor(self.model, mesh["tp"])
        for module in (*self.model.blocks, self.model):
            fully_shard(module, mesh=mesh[dims], **options)
        self.optimizer = torch.optim.AdamW(param_groups(self.model, weight_decay=0.1), lr=3e-4)
        self.number = mesh.get_rank() // mesh["tp"].size()  # among the replicas

    def step(self, step):
        size = 4 // self.dp
        backward(self.model, step, slice(self.number * size, (self.number + 1) * size))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def validate(self):
        """After which FSDP2 leaves the root's parameters gathered."""
        with torch.no_grad():
            self.model.eval()(torch.arange(16).view(2, 8))
        self.model.train()


def backward(model, step, samples):
    ids = torch.randint(STEP_CONFIG.vocab_size, (4, 8), generator=torch.Generator().manual_seed(step))[samples]
    model(ids, labels=ids, step=step, first_sample=samples.start).loss.backward()


def sharded_steps(world, sizes, names, path, options):
    training = Sharded(init_device_mesh("cpu", sizes, mesh_dim_names=names), **options)
    for step in range(3):
        training.step(step)
        training.validate()
        save_checkpoint(path, training.model, training.optimizer, step=step)
    training.validate()
    return load_checkpoint(path, training.model, training.optimizer)


def alone_steps(world, path):
    """-> the end of a run in one process, and of the one whose checkpoint is read."""
    with default_dtype(F64):
        models = [GPT(STEP_CONFIG, seed=seed) for seed in (0, 1)]
    optimizers = [torch.optim.AdamW(param_groups(model, weight_decay=0.1), lr=3e-4) for model in models]
    for step in range(3):
        backward(models[0], step, slice(0, 4))
        optimizers[0].step()
        optimizers[0].zero_grad()
    load_checkpoint(path, models[1], optimizers[1])
    return [{name: p.detach() for name, p in model.named_parameters()} for model in models]


DP_TP, HSDP = ("dp", "tp"), ("replicate", "shard", "tp")


@pytest.mark.parametrize(
    "sizes, names, options",
    [
        ((2, 2), DP_TP, {}),
        pytest.param((2, 1, 2), HSDP, {}, marks=pytest.mark.slow),
        pytest.param((2, 2, 1), HSDP, dict(reshard_after_forward=True), marks=pytest.mark.slow),
        pytest.param((1, 2, 2), HSDP, dict(reshard_after_forward=False), marks=pytest.mark.slow),
    ],
)
def test_fsdp_trains_and_saves_after_validation(ranks, tmp_path, sizes, names, options):
    assert ranks(4, sharded_steps, sizes, names, tmp_path, options) == [(2, None)] * 4
    exact, saved = ranks(1, alone_steps, tmp_path)[0]
    assert_close(saved, exact, F64)


def generated(world, register):
    training = Sharded(world.mesh(2, 2))
    if register:
        register_fsdp_forward_method(training.model, "generate")
    ids = torch.arange(6).view(2, 3)
    with default_dtype(F64):
        exact = GPT(STEP_CONFIG).generate(ids, max_new_tokens=3)
    for _ in range(2):
        if register:
            assert torch.equal(training.model.generate(ids, max_new_tokens=3), exact)
        else:
            with pytest.raises(ValueError, match=r"register_fsdp_forward_method\(model, 'generate'\)"):
                training.model.generate(ids, max_new_tokens=3)
        training.step(0)
        exact = training.model.generate(ids, max_new_tokens=3) if register else exact
    return True


@pytest.mark.parametrize("register", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_fsdp_generates_where_the_method_is_registered(ranks, register):
    assert all(ranks(4, generated, register))


def mixed(world, sizes):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    training = Sharded(world.mesh(*sizes), dtype=torch.float32, mp_policy=policy)
    size = 4 // training.dp
    backward(training.model, 0, slice(training.number * size, (training.number + 1) * size))
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in training.model.parameters())
    return whole(training.model, grad=True)


def test_fsdp_mixed_precision(ranks):
    """In bf16, gradients as far from those in fp32 at (2, 2) as in one process."""
    with default_dtype(torch.float32):
        model = GPT(STEP_CONFIG)
    backward(model, 0, slice(0, 4))
    exact = {name: p.grad for name, p in model.named_parameters()}
    far = lambda grads: {name: ((g - exact[name]).norm() / exact[name].norm()).item() for name, g in grads.items()}
    single = far(ranks(1, mixed, (1, 1))[0])
    for grads in ranks(4, mixed, (2, 2)):
        assert all(0 < error < 2 * single[name] for name, error in far(grads).items())
