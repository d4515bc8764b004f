"""data_parallel(bitwise_micro_batches=K) of what FSDP2 shards: the bits of one process, and every refusal."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from bench.bits.kinds import KINDS
from tests.training.test_micro_batches import LAYOUTS, SAMPLES, SEQ, K, Line, compare, trained
from tpfuse import TensorParallel, as_dtensor, clip_grad_norm_, data_parallel, load_checkpoint
from tpfuse.models import GPT

F32, BF16 = torch.float32, torch.bfloat16


def shard(model, mesh, **settings):
    as_dtensor(model, mesh["tp"])
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh["dp"], **settings)


@pytest.mark.slow
def test_shards_have_the_bits_of_one_process(ranks):
    """The head shares the embedding's weight: two trees, and one gradient."""
    compare(ranks, "gpt2", F32, [(2, 2)], shard)


@pytest.mark.slow
@pytest.mark.parametrize("kind, dtype", [("gpt2", BF16), ("llama", F32)])
def test_all_splits(kind, dtype, ranks):
    compare(ranks, kind, dtype, [*LAYOUTS[1:], (1, 1)], shard)


def in_fp32(world, dp):
    """FSDP2 multiplies in bf16 and adds in fp32 -> weights after two steps"""
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32)
    prepare = lambda model, mesh: shard(model, mesh, mp_policy=policy)
    tensors = trained(world, dp, "llama", F32, prepare)[2]
    return {name: t for name, (t, _) in tensors.items()}


@pytest.mark.slow
def test_mixed_precision(ranks):
    (one,) = ranks(1, in_fp32, 1)
    for size in 2, 4:
        for got in ranks(size, in_fp32, size):
            assert all(torch.equal(t, one[name]) for name, t in got.items())


def resumed(world, folder):
    """One process goes on from what (dp, tp) = (2, 2) saved, with replicas of whole gradients -> weights."""
    torch.set_num_threads(1)
    config = KINDS["gpt2"]
    model = GPT(config, tp=TensorParallel(bitwise=8), seed=7)
    replica = data_parallel(model, None, bitwise_micro_batches=K)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    assert load_checkpoint(folder, model, optimizer)[0] == 1
    generator = torch.Generator().manual_seed(5)
    ids = [torch.randint(config.vocab_size, (K, SAMPLES, SEQ), generator=generator) for _ in range(2)][1]
    for micro in range(K):
        replica(ids[micro], labels=ids[micro], step=1, first_sample=micro * SAMPLES).loss.backward()
    clip_grad_norm_(model, 0.5)
    optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.slow
def test_a_checkpoint_goes_on_in_one_process(ranks, tmp_path):
    saved = ranks(4, trained, 2, "gpt2", F32, shard, tmp_path)[0][2]
    (weights,) = ranks(1, resumed, tmp_path)
    for name, p in weights.items():
        assert torch.equal(p, saved[f"weight {name}"][0]), name


def sent(world):
    """-> elements of the exchange of one backward pass, and the gradients'"""
    model, counts, exchange = Line(), [], dist.all_to_all_single
    fully_shard(model, mesh=world.mesh(world.size, 1)["dp"])
    replica = data_parallel(model, dist.group.WORLD, bitwise_micro_batches=2 * world.size)
    try:
        dist.all_to_all_single = lambda out, x, group: (counts.append(x.numel()), exchange(out, x, group=group))
        for _ in range(replica.local_micro_batches):
            assert model.w.grad is None
            replica(torch.full((5,), 1.0 + replica.micro_batch)).backward()
    finally:
        dist.all_to_all_single = exchange
    assert isinstance(model.w.grad, DTensor)
    return counts, model.w.grad.full_tensor()


@pytest.mark.parametrize("size", [2, 4])
def test_an_exchange_a_pass_of_a_reduce_scatters_bytes(size, ranks):
    """Of two parameters of 5 and 2 rows, each padded to a multiple of R."""
    for counts, gradient in ranks(size, sent):
        assert counts == [(5 + -5 % size) + (2 + -2 % size)] * 2
        assert gradient.eq((1 + 2 * size) / 2).all()


def refused(world, case):
    mesh = world.mesh(2, 1)
    model = GPT(KINDS["llama"], tp=TensorParallel(bitwise=8), seed=3)
    dp, ids = mesh["dp"], torch.ones(1, 4, dtype=torch.int64)
    if case == "blocks alone":
        for block in model.blocks:
            fully_shard(block, mesh=dp)
    elif case == "replicated shards":
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    else:
        policy = MixedPrecisionPolicy(reduce_dtype=BF16) if case == "sums in bf16" else MixedPrecisionPolicy()
        fully_shard(model, mesh=dp, mp_policy=policy)
    try:
        replica = data_parallel(model, None if case == "no replicas" else dp, bitwise_micro_batches=2)
        replica(ids, labels=ids, step=0, first_sample=0).loss.backward()
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    "case, words",
    [
        ("blocks alone", "fully_shard does not divide embedding.weight, input_norm.weight, head.weight over just"),
        ("replicated shards", "fully_shard does not divide embedding.weight"),
        ("no replicas", "is under FSDP, so dp must be its replicas, got None"),
        (
            "sums in bf16",
            "over replicas in torch.bfloat16, and over micro-batches in torch.float32; use MixedPrecision",
        ),
    ],
)
def test_what_would_be_no_tree_is_named_on_every_rank(case, words, ranks):
    for message in ranks(2, refused, case):
        assert message is not None and words in message


def leaves_of_other_slices(world):
    """A vocabulary that V does not divide, over two ranks -> what as_dtensor says, and the parameters' types."""
    model = GPT(KINDS["gpt2 odd"], tp=TensorParallel(world.group, bitwise=8))
    with pytest.raises(ValueError) as caught:
        as_dtensor(model, world.mesh(1, 2)["tp"])
    return str(caught.value), any(isinstance(p, DTensor) for p in model.parameters())


def test_slices_that_no_dtensor_has_change_nothing(ranks):
    for message, changed in ranks(2, leaves_of_other_slices):
        assert "is in slices of whole leaves, which no DTensor has" in message and not changed
