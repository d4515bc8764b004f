"""data_parallel(bitwise_micro_batches=K): the bits of one process at every (dp, tp), its bytes, and every refusal."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from bench.bits.kinds import KINDS
from tpfuse import TensorParallel, clip_grad_norm_, data_parallel, save_checkpoint
from tpfuse.layers.shards import named_specs
from tpfuse.models import GPT
from tpfuse.pipeline import schedule
from tpfuse.pipeline.trees import micro_batches_of
from tpfuse.training.micro_batches import MicroBatchReplica

K, SAMPLES, SEQ = 4, 3, 13
LAYOUTS = (1, 1), (4, 1), (2, 2), (1, 4), (2, 1)  # dp, tp


def trained(world, dp, kind, dtype, prepare=lambda model, mesh: model, folder=None):
    """-> losses by micro-batch, norms; weights and gradients after two steps, with their slices of the whole.

    ``prepare`` divides the model over the replicas; ``folder`` takes a checkpoint after the first step.
    """
    torch.set_num_threads(1)
    mesh = world.mesh(dp, world.size // dp)
    config = KINDS[kind]
    model = GPT(config, tp=TensorParallel(mesh["tp"], sequence_parallel=True, bitwise=8), dp=mesh["dp"], seed=3)
    specs = {name: spec.local(owner) for name, _, spec, owner in named_specs(model)}
    prepare(model.to(dtype).train(), mesh)
    replica = data_parallel(model, mesh["dp"], bitwise_micro_batches=K)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator, losses, norms, tensors = torch.Generator().manual_seed(5), {}, [], {}
    for step in range(2):
        ids = torch.randint(config.vocab_size, (K, SAMPLES, SEQ), generator=generator)
        replica.zero_grad()
        for _ in range(replica.local_micro_batches):
            micro = replica.micro_batch
            loss = replica(ids[micro], labels=ids[micro], step=step, first_sample=micro * SAMPLES).loss
            loss.backward()
            losses[step, micro] = loss.detach()
        tensors |= {f"gradient {name}": p.grad.clone() for name, p in model.named_parameters()}
        norms.append(clip_grad_norm_(model, 0.5))
        optimizer.step()
        if folder is not None and step == 0:
            save_checkpoint(folder, model, optimizer, step=1)
    tensors |= {f"weight {name}": p.detach() for name, p in model.named_parameters()}
    is_whole = lambda t: isinstance(t, DTensor)
    return (
        losses,
        norms,
        {
            name: (t.full_tensor(), ()) if is_whole(t) else (t, specs[name.split(" ", 1)[1]])
            for name, t in tensors.items()
        },
    )


def assert_same_bits(one, other):
    losses, norms, tensors = other
    assert all(torch.equal(loss, one[0][key]) for key, loss in losses.items()) and losses
    assert all(map(torch.equal, norms, one[1])) and len(norms) == 2
    for name, (tensor, slices) in tensors.items():
        assert torch.equal(tensor, one[2][name][0][slices]), name


def compare(ranks, kind, dtype, layouts, *args, timeout=120):
    (one,) = ranks(1, trained, 1, kind, dtype)
    assert len(one[0]) == 2 * K
    for dp, tp in layouts:
        for result in ranks(dp * tp, trained, dp, kind, dtype, *args, timeout=timeout):
            assert_same_bits(one, result)


def compiled(model, mesh):
    """A graph is there already, of a call outside of the replica."""
    model.compile(backend="eager")
    ids = torch.zeros(1, SEQ, dtype=torch.int64)
    model(ids, labels=ids, step=0, first_sample=0).loss.backward()
    model.zero_grad()


@pytest.mark.slow
def test_a_compiled_model_has_the_bits_of_an_eager_one(ranks):
    compare(ranks, "gpt2", torch.float32, [(1, 1)], compiled, timeout=300)


def test_every_split_has_the_bits_of_one_process(ranks):
    compare(ranks, "gpt2 odd", torch.float32, [(2, 2)])


@pytest.mark.slow
@pytest.mark.parametrize("kind, dtype", [("gpt2 odd", torch.bfloat16), ("llama", torch.float32)])
def test_all_splits(kind, dtype, ranks):
    compare(ranks, kind, dtype, LAYOUTS[1:])


class Line(nn.Module):
    """y = w x; ``unused`` takes part where it is asked to."""

    def __init__(self):
        super().__init__()
        self.w, self.unused = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(2))

    def forward(self, x, use=True):
        return (self.w * x).sum() + (self.unused.sum() if use else 0)


def gradients_of(world, inputs):
    model = Line()
    replica = data_parallel(model, dist.group.WORLD, bitwise_micro_batches=len(inputs))
    for _ in range(replica.local_micro_batches):
        assert model.w.grad is None
        replica(inputs[replica.micro_batch]).backward()
    return model.w.grad


def test_the_mean_is_a_tree(ranks):
    """((a + b) + (c + d)) / 4 at every number of replicas; in order it would be another number."""
    inputs = torch.tensor([1.0, 2.0**-24, 2.0**-24, 2.0**-24])[:, None].expand(4, 5).contiguous()
    right = (1 + 2.0**-23) / 4
    assert (inputs[0] + inputs[1] + inputs[2] + inputs[3])[0] / 4 != right
    for size in 1, 2, 4:
        for gradient in ranks(size, gradients_of, inputs):
            assert gradient.eq(right).all()
    replica = data_parallel(Line(), None, bitwise_micro_batches=4)
    for row in inputs:
        replica(row).backward()
    assert replica.module.w.grad.eq(right).all()


def strided(world):
    """-> weights of channels_last, beside another format on rank 1, and of every second element; a gradient"""
    model, size = nn.Module(), (1, 2, 2, 4)
    values = torch.arange(16.0).view(size) + 100 * world.rank
    model.same = nn.Parameter(values.clone(memory_format=torch.channels_last))
    model.other = nn.Parameter(values.clone(memory_format=(torch.channels_last, torch.contiguous_format)[world.rank]))
    model.apart = nn.Parameter(values.repeat_interleave(2).view(16, 2)[:, 0].view(size))
    model.forward = lambda x: (x * model.same * model.other * model.apart).sum()
    replica = data_parallel(model, dist.group.WORLD, bitwise_micro_batches=world.size)
    replica(torch.ones(size)).backward()
    return [p.detach().contiguous() for p in model.parameters()], model.other.grad.contiguous()


def test_weights_of_any_strides_become_those_of_replica_0(ranks):
    values = torch.arange(16.0).view(1, 2, 2, 4)
    for weights, gradient in ranks(2, strided):
        assert all(torch.equal(weight, values) for weight in weights) and torch.equal(gradient, values**2)


def sent(world):
    """-> elements that a step's messages have, the exchange's and the gathered ones, and the gradients'"""
    replica, counts = data_parallel(Line(), dist.group.WORLD, bitwise_micro_batches=world.size), []
    exchange, gather = dist.all_to_all_single, dist.all_gather_into_tensor
    try:
        dist.all_to_all_single = lambda out, x, group: (counts.append(x.numel()), exchange(out, x, group=group))
        dist.all_gather_into_tensor = lambda out, x, group: (counts.append(out.numel()), gather(out, x, group=group))
        replica(torch.ones(5)).backward()
    finally:
        dist.all_to_all_single, dist.all_gather_into_tensor = exchange, gather
    return counts, 5 + 2


@pytest.mark.parametrize("size", [2, 4])
def test_messages_are_as_long_as_a_rings(size, ranks):
    """Of each an R-th stays: 2 (R - 1) / R of the gradients, padded to a multiple of R."""
    for counts, elements in ranks(size, sent):
        assert counts == [elements + -elements % size] * 2


def begin(world):
    return data_parallel(Line(), dist.group.WORLD, bitwise_micro_batches=4)


def errors(world):
    """-> the messages of what is refused; each step is right after zero_grad()"""
    replica, x, messages = begin(world), torch.ones(5), []

    def refused(call):
        try:
            call()
        except ValueError as error:
            messages.append(str(error))
        replica.zero_grad()

    def twice():
        replica(x)
        replica(x)

    def absent():
        for _ in range(replica.local_micro_batches):
            replica(x, use=world.rank == 0).backward()

    def left():
        replica.module.w.grad = torch.ones(5)
        torch.optim.SGD(replica.module.parameters()).zero_grad(set_to_none=False)
        replica(x)

    for call in twice, absent, left:
        refused(call)
    for _ in range(replica.local_micro_batches):
        replica(x).backward()
    return messages, replica.module.w.grad


def test_misuse_is_named_on_every_rank(ranks):
    for messages, gradient in ranks(2, errors):
        twice, absent, left = messages
        assert "Line: the micro-batch before has had no whole backward pass" in twice
        assert "unused took no part in the loss of a micro-batch" in absent
        assert (
            "w has a gradient when a step begins; call zero_grad() first, an optimizer's with set_to_none=True" in left
        )
        assert gradient.eq(1).all()


def test_a_call_outside_a_step_changes_nothing():
    replica = data_parallel(Line(), None, bitwise_micro_batches=2)
    replica.module(torch.ones(5)).backward()
    assert replica.module.w.grad.eq(1).all()
    replica.zero_grad()
    with pytest.raises(TypeError):
        replica()  # a call that fails is none of the step
    replica.eval()(torch.ones(5))
    replica.train()
    for _ in range(2):
        replica(torch.ones(5)).backward()
    assert replica.module.w.grad.eq(1).all()


def evaluating(world, one):
    """Two steps, the second with ``eval()`` on rank 1 or, unless ``one``, on each -> what is said, and the gradient."""
    replica, x = begin(world), torch.full((5,), 1.0 + world.rank)

    def step():
        replica.zero_grad()
        for _ in range(replica.local_micro_batches):
            replica(x).backward()

    step()
    replica.train(one and world.rank == 0)
    try:
        step()
    except ValueError as error:
        return str(error), None
    return "", replica.module.w.grad


def test_eval_on_one_replica_is_named_at_the_end_of_the_step(ranks):
    for said, _ in ranks(2, evaluating, True):
        assert said.startswith("data_parallel: training must be the same on every data-parallel rank, got rank 0: True")


def test_gradients_of_calls_in_eval_are_averaged_too(ranks):
    for said, gradient in ranks(2, evaluating, False):
        assert said == "" and gradient.eq(1.5).all()


def trained_otherwise(world, ranks_that_change):
    """-> what is said of a step after a parameter is frozen or made trainable, and the other's gradient"""
    model, said = Line(), []
    for trainable in False, True:
        model.unused.requires_grad_(not trainable)
        replica = data_parallel(model, dist.group.WORLD, bitwise_micro_batches=4)
        if world.rank in ranks_that_change:
            model.unused.requires_grad_(trainable)
        with pytest.raises(ValueError) as caught:
            for _ in range(replica.local_micro_batches):
                replica(torch.ones(5)).backward()
        said.append(str(caught.value))
        assert model.w.grad is None
        replica.zero_grad()
    return said


@pytest.mark.parametrize("ranks_that_change", [(0, 1), (1,)])
def test_parameters_frozen_or_made_trainable_later_are_named_on_every_rank(ranks, ranks_that_change):
    for said in ranks(2, trained_otherwise, ranks_that_change):
        assert all("data_parallel: unused has been frozen or made trainable since" in text for text in said)


def silent(world):
    """Rank 1 leaves out a step: what rank 0 is told."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    replica = data_parallel(Line(), group, bitwise_micro_batches=2)
    replica(torch.ones(5)).backward()
    said = None
    if world.rank == 0:
        replica.zero_grad()
        with pytest.raises(RuntimeError) as caught:
            replica(torch.ones(5)).backward()
        said = str(caught.value)
    dist.barrier()
    return said


def test_a_replica_without_a_step_is_named_at_the_groups_limit(ranks):
    said, _ = ranks(2, silent)
    assert said.startswith("rank 1 has ended, or has come to no such call within the group's limit of 1 s")


@pytest.mark.parametrize("count, words", [(3, "must be a power of two, got 3"), (0, "must be at least 1")])
def test_numbers_of_micro_batches(count, words):
    with pytest.raises(ValueError, match=words):
        data_parallel(Line(), None, bitwise_micro_batches=count)


def test_masks_must_be_numbered():
    model = GPT(KINDS["gpt2"], tp=TensorParallel(bitwise=8))
    replica = data_parallel(model, None, bitwise_micro_batches=2)
    assert isinstance(replica, MicroBatchReplica)
    ids = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="masks are numbered by step and first_sample"):
        replica(ids, labels=ids)


def test_a_step_of_too_few_micro_batches_is_named():
    """As by a loop that steps its optimizer after each of them."""
    model = GPT(KINDS["gpt2"], tp=TensorParallel(bitwise=8))
    replica, optimizer = data_parallel(model, None, bitwise_micro_batches=4), torch.optim.SGD(model.parameters(), 0.1)
    ids = torch.zeros(1, 4, dtype=torch.int64)
    for step in range(3):
        replica(ids, labels=ids, step=step, first_sample=0).loss.backward()
        optimizer.step()
    with pytest.raises(ValueError, match="a step has 4 micro-batches .*, and 1 of them came with step=0, the others"):
        replica(ids, labels=ids, step=3, first_sample=0).loss.backward()
    assert all(p.grad is None for p in model.parameters())
    replica.zero_grad()
    for step in (torch.tensor(1), 1, 1, 1):
        replica(ids, labels=ids, step=step, first_sample=0).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def otherwise_later(world):
    """-> K of a model, after each way of training it that comes after the one before; and after an evaluation."""
    model = GPT(KINDS["gpt2 odd"], dp=world.group)
    found = []
    for count in K, None:
        data_parallel(model, world.group, bitwise_micro_batches=count)
        found.append(micro_batches_of(model))
    mesh = world.stages(2, 1, 1)
    staged = GPT(KINDS["gpt2 odd"], stage=(world.rank, 2, "1f1b")).eval()
    call = torch.zeros(K, SEQ, dtype=torch.int64)
    bitwise, plain = (schedule(staged, mesh["pp"], "1f1b", K, bitwise=bits) for bits in (True, False))
    found.append(micro_batches_of(staged))
    for pipeline, how in (bitwise, "evaluate"), (bitwise, "step"), (plain, "evaluate"), (plain, "step"):
        getattr(pipeline, how)(call, labels=call)
        found.append(micro_batches_of(staged))
    return found


def test_gradients_are_trees_of_what_trains_last(ranks):
    for found in ranks(2, otherwise_later):
        assert found == [K, None, None, None, K, K, None]


def too_many(world):
    try:
        data_parallel(Line(), dist.group.WORLD, bitwise_micro_batches=1 if world.rank else 2)
    except ValueError as error:
        return str(error)


def test_replicas_must_divide_and_agree(ranks):
    for message in ranks(2, too_many):
        assert "bitwise_micro_batches=1 is not divisible by 2 replicas" in message
