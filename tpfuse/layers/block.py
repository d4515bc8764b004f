"""A transformer block: two GEMM pairs, and one kernel after each.

    h [m, D]                       residual stream, this rank's rows;  n = norm(h) from the kernel before, [R, m, D] with stride 0
    gather_linear(n)               all-gather, GEMM + bias             -> qkv [M, G/R, Q + 2, E]
    attention(qkv)                                                     -> [M, H/R E]
    linear_exchange                GEMM, send each peer its rows       -> parts [R, m, D]
    reduce_bias_dropout_add_norm   h' = h + dropout(sum_r parts + bias);  n' = norm(h')
    gather_mlp_exchange(n')        all-gather, GEMM + bias + act, GEMM, send  -> parts [R, m, D]
    reduce_bias_dropout_add_norm   h'', n''

Where messages overlap, the first three are one op, gather_attention_exchange.

A block owns the norm *after* each of its GEMM pairs, so every parameter a kernel touches belongs to the module that runs it.  Its six
vectors travel as one packed fp32 message, whose gradients are summed over the ranks.
"""

from typing import NamedTuple

from torch import Tensor

from ..kernels._op import check
from ..kernels.norm import Remake, norm_in
from ..kernels.reduce_bias_dropout_add_norm import reduce_bias_dropout_add_norm
from ..parallel import TensorParallel
from ._cache import KVCache
from ._module import ParallelModule, replicated
from .attention import ParallelAttention, Rope
from .mlp import ParallelMLP
from .norm import LayerNorm, RMSNorm

SAVING = "fastest", "smallest"


class Normed(NamedTuple):
    """n [m, D] or [R, m, D] with stride 0, and how to make it again where it is not to be saved."""

    n: Tensor
    remake: Remake | None = None


class TransformerBlock(ParallelModule):
    """One block, pre-norm (``norm_in=True``: x -> x, in anybody's model; else (h, n) -> (h, n), in a stack of blocks) or ``post_norm``.

    ``layer`` numbers the dropout masks.  ``saving``: "fastest" keeps n and the activation for backward (32 bytes a row and width over R in
    16 bit), "smallest" makes them again (20).  ``dropout`` after attention and MLP, ``attention_dropout`` on the probabilities.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        ffn_size: int | None = None,
        *,
        num_kv_heads: int | None = None,
        head_width: int | None = None,
        tp: TensorParallel | None = None,
        layer: int = 0,
        causal: bool = True,
        window: int | None = None,
        qk_norm: bool = False,
        activation: str = "gelu_tanh",
        gated: bool = False,
        norm: str = "layer",
        eps: float = 1e-5,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        bias: bool = True,
        qkv_bias: bool | None = None,
        out_bias: bool | None = None,
        mlp_bias: bool | None = None,
        norm_in: bool = True,
        post_norm: bool = False,
        saving: str = "fastest",
        init_std: float = 0.02,
        out_init_std: float | None = None,
        **factory,
    ):
        super().__init__(tp)
        check(saving in SAVING, f"TransformerBlock: saving must be one of {', '.join(SAVING)}, got {saving!r}")
        check(norm in ("layer", "rms"), f"TransformerBlock: norm must be layer or rms, got {norm!r}")
        self.dropout, self.saving, self.post_norm, self.layer = dropout, saving, post_norm, layer
        shared = dict(tp=self.tp, init_std=init_std, out_init_std=out_init_std, **factory)
        qkv_bias, out_bias, mlp_bias = (bias if b is None else b for b in (qkv_bias, out_bias, mlp_bias))
        self.attention = ParallelAttention(
            hidden_size,
            num_heads,
            num_kv_heads=num_kv_heads,
            head_width=head_width,
            causal=causal,
            window=window,
            qk_norm=qk_norm,
            eps=eps,
            dropout=attention_dropout,
            bias=qkv_bias,
            out_bias=out_bias,
            layer=layer,
            **shared,
        )
        ffn_size = 4 * hidden_size if ffn_size is None else ffn_size
        self.mlp = ParallelMLP(hidden_size, ffn_size, activation=activation, gated=gated, bias=mlp_bias, **shared)
        make_norm = lambda: (RMSNorm if norm == "rms" else LayerNorm)(hidden_size, eps, tp=self.tp, **factory)  # noqa: E731
        first, second = (False, True) if post_norm or not norm_in else (True, False)
        self.norm_in = make_norm() if first else None
        self.norm_attention = make_norm()
        self.norm_mlp = make_norm() if second else None

    def forward(
        self,
        h: Tensor,
        normed: Normed | None = None,
        *,
        batch: int,
        seq: int | None = None,
        rng: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        rope: Rope | None = None,
        cache: KVCache | None = None,
    ) -> Tensor | tuple[Tensor, Normed]:
        """h [m, D], rows s * batch + b (without sequence parallelism [M, D]) -> [m, D]; with ``normed`` -> (h, normed).

        ``attention_mask`` [batch, seq], nonzero where a key may be seen; ``seq`` where rows beyond seq * batch are padding;
        ``cu_seqlens`` int32 [N + 1], the bounds of packed documents (batch 1), the longest of ``max_seqlen``; ``rope`` rotary positions;
        ``rng`` int64 [3] = (seed, step, first_sample) where dropout is on.
        """
        alone = normed is None
        check(alone or self.norm_in is None, "TransformerBlock: a block with norm_in takes h alone")
        check(not alone or self.norm_in is not None or self.post_norm, "TransformerBlock: without norm_in it takes (h, normed)")
        a, m = self.norm_attention, self.norm_mlp
        names = [self.attention.out.bias, a.weight, a.bias, self.mlp.fc2.bias]
        names += [None, None] if m is None else [m.weight, m.bias]
        if self.norm_in is not None:
            names += [self.norm_in.weight, self.norm_in.bias]
        out_bias, wa, ba, fc2_bias, wm, bm, *first = replicated(self.tp, *names)
        if first:
            h, *normed = norm_in(h, *first, eps=self.norm_in.eps, rms=self.norm_in.rms, ranks=self.tp.row_shards)
        elif alone:
            normed = Normed(h)
        n, remake = normed
        mask = None if attention_mask is None else attention_mask.bool()
        masked = dict(key_mask=mask, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, rope=rope, cache=cache)
        parts = self.attention.parts(n, batch=batch, seq=seq, rng=rng, remake=self._keep(remake), **masked)
        h, n, remake = self._fused(parts, out_bias, h, wa, ba, 2, batch, rng)
        parts = self.mlp.parts(n, self._keep(remake))
        h, n, remake = self._fused(parts, fc2_bias, h, wm, bm, 3, batch, rng)
        return h if alone else (h, Normed(n, self._keep(remake)))

    def _keep(self, remake: Remake | None) -> Remake | None:
        return remake if self.saving == "smallest" else None

    def _fused(self, parts, bias, h, weight, norm_bias, site, batch, rng):
        return reduce_bias_dropout_add_norm(
            parts,
            bias,
            h,
            weight,
            norm_bias,
            p=self.dropout if self.training else 0.0,
            rng=rng,
            site=3 * self.layer + site,
            first_row=self.tp.row_rank * len(h),
            batch=batch,
            eps=self.norm_attention.eps,
            rms=self.norm_attention.rms,
            post_norm=self.post_norm,
            ranks=self.tp.row_shards,
        )
