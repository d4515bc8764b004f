"""One block of a stack as DTensors in the layouts of a plan, and the same in one process; fp64, no dropout.

The ops are those of tpfuse.tools.plan.intra.graph, on weights [out, in].  The width of qkv is ordered by kv heads (its
q heads, k and v together) and that of a gated fc 1 by its units (gate and up together), so that any equal cut is one of
heads or units.  Where two axes shard one dimension DTensor cannot flatten it with another, which its matrix products
do: on two axes they are written as products and sums.
"""

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from tests.tools.plan.intra.dtensors import Sent, all_to_all, gradients, laid_out, placements, walked
from tpfuse.models import BertConfig, GPTConfig
from tpfuse.plan import Link
from tpfuse.tools.ledger.shapes import Shape
from tpfuse.tools.plan.intra.conversions import Mesh
from tpfuse.tools.plan.intra.graph import ACTIVATION, ADD, ATTENTION, NORM, stack
from tpfuse.tools.plan.intra.space import Rates, Space
from tpfuse.tools.plan.split import Job

BATCH, SEQ = 4, 8
SIZES = dict(vocab_size=64, max_positions=16, hidden_size=32, num_layers=3, num_heads=8, dropout=0.0)
LINK = Link(1e-6, 1e9)


LLAMA = dict(norm="rms", gated=True, num_kv_heads=4, ffn_size=48, activation="silu")
CONFIGS = {  # one of each wiring, and a gated one
    "gpt": GPTConfig(**SIZES),
    "llama": GPTConfig(**SIZES, **LLAMA),
    "bert": BertConfig(**SIZES),
    "neox": GPTConfig(**SIZES, parallel_residual=True),
    "gemma": GPTConfig(**SIZES, **LLAMA, branch_norm=True),
    "olmo": GPTConfig(**SIZES, **LLAMA, branch_norm=True, pre_norm=False),
}


def space(kind, sizes, **rates):
    rates = dict(flops=1e9, bytes=1e9) | rates
    graph = stack(Job(CONFIGS[kind], BATCH, SEQ, torch.float64))
    return Space(graph, Mesh(sizes, (LINK,) * len(sizes)), Rates(**rates))


def attention(s, qkv):
    group = s.H // s.G
    heads = qkv.view(BATCH, SEQ, s.G, group + 2, s.E).permute(0, 2, 3, 1, 4)  # [batch, kv head, what, seq, E]
    q, k, v = heads[:, :, :group], heads[:, :, group : group + 1], heads[:, :, group + 1 :]
    k, v = (t.expand(-1, -1, group, -1, -1) for t in (k, v))
    scores = (q.unsqueeze(-2) * k.unsqueeze(-3)).sum(-1) / s.E**0.5
    mixed = (scores.softmax(-1).unsqueeze(-1) * v.unsqueeze(-3)).sum(-2)
    return mixed.permute(0, 3, 1, 2, 4).reshape(BATCH, SEQ, s.H * s.E)


def norm(s, x, weight):
    if s.gated:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight
    return F.layer_norm(x, (s.D,), weight[0], weight[1])


def activation(s, x):
    if s.gated:
        gate, up = x.view(BATCH, SEQ, s.F, 2).unbind(-1)
        return F.silu(gate) * up
    return F.gelu(x)


def run(s, op, inputs, weight):
    """The output of an op on its inputs, tensors or DTensors."""
    if op.kind == ADD:
        return inputs[0] + inputs[1]
    if op.kind == NORM:
        return norm(s, inputs[0], weight)
    if op.kind in (ATTENTION, ACTIVATION):
        return dict(attention=attention, activation=activation)[op.kind](s, inputs[0])
    return product(inputs[0], weight)


def product(x, weight):
    if isinstance(x, DTensor) and x.device_mesh.ndim == 2:
        return (x.unsqueeze(-2) * weight).sum(-1)
    return F.linear(x, weight)


def weights(graph, s):
    """Weights of each op; None where it has none."""
    tensors = []
    for op in graph.ops:
        if op.kind == NORM:
            tensors.append(torch.randn(s.D) + 1 if s.gated else torch.randn(2, s.D) + 1)
        else:
            columns = dict(zip(("qkv", "out", "fc 1", "fc 2"), (s.D, s.H * s.E, s.D, s.F))).get(op.name)
            tensors.append(torch.randn(op.weights // columns, columns) / columns**0.5 if columns else None)
    return [w if w is None else w.double().requires_grad_() for w in tensors]


def outputs(graph, convert, run_op, x):
    """The last op's output; ``convert(v, u, t)``: op u's output, of value t, as op v reads it."""
    end = len(graph.ops) - 1
    values = {end: x}
    for v, op in enumerate(graph.ops):
        out = run_op(v, [convert(v, u, values[u]) for u in op.inputs])
        values[v] = out
    return values[end]


def one_process(graph, s):
    """-> input, weights, output, its gradient, and the gradients of input and weights."""
    torch.manual_seed(0)
    x = torch.randn(BATCH, SEQ, s.D, dtype=torch.float64, requires_grad=True)
    ws = weights(graph, s)
    y = outputs(graph, lambda v, u, t: t, lambda v, ins: run(s, graph.ops[v], ins, ws[v]), x)
    grad = torch.randn_like(y)
    grads = torch.autograd.grad(y, [x, *(w for w in ws if w is not None)], grad)
    return x, ws, y, grad, grads


def planned(mesh, space, kind, solution):
    """-> whether every op leaves its declared layout, the largest error, and the bytes that this rank has sent."""
    s, graph, chosen = Shape.of(CONFIGS[kind]), space.graph, space.chosen(solution)
    x, ws, y, grad, expected = one_process(graph, s)
    declared = []
    with all_to_all():
        placed_ws = [None if w is None else placed(w, mesh, c) for w, c in zip(ws, chosen)]
        x = laid_out(x.detach(), mesh, placements(chosen[-1].output)).requires_grad_()
        above = laid_out(grad, mesh, gradients(chosen[-1].output))

        def convert(v, u, t):
            return walked(t, space.conversions(u).path(chosen[u].output, chosen[v].input))

        def run_op(v, inputs):
            out = run(s, graph.ops[v], inputs, placed_ws[v])
            declared.append(list(out.placements) == placements(chosen[v].output))
            return out

        with Sent(mesh.size(0)) as sent:
            out = outputs(graph, convert, run_op, x)
            leaves = [x, *(w for w in placed_ws if w is not None)]
            grads = torch.autograd.grad(out, leaves, above)
            summed = [placed_like(g, t) for g, t in zip(grads, leaves)]  # sums of weights' gradients
    errors = [float((a.full_tensor() - b).detach().abs().max()) for a, b in zip([out, *summed], [y, *expected])]
    return all(declared), max(errors), sent.bytes


def placed(weight, mesh, strategy):
    """A norm's vectors are whole; torch's names of a matrix's placements are the plan's."""
    return laid_out(weight.detach(), mesh, placements(strategy.weight)).requires_grad_()


def placed_like(grad, leaf):
    return grad.redistribute(leaf.device_mesh, leaf.placements)
