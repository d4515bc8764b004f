"""Each signature is one that DTensor's op has: the same values and gradients as in one process, and nothing is sent."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.tools.plan.intra.blocks import BATCH, CONFIGS, SEQ, run, space
from tests.tools.plan.intra.dtensors import Sent, gradients, laid_out, placements
from tpfuse.tools.ledger.shapes import Shape
from tpfuse.tools.plan.intra.graph import ADD, LINEAR, Tensor
from tpfuse.tools.plan.intra.signatures import FORKED, REPLICATE, SHARDS, SIGNATURES, fits


def signed(world, kind):
    """For each op of a block and each of its signatures: the op, what is wrong, and the largest error."""
    mesh, results = init_device_mesh("cpu", (world.size,)), []
    s, sp = Shape.of(CONFIGS[kind]), space(kind, (world.size,))
    for k, op in enumerate(sp.graph.ops):
        read = sp.graph.read(op)
        torch.manual_seed(k)
        width = read.size // (8 * BATCH * SEQ)
        tensors = [torch.randn(BATCH, SEQ, width, dtype=torch.float64) for _ in op.inputs]
        if op.weights:
            shape = (op.weights // width, width) if op.kind == LINEAR else (s.D,) if s.gated else (2, s.D)
            tensors.append(torch.randn(shape, dtype=torch.float64))
        leaves = [t.requires_grad_() for t in tensors]
        split = lambda values, op=op: (values[: len(op.inputs)], values[-1])
        y = run(s, op, *split(leaves))
        grad = torch.randn_like(y)
        expected = torch.autograd.grad(y, leaves, grad)
        for strategy in sp.strategies[k]:
            layouts = [strategy.input] * len(op.inputs) + [strategy.weight] * bool(op.weights)
            xs = [laid_out(t.detach(), mesh, placements(a)).requires_grad_() for t, a in zip(tensors, layouts)]
            above = laid_out(grad, mesh, gradients(strategy.output))
            with Sent(world.size) as sent:
                out = run(s, op, *split(xs))
                grads = torch.autograd.grad(out, xs, above)
            wrong = list(sent.names)
            if list(out.placements) != placements(strategy.output):
                wrong.append(f"left {out.placements}")
            for g in grads[: len(op.inputs)]:
                if list(g.placements) != gradients(strategy.input):
                    wrong.append(f"gradient {g.placements}")
            if op.weights and grads[-1].placements[0].is_partial() != strategy.signatures[0].sums:
                wrong.append(f"weight's gradient {grads[-1].placements}")
            errors = [float((a.full_tensor() - b).detach().abs().max()) for a, b in zip([out, *grads], [y, *expected])]
            results.append((op.name, strategy.signatures[0], wrong, max(errors)))
    return results


@pytest.mark.skipif(torch.__version__ < "2.13", reason="an older DTensor does not flatten a split dimension")
@pytest.mark.parametrize("kind", ["gpt", pytest.param("llama", marks=pytest.mark.slow)])
def test_dtensor_has_every_signature(ranks, kind):
    for results in ranks(2, signed, kind):
        assert [(op, signature, wrong) for op, signature, wrong, _ in results if wrong] == []
        assert max(error for *_, error in results) < 1e-12
    kinds = {op.kind for op in space(kind, (2,)).graph.ops}
    assert len(results) == sum(len(SIGNATURES[op.kind]) for op in space(kind, (2,)).graph.ops) and len(kinds) == 5


def test_what_a_signature_divides():
    undivided = [s for kind in SIGNATURES.values() for s in kind if not s.divides]
    assert {(s.input, s.output) for s in undivided} == {(REPLICATE, REPLICATE)}
    assert [s.input for s in SIGNATURES[LINEAR] if s.sums] == list(SHARDS[:2])
    assert all(s.output != FORKED for kind in SIGNATURES.values() for s in kind)
    assert {s.input for s in SIGNATURES[ADD]} == {*SHARDS, REPLICATE}


def test_a_mesh_cuts_evenly():
    t = Tensor(batch=2, seq=12, units=8, size=1)
    assert fits(t, (SHARDS[0],), (2,)) and not fits(t, (SHARDS[0],), (4,))
    assert fits(t, (SHARDS[2], SHARDS[2]), (2, 4)) and not fits(t, (SHARDS[1], SHARDS[1]), (4, 2))
    assert fits(t, (REPLICATE, SHARDS[1]), (5, 3))
