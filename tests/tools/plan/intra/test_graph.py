"""The ops of a block count what the model does."""

import pytest
import torch

from tests.tools.plan.intra.blocks import CONFIGS
from tpfuse.models import GPTConfig
from tpfuse.tools.ledger import model_flops
from tpfuse.tools.ledger.mfu import forward_flops
from tpfuse.tools.ledger.presets import load_config
from tpfuse.tools.ledger.shapes import Shape
from tpfuse.tools.plan.intra.graph import ATTENTION, LINEAR, NORM, stack
from tpfuse.tools.plan.split import Job

SIZES = dict(vocab_size=64, max_positions=16, hidden_size=32, num_layers=3, num_heads=8)


@pytest.mark.parametrize("model", ["gpt-22b", "llama3-70b", "gpt2"])
def test_flops_and_parameters_are_the_models(model):
    config = load_config(model)
    s, graph = Shape.of(config), stack(Job(config, 2, 512), blocks=2)
    of = lambda kind: [op for op in graph.ops if op.kind == kind]
    gemms, products, _ = forward_flops(config, 512, 2)
    assert s.L / 2 * sum(op.flops for op in of(LINEAR)) == 3 * gemms
    assert s.L / 2 * sum(op.flops for op in of(ATTENTION)) == 3 * products
    assert sum(op.weights for op in of(LINEAR)) == 2 * s.weights
    assert sum(op.weights for op in of(NORM)) == 2 * 2 * s.D * (2 if config.norm == "layer" else 1)
    assert model_flops(config, 512, 2) > s.L / 2 * sum(op.flops for op in graph.ops)
    assert graph.state == (2 + 2 + 4) * s.L / 2  # torch's AdamW: both moments in bf16


def test_bytes_by_hand():
    graph = stack(Job(GPTConfig(**SIZES), 4, 8, torch.float32, "adamw-fp32"))
    h, ops = 4 * 4 * 8 * 32, {op.name: op for op in graph.ops}
    moved = {name: ops[name].moved / h for name in ops}
    assert moved == {
        "norm 1": 5,
        "qkv": 12,
        "attention": 12,
        "out": 6,
        "add 1": 8,
        "norm 2": 5,
        "fc 1": 15,
        "activation": 20,
        "fc 2": 15,
        "add 2": 8,
    }
    assert graph.element == 4 and graph.state == (4 + 4 + 8) * 3


def test_grouped_heads_and_gates():
    config = GPTConfig(**SIZES, num_kv_heads=2, gated=True, ffn_size=48, norm="rms")
    ops = {op.name: op for op in stack(Job(config, 1, 8)).ops}
    assert ops["qkv"].output == (1, 8, 2, 2 * 8 * (8 + 2 * 2) * 4) and ops["attention"].output.units == 8
    assert ops["fc 1"].output.size == 2 * ops["activation"].output.size and ops["fc 1"].output.units == 48


def test_blocks_follow_one_another():
    graph = stack(Job(GPTConfig(**SIZES), 1, 8), blocks=3)
    by_name = {op.name: [graph.ops[u].name for u in op.inputs] for op in graph.ops}
    assert len(graph.ops) == 30 and graph.read(graph.ops[2]).units == 8
    assert by_name["0.norm 1"] == ["2.add 2"] and by_name["1.norm 1"] == ["0.add 2"]
    assert by_name["1.add 1"] == ["1.out", "0.add 2"] and by_name["2.add 2"] == ["2.fc 2", "2.add 1"]


EXPERTS = GPTConfig(**SIZES, gated=True, activation="silu", mlp_bias=False, num_experts=4, experts_per_token=2)


WIRED = {  # inputs of ops that do not read the op before them; the last op is the stream that enters the block
    "bert": {"add 1": ["out", "norm 2"], "add 2": ["fc 2", "norm 1"]},
    "neox": {"norm 2": ["add 2"], "qkv": ["norm 1"], "add 1": ["out", "add 2"], "fc 1": ["norm 2"]}
    | {"add 2": ["fc 2", "add 1"]},
    "gemma": {"add 1": ["norm 2", "add 2"], "add 2": ["norm 4", "add 1"]},
    "olmo": {"add 1": ["norm 1", "add 2"], "add 2": ["norm 2", "add 1"]},
}


@pytest.mark.parametrize("kind", WIRED)
def test_other_wirings(kind):
    graph, s = stack(Job(CONFIGS[kind], 1, 8)), Shape.of(CONFIGS[kind])
    names = [op.name for op in graph.ops]
    inputs = {op.name: [names[u] for u in op.inputs] for op in graph.ops}
    assert inputs == {name: [names[i - 1]] for i, name in enumerate(names)} | WIRED[kind]
    assert len(names) == (12 if kind == "gemma" else 10)
    assert sum(op.weights for op in graph.ops if op.kind == LINEAR) == s.weights


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: stack(Job(GPTConfig(**SIZES), 1, 8), blocks=0), "blocks must be a positive integer, got 0"),
        (lambda: stack(Job(EXPERTS, 1, 8)), "layouts: experts have one layout, by expert, got num_experts=4"),
        (lambda: stack(Job(GPTConfig(**SIZES), 0, 8)), "batch and seq must be positive, got 0 and 8"),
    ],
)
def test_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
