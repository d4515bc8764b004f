"""Biases of routers by the load of their experts: the rule, counts of rows, every split, and what is refused."""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import tpfuse
from tests.common import assert_equal
from tests.models.common import batch, whole
from tests.planted import Mistaken
from tests.training.test_experts import CONFIG, Loop, made
from tpfuse import TensorParallel, balance_experts, load_checkpoint, save_checkpoint
from tpfuse.kernels import Routing, route
from tpfuse.layers import ParallelMoE
from tpfuse.models import GPT
from tpfuse.pipeline import schedule

BIASED = replace(CONFIG, router_bias=True)
STEPS = 3
SEQ = batch(BIASED)["input_ids"].shape[1]


def layer(E=6, k=2, D=16, **options) -> ParallelMoE:
    torch.manual_seed(0)
    return ParallelMoE(D, 8, E, Routing(k, biased=True), init_std=0.5, **options)


def test_the_rule():
    """Against the algorithm in plain torch, over calls of which some do not count."""
    moe, bias = layer(), torch.zeros(6)
    for _ in range(4):
        calls = [torch.randn(9, 16) for _ in range(2)]
        counts = torch.stack([
            route(x, moe.router, bias, routing=moe.routing)[1].flatten().bincount(minlength=6) for x in calls
        ]).sum(0)  # fmt: skip
        for x in calls:
            moe(x)
        moe.eval()(calls[0])
        moe.train()
        assert balance_experts(moe, None, rate=0.25)[""].equal(counts)
        change = torch.sign(counts.double().mean() - counts) * 0.25
        bias = bias + (change - change.mean()).float()
        assert moe.router_bias.equal(bias)
        assert moe.router_bias.unique().numel() > 1
    before = moe.router_bias.clone()
    assert balance_experts(moe, None)[""].sum() == 0  # no call since
    assert moe.router_bias.equal(before)


def test_the_choice_alone():
    """A bias chooses experts; it weighs nothing and has no gradient, and weights in 16 bits have one in fp32."""
    moe = layer(dtype=torch.bfloat16)
    assert moe.router_bias.dtype == torch.float32 and not moe.router_bias.requires_grad
    moe = layer(k=6)
    x = torch.randn(5, 16)
    y = moe(x)
    moe.router_bias[::2] += 1.0
    torch.testing.assert_close(moe(x), y)


def test_a_router_that_floods_an_expert():
    """In 200 calls the busiest expert falls from more than three times the mean to less than 1.2 times."""
    torch.manual_seed(0)
    moe, busiest = ParallelMoE(16, 8, 8, Routing(2, "sigmoid", biased=True), init_std=0.2), []
    with torch.no_grad():
        moe.router[0] += 0.5
    for _ in range(200):
        moe(torch.randn(512, 16) + 0.5)
        counts = balance_experts(moe, None, rate=0.005)[""]
        busiest.append(counts.max() / counts.double().mean())
    assert busiest[0] > 3 and torch.stack(busiest[-20:]).mean() < 1.2


@pytest.mark.parametrize("options", [dict(recompute="full"), dict(saving="smallest"), {}])
def test_what_backward_computes_again_counts_nothing(options):
    model = GPT(BIASED, **options)
    calls = batch(BIASED, size=4)
    model(**calls).loss.backward()
    for counts in balance_experts(model, None).values():
        assert counts.sum() == calls["input_ids"].numel() * BIASED.experts_per_token


def counted(world, sequence_parallel, padded):
    """-> rows of experts, without padding and with it: behind each sample, or behind the last packed document."""
    tp = TensorParallel(world.group, sequence_parallel=sequence_parallel)
    ids = batch(BIASED, size=2)["input_ids"]
    if padded == "samples":
        calls = [dict(input_ids=ids)]
        mask = torch.tensor([1] * SEQ + [0] * 5).expand(len(ids), -1)
        calls.append(dict(input_ids=torch.nn.functional.pad(ids, (0, 5)), attention_mask=mask))
    else:
        bounds = torch.tensor([0, 4, SEQ], dtype=torch.int32)
        calls = [
            dict(input_ids=row[None], cu_seqlens=bounds) for row in (ids[0], torch.nn.functional.pad(ids[0], (0, 5)))
        ]
    loads = []
    for call in calls:
        model = GPT(BIASED, tp=tp)
        model(**call).logits.sum().backward()
        loads.append({name: count.tolist() for name, count in balance_experts(model, None).items()})
    return loads


@pytest.mark.parametrize("R, sequence_parallel", [(1, True), (2, True), (2, False)])
@pytest.mark.parametrize("padded", ["samples", "documents"])
def test_padding_counts_nothing(ranks, R, sequence_parallel, padded):
    for without, with_padding in ranks(R, counted, sequence_parallel, padded):
        assert without == with_padding and all(map(sum, without.values()))


def trained(world, dp, wrap, micro=1, options=None, folder=None):
    """-> counts and biases of three steps."""
    loop = Loop(world, dp, wrap, config=BIASED, **options or {})
    result = {}
    for step in range(STEPS):
        loop.step(step, "equal", micro)
        counts = balance_experts(loop.model, loop.mesh["dp"], rate=0.3)
        result |= {f"{step} {name}": count for name, count in counts.items()}
    if folder is not None:
        save_checkpoint(folder, loop.model, loop.optimizer, step=STEPS)
    biases = {name: x for name, x in whole(loop.model).items() if name.endswith("router_bias")}
    assert len(biases) == BIASED.num_layers and all(x.any() for x in biases.values())
    return result | biases


@pytest.mark.parametrize("dp, tp, wrap, options", [
    (2, 2, "ddp", {}), (2, 2, "ddp", dict(over=True, sp=False)), (1, 4, "main", dict(over=False)),
    (2, 1, "fsdp", dict(over=False)), (1, 4, "main", dict(over=False, cp=2)), (2, 2, "ddp", dict(over=False, cp=2)),
])  # fmt: skip
def test_every_split_has_the_same_bits(ranks, dp, tp, wrap, options):
    one = ranks(1, trained, 1, None, 2, dict(over=False))[0]
    rows = [2 * 4 * SEQ * BIASED.experts_per_token] * (STEPS * BIASED.num_layers)  # two calls of four samples
    assert [count.sum() for name, count in one.items() if "router_bias" not in name] == rows
    for found in ranks(dp * tp, trained, dp, wrap, 2, dict(over=False) | options):
        assert_equal(found, one)


def of_one_replica(right, loads, groups, joined):
    return right(loads, groups[:-1], joined)


def test_replicas_left_out_are_seen(ranks):
    one = ranks(1, trained, 1, None, 2, dict(over=False))[0]
    spoilt = Mistaken(trained, "tpfuse.training.expert_load.over_groups", of_one_replica)
    assert all(any(not x.equal(one[name]) for name, x in found.items()) for found in ranks(2, spoilt, 2, "ddp", 2))


def resumed(world, folder):
    model, _ = made(world, 1, over=False, config=BIASED)
    load_checkpoint(folder, model)
    return {name: x for name, x in whole(model).items() if name.endswith("router_bias")}


def test_a_checkpoint_has_them(ranks, tmp_path):
    saved = ranks(2, trained, 2, "ddp", 1, dict(over=False), tmp_path / "one")[0]
    for found in ranks(2, resumed, tmp_path / "one"):
        assert_equal(found, {name: saved[name] for name in found})


def staged(world):
    mesh = world.stages(2, 1, 1)
    config = replace(BIASED, num_layers=4, mlp_layers=(2, 3))
    model = GPT(config, stage=(mesh["pp"].get_local_rank(), 2, "1f1b"))
    pipeline = schedule(model, mesh["pp"], "1f1b", 2)
    call = batch(BIASED, size=4)
    pipeline.step(call["input_ids"], labels=call["labels"])
    return balance_experts(model, None)


def test_stages(ranks):
    first, last = ranks(2, staged)
    assert last == {} and [count.sum() for count in first.values()] == [4 * SEQ * BIASED.experts_per_token] * 2


def test_generation_chooses_by_them():
    """The CPU's short path has the tokens of the layers' own forward pass."""
    model = GPT(BIASED).eval()
    with torch.no_grad():
        for block in model.blocks:
            block.mlp.router_bias.copy_(torch.linspace(1.0, -1.0, 8))
    ids = torch.arange(6)[None]
    tokens = model.generate(ids, max_new_tokens=6)
    for end in range(6, 12):
        assert model(tokens[:, :end]).logits[0, -1].argmax() == tokens[0, end]
    with torch.no_grad():
        for block in model.blocks:
            block.mlp.router_bias.zero_()
    assert not model.generate(ids, max_new_tokens=6).equal(tokens)


@pytest.mark.slow
def test_a_graph_counts_once():
    """The backend divides a graph as inductor does, which makes cheap ops again in backward, and compiles none."""
    torch.manual_seed(0)
    model = GPT(BIASED)
    compiled = torch.compile(model, backend="aot_eager_decomp_partition")
    call = batch(BIASED, size=4)
    for _ in range(3):
        compiled(**call).loss.backward()
    for counts in balance_experts(model, None).values():
        assert counts.sum() == 3 * call["input_ids"].numel() * BIASED.experts_per_token


def differing(world, what):
    mesh = world.mesh(1, 2)
    model = GPT(BIASED, tp=TensorParallel(mesh["tp"]))
    rank = mesh["tp"].get_local_rank()
    try:
        balance_experts(model, None, rate=(0.1 + 0.1 * rank if what == "rate" else (-0.1 if rank else 0.1)))
    except ValueError as error:
        biases = [block.mlp.router_bias for block in model.blocks]
        return str(error), any(bias.any() for bias in biases)


@pytest.mark.parametrize("what, message", [
    ("rate", r"balance_experts: rate must be the same on every tensor-parallel rank, got rank 0: 0\.1; rank 1: 0\.2"),
    ("sign", r"balance_experts: rate must be positive and finite, got -0\.1"),
])  # fmt: skip
def test_ranks_that_differ(ranks, what, message):
    for text, changed in ranks(2, differing, what):
        assert re.search(message, text) and not changed


def test_what_is_refused():
    with pytest.raises(
        ValueError, match=r"a layer's routing must be biased, as Routing\(k, biased=True\) is, got none"
    ):
        balance_experts(GPT(CONFIG), None)
    with pytest.raises(ValueError, match="model must be a module, got"):
        balance_experts([nn.Linear(2, 2)], None)
    with pytest.raises(
        ValueError, match="dp must be a DeviceMesh of one dimension or a ProcessGroup that this process is in, got 'dp'"
    ):
        balance_experts(layer(), "dp")
    with pytest.raises(ValueError, match="router_bias is of models with experts, got True without"):
        one = dict(num_experts=None, experts_per_token=None, shared_size=None, shared_gate=False, family="llama")
        replace(CONFIG, router_bias=True, **one)
    with pytest.raises(ValueError, match="a qwen2_moe model of transformers has router_bias=False, got True"):
        BIASED.to_hf()
    assert tpfuse.balance_experts is balance_experts


def of_others(world, left_out):
    model, mesh = made(world, 2, over=False, config=BIASED)
    with pytest.raises(ValueError, match=r"the model's replicas are ranks \[0, 1\], got dp=\[\]"):
        balance_experts(model, None if mesh["dp"].get_local_rank() in left_out else mesh["dp"])
    return not any(block.mlp.router_bias.any() for block in model.blocks)


@pytest.mark.parametrize("left_out", [(0, 1), (1,)])
def test_replicas_that_a_rank_leaves_out(ranks, left_out):
    assert ranks(2, of_others, left_out) == [True, True]


def of_one(world):
    model, _ = made(world, 1, over=False, config=BIASED)
    return balance_experts(model, None)


def test_one_replica_has_none(ranks):
    (counts,) = ranks(1, of_one)
    assert len(counts) == BIASED.num_layers
