"""Losses by leaves of a vocabulary: ranks simulated in one process by slices of whole leaves, against one rank; under
Triton's interpreter or on a GPU.

Spans: tpfuse/kernels/losses/op.py, linear_triton.py, tpfuse/sequence_parallel/loss.py.
"""

import functools

import pytest
import torch
from torch import Tensor

from tests.bitwise.training import bits
from tpfuse import TensorParallel
from tpfuse.kernels import replay
from tpfuse.kernels.losses import linear_triton
from tpfuse.kernels.losses.linear import stats_in_tiles
from tpfuse.kernels.losses.op import leaf_bwd, leaf_stats, row_losses
from tpfuse.kernels.losses.options import Linear, Loss, Rows
from tpfuse.kernels.runtime.leaves import tree
from tpfuse.sequence_parallel.loss import _leaf_gradients, leaf_of

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
V, RANKS = 8, (1, 2, 4, 8)


@pytest.fixture
def launchers(monkeypatch):
    """Ops run their launchers, on a CPU too, and no library multiplies."""
    monkeypatch.setattr(replay.calls, "LAUNCHED", replay.calls.LAUNCHED)
    replay.calls.LAUNCHED.add(DEVICE)
    monkeypatch.setattr(linear_triton, "_multiply", lambda *_, **__: pytest.fail("a library's GEMM"))
    yield
    if DEVICE == "cpu":
        replay.calls.LAUNCHED.discard("cpu")


def problem(M: int, N: int, D: int, dtype: torch.dtype) -> tuple[Linear, Rows, Loss]:
    random = lambda *shape: torch.randn(*shape, device=DEVICE).to(dtype)
    labels = torch.randint(N, (M,), device=DEVICE)
    labels[::5] = -100
    rows = Rows(labels, torch.empty(0), torch.rand(M, device=DEVICE))
    return Linear(random(M, D), random(N, D) / D**0.5, random(N)), rows, Loss(N, label_smoothing=0.1, z_loss=1e-2)


def results(layer: Linear, rows: Rows, loss: Loss, ranks: int, join=tree) -> dict[str, Tensor]:
    """What ``ranks`` make of it together: from a linear layer, and from the logits."""
    tp = TensorParallel(None, bitwise=V)
    leaf = leaf_of(loss.vocab_size, tp)
    logits = layer.x @ layer.w.t()
    slices = [slice(i, i + leaf * V // ranks) for i in range(0, leaf * V, leaf * V // ranks)]
    layers = [Linear(*(None if t is None else t.contiguous() for t in layer.of(tokens))) for tokens in slices]
    losses = [loss._replace(first_token=tokens.start) for tokens in slices]
    pieces = [
        torch.stack([stats_in_tiles(part.of(v), rows.labels, of, 0) for v, of in own.leaves(len(part.w), leaf)])
        for part, own in zip(layers, losses, strict=True)
    ]
    made: dict[str, Tensor] = {}
    made["loss"], lse = row_losses(torch.cat(pieces), rows.labels, loss)
    rows = rows._replace(lse=lse)
    gradients = [_leaf_gradients(*(part, rows, own, tp), None) for part, own in zip(layers, losses, strict=True)]
    dx, dw, db = zip(*gradients, strict=True)
    made |= dict(dx=join(dx), dw=torch.cat(dw), db=torch.cat(db))
    own_logits = [logits[:, tokens].contiguous() for tokens in slices]
    stats = [leaf_stats(z, rows.labels, own, leaf) for z, own in zip(own_logits, losses, strict=True)]
    made["loss of logits"], lse = row_losses(torch.cat(stats), rows.labels, loss)
    rows = rows._replace(lse=lse)
    made["dlogits"] = torch.cat([leaf_bwd(z, rows, own, leaf) for z, own in zip(own_logits, losses, strict=True)], 1)
    return made


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    return [name for name in one if not torch.equal(bits(one[name]), bits(other[name]))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("N", [320, 315])
def test_every_split(launchers, N, dtype):
    """Leaves of 40 tokens, the last of 40 or 35; rows of 40 begin at multiples of 16 bytes, those of 35 do not."""
    given = problem(19, N, 24, dtype)
    one = results(*given, 1)
    assert not any(t.isnan().any() for t in one.values())
    assert {ranks: differing(one, results(*given, ranks)) for ranks in RANKS} == {ranks: [] for ranks in RANKS}


def test_values(launchers):
    """Those of torch's own loss, to rounding."""
    layer, rows, loss = problem(19, 315, 24, torch.float32)
    made = results(layer, rows, loss, 4)
    x, w, b = (t.detach().double().requires_grad_() for t in layer)
    z = torch.nn.functional.linear(x, w, b)
    exact = torch.nn.functional.cross_entropy(z, rows.labels, reduction="none", label_smoothing=0.1)
    exact = exact + torch.where(rows.labels >= 0, 1e-2 * z.logsumexp(-1) ** 2, 0)
    gradients = torch.autograd.grad(exact, (x, w, b), rows.dloss.double())
    for name, t in zip(("loss", "dx", "dw", "db"), (exact, *gradients), strict=True):
        torch.testing.assert_close(made[name].double(), t, rtol=2e-5, atol=2e-5)


def test_rank_order_is_seen(launchers):
    given, in_order = problem(19, 315, 24, torch.float32), functools.partial(functools.reduce, torch.add)
    one = results(*given, 1)
    assert not differing(one, results(*given, 2, in_order))
    assert differing(one, results(*given, 4, in_order)) == ["dx"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("N", [8192, 50257])
def test_on_a_gpu(launchers, N, dtype):
    given = problem(333, N, 768, dtype)
    one = results(*given, 1)
    assert {ranks: differing(one, results(*given, ranks)) for ranks in RANKS} == {ranks: [] for ranks in RANKS}
