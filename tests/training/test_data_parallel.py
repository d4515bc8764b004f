"""tpfuse.data_parallel: the gradients of one process, one copy of them, its line in explain, and every refusal."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tpfuse
from tests.common import assert_close
from tests.models.common import GPT_CONFIG, batch, whole
from tpfuse import MainGrad, TensorParallel, as_dtensor, data_parallel
from tpfuse.models import GPT
from tpfuse.pipeline.placement import Stage
from tpfuse.tools.ledger import state_bytes

CONFIG = replace(GPT_CONFIG, num_layers=1)  # 97 words: ranks have slices of two shapes
NO_DROPOUT = replace(CONFIG, dropout=0.0, attention_dropout=0.0, embedding_dropout=0.0)


def made(world, dp, config=CONFIG):
    mesh = world.mesh(dp, world.size // dp)
    return GPT(config, tp=TensorParallel(mesh["tp"], sequence_parallel=True), dp=mesh["dp"]), mesh


# ---- what it computes and holds ----


def trained(world, dp, wrap, backend=None):
    """-> full gradients of two micro-batches of three samples, each replica a sample of its own twice."""
    model, mesh = made(world, dp, NO_DROPOUT)
    compiled = model.double() if backend is None else torch.compile(model.double(), backend=backend)
    options = {} if backend else dict(bucket_cap_mb=0.001)  # torch compiles for buckets of 1 MB and more
    replica = data_parallel(compiled, mesh["dp"], **options) if wrap else compiled
    for _ in range(2):  # DDP makes its buckets anew after the first
        model.zero_grad()
        for micro in range(2):
            call = batch(CONFIG, seed=micro)
            n = len(call["input_ids"])
            share = slice(mesh["dp"].get_local_rank() * n // dp, (mesh["dp"].get_local_rank() + 1) * n // dp)
            call = {key: value[share] if torch.is_tensor(value) else value for key, value in call.items()}
            if wrap:
                replica.require_backward_grad_sync = micro == 1
            replica(**call, first_sample=share.start, loss_normalizer=100.0 / dp).loss.backward()
    return whole(model, grad=True)


@pytest.mark.parametrize("dp, tp", [(2, 1), (2, 2)])
def test_gradients_are_those_of_one_process(ranks, dp, tp):
    exact = ranks(1, trained, 1, False)[0]
    for found in ranks(dp * tp, trained, dp, True):
        assert len(found) > 4
        assert_close(found, exact, torch.float64)


@pytest.mark.slow
def test_gradients_of_a_compiled_model(ranks):
    exact = ranks(1, trained, 1, False)[0]
    for found in ranks(4, trained, 2, True, "aot_eager"):
        assert_close(found, exact, torch.float64)


def held(world, views):
    """-> the bytes of gradients and buckets, each storage once, and those of the ledger."""
    model, mesh = made(world, 2)
    group, storages = mesh["dp"].get_group(), {}
    replica = data_parallel(model, mesh["dp"]) if views else DistributedDataParallel(model, process_group=group)

    def note(state, bucket):
        storage = bucket.buffer().untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    replica.register_comm_hook(None, note)
    for _ in range(3):
        storages.clear()
        model.zero_grad()
        replica(**batch(CONFIG), first_sample=0).loss.backward()
    kept = [p.grad.untyped_storage() for p in model.parameters()]
    storages |= {storage.data_ptr(): storage.nbytes() for storage in kept}
    state = state_bytes(model, dp=2, bucket_views=views)
    return sum(storages.values()), state.gradients + state.buckets, state.gradients


@pytest.mark.parametrize("views", [True, False], ids=["data_parallel", "DistributedDataParallel"])
def test_the_ledgers_bytes_are_those_that_are_held(ranks, views):
    for measured, counted, gradients in ranks(4, held, views):
        assert measured == counted == (1 if views else 2) * gradients


def explained(world):
    model, mesh = made(world, 2)
    before = len(tpfuse.explain(model))
    replica = data_parallel(model, mesh["dp"])
    small = data_parallel(GPT(CONFIG, tp=model.tp, dp=mesh["dp"]), mesh["dp"], bucket_cap_mb=0)
    plain = DistributedDataParallel(GPT(CONFIG, tp=model.tp), process_group=mesh["dp"].get_group())
    own = tpfuse.explain(model)
    sizes = sum(p.numel() * p.element_size() for p in model.parameters()), len(list(model.parameters()))
    return before, len(own), [tpfuse.explain(m)[-1] for m in (model, replica, small, plain)], repr(own), sizes


def test_explain_says_what_was_chosen(ranks):
    for before, after, (line, same, small, plain), table, (size, count) in ranks(4, explained):
        assert after == before + 1 and same == line and table.splitlines()[-1].startswith("data parallel")
        assert (line.bytes, line.messages, small.messages) == (size, 1, count)  # 2 (n - 1) / n of them
        assert line.reason == "2 replicas, buckets of 25 MiB, the first of 1, gradients views of them"
        assert small.reason == "2 replicas, buckets of 0 MiB, gradients views of them"
        assert plain.reason.endswith("gradients copied into them")


def buffers(world):
    """-> a buffer that was each replica's own, after it was wrapped, and after a forward in which it has changed."""
    model = nn.Linear(2, 2)
    model.register_buffer("scale", torch.full((1,), float(world.rank + 1)))
    replica = data_parallel(model, world.group)
    first = model.scale.item()
    model.scale += world.rank
    replica(torch.ones(1, 2)).sum().backward()
    return first, model.scale.item()


def test_buffers_are_replica_0s_and_are_sent_once(ranks):
    assert ranks(2, buffers) == [(1.0, 1.0), (1.0, 2.0)]


# ---- what it refuses ----


def refrozen(model):
    for p in model.parameters():
        p.requires_grad_(False)
    return model


def with_norm(model):
    model.extra = nn.BatchNorm1d(4)
    return model


def staged(model):
    model.stages.place = Stage(0, 2, "1f1b")
    return model


def under(wrap, model):
    model.held = [wrap(model)]  # what nobody holds does not count
    return model


def another(model):
    model.extra = nn.Linear(2, 2 + (dist.get_rank() == 1))
    return model


def own_cap():
    return 1.0 + (dist.get_rank() == 1)


DP = lambda mesh: mesh["dp"]
GROUP = lambda mesh: mesh["dp"].get_group()
REFUSED = {
    "no group": (lambda m, mesh: data_parallel(m, None), "dp must be a DeviceMesh of one dimension or a ProcessGroup"),
    "two dimensions": (lambda m, mesh: data_parallel(m, mesh), "DeviceMesh of one dimension .* pass mesh\\['dp'\\]"),
    "no module": (lambda m, mesh: data_parallel("gpt", DP(mesh)), "model must be a module, got str"),
    "tp": (lambda m, mesh: data_parallel(m, mesh["tp"]), "data_parallel: .* hold different slices of embedding.weight"),
    "the world": (lambda m, mesh: data_parallel(m, dist.group.WORLD), "hold different slices of embedding.weight"),
    "a negative cap": (
        lambda m, mesh: data_parallel(m, DP(mesh), bucket_cap_mb=-1),
        "bucket_cap_mb must be at least 0",
    ),
    "twice": (
        lambda m, mesh: data_parallel(data_parallel(m, DP(mesh)), DP(mesh)),
        "DistributedDataParallel is under DistributedDataParallel already",
    ),
    "the model twice": (
        lambda m, mesh: data_parallel(under(lambda m: data_parallel(m, DP(mesh)).train(), m), DP(mesh)),
        "GPT is under DistributedDataParallel already",
    ),
    "DTensors": (lambda m, mesh: data_parallel(as_dtensor(m, mesh), DP(mesh)), "embedding.weight.* is a DTensor"),
    "meta": (lambda m, mesh: data_parallel(m.to("meta"), DP(mesh)), "embedding.weight.* is on the meta device"),
    "frozen": (lambda m, mesh: data_parallel(refrozen(m), DP(mesh)), "GPT has no trainable parameter"),
    "frozen on a rank": (
        lambda m, mesh: data_parallel(refrozen(m) if dist.get_rank() == 3 else m, DP(mesh)),
        "GPT has no trainable parameter",
    ),
    "stages": (lambda m, mesh: data_parallel(staged(m), DP(mesh)), "GPT holds pipeline stages"),
    "a MainGrad": (lambda m, mesh: (MainGrad(m), data_parallel(m, DP(mesh))), "leave DistributedDataParallel off"),
    "statistics": (lambda m, mesh: data_parallel(with_norm(m), DP(mesh)), "extra keeps statistics of its replica's"),
    "others on a rank": (
        lambda m, mesh: data_parallel(another(m), DP(mesh)),
        "data_parallel: trainable parameters must be the same on every data-parallel rank",
    ),
    "a cap of a rank's own": (
        lambda m, mesh: data_parallel(m, DP(mesh), bucket_cap_mb=own_cap()),
        "bucket_cap_mb must be the same on every data-parallel rank, got rank 0: 2.0; rank 1: 1.0",
    ),
}


def refused(world, wrong):
    """-> the error, and whether the parameters and the hooks are what they were."""
    model, mesh = made(world, 2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    hooks = len(model._forward_pre_hooks)
    with pytest.raises(ValueError, match=REFUSED[wrong][1]) as caught:
        REFUSED[wrong][0](model, mesh)
    kept = wrong in ("meta", "DTensors") or all(
        torch.equal(before[name], p) for name, p in model.named_parameters() if name in before
    )
    return str(caught.value), kept and len(model._forward_pre_hooks) == hooks


@pytest.mark.parametrize("wrong", REFUSED)
def test_what_would_go_wrong_is_refused_on_every_rank(ranks, wrong):
    every = ranks(4, refused, wrong)
    assert all(clean for _, clean in every)
    assert len({message for message, _ in every}) == (2 if wrong == "tp" else 1)  # whose groups are two


def other_group(world):
    """A model that numbers its samples by another group of as many ranks."""
    mesh = world.mesh(2, 2)
    model = GPT(CONFIG, dp=mesh["tp"])
    with pytest.raises(ValueError, match="GPT was given dp=.*and dp here is.*pass the same mesh"):
        data_parallel(model, mesh["dp"])


def test_another_group_than_the_models(ranks):
    ranks(4, other_group)


def frozen_parts(world):
    """A part that is frozen is left alone."""
    model, mesh = made(world, 2, NO_DROPOUT)
    for p in model.embedding.parameters():
        p.requires_grad_(False)
    replica = data_parallel(model, mesh["dp"])
    for _ in range(2):
        replica(**batch(CONFIG), first_sample=0).loss.backward()
    return all((p.grad is None) != p.requires_grad for p in model.parameters())


def test_frozen_parts_are_left_alone(ranks):
    assert all(ranks(2, frozen_parts))
