import torch
from tpfuse import TensorParallel
from tpfuse.kernels._philox import make_rng
from tpfuse.layers import TransformerBlock
from tpfuse.layers._module import named_specs

def build(tp, **kw):
    torch.manual_seed(0)
    return TransformerBlock(48, 12, 96, tp=tp, dropout=0.1, attention_dropout=0.1, dtype=torch.float64, **kw)

def sharded(world, sp, kw, x, dy):
    tp = TensorParallel(world.group if world.size > 1 else None, sequence_parallel=sp)
    b = build(tp, **kw)
    m = len(x) // tp.row_shards
    rows = slice(tp.row_rank * m, (tp.row_rank + 1) * m)
    x = x[rows].clone().requires_grad_()
    y = b(x, batch=3, rng=make_rng(1, 0))
    y.backward(dy[rows])
    return rows, y.detach(), x.grad, {n: (s.local(t), p.grad) for (n, s, t), p in zip(named_specs(b), b.parameters())}

import pytest
@pytest.mark.parametrize("R", [1, 2, 4])
@pytest.mark.parametrize("sp", [True, False])
@pytest.mark.parametrize("kw", [dict(), dict(saving="smallest"), dict(post_norm=True), dict(post_norm=True, saving="smallest")])
def test(ranks, R, sp, kw):
    x, dy = torch.randn(2, 24, 48, dtype=torch.float64)
    b = build(None, **kw)
    x.requires_grad_()
    y = b(x, batch=3, rng=make_rng(1, 0)); y.backward(dy)
    for rows, yr, dx, grads in ranks(R, sharded, sp, kw, x.detach(), dy):
        torch.testing.assert_close(yr, y[rows].detach(), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(dx, x.grad[rows], rtol=1e-10, atol=1e-12)
        for n, p in b.named_parameters():
            sl, g = grads[n]
            torch.testing.assert_close(g, p.grad[sl], rtol=1e-10, atol=1e-11, msg=lambda m: n+m)
