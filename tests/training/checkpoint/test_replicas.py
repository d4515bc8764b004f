"""What several ranks hold is held equal to the bit: at every save, under checking(), every n calls, and when asked."""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import tpfuse
from tests.models.common import STEP_CONFIG, batch
from tpfuse import TensorParallel, check_replicas, load_checkpoint, save_checkpoint, watch_replicas
from tpfuse.models import GPT
from tpfuse.pipeline import schedule
from tpfuse.training.checkpoint.replicas import _BLOCK, bits_of, differences

CALL = batch(STEP_CONFIG, size=4)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn]


# ---- the bits of a tensor ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_flipped_bit_shows(dtype):
    x = torch.randint(0, 2, (3 * 8,), dtype=torch.uint8).view(3, 8).view(torch.uint8)
    x = x.to(torch.bool) if dtype == torch.bool else x.view(dtype)
    seen = {bits_of(x)}
    for bit in range(1 if dtype == torch.bool else 8 * 8):
        flipped = x.clone()
        flipped.view(torch.uint8)[1, bit // 8] ^= 1 << bit % 8
        assert bits_of(flipped.clone()) not in seen
        seen.add(bits_of(flipped))


def test_what_compares_equal_may_have_other_bits():
    nans = torch.tensor([0x7FC00000, 0x7FC00001, 0x7F800001, -4194304], dtype=torch.int32).view(torch.float32)
    values = [*nans.unbind(), torch.tensor(0.0), torch.tensor(-0.0), torch.tensor(math.inf)]
    assert len({bits_of(x) for x in values}) == len(values)
    assert bits_of(nans) == bits_of(nans.clone()) != bits_of(nans.flip(0))


def test_places_and_strides():
    x = torch.zeros(3 * _BLOCK + 5)
    zero, ones = bits_of(x), set()
    for place in (0, 1, _BLOCK - 1, _BLOCK, 2 * _BLOCK, 3 * _BLOCK + 4):
        x[place] = 1
        ones.add(bits_of(x))
        x[place] = 0
    assert len(ones) == 6 and zero not in ones
    y = torch.randn(6, 4)
    assert bits_of(y.t()) == bits_of(y.t().contiguous()) != bits_of(y)
    assert bits_of(torch.empty(0, 3)) == bits_of(torch.empty(0))


def test_the_odd_one_is_named():
    bits = {rank: {("a", ()): 1, ("b", (0,)): 2, ("own", (rank,)): rank} for rank in range(4)}
    assert differences(bits) == []
    assert differences(bits | {2: {("a", ()): 9, ("b", (0,)): 9}}) == ["rank 2 differs from ranks 0, 1, 3 in a, b"]
    assert differences({0: {("a", ()): 1}, 5: {("a", ()): 2}}) == ["rank 0 and rank 5 differ in a"]
    two = {r: {("a", ()): r // 2} for r in range(4)}
    assert differences(two) == ["ranks 0, 1 and ranks 2, 3 differ in a"]


# ---- over ranks ----


class Run:
    def __init__(self, world, dp, cp, tp):
        mesh = world.pieces(dp, cp, tp)
        ranks = TensorParallel(mesh["tp"], sequence_parallel=tp > 1, cp=mesh["cp"])
        self.model = GPT(STEP_CONFIG, tp=ranks, dp=mesh["dp"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, *, skip=False):
        self.model(**CALL, first_sample=0).loss.backward()
        if not skip:
            self.optimizer.step()
        self.optimizer.zero_grad()


def flip(x, element=0):
    """Flips the lowest bit of one element."""
    x.detach().view(-1)[element : element + 1].view(torch.int32).bitwise_xor_(1)


def weight(run, rank):
    flip(run.model.blocks[0].mlp_norm.weight, 3) if run.rank == rank else None


def shard(run, rank):
    """A slice over tensor-parallel ranks, which another replica holds too."""
    flip(run.model.blocks[0].mlp.fc1.weight) if run.rank == rank else None


def moment(run, rank):
    flip(run.optimizer.state[run.model.input_norm.bias]["exp_avg_sq"]) if run.rank == rank else None


def negative_zero(run, rank):
    run.model.positions.weight.data[0, 0] = -0.0 if run.rank == rank else 0.0


def learning_rate(run, rank):
    run.optimizer.param_groups[0]["lr"] *= 2 if run.rank == rank else 1


def skipped_step(run, rank):
    run.step(skip=run.rank == rank)


def counter(run, rank):
    run.model.step += run.rank == rank


def evaluation(run, rank):
    run.model.blocks[0].train(run.rank != rank)


MISTAKES = {  # and the tensor that is named
    weight: "model.blocks.0.mlp_norm.weight",
    shard: "model.blocks.0.mlp.fc1.weight",
    moment: "optimizer.input_norm.bias.exp_avg_sq",
    negative_zero: "model.positions.weight",
    skipped_step: "model.input_norm.weight",
    learning_rate: "the optimizer's groups",
    counter: "model.step",
    evaluation: "parts in another mode",
}


SILENT = [("checking", moment), ("checking", learning_rate), ("save_checkpoint", evaluation)]  # not compared there


def said(action):
    try:
        action()
    except ValueError as error:
        return str(error)
    return ""


def checked(world, folder, dp, cp, tp):
    """-> by mistake what each way to check says; the weights are whole again before the next one"""
    run, found = Run(world, dp, cp, tp), {}
    run.rank, bad = world.rank, world.size - 1
    run.step()
    check_replicas(run.model, run.optimizer)
    save_checkpoint(folder, run.model, run.optimizer, step=1)
    for mistake in MISTAKES:
        mistake(run, bad)
        ways = {
            "check_replicas": lambda: check_replicas(run.model, run.optimizer),
            "save_checkpoint": lambda: save_checkpoint(folder, run.model, run.optimizer, step=2),
        }
        latest = (folder / "latest").read_text()
        found[mistake.__name__] = {way: said(action) for way, action in ways.items()}
        dist.barrier()
        published = (folder / "latest").read_text() != latest
        assert published == (not found[mistake.__name__]["save_checkpoint"])
        with tpfuse.checking():
            found[mistake.__name__]["checking"] = said(lambda: run.model(**CALL, first_sample=0))
        dist.barrier()
        load_checkpoint(folder, run.model, run.optimizer)
        run.model.train()
    watch_replicas(run.model, run.optimizer, every=2)
    weight(run, bad)
    found["watch"] = [said(run.step), said(run.step)]
    return found


@pytest.mark.parametrize("dp, cp, tp", [(1, 1, 3), (1, 2, 1), pytest.param(2, 1, 2, marks=pytest.mark.slow)])
def test_every_mistake_is_named(ranks, tmp_path, dp, cp, tp):
    """On every rank alike, those too that share nothing with the one that is wrong."""
    found = ranks(dp * cp * tp, checked, tmp_path, dp, cp, tp)
    assert all(each == found[0] for each in found)
    bad, axis = dp * cp * tp - 1, "tensor" if cp == 1 else "context"
    odd = f"rank {bad} differs from ranks 0, 1 in " if tp == 3 else f"rank {bad} differ"
    for mistake, name in MISTAKES.items():
        if mistake is shard and dp * cp == 1:
            assert not any(found[0]["shard"].values())  # nobody else holds it
            continue
        for way, text in found[0][mistake.__name__].items():
            if (way, mistake) in SILENT:
                assert text == ""
            elif way == "checking" and mistake in (counter, evaluation):
                assert f"{name} must be the same on every {axis}-parallel rank" in text
            elif way == "save_checkpoint" and mistake in (learning_rate, counter):
                assert "must be the same on every rank" in text
            else:
                assert odd in text and name in text, (mistake, way, text)
    first, second = found[0]["watch"]
    assert first == "" and odd in second


def tied(world):
    """An embedding on the first stage and the last."""
    mesh = world.stages(2, 1, 1)
    stage = (world.rank, 2, "gpipe")
    model = GPT(replace(STEP_CONFIG, num_layers=2), stage=stage, dp=mesh["dp"])
    pipeline = schedule(model, mesh["pp"], "gpipe", 2)
    watch_replicas(model, every=2)
    flip(model.embedding.weight) if world.rank else None
    return [said(lambda: pipeline.step(CALL["input_ids"], labels=CALL["labels"])) for _ in range(2)]


def test_copies_on_two_stages(ranks):
    first, second = ranks(2, tied)
    assert first == second and first[0] == ""
    assert "rank 0 and rank 1 differ in model.embedding.weight" in first[1]
