"""A transformer block: two GEMM pairs, and one kernel after each.

    h [m, D]                       residual stream, this rank's rows
    n = norm(h)                    from the kernel before, [R, m, D] with stride 0
    gather_linear(n)               all-gather, GEMM + bias             -> qkv [M, G/R, Q + 2, E]
    attention(qkv)                                                     -> [M, H/R E]
    linear_exchange                GEMM, send each peer its rows       -> parts [R, m, D]
    reduce_bias_dropout_add_norm   h' = h + dropout(sum_r parts + bias);  n' = norm(h')
    gather_mlp_exchange(n')        all-gather, GEMM + bias + act, GEMM, send  -> parts [R, m, D]
    reduce_bias_dropout_add_norm   h'', n''

Where messages overlap, the first three are one op, gather_attention_exchange.

A block owns the norm *after* each of its GEMM pairs, so every parameter a kernel touches belongs to the module that
runs it.  Its six vectors travel as one packed fp32 message, whose gradients are summed over the ranks.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..kernels.attention.options import as_key_mask
from ..kernels.norm import Recompute, check_kind, norm_in, reduce_bias_dropout_add_norm
from ..kernels.runtime.errors import check
from ..kernels.runtime.op import autocasts
from ..kernels.runtime.philox import Mask, active_rng, threshold
from ..parallel import TensorParallel
from ..sequence_parallel.crossings import expanded
from .attention import ParallelAttention, Rope, Ropes
from .cache import KVCache
from .hooks import hooked
from .mlp import ParallelMLP
from .module import ParallelModule, check_rows, local, replicated
from .norm import LayerNorm, norm_layer
from .one_node import Constants, Layer, Parameters, block
from .sites import sites

SAVING = "fastest", "smallest"


class Normed(NamedTuple):
    """n [m, D] or [R, m, D] with stride 0, and how to recompute it where it is not saved."""

    n: Tensor
    recompute: Recompute | None = None

    @property
    def rows(self) -> Tensor:
        """n [m, D]"""
        return self.n[0] if self.n.dim() == 3 else self.n


class TransformerBlock(ParallelModule):
    """One block: attention and MLP with their norms and residuals, pre-norm or ``post_norm``.

    With ``norm_in=True`` it maps x to x and can stand in any model; without, it maps (h, n) to (h, n) in a stack of
    blocks.  ``layer`` numbers the dropout masks.  ``saving``: "fastest" keeps n and the activation for backward (32
    bytes per row and width over R in 16 bit), "smallest" recomputes them (20).  ``dropout`` acts after attention and
    MLP, ``attention_dropout`` on the probabilities.  ``norm_bias``: whether LayerNorms have a bias.
    """

    shown = "dropout", "post_norm", "saving"
    norm_in: LayerNorm | None
    norm_mlp: LayerNorm | None

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
        norm_bias: bool = True,
        norm_in: bool = True,
        post_norm: bool = False,
        saving: str = "fastest",
        init_std: float = 0.02,
        out_init_std: float | None = None,
        **factory: Any,
    ):
        super().__init__(tp)
        check(saving in SAVING, f"TransformerBlock: saving must be one of {', '.join(SAVING)}, got {saving!r}")
        check_kind("TransformerBlock", norm, eps)
        threshold(dropout)
        self.width = hidden_size
        self.dropout, self.saving, self.post_norm, self.sites = dropout, saving, post_norm, sites(layer)
        shared: dict[str, Any] = dict(tp=self.tp, init_std=init_std, out_init_std=out_init_std, **factory)
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
            bias=bias if qkv_bias is None else qkv_bias,
            out_bias=bias if out_bias is None else out_bias,
            layer=layer,
            **shared,
        )
        ffn_size = 4 * hidden_size if ffn_size is None else ffn_size
        shared["bias"] = bias if mlp_bias is None else mlp_bias
        self.mlp = ParallelMLP(hidden_size, ffn_size, activation=activation, gated=gated, **shared)
        make_norm = lambda: norm_layer(norm, hidden_size, eps, bias=norm_bias, tp=self.tp, **factory)
        enters = norm_in and not post_norm
        self.norm_in = make_norm() if enters else None
        self.norm_attention = make_norm()  # the norm after attention; its name is part of the checkpoint format
        self.norm_mlp = None if enters else make_norm()
        self.compare_alone()

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
        rope: Rope | Ropes | None = None,
        cache: KVCache | None = None,
    ) -> Tensor | tuple[Tensor, Normed]:
        """h [m, D], rows s * batch + b (without sequence parallelism [M, D]) -> [m, D]; with ``normed`` -> (h, normed).

        ``attention_mask`` [batch, seq], nonzero where a key may be seen.  ``seq``: rows beyond seq * batch are padding.
        ``cu_seqlens`` int32 [N + 1], the bounds of packed documents (batch 1), of which the longest has ``max_seqlen``
        positions.  ``rope``: rotary positions; of two, those of the block's kind.  ``rng`` int64 [3] = (seed, step,
        first_sample), needed where dropout is on.  ValueError for an h of other dimensions, or rows that do not fit
        ``batch``.
        """
        check_rows("TransformerBlock", h, self.width, tp=self.tp, batch=batch, seq=seq)
        alone, enters = normed is None, self.norm_in is not None
        check(alone or not enters, "TransformerBlock: a block with norm_in takes h alone")
        check(not alone or enters or self.post_norm, "TransformerBlock: without norm_in it takes (h, normed)")
        if isinstance(rope, Ropes):
            rope = rope.full if self.attention.window is None else rope.sliding
        attending: dict[str, Any] = dict(
            batch=batch,
            seq=seq,
            rng=rng,
            key_mask=as_key_mask("TransformerBlock: attention_mask", attention_mask),
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
            rope=rope,
        )
        if hooked(self):
            return self._by_parts(h, normed, cache=cache, **attending)
        if cache is None and self._is_one_node(h, normed):
            return self._one_node(h, normed, **attending)
        a, m = self.norm_attention, self.norm_mlp
        vectors = [self.attention.out.bias, a.weight, a.bias, self.mlp.fc2.bias]
        vectors += [None, None] if m is None else [m.weight, m.bias]
        if self.norm_in is not None:
            vectors += [self.norm_in.weight, self.norm_in.bias]
        out_bias, wa, ba, fc2_bias, wm, bm, *first = replicated(self.tp, *vectors)
        if normed is not None:
            n, recompute = normed
        elif self.norm_in is not None:
            h, n, recompute = norm_in(h, *first, eps=self.norm_in.eps, norm=self.norm_in.kind, ranks=self.tp.row_shards)
        else:
            n, recompute = h, None
        parts = self.attention.parts(n, recompute=self._keep(recompute), cache=cache, **attending)
        add: dict[str, Any] = dict(
            p=self.dropout if self.training else 0.0,
            rng=rng,
            first_row=self.tp.row_rank * len(h),
            batch=batch,
            eps=a.eps,
            norm=a.kind,
            post_norm=self.post_norm,
            ranks=self.tp.row_shards,
        )
        site = self.sites.after_attention
        h, n, recompute = reduce_bias_dropout_add_norm(parts, out_bias, h, wa, norm_bias=ba, site=site, **add)
        parts, site = self.mlp.parts(n, self._keep(recompute)), self.sites.after_mlp
        h, n, recompute = reduce_bias_dropout_add_norm(parts, fc2_bias, h, wm, norm_bias=bm, site=site, **add)
        return h if alone else (h, Normed(n, self._keep(recompute)))

    def _by_parts(
        self, h: Tensor, normed: Normed | None, *, key_mask: Tensor | None, **attending: Any
    ) -> Tensor | tuple[Tensor, Normed]:
        """Runs the block as the composition of its modules, each by its __call__: values to rounding, masks bitwise."""
        batch, rng = attending["batch"], attending["rng"]
        drop: dict[str, Any] = dict(p=self.dropout if self.training else 0.0, rng=rng, batch=batch)
        drop["first_row"] = self.tp.row_rank * len(h)

        def add(x: Tensor, site: int) -> Tensor:
            return reduce_bias_dropout_add_norm(x, residual=h, site=site, **drop)[0]

        if normed is not None:
            n = normed.rows
        else:
            n = h if self.norm_in is None else self.norm_in(h)
        x = self.attention(n, attention_mask=key_mask, **attending)
        h = add(x, self.sites.after_attention)
        n = self.norm_attention(h).to(x.dtype)
        h = n if self.post_norm else h
        x = self.mlp(n)
        h = add(x, self.sites.after_mlp)
        n = h if self.norm_mlp is None else self.norm_mlp(h).to(x.dtype)
        h = n if self.post_norm else h
        return h if normed is None else (h, Normed(expanded("TransformerBlock", n, self.tp)))

    def _is_one_node(self, h: Tensor, normed: Normed | None) -> bool:
        """Whether the block runs as one node: on one rank, where nothing stands between its ops or is recomputed."""
        return (
            self.tp.size == 1
            and self.saving == "fastest"
            and (normed is None or normed.recompute is None)
            and not torch.compiler.is_compiling()
            and not autocasts(h)
            and self.attention.in_one
            and self.mlp.in_one
        )

    def _parameters_of(self) -> Parameters:
        """Modules are taken from their dictionaries, as parameters are: nn.Module's attribute access costs the host."""
        own: dict[str, Any] = self._modules
        attention, mlp = own["attention"]._modules, own["mlp"]._modules
        tensors: list[Any] = []
        for module in (
            own.get("norm_in"), attention["qkv"], attention["out"], own["norm_attention"],
            mlp["fc1"], mlp["fc2"], own.get("norm_mlp"),
        ):  # fmt: skip
            tensors += (None, None) if module is None else (_parameter(module, "weight"), _parameter(module, "bias"))
        return Parameters(*tensors)

    def _one_node(self, h: Tensor, normed: Normed | None, *, rng: Tensor | None, **attending: Any) -> Any:
        first, a, batch, sites = self.norm_in, self.norm_attention, attending["batch"], self.sites
        p = self.dropout if self.training else 0.0
        drops = active_rng("TransformerBlock", p, rng)
        constants = Constants(
            activation=self.mlp.activation,
            kind=a.kind,
            eps_in=a.eps if first is None else first.eps,
            eps=a.eps,
            post_norm=self.post_norm,
            attention_mask=Mask(drops, p, sites.after_attention, first_row=0, batch=batch),
            mlp_mask=Mask(drops, p, sites.after_mlp, first_row=0, batch=batch),
        )
        n = None if normed is None else normed.n if normed.n.dim() == 3 else normed.n[None]
        options = self.attention.options(h, rng=rng, **attending)
        made = block(h.contiguous(), n, Layer(constants, options, self._parameters_of()))
        return made if normed is None else (made[0], Normed(made[1]))

    def _keep(self, recompute: Recompute | None) -> Recompute | None:
        return recompute if self.saving == "smallest" else None


def _parameter(module: nn.Module, name: str) -> Tensor | None:
    """Returns a parameter from the module's dictionary, which spares the host nn.Module's attribute access; or, where a
    parametrization has taken its place, the attribute."""
    own = module._parameters
    return local(own[name] if name in own else getattr(module, name))
