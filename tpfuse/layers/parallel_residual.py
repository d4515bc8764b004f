"""A transformer block whose attention and MLP stand side by side, as in GPT-NeoX (Black et al. 2022,
arXiv:2204.06745): h' = h + dropout(attention(norm(h))) + dropout(mlp(norm'(h))).

    h [m, D], n = norm(h)          from the block before
    n' = norm_attention(h)         a kernel of its own: the norm in front of the MLP, which reads the same h
    gather_attention_exchange(n)   -> parts [R, m, D]
    reduce_bias_dropout_add        a = h + dropout(sum_r parts + bias)
    gather_mlp_exchange(n')        -> parts [R, m, D]
    reduce_bias_dropout_add_norm   h' = a + dropout(sum_r parts + bias);  n of the next block

Both sums are taken in rank order, attention's first.  Beside one kernel over 2R parts this writes and reads ``a`` once
more, and spares what would bring both branches' parts into one buffer; for backward ``a`` is not kept.
"""

from typing import Any

from torch import Tensor

from ..kernels.norm import Recompute, norm_in, reduce_bias_dropout_add_norm
from .module import replicated


def parallel_residual(
    block: Any, h: Tensor, given: tuple[Tensor, Recompute | None] | None, *, rng: Tensor | None, **attending: Any
) -> tuple[Tensor, Tensor, Recompute | None]:
    """h [m, D], and its n with how to recompute it where the block has no norm_in -> h', n' and how to recompute it."""
    tp, attention, mlp = block.tp, block.attention, block.mlp
    own, last, first = block.norm_attention, block.last_norm, block.norm_in
    vectors = [attention.out.bias, mlp.fc2.bias]
    for norm in (own, last, first):
        vectors += [None, None] if norm is None else [norm.weight, norm.bias]
    out_bias, fc2_bias, *norms = replicated(tp, *vectors)
    enter: dict[str, Any] = dict(eps=own.eps, norm=own.kind, ranks=tp.row_shards, recompute=block._again)
    h, n, recompute = norm_in(h, *norms[4:], **enter) if given is None else (h, *given)
    h, beside, how = norm_in(h, *norms[:2], **enter)
    drop: dict[str, Any] = dict(p=block.dropout if block.training else 0.0, rng=rng, batch=attending["batch"])
    drop["first_row"] = tp.row_rank * len(h)
    parts = attention.parts(n, recompute=block._keep(recompute), rng=rng, **attending)
    a, *_ = reduce_bias_dropout_add_norm(parts, out_bias, h, site=block.sites.after_attention, **drop)
    parts = mlp.parts(beside, how)
    drop |= enter | dict(site=block.sites.after_mlp)
    return reduce_bias_dropout_add_norm(parts, fc2_bias, a, norms[2], norm_bias=norms[3], **drop)
