"""Losses that balance experts: by their definitions in plain torch, transformers' own, and the same at every split."""

import re

import pytest
import torch
from torch import Tensor

from tests.common import error, make_tp
from tests.planted import Mistaken
from tpfuse import TensorParallel
from tpfuse.kernels import Routing
from tpfuse.kernels.runtime.philox import make_rng
from tpfuse.layers import Call, ExpertBalance, ParallelMoE, TransformerBlock, balance_loss

F64 = torch.float64
D, FFN, E, B, S = 24, 12, 8, 3, 9  # 27 rows, and one of padding, over 2 and 4 ranks: no multiple of the samples
ROUTINGS = {
    "softmax": Routing(2),
    "all probabilities": Routing(3, renormalize=False),
    "sigmoid": Routing(2, "sigmoid"),
    "groups": Routing(2, "sigmoid", True, 2.5, 4, 2),
}


def plain(x: Tensor, router: Tensor, routing: Routing, chosen: Tensor) -> dict[str, Tensor]:
    """x [B, S, D], chosen [B, S, k] -> each kind of loss, by its definition."""
    logits = x @ router.t()
    p = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True) if routing.score == "sigmoid" else logits.softmax(-1)
    f = torch.nn.functional.one_hot(chosen, E).sum(-2).to(p)  # [B, S, E]
    sequence = (f.mean(1) * E / routing.k * p.mean(1)).sum(-1).mean()
    batch = E * (f.mean((0, 1)) * p.mean((0, 1))).sum()
    return dict(sequence=sequence, batch=batch, z=logits.logsumexp(-1).square().mean())


BALANCES = dict(
    sequence=ExpertBalance("sequence", 1.0), batch=ExpertBalance("batch", 1.0), z=ExpertBalance("batch", 0.0, 1.0)
)


def data(seq: int = S) -> Tensor:
    return torch.randn(B, seq, D, generator=torch.Generator().manual_seed(4), dtype=F64)


def make(routing: Routing, tp: TensorParallel | None) -> ParallelMoE:
    torch.manual_seed(1)
    return ParallelMoE(D, FFN, E, routing, tp=tp, init_std=0.4, dtype=F64)


def losses(world, routing: Routing, sp: bool):
    """Each kind's loss, and its gradients of all rows and of the router; the last rows are padding."""
    layer = make(routing, TensorParallel(world.group, sequence_parallel=sp) if world else None)
    rows = torch.nn.functional.pad(data().transpose(0, 1).flatten(0, 1), (0, 0, 0, 1), value=9.0)
    found = {}
    for kind, balance in BALANCES.items():
        x = rows.chunk(layer.tp.row_shards)[layer.tp.row_rank].clone().requires_grad_()
        layer.zero_grad()
        _, sums = layer(x, call=Call(batch=B, seq=S, router_sums=True))
        loss = balance_loss([sums], balance, tp=layer.tp)
        loss.backward()
        found[kind] = loss.detach(), x.grad, layer.router.grad.clone()
    return found


@pytest.mark.parametrize("R, sp", [(1, True), (2, True), (4, True), (2, False)])
@pytest.mark.parametrize("name", ROUTINGS)
def test_losses_by_their_definition(ranks, name, R, sp):
    layer, x = make(ROUTINGS[name], None), data().requires_grad_()
    routed = layer._routed(x.transpose(0, 1).flatten(0, 1), B * S, None, Call(B, S))
    expected = plain(x, layer.router, layer.routing, routed.chosen.view(S, B, -1).transpose(0, 1).long())
    every = ranks(R, losses, ROUTINGS[name], sp)
    for kind, loss in expected.items():
        dx, dw = torch.autograd.grad(loss, (x, layer.router), retain_graph=True)
        rows = torch.nn.functional.pad(dx.transpose(0, 1).flatten(0, 1), (0, 0, 0, 1))
        shards = rows.chunk(R) if sp else [rows] * R
        for found, shard in zip(every, shards, strict=True):
            value, of_rows, of_router = found[kind]
            assert abs(value - loss) < 1e-13 and error(of_rows, shard) < 1e-12 and error(of_router, dw) < 1e-12, kind


def of_all_ranks_alike(right, logits, chosen, score, call, m, tp):
    """Every rank's rows are taken for the first one's."""
    return right(logits, chosen, score, call, m=0, tp=TensorParallel())


def test_a_mistake_is_seen(ranks):
    spoilt = Mistaken(losses, "tpfuse.layers.moe.router_sums", of_all_ranks_alike)
    (right,) = ranks(1, losses, ROUTINGS["softmax"], True)
    for found in ranks(2, spoilt, ROUTINGS["softmax"], True):
        assert abs(found["sequence"][0] - right["sequence"][0]) > 1e-3
        assert abs(found["batch"][0] - right["batch"][0]) < 1e-12  # which knows no sequences


def of_documents(world, packed: bool):
    """Documents of 4, 1 and 6 tokens in one row, and 3 tokens behind them that are none's."""
    layer, bounds = make(ROUTINGS["softmax"], make_tp(world)), torch.tensor([0, 4, 5, 11], dtype=torch.int32)
    x = torch.randn(14, D, generator=torch.Generator().manual_seed(2), dtype=F64)
    x = torch.nn.functional.pad(x, (0, 0, 0, -14 % layer.tp.size))
    if packed:
        shard = x.chunk(layer.tp.row_shards)[layer.tp.row_rank]
        _, sums = layer(shard, call=Call(1, 14, cu_seqlens=bounds, max_seqlen=6, router_sums=True))
        return balance_loss([sums], ExpertBalance("sequence", 1.0), weights=bounds.diff(), tp=layer.tp)
    alone = [layer(rows, router_sums=True)[1] for rows in x[:11].split((4, 1, 6))]
    each = torch.stack([balance_loss([sums], ExpertBalance("sequence", 1.0)) for sums in alone])
    return (each * bounds.diff()).sum() / 11


def test_packed_documents_are_sequences(ranks):
    (alone,) = ranks(1, of_documents, False)
    for R in (1, 2, 4):
        for loss in ranks(R, of_documents, True):
            assert abs(loss - alone) < 1e-13


def test_keys_that_are_masked_count_nothing():
    layer, x = make(ROUTINGS["softmax"], None), data()
    mask = torch.arange(S) < torch.tensor([S, 3, 5])[:, None]
    _, sums = layer(x.transpose(0, 1).flatten(0, 1), call=Call(B, S, key_mask=mask, router_sums=True))
    alone = [layer(rows[valid], router_sums=True)[1] for rows, valid in zip(x, mask, strict=True)]
    assert error(sums, torch.cat(alone)) < 1e-14 and sums[:, -1].tolist() == [S, 3, 5]


def test_a_loss_of_the_logits_alone():
    """Where the layer's output is not used its weights have gradients of zeros, and the router that of the loss."""
    layer = make(ROUTINGS["softmax"], None)
    balance_loss([layer(data(), router_sums=True)[1]], BALANCES["z"]).backward()
    assert layer.fc1.grad.eq(0).all() and layer.fc2.grad.eq(0).all() and layer.router.grad.abs().sum() > 0


def test_autocast_leaves_the_sums_alone():
    """Of logits in fp32: 16 bits cannot count beyond 256."""
    layer = ParallelMoE(D, FFN, E, Routing(2))
    x = torch.randn(600, D, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16):
        _, sums = layer(x, router_sums=True)
    assert sums.dtype == torch.float32 and sums[0, -1] == 600 and sums[0, :E].sum() == 2 * 600
    assert abs(sums[0, E : 2 * E].sum() - 600) < 1e-2


@pytest.mark.parametrize("weights", [[0.25, 0.5, 0.05], [2.0, 4.0, 0.4]])
def test_weights_are_relative(weights):
    layer, x = make(ROUTINGS["softmax"], None), data().transpose(0, 1).flatten(0, 1)
    _, sums = layer(x, batch=B, router_sums=True)
    each = torch.stack([balance_loss([part], BALANCES["sequence"]) for part in sums.split(1)])
    w = torch.tensor(weights, dtype=F64)
    assert abs(balance_loss([sums], BALANCES["sequence"], weights=w) - (each * w).sum() / w.sum()) < 1e-13
    assert balance_loss([sums], BALANCES["sequence"], weights=0 * w) == 0


# ---- in a block ----


def of_a_block(world, name: str):
    options = dict(num_experts=E, routing=Routing(2), gated=True, activation="silu", bias=False, norm="rms")
    torch.manual_seed(2)
    tp = TensorParallel(world.group, sequence_parallel=name != "replicated") if world else None
    saving = "smallest" if name == "smallest" else "fastest"
    block = TransformerBlock(D, 4, FFN, tp=tp, dropout=0.1, init_std=0.3, saving=saving, dtype=F64, **options)
    if name == "hooked":
        block.mlp.register_forward_hook(lambda *_: None)
    rows = torch.nn.functional.pad(data().transpose(0, 1).flatten(0, 1), (0, 0, 0, 1))
    x = rows.chunk(block.tp.row_shards)[block.tp.row_rank].clone().requires_grad_()
    y, sums = block(x, batch=B, seq=S, rng=make_rng(1, 1), router_sums=True)
    loss = balance_loss([sums], ExpertBalance("sequence", 0.1, 0.01), tp=block.tp)
    dy = torch.full_like(y, 0.1)
    torch.autograd.backward([y, loss], [dy, torch.ones_like(loss)])
    return loss.detach(), block.mlp.router.grad, block.input_norm.weight.grad


@pytest.mark.parametrize("name", ["fused", "replicated", "smallest", "hooked"])
def test_blocks_hand_the_sums_on(ranks, name):
    (one,) = ranks(1, of_a_block, "fused")
    for found in ranks(2, of_a_block, name):
        assert all(error(a, b) < 1e-12 for a, b in zip(found, one, strict=True))


# ---- what is refused ----


@pytest.mark.parametrize("balance, message", [
    (ExpertBalance("global"), "balance_loss: balance: kind must be one of sequence, batch, got 'global'"),
    (ExpertBalance(coefficient=-1.0), "balance_loss: balance: coefficient must be at least 0 and finite, got -1.0"),
    (0.1, "balance_loss: balance must be a tpfuse.layers.ExpertBalance, got 0.1"),
])  # fmt: skip
def test_balances_that_are_refused(balance, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        balance_loss([torch.zeros(1, 2 * E + 2)], balance)


def test_sums_that_nobody_has():
    with pytest.raises(ValueError, match="balance_loss: sums must be of one layer at least, got none"):
        balance_loss([], ExpertBalance())
    with pytest.raises(
        ValueError, match=re.escape("layers must have as many experts and sequences each, got sums [(1, 6)")
    ):
        balance_loss([torch.zeros(1, 6), torch.zeros(1, 10)], ExpertBalance())
    with pytest.raises(ValueError, match=re.escape("balance_loss: weights must be [2], those of the sequences, got")):
        balance_loss([torch.zeros(2, 6)], ExpertBalance(), weights=torch.ones(3))
    block = TransformerBlock(D, 4, FFN, dtype=F64)
    with pytest.raises(ValueError, match="TransformerBlock: router_sums=True needs experts, got num_experts=None"):
        block(torch.zeros(4, D, dtype=F64), batch=1, router_sums=True)
