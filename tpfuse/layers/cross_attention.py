"""Attention from one sequence to another, with the heads split over the ranks.

x [m, D] -> q [M, H/R, E]        memory [t, C] -> k, v [T, G/R, 2, E]        o [M, H/R E] -> sum + bias [m, D]

Both sequences are rows, s * batch + b, each with its own length and padding.  Between the projections stands torch's
scaled_dot_product_attention, and with dropout the same in plain torch with this library's masks; with ``tp.bitwise`` by
leaves of the heads.
"""

import functools
import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.attn.options import Options, as_key_mask
from ..kernels.attn.reference import keep_mask
from ..kernels.runtime import matmul
from ..kernels.runtime.errors import check
from ..kernels.runtime.leaves import cut
from ..kernels.runtime.op import acc_dtype
from ..kernels.runtime.philox import active_rng, scale, threshold
from ..kernels.runtime.rules import COUNT, check_number
from ..parallel import TensorParallel
from ..sequence_parallel.context import HeadSplit, cross_back, cross_rows
from .linear import ColumnParallelLinear, ColumnProjection, RowParallelLinear
from .module import ParallelModule, leaf_slices, on_pieces
from .shapes import check_heads
from .sites import cross_site


class KeyValue(ColumnProjection):
    """The projection to k and v, [G, 2, E, C]; ``copies`` leaves, without ``tp.bitwise`` ranks, in a row hold the same
    head."""

    repr_fields = "in_features", "groups", "copies"
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        groups: int,
        head_width: int,
        *,
        copies: int,
        bias: bool,
        tp: TensorParallel,
        init_std: float,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__(tp)
        self.in_features, self.groups, self.copies = in_features, groups, copies
        shape = groups, 2, head_width
        self.add_parameter("weight", (*shape, in_features), 0, init_std, copies=copies, dtype=dtype, device=device)
        self.add_parameter("bias", shape, 0, "zeros", present=bias, copies=copies, dtype=dtype, device=device)
        self.initialize_alone()

    def flat(self) -> tuple[Tensor, Tensor | None]:
        weight, bias = self._all_copies(on_pieces(self.weight, self.tp)), on_pieces(self.bias, self.tp)
        return weight.reshape(-1, self.in_features), None if bias is None else self._all_copies(bias).reshape(-1)

    def _all_copies(self, p: Tensor) -> Tensor:
        return p if self.copies == 1 else torch.cat(leaf_slices(p, self.tp, self.copies))

    def forward(self, memory: Tensor) -> Tensor:
        """memory [t, C] -> [T, 2 E G/R]"""
        return self.project(memory)


class CrossAttention(ParallelModule):
    """Attention of x to another sequence, ``memory``: torch.nn.MultiheadAttention(x, memory, memory).

    ``memory_size`` is memory's width (default: hidden_size); ``num_kv_heads`` fewer kv heads, each for a group of query
    heads; ``head_width`` defaults to hidden_size / num_heads.  ``bias`` is that of the projections to q, k and v and,
    unless ``out_bias`` is given, of the output's.  ``dropout`` is on the probabilities; ``layer`` numbers its masks
    among cross-attentions (they differ from those of every block).  ValueError where heads cannot be split.
    """

    repr_fields = "head_width", "dropout"

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        memory_size: int | None = None,
        num_kv_heads: int | None = None,
        head_width: int | None = None,
        tp: TensorParallel | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        out_bias: bool | None = None,
        layer: int = 0,
        init_std: float = 0.02,
        out_init_std: float | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__(tp)
        name = "CrossAttention"
        groups = num_heads if num_kv_heads is None else num_kv_heads
        check_heads(name, hidden_size, num_heads, groups, head_width=head_width)
        self.heads = self.tp.divide_leaves(num_heads, f"{name}: num_heads")
        leaves, bitwise = self.tp.all_leaves, self.tp.bitwise
        split = f"tensor-parallel size {leaves}" if bitwise is None else f"bitwise={bitwise}"
        fits = groups % leaves == 0 or leaves % groups == 0
        check(fits, f"{name}: num_kv_heads={groups} and {split}: one must divide the other")
        check(self.tp.batch_invariant is None, f"{name}: it is not built for batch_invariant")
        threshold(dropout)
        self.hidden_size, self.memory_size = hidden_size, hidden_size if memory_size is None else memory_size
        self.head_width = E = hidden_size // num_heads if head_width is None else head_width
        self.first_head, self.dropout, self.site = self.tp.rank * self.heads, dropout, cross_site(layer)
        here = max(1, groups // leaves)
        if self.tp.cp_kind != "keys":
            HeadSplit(here, self.heads // here, self.tp.cp_size).check(name)
        self.q = ColumnParallelLinear(
            hidden_size, (num_heads, E), bias, tp=self.tp, init_std=init_std, dtype=dtype, device=device
        )
        self.kv = KeyValue(
            self.memory_size, groups, E, copies=max(1, leaves // groups), bias=bias, tp=self.tp, init_std=init_std,
            dtype=dtype, device=device,
        )  # fmt: skip
        out_bias = bias if out_bias is None else out_bias
        out_std = init_std if out_init_std is None else out_init_std
        self.out = RowParallelLinear(
            num_heads * E, hidden_size, out_bias, tp=self.tp, init_std=out_std, dtype=dtype, device=device
        )
        self.compare_alone()

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        *,
        batch: int,
        seq: int | None = None,
        memory_seq: int | None = None,
        attention_mask: Tensor | None = None,
        rng: Tensor | None = None,
    ) -> Tensor:
        """x [m, D], memory [t, C], this rank's rows of each (without sequence parallelism all) -> [m, D].

        ``seq`` and ``memory_seq`` positions: all rows over ``batch`` unless given; rows beyond are padding.
        ``attention_mask`` [batch, memory_seq], nonzero where a key may be seen; a sample that sees none gets 0 before
        the output's bias.  ``rng`` where dropout is on.
        """
        _check_rows("x", x, self.hidden_size)
        _check_rows("memory", memory, self.memory_size)
        q, kv, E = self.q(x), self.kv(memory), self.head_width
        seq = _positions("x", q.shape[0], batch, seq, tp=self.tp)
        memory_seq = _positions("memory", len(kv), batch, memory_seq, tp=self.tp)
        rows = q.shape[0]
        mask = as_key_mask("CrossAttention: attention_mask", attention_mask)
        shape = batch, memory_seq
        fits = mask is None or mask.shape == shape
        check(
            fits, f"CrossAttention: attention_mask must be {shape}, got {None if mask is None else tuple(mask.shape)}"
        )
        q, kv = q.unflatten(1, (-1, E)), kv.unflatten(1, (-1, 2, E))
        here = cross_rows(q, kv, (seq, memory_seq), batch=batch, tp=self.tp)
        k, v = here.kv.unflatten(0, (memory_seq, batch)).permute(3, 1, 2, 0, 4)  # [B, G, T, E]
        q = here.q.unflatten(0, (-1, batch)).permute(1, 2, 0, 3)
        p = self.dropout if self.training else 0.0
        rng, leaves = active_rng("CrossAttention", p, rng), max(self.tp.leaves, 1)
        attend = functools.partial(self._attend, mask=mask, rng=rng, positions=here.positions)
        by_leaf = (cut("CrossAttention", t, 1, leaves) if leaves > 1 else (t,) for t in (q, k, v))
        first_heads = itertools.count(self.first_head + here.skipped, self.heads // leaves)
        o = torch.cat([attend(*pieces, first_head=h) for *pieces, h in zip(*by_leaf, first_heads)], 1)
        o = o.permute(2, 0, 1, 3).flatten(0, 1).flatten(1)
        return self.out(cross_back(o, rows, self.tp.piece(seq) * batch, self.tp))

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, rng: Tensor | None, positions: Tensor,
        first_head: int,
    ) -> Tensor:  # fmt: skip
        """q [B, H, S, E] of ``positions`` [S], k and v [B, G, T, E] of heads from ``first_head`` on, mask bool [B, T]
        -> [B, H, S, E]"""
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        dtype, (q, k, v) = q.dtype, matmul.operands(q, k, v)
        visible = None if mask is None else mask.any(1)[:, None, None, None]
        if mask is not None and visible is not None:
            # Who sees nothing would get NaN: it sees all, and then counts nothing.
            mask = mask[:, None, None] | ~visible
        if rng is None:
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            s = (q @ k.transpose(-1, -2)).to(acc_dtype(q)) * self.head_width**-0.5
            probs = (s if mask is None else s.masked_fill(~mask, -torch.inf)).softmax(-1)
            o = (probs * self._mask(rng, probs, positions, first_head)).to(v.dtype) @ v
        return (o if visible is None else torch.where(visible, o, 0)).to(dtype)

    @torch.no_grad()
    def _mask(self, rng: Tensor, probs: Tensor, positions: Tensor, first_head: int) -> Tensor:
        """Returns 0 or 1 / (1 - p) for every probability [B, H, S, T]; it reads rng, so that a GPU is waited for."""
        (_, heads, _, keys), samples = probs.shape, torch.arange(len(probs), device=probs.device)
        options = Options(rng=rng, p=self.dropout, site=self.site, first_head=first_head)
        kept = keep_mask(options, positions, samples, heads=heads, keys=range(keys), dtype=probs.dtype)
        return kept * scale(self.dropout)


def _check_rows(name: str, x: Tensor, width: int) -> None:
    fits = x.dim() == 2 and x.shape[1] == width
    check(fits, f"CrossAttention: {name} must be rows [m, {width}], row s * batch + b, got {tuple(x.shape)}")


def _positions(name: str, rows: int, batch: int, seq: int | None, *, tp: TensorParallel) -> int:
    """Returns the positions of whole sequences, of which the ranks of ``tp`` together have ``rows`` rows."""
    check_number("CrossAttention: batch", batch, COUNT)
    if seq is None:
        check(rows % batch == 0, f"CrossAttention: {rows} rows of {name} are not divisible by batch={batch}; give seq")
        return rows // batch * tp.cp_size
    here = tp.piece(seq)
    check(
        0 < here * batch <= rows, f"CrossAttention: seq x batch = {here} x {batch} rows of {name}, and there are {rows}"
    )
    return seq
