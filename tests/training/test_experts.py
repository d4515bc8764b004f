"""Training a model whose experts are divided among replicas and tensor-parallel ranks: one process's losses, norms and
gradients, checkpoints at other splits, files, and every refusal.

Spans: experts over replicas in all tools of training, on one model.
"""

import copy
import functools
import re
from dataclasses import replace
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import tpfuse
from tests.common import assert_close, assert_equal
from tests.models.common import GPT_CONFIG, batch, default_dtype, whole
from tests.pipeline.common import said
from tests.planted import Mistaken
from tpfuse import (
    MainGrad,
    TensorParallel,
    clip_grad_norm_,
    data_parallel,
    load_checkpoint,
    param_groups,
    save_checkpoint,
)
from tpfuse.kernels import Routing
from tpfuse.layers import ExpertBalance, ParallelMoE
from tpfuse.models import GPT
from tpfuse.models.files import source
from tpfuse.pipeline import Stage, schedule
from tpfuse.tools.ledger import state_bytes
from tpfuse.training.checkpoint.replicas import check_replicas, watch_replicas

F64 = torch.float64
CONFIG = replace(
    GPT_CONFIG, family="qwen2_moe", num_layers=2, hidden_size=48, ffn_size=20, num_heads=4, num_kv_heads=2, norm="rms",
    activation="silu", gated=True, qkv_bias=False, out_bias=False, mlp_bias=False, tie_embeddings=False,
    rope={"rope_type": "default", "rope_theta": 10000.0}, num_experts=8, experts_per_token=2, shared_size=24,
    shared_gate=True, dropout=0.0, attention_dropout=0.0, embedding_dropout=0.0, init_std=0.2,
)  # fmt: skip
SHARES = {"equal": (2, 2), "unequal": (3, 1)}  # samples of each of two replicas


def made(
    world,
    dp: int,
    *,
    over: bool = True,
    sp: bool = True,
    dtype: torch.dtype = F64,
    config=CONFIG,
    cp: int = 1,
    **options,
):
    mesh = world.pieces(dp, cp, world.size // dp // cp)
    tp = TensorParallel(mesh["tp"], sequence_parallel=sp, cp=mesh["cp"])
    with default_dtype(dtype):
        experts = mesh["dp", "tp"] if over else None
        return GPT(config, tp=tp, dp=mesh["dp"], experts=experts, **options), mesh


def share_of(mesh, step: int, kind: str, micro: int = 1):
    """Yields this replica's calls of a step, of 4 samples each, whose loss is a mean over all labels of the step."""
    dp, replica = mesh["dp"].size(), mesh["dp"].get_local_rank()
    calls = [batch(CONFIG, size=4, seed=10 * step + i) for i in range(micro)]
    count = sum(int((call["labels"][:, 1:] != -100).sum()) for call in calls)
    for call in calls:
        mine = call if dp == 1 else {key: value.split(SHARES[kind])[replica] for key, value in call.items()}
        yield mine | dict(loss_normalizer=count / dp)


class Loop:
    """Steps of AdamW of a model under ``wrap``: "ddp", "main" (MainGrad), or None."""

    def __init__(self, world, dp: int, wrap: str | None = "ddp", **options):
        self.model, self.mesh = made(world, dp, **options)
        self.main = MainGrad(self.model, self.mesh["dp"]) if wrap == "main" else None
        self.replica = data_parallel(self.model, self.mesh["dp"]) if wrap == "ddp" else self.model
        if wrap == "fsdp":
            tpfuse.as_dtensor(self.model, self.mesh)
            for module in (*self.model.blocks, self.model):
                fully_shard(module, mesh=self.mesh["dp"])
        self.optimizer = torch.optim.AdamW(param_groups(self.model, weight_decay=0.1), lr=1e-2)

    def backward(self, step: int, kind: str, micro: int = 1) -> None:
        for i, call in enumerate(share_of(self.mesh, step, kind, micro)):
            if isinstance(self.replica, DistributedDataParallel):
                self.replica.require_backward_grad_sync = i == micro - 1
            self.replica(**call).loss.backward()
        if self.main is not None:
            self.main.reduce()

    def gradients(self) -> dict[str, torch.Tensor]:
        if self.main is None:
            return whole(self.model, grad=True)
        for p, weight in zip(self.model.parameters(), self.main.parameters(), strict=True):
            p.grad = weight.grad.clone()
        found = whole(self.model, grad=True)
        for p in self.model.parameters():
            p.grad = None
        return found

    def step(self, step: int, kind: str, micro: int = 1) -> torch.Tensor:
        self.backward(step, kind, micro)
        norm = clip_grad_norm_(self.model, 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad() if self.main is None else self.main.zero()
        return norm.double()


def trained(world, dp, kind, wrap, micro=1, options=None):
    """-> gradients of the first step, then norms and weights of three."""
    loop = Loop(world, dp, wrap, **options or {})
    loop.backward(0, kind, micro)
    found = {f"d {name}": g for name, g in loop.gradients().items()}
    loop.optimizer.zero_grad() if loop.main is None else loop.main.zero()
    norms = [loop.step(i, kind, micro) for i in range(3)]
    check_replicas(loop.model, loop.optimizer)
    return found | whole(loop.model) | dict(norms=torch.stack(norms))


@pytest.fixture(scope="module")
def one(ranks):
    """(kind, micro-batches, balance) -> what one process is trained to."""

    @functools.cache
    def make(kind, micro=1, balance=None):
        return ranks(1, trained, 1, kind, None, micro, dict(balance=balance))[0]

    return make


@pytest.mark.parametrize("wrap, dp, tp, kind, micro, options", [
    ("ddp", 2, 2, "equal", 1, {}),
    ("ddp", 2, 1, "unequal", 2, {}),
    ("ddp", 2, 2, "unequal", 1, dict(sp=False)),
    ("ddp", 2, 2, "unequal", 1, dict(recompute="full")),
    ("ddp", 2, 2, "equal", 1, dict(balance=ExpertBalance("sequence", 0.1, z=0.01))),
    ("fsdp", 2, 2, "unequal", 2, {}),
    ("fsdp", 2, 1, "equal", 1, dict(recompute="full")),
    ("main", 2, 2, "unequal", 2, {}),
    ("main", 2, 1, "equal", 1, {}),
])  # fmt: skip
def test_training_is_that_of_one_process(ranks, one, wrap, dp, tp, kind, micro, options):
    for found in ranks(dp * tp, trained, dp, kind, wrap, micro, options):
        assert_close(found, one(kind, micro, options.get("balance")), F64)


def undivided(right, work):
    return right(work._replace(divisor=1))


@pytest.mark.slow
def test_a_mistake_is_seen(ranks, one):
    spoilt = Mistaken(trained, "tpfuse.sequence_parallel.records.ExpertWeightGrad.run", undivided)
    for found in ranks(4, spoilt, 2, "equal", "ddp"):
        with pytest.raises(AssertionError, match="mlp.fc1"):
            assert_close(found, one("equal"), F64)


def bare(world):
    """Gradients after backward() alone, in one micro-batch."""
    model, mesh = made(world, 2)
    (call,) = share_of(mesh, 0, "unequal")
    model(**call).loss.backward()
    return {name: g for name, g in whole(model, grad=True).items() if ".mlp.fc" in name}


def test_gradients_of_experts_are_complete_after_backward(ranks, one):
    for found in ranks(4, bare):
        assert len(found) == 4
        assert_close(found, {name: one("unequal")[f"d {name}"] for name in found}, F64)


def initial(world, dp, over):
    return whole(made(world, dp, over=over, dtype=torch.float32)[0])


def test_initial_weights_are_the_same_bits(ranks):
    one = ranks(1, initial, 1, False)[0]
    for dp, tp in (2, 2), (2, 1), (4, 1):
        for found in ranks(dp * tp, initial, dp, True):
            assert_equal(found, one)


# ---- norms by torch, an infinity ----


def norms(world):
    """The norm by clip_grad_norm_ and by torch, and whether a scaler's step is left out everywhere."""
    loop = Loop(world, 2)
    loop.backward(0, "equal")
    ours = clip_grad_norm_(loop.model, torch.inf)
    theirs = torch.nn.utils.clip_grad_norm_(loop.model.parameters(), torch.inf)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    if world.rank == 3:
        loop.model.blocks[0].mlp.fc1.grad[0, 0, 0, 0] = torch.inf
    before = whole(loop.model)
    scaler.step(loop.optimizer)
    assert_equal(whole(loop.model), before)
    with pytest.raises(RuntimeError, match="blocks.0.mlp.fc1 is not finite"):
        clip_grad_norm_(loop.model, 1.0, error_if_nonfinite=True)
    return ours, theirs


def test_norms(ranks, one):
    exact = one("equal")["norms"][0]
    for found in ranks(4, norms):
        torch.testing.assert_close(torch.stack([x.double() for x in found]), exact.expand(2), rtol=1e-10, atol=0)


# ---- checkpoints and files ----


def through_checkpoints(world, dp, wrap, folder, begin, end):
    """Loads what is in ``folder``, trains from step ``begin`` to ``end``, and saves."""
    loop = Loop(world, dp, wrap, seed=begin)
    if begin:
        assert load_checkpoint(folder, loop.model, loop.optimizer) == (begin, None)
    for i in range(begin, end):
        loop.step(i, "equal")
    save_checkpoint(folder, loop.model, loop.optimizer, step=end)
    return whole(loop.model)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:load_checkpoint. training goes on")
def test_checkpoints_at_other_splits(ranks, tmp_path):
    """(2, 2) with experts over both, then (1, 2), (1, 1), and replicas again: a run that was never interrupted."""
    layouts = (2, 2, "ddp"), (1, 2, None), (1, 1, None), (2, 2, "fsdp"), (2, 1, "main")
    for i, (dp, tp, wrap) in enumerate(layouts):
        every = ranks(dp * tp, through_checkpoints, dp, wrap, tmp_path / "cut", i, i + 1)
    one = ranks(1, through_checkpoints, 1, None, tmp_path / "whole", 0, len(layouts))[0]
    for found in every:
        assert_close(found, one, F64)


def through_files(world, dp, path, out):
    """Reads a directory and writes it again -> the numbers of the experts whose tensors this rank opens."""
    opened: set[str] = set()
    read = source.Source.read

    def noted(of, *args):
        opened.update(of.names)
        return read(of, *args)

    mesh = world.mesh(dp, world.size // dp)
    tp = TensorParallel(mesh["tp"], sequence_parallel=True)
    with mock.patch.object(source.Source, "read", noted):
        model = GPT.from_pretrained(path, tp=tp, dp=mesh["dp"], experts=mesh["dp", "tp"], dtype=F64)
    model.save_pretrained(out)
    return sorted({int(number) for name in opened for number in re.findall(r"experts[.](\d+)", name)})


def write(world, path):
    made(world, 1)[0].save_pretrained(path)


def test_files(ranks, tmp_path):
    ranks(1, write, tmp_path / "one")
    assert ranks(4, through_files, 2, tmp_path / "one", tmp_path / "again") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert_equal(*(load_file(tmp_path / name / "model.safetensors") for name in ("again", "one")))


def copied(world):
    """A deep copy has the same ranks and outputs."""
    model, mesh = made(world, 2)
    (call,) = share_of(mesh, 0, "unequal")
    again = copy.deepcopy(model)
    assert again.groups.experts == model.groups.experts and again.blocks[0].mlp.experts.replicas == 2
    state = model.state_dict()
    model.load_state_dict(state)
    return tuple(state["blocks.0.mlp.fc1"].shape), torch.equal(model(**call).loss, again(**call).loss)


def test_copies_and_state_dictionaries(ranks):
    for shape, same in ranks(4, copied):
        assert shape == (8, 20, 2, 48) and same


# ---- with other tools ----


def sparse(world, send_all):
    """Two steps with Ok-Topk, which sends all of the gradients, and is not given those of experts."""
    loop = Loop(world, 2)
    hook = tpfuse.OkTopk(1.0, group=loop.mesh["dp"].get_group())
    if send_all:
        loop.replica.register_comm_hook(hook, tpfuse.ok_topk_hook)
    for i in range(2):
        loop.step(i, "equal")
    assert not {p for unit in hook.units for p in unit.parameters} & {loop.model.blocks[0].mlp.fc1}
    return whole(loop.model)


@pytest.mark.slow
def test_sparse_gradients(ranks):
    for found, exact in zip(ranks(4, sparse, True), ranks(4, sparse, False), strict=True):
        assert_close(found, exact, F64)


def counted(world):
    """The bytes of buckets, and those that explain says a rank sends."""
    loop = Loop(world, 2)
    averaged = [p for name, p in loop.model.named_parameters() if ".mlp.fc" not in name]
    size = sum(p.numel() * p.element_size() for p in averaged)
    (path,) = [path for path in tpfuse.explain(loop.model) if path.layer == "data parallel"]
    return size, state_bytes(loop.model, dp=2).buckets, path.bytes


def test_experts_are_in_no_bucket(ranks):
    for size, buckets, sent in ranks(4, counted):
        assert size == buckets == sent


def compiled(world, on):
    loop = Loop(world, 2, "ddp")
    if on:
        loop.replica = torch.compile(loop.replica, backend="aot_eager")
    loop.backward(0, "equal")
    return loop.gradients()


@pytest.mark.slow
def test_compile(ranks):
    for found, exact in zip(ranks(2, compiled, True), ranks(2, compiled, False), strict=True):
        assert_close(found, exact, F64)


# ---- agreement of replicas ----


def watched(world):
    """What replicas hold alike is compared, and experts, of which each holds others, are not."""
    loop = Loop(world, 2)
    watch_replicas(loop.model, loop.optimizer, every=1)
    for i in range(2):
        loop.step(i, "equal")
    if world.rank == 3:
        loop.model.blocks[0].mlp.router.data[0, 0] += 1.0
    with pytest.raises(ValueError) as found:
        loop.backward(2, "equal")
    return str(found.value)


def test_watched_replicas(ranks):
    for message in ranks(4, watched):
        assert "blocks.0.mlp.router" in message and "fc1" not in message


def other_modes(world, change):
    model, mesh = made(world, 2)
    (call,) = share_of(mesh, 0, "unequal")
    replica = mesh["dp"].get_local_rank()
    if change == "mode":
        model.train(replica == 0)
    if change == "labels" and world.rank == 3:  # of one tensor-parallel rank alone
        call["labels"] = call["labels"] - 1
    if change == "no labels" and replica == 1:
        del call["labels"]
    if change == "step":
        call["step"] = 4 + replica
    with pytest.raises(ValueError) as found, torch.set_grad_enabled(change != "gradients" or replica == 0):
        model(**call)
    return str(found.value)


@pytest.mark.parametrize("change, message", [
    ("mode", "training must be the same on every expert-parallel rank"),
    ("gradients", "grad mode must be the same on every expert-parallel rank"),
    ("labels", "labels must be the same on every tensor-parallel rank"),
    ("no labels", "labels must be the same on every expert-parallel rank"),
    ("step", "step must be the same on every expert-parallel rank"),
])  # fmt: skip
def test_replicas_with_other_calls_are_refused(ranks, change, message):
    for found in ranks(4, other_modes, change):
        assert message in found


def without_samples(world):
    """Gradients where replica 1 has no sample of its own: it calls with one that has no labels."""
    loop = Loop(world, 2)
    call = batch(CONFIG, size=4)
    count = int((call["labels"][:, 1:] != -100).sum())
    if loop.mesh["dp"].get_local_rank() == 1:
        call = dict(input_ids=call["input_ids"][:1], labels=torch.full((1, 7), -100))
    loop.replica(**call, loss_normalizer=count / 2).loss.backward()
    return loop.gradients()


def test_a_replica_without_samples(ranks, one):
    for found in ranks(4, without_samples):
        assert_close(found, {name: one("equal")[f"d {name}"] for name in found}, F64)


# ---- what is refused ----


def refused(world):
    model, mesh = made(world, 2)
    tp = TensorParallel(mesh["tp"], sequence_parallel=True)
    both, pipeline = mesh["dp", "tp"], world.stages(1, 2, 2)["pp"]
    dense = replace(CONFIG, num_experts=None, experts_per_token=None, shared_size=None, shared_gate=False)
    actions = {
        "no dp": lambda: GPT(CONFIG, tp=tp, experts=both),
        "dense": lambda: GPT(dense, tp=tp, dp=mesh["dp"], experts=both),
        "sizes": lambda: GPT(replace(CONFIG, num_experts=6), tp=tp, dp=mesh["dp"], experts=both),
        "stages": lambda: schedule(
            GPT(CONFIG, tp=tp, dp=mesh["dp"], experts=both, stage=Stage(0, 1)), pipeline, "1f1b", 2, bitwise=True
        ),
        "ddp": lambda: DistributedDataParallel(model, process_group=mesh["dp"].get_group()),
        "data_parallel": lambda: data_parallel(ParallelMoE(8, 6, 4, Routing(2), experts=mesh["tp"]), mesh["dp"]),
        "micro-batches": lambda: data_parallel(model, mesh["dp"], bitwise_micro_batches=4),
        "MainGrad": lambda: MainGrad(model),
        "generate": lambda: model.generate(torch.ones(1, 2, dtype=torch.int64)),
        "fully_shard": lambda: fully_shard(
            tpfuse.as_dtensor(model, mesh), mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(torch.bfloat16)
        ),
    }
    return {kind: said(action) for kind, action in actions.items()}


REFUSED = {
    "no dp": "GPT: experts are divided among replicas",
    "dense": "GPT: experts= needs experts, got num_experts=None",
    "sizes": "ParallelMoE: num_experts=6 is not divisible by expert-parallel size 4; use 1, 2, 3 or 6",
    "stages": "pipeline 1f1b: bitwise is not built for experts over replicas",
    "ddp": "DistributedDataParallel: .*experts are divided among the replicas; use tpfuse.data_parallel",
    "data_parallel": r"data_parallel: fc1 is divided among replicas \[., .\], and dp here is \[., .\]",
    "micro-batches": "data_parallel: bitwise_micro_batches=4 is not built for experts over replicas",
    "MainGrad": "MainGrad: blocks.0.mlp.fc1 is divided among replicas",
    "fully_shard": "fully_shard: param_dtype=torch.bfloat16 of mp_policy does not reach experts",
    "generate": "generate: experts over replicas are not built",
}


def test_what_is_refused(ranks):
    for found in ranks(4, refused):
        assert found.keys() == REFUSED.keys()
        assert [text for kind, text in found.items() if not re.match(REFUSED[kind], text)] == []
