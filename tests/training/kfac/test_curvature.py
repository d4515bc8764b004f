"""Factors of a model against those by module hooks on the same weights in nn.Linear layers of transformers."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.common import error, make_tp
from tests.models import theirs
from tests.models.common import batch
from tests.planted import planted
from tpfuse import KFAC, TensorParallel
from tpfuse.layers.shards import SplitParameter
from tpfuse.layers.spec import Spec
from tpfuse.models import GPT
from tpfuse.training.kfac.bubbles import _adding
from tpfuse.training.kfac.curvature import INPUT, SIDES, CapturedRows, Curvature, Moment, inverse

F64 = torch.float64
PARTS = {"attention.qkv": "qkv", "attention.out": "o_proj", "mlp.fc1": "gate_up", "mlp.fc2": "down_proj"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A Llama of transformers with 2 kv heads for 12 heads, and its directory."""
    model, path = theirs.make("llama"), tmp_path_factory.mktemp("llama")
    model.save_pretrained(path)
    return model, path


def call_of(model):
    return batch(model.config, size=3, seq=7)


def by_hooks(model):
    """-> {our name: (A, G)} of one forward and backward."""
    model.zero_grad()
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and "layers" in name}
    x, dy, handles = {}, {}, []
    for name, layer in layers.items():
        handles += [
            layer.register_forward_hook(
                lambda _, args, out, name=name: x.update({name: args[0].detach().flatten(0, 1)})
            ),
            layer.register_full_backward_hook(lambda _, into, out, name=name: dy.update({name: out[0].flatten(0, 1)})),
        ]
    call = call_of(model)
    theirs.loss_of(model(call["input_ids"]).logits, call["labels"], shift=True).backward()
    for handle in handles:
        handle.remove()
    found = {}
    for i in range(model.config.num_hidden_layers):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        q, k, v = (dy[f"{attention}.{part}_proj"] for part in "qkv")
        q, k, v = (part.unflatten(1, (2, -1, k.shape[1] // 2)) for part in (q, k, v))
        gate_up = torch.stack([dy[f"{mlp}.{part}_proj"] for part in ("gate", "up")], -1)
        sides = {
            "attention.qkv": (x[f"{attention}.q_proj"], torch.cat([q, k, v], 2).flatten(1)),
            "attention.out": (x[f"{attention}.o_proj"], dy[f"{attention}.o_proj"]),
            "mlp.fc1": (x[f"{mlp}.gate_proj"], gate_up.flatten(1)),
            "mlp.fc2": (x[f"{mlp}.down_proj"], dy[f"{mlp}.down_proj"]),
        }
        for name, (inputs, gradients) in sides.items():
            rows = gradients.any(1)
            inputs, gradients, n = inputs[rows], gradients[rows], int(rows.sum())
            found[f"blocks.{i}.{name}.weight"] = (inputs.T @ inputs / n, n * gradients.T @ gradients)
    return found


def factors(world, path, sequence_parallel, call, autocast=False):
    model = GPT.from_pretrained(path, tp=make_tp(world, sequence_parallel), dtype=torch.float32 if autocast else F64)
    kfac = KFAC(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(**call).loss
    loss.backward()
    kfac.step()
    for curvature in kfac._curvature.values():  # what would wait for a bubble: 1 / R of both matrices
        sizes, elements = curvature.size, sum(curvature.placement.spec.shape)
        assert sizes.x.numel() + sizes.dy.numel() <= 22 * elements / world.size  # 21 rows, and one of padding
    names = [name for name, _ in model.named_parameters() if name.startswith("blocks") and "norm" not in name]
    states = [kfac.state[p] for p in kfac.matrices.parameters()]
    return {name: (state["input"], state["output"]) for name, state in zip(names, states, strict=True)}


def worst(found, exact):
    assert found.keys() == exact.keys()
    pairs = [pair for name in exact for pair in zip(found[name], exact[name], strict=True)]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


@pytest.mark.parametrize("R, sequence_parallel", [(1, True), (2, True), pytest.param(2, False, marks=pytest.mark.slow)])
def test_factors_are_those_of_module_hooks(ranks, saved, R, sequence_parallel):
    model, path = saved
    exact = by_hooks(model)
    for found in ranks(R, factors, path, sequence_parallel, call_of(model)):
        assert worst(found, exact) < 1e-12


def test_under_autocast(ranks, saved):
    """The weights that ops are given are copies in bf16; factors are in fp32."""
    model, path = saved
    (found,) = ranks(1, factors, path, True, call_of(model), True)
    assert {x.dtype for pair in found.values() for x in pair} == {torch.float32}
    assert worst(found, by_hooks(model)) < 0.1


def rows_of_a_neighbour(right, self, side):
    rank = (self.placement.tp.rank + 1) % self.placement.tp.size
    m = len(side) // self.placement.tp.size
    return side[rank * m : (rank + 1) * m]


def with_mistake(world, *args):
    with planted("tpfuse.training.kfac.curvature.Curvature._mine", rows_of_a_neighbour):
        return factors(world, *args)


def test_other_rows_are_seen(ranks, saved):
    """Each factor alone would be right: all rows are in the sum.  Which of them count is told by the other side."""
    model, path = saved
    exact = by_hooks(model)
    assert all(worst(found, exact) > 1e-3 for found in ranks(2, with_mistake, path, True, call_of(model)))


def curvature_of(groups):
    """Of a weight [2, 3]."""
    placement = SplitParameter(Spec((2, 3), None, None), TensorParallel())
    return Curvature("weight", placement, groups, Moment(lambda: 1), weight=torch.zeros(2, 3))


def matrices():
    generator = torch.Generator().manual_seed(0)
    return CapturedRows(*(torch.randn(4, columns, generator=generator) for columns in (3, 2)))


def used_by(world, ranks_that_use):
    """-> the states of a weight, one by one, that these ranks alone use"""
    states = []
    for used in ranks_that_use:
        curvature, state = curvature_of([world.group]), {}
        if world.rank in used:
            curvature.add(matrices())
        for side in SIDES:
            curvature.refresh(side, state, decay=0.5, damping=1.0)
        states.append(state)
    return states


def test_a_weight_that_some_replicas_do_not_use(ranks):
    for one, none in ranks(2, used_by, [(0,), ()]):
        torch.testing.assert_close(one[INPUT], matrices().x.mT @ matrices().x / 4)
        assert none == {}


def test_a_layer_may_be_called_twice_in_a_micro_batch():
    x, dy = matrices()
    exact, waiting = curvature_of([]), curvature_of([])
    waiting.moment.pipeline = SimpleNamespace(filler=SimpleNamespace(step=0), micro_batch=7)
    for scale in 1.0, 2.0:
        exact.add(CapturedRows(scale * x, dy))
        waiting.receive(dy, scale * x)
    _adding(waiting, 7)()
    assert all(map(torch.equal, exact.sums[INPUT], waiting.sums[INPUT])) and not waiting.held


def test_inverse():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(40, 8, generator=g, dtype=F64)
    factor = x.T @ x
    mean = torch.linalg.eigvalsh(factor).mean()
    exact = torch.linalg.inv(factor / mean + 0.5 * torch.eye(8, dtype=F64))
    assert error(inverse(factor, 0.25), exact) < 1e-13
    assert error(inverse(1e-9 * factor, 0.25), exact) < 1e-13  # of any scale
