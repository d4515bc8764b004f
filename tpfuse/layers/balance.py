"""Losses that keep a router's experts equally busy, of sums over rows that every layer with experts gives.

Of each sequence n, with T_n tokens t, logits x and probabilities p over all E experts (their softmax, or sigmoids
divided by their sum), a layer gives

    c_ne  tokens that chose expert e      P_ne = sum_t p_te      z_n = sum_t (log sum_e exp x_te)^2      T_n

and a loss is made of the sums of all layers at the end of a model:

    "sequence"  sum over layers, mean over sequences, of  E / (k T_n^2) sum_e c_ne P_ne
                (DeepSeek-V3, arXiv:2412.19437, equations 17 to 20)
    "batch"     E / T^2 sum_e c_e P_e, with c, P and T summed over sequences and layers, as transformers has it (Switch
                Transformer, arXiv:2101.03961, equations 4 to 6, of one layer)
    z           sum over layers, mean over sequences, of  z_n / T_n      (ST-MoE, arXiv:2202.08906, equation 5)

The sums are outputs of a block, which travel with n: a block that is computed again in backward counts nothing twice.
Each rank sums its own rows; the ranks' sums are added in one message for all layers.  Counts have no gradient.

"sequence" and z are sums over sequences, each weighed by its labels where the cross entropy is a mean over labels: they
are the same however sequences are shared out to micro-batches, replicas and ranks.  "batch" is not: its product is of
what one call has.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..collectives import reduce
from ..kernels.experts.router import sigmoid
from ..kernels.runtime.errors import check
from ..kernels.runtime.leaves import tree
from ..kernels.runtime.philox import FirstRow, global_rows
from ..kernels.runtime.rules import NOT_NEGATIVE, check_rules, described, one_of
from ..parallel import TensorParallel
from .call import Call

KINDS = "sequence", "batch"


class ExpertBalance(NamedTuple):
    """``coefficient`` times the loss of balance of this ``kind``, and ``z`` times that of the router's logits."""

    kind: str = "sequence"
    coefficient: float = 1e-3
    z: float = 0.0


_RULES = dict(kind=one_of(KINDS), coefficient=NOT_NEGATIVE, z=NOT_NEGATIVE)


def check_balance(caller: str, balance: ExpertBalance) -> None:
    """Raises ValueError, in the name of ``caller``, for a loss that is not built."""
    check(
        isinstance(balance, ExpertBalance), f"{caller}: balance must be a tpfuse.layers.ExpertBalance, got {balance!r}"
    )
    check_rules(f"{caller}: balance", balance._asdict(), _RULES)


# ---- of a layer ----


def router_sums(logits: Tensor, chosen: Tensor, score: str, call: Call, m: int, tp: TensorParallel) -> Tensor:
    """Returns [N, 2 E + 2], columns c, P, z and T, of this rank's m rows, of which the last may be padding.

    logits [valid, E] and chosen [valid, k] are the router's, ``score`` its Routing's.  N counts ``call``'s samples, or
    its packed documents.  Padding and keys that are masked count nothing.  With ``tp.bitwise`` the sum is a node of
    that over all rows.
    """
    counts = torch.zeros_like(logits).scatter_(1, chosen.long(), 1.0)
    p = logits.softmax(-1)
    if score == "sigmoid":
        p = sigmoid(logits)
        p = p / p.sum(-1, keepdim=True)
    z = logits.logsumexp(-1, keepdim=True).square()
    values = torch.cat((counts, p, z, torch.ones_like(z)), 1)
    of = _sequences(call, call.first_row(m, tp.rank, tp.size, tp), logits.shape[0], logits.device).to(values.dtype)
    with torch.autocast(logits.device.type, enabled=False):  # whose products would count in 16 bits
        if tp.bitwise is None or m == 0:
            return of @ values
        of, values = (F.pad(t, (0, 0, 0, m - logits.shape[0])) for t in (of.t(), values))
        pieces = (t.split(m // tp.leaves) for t in (of, values))
        return tree(o.t().contiguous() @ v.clone() for o, v in zip(*pieces, strict=True))


def in_a_sequence(call: Call, m: int, *, valid: int, tp: TensorParallel, device: torch.device) -> Tensor:
    """Returns bool [valid]: which of the first of this rank's m rows count, those of a sequence and no padding."""
    if call.cu_seqlens is None and call.key_mask is None:
        return torch.ones(valid, dtype=torch.bool, device=device)
    return _sequences(call, call.first_row(m, tp.rank, tp.size, tp), valid, device).any(0)


def _sequences(call: Call, first_row: FirstRow, m: int, device: torch.device) -> Tensor:
    """Returns bool [N, m]: which sequence a row is of, none for padding."""
    row = global_rows(first_row, m, device)
    if call.cu_seqlens is None:
        number, count = row % call.batch, call.batch
    else:
        bounds = call.cu_seqlens.long()
        number, count = torch.searchsorted(bounds, row, right=True) - 1, len(bounds) - 1
    valid = torch.ones_like(row, dtype=torch.bool) if call.seq is None else row < call.seq * call.batch
    if call.key_mask is not None:
        batch, seq = call.key_mask.shape
        valid &= call.key_mask[row % batch, (row // batch).clamp(max=seq - 1)]
    return (number == torch.arange(count, device=device)[:, None]) & valid


# ---- of a model ----


def balance_loss(
    sums: Iterable[Tensor],
    balance: ExpertBalance,
    *,
    weights: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    tp: TensorParallel | None = None,
) -> Tensor:
    """Returns the loss, a scalar in fp32 (fp64 for fp64): sums of each layer, [N, 2 E + 2] of this rank's rows.

    It is the same on every rank of ``tp``, whose ranks call it together.  ``weights`` [N] are those of the sequences,
    usually the number of labels of each (default: equal), and ``normalizer`` what their sum is divided by (default:
    itself): the cross entropy's.  ValueError for a balance that is not built, where there are no layers, and for sums
    or weights that do not fit each other.
    """
    check_balance("balance_loss", balance)
    layers = list(sums)
    check(len(layers) > 0, "balance_loss: sums must be of one layer at least, got none")
    shapes = dict.fromkeys(tuple(layer.shape) for layer in layers)
    check(len(shapes) == 1, f"balance_loss: layers must have as many experts and sequences each, got sums {[*shapes]}")
    tp = TensorParallel() if tp is None else tp
    total = reduce(torch.stack(layers), tp)  # [L, N, 2 E + 2]
    total = total if tp.cp is None else reduce(total, tp.cp)
    E = total.shape[-1] // 2 - 1
    c, P, z, T = total.split((E, E, 1, 1), dim=-1)
    T = T.squeeze(-1)
    weights = torch.ones_like(T[0]) if weights is None else weights.to(T)
    check(
        weights.shape == T[0].shape,
        f"balance_loss: weights must be [{T.shape[1]}], those of the sequences, got {described(weights)}",
    )
    if normalizer is None:
        whole = weights.sum()
        normalizer = torch.where(whole == 0, 1, whole)  # no labels: no loss
    share = weights / normalizer
    if balance.kind == "sequence":
        of_sequences = E * (c * P).sum(-1) / (T * c.sum(-1)).clamp(min=1)
        loss = (of_sequences.sum(0) * share).sum()
    else:
        c, P, tokens = (t.flatten(0, 1).sum(0) for t in (c, P, T))
        loss = E * (c * P).sum() / tokens.square().clamp(min=1) * share.sum()
    loss = balance.coefficient * loss
    if balance.z == 0:
        return loss
    of_sequences = z.squeeze(-1) / T.clamp(min=1)
    return loss + balance.z * (of_sequences.sum(0) * share).sum()
