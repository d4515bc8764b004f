"""Parameters as DTensors: the same memory, the same names; FSDP2 and DDP give what one process gives."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.common import assert_close, assert_equal, make_tp
from tests.models.common import GPT_CONFIG, STEP_CONFIG, Training, batch, results, whole
from tpfuse import TensorParallel, as_dtensor
from tpfuse.layers.module import named_specs
from tpfuse.models import GPT

F64 = torch.float64


def viewed(world):
    mesh = world.mesh(1, world.size)
    model = GPT(GPT_CONFIG, tp=TensorParallel(mesh["tp"]))
    plain = {name: (p.data_ptr(), p.shape) for name, p in model.named_parameters()}
    values, keys, specs = (
        whole(model),
        list(model.state_dict()),
        dict((name, spec) for name, spec, _ in named_specs(model)),
    )
    model.norm_in.weight.requires_grad_(False)
    assert as_dtensor(model, mesh) is model  # a mesh with a dimension "tp"; mesh["tp"] alone below
    assert list(model.state_dict()) == keys and list(dict(model.named_parameters())) == list(plain)
    for name, p in model.named_parameters():
        assert isinstance(p, torch.nn.Parameter) and isinstance(p, DTensor)
        assert (p.to_local().data_ptr(), p.to_local().shape) == plain[name]  # zero-copy
        assert p.shape == specs[name].shape and p.requires_grad == (name != "norm_in.weight")
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
    return training.model.norm_in.weight.grad


def test_without_the_sum_over_dp_it_would_show(ranks):
    first, second = ranks(2, unsynced)
    exact = ranks(1, steps, "ddp", 1, False, 1)[0]["norm_in.weight"]
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
    return found


def test_a_mesh_that_does_not_fit(ranks):
    for unnamed, small in ranks(2, refused):
        assert "as_dtensor: a mesh of 2 dimensions must have one named 'tp'" in unnamed
        assert small == "as_dtensor: embedding.weight is split over 2 ranks, and the mesh has 1"


def test_one_process_without_a_group(ranks):
    assert ranks(1, one_process)[0]


def one_process(world):
    model, other = (GPT(GPT_CONFIG, tp=TensorParallel(world.mesh(1, 1)["tp"])) for _ in range(2))
    as_dtensor(other, world.mesh(1, 1)["tp"])
    assert_equal(results(other, batch(GPT_CONFIG)), results(model, batch(GPT_CONFIG)))
    return True
