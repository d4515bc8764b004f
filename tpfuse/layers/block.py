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

With ``branch_norm`` what a GEMM pair gives is normed before it joins the residual stream, for one kernel more:

    reduce_bias_dropout_add_norm   y = norm(sum_r parts + bias)
    reduce_bias_dropout_add_norm   h' = h + dropout(y);  n' = norm(h'), without ``pre_norm`` n' = h'
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..kernels.attn.options import as_key_mask
from ..kernels.norm import Recompute, check_kind, norm_in, reduce_bias_dropout_add_norm
from ..kernels.runtime.deferred import deferring
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
from .parallel_residual import parallel_residual
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

    ``branch_norm`` puts a norm on what attention and the MLP give, before the residual is added: beside the norms on
    what they are given, as in Gemma 2, or without ``pre_norm`` in their place, as in OLMo 2.

    With ``norm_in=True`` it maps x to x and can stand in any model; without, it maps (h, n) to (h, n) in a stack of
    blocks, where n is h without ``pre_norm``: ``norm_out=True`` makes the last block's n a norm of h all the same.
    ``layer`` numbers the dropout masks.  ``saving``: "fastest" keeps n and the activation for backward (32
    bytes per row and width over R in 16 bit), "smallest" recomputes them (20).  ``dropout`` acts after attention and
    MLP, ``attention_dropout`` on the probabilities.  ``parallel``: the MLP reads what attention does, not its result
    (parallel_residual.py); pre-norm only.  ``norm_bias``: whether LayerNorms have a bias.
    """

    shown = "dropout", "post_norm", "parallel", "saving"
    norm_in: LayerNorm | None
    norm_attention: LayerNorm | None
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
        parallel: bool = False,
        pre_norm: bool = True,
        branch_norm: bool = False,
        norm_out: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
        qk_norm_kind: str = "rms",
        qk_norm_all: bool = False,
        saving: str = "fastest",
        init_std: float = 0.02,
        out_init_std: float | None = None,
        **factory: Any,
    ):
        super().__init__(tp)
        check(saving in SAVING, f"TransformerBlock: saving must be one of {', '.join(SAVING)}, got {saving!r}")
        check_kind("TransformerBlock", norm, eps)
        check(not (post_norm and branch_norm), "TransformerBlock: post_norm and branch_norm are two forms, got both")
        check(not (parallel and post_norm), "TransformerBlock: parallel and post_norm are two forms, got both")
        check(not (parallel and branch_norm), "TransformerBlock: parallel and branch_norm are two forms, got both")
        check(pre_norm or branch_norm, "TransformerBlock: pre_norm=False needs branch_norm=True, or there is no norm")
        check(not (norm_out and (norm_in or pre_norm)), "TransformerBlock: norm_out needs norm_in and pre_norm False")
        threshold(dropout)
        self.width = hidden_size
        self.dropout, self.saving, self.post_norm, self.sites = dropout, saving, post_norm, sites(layer)
        self.parallel, self.pre_norm, self.branch_norm = parallel, pre_norm, branch_norm
        shared: dict[str, Any] = dict(tp=self.tp, init_std=init_std, out_init_std=out_init_std, **factory)
        self.attention = ParallelAttention(
            hidden_size,
            num_heads,
            num_kv_heads=num_kv_heads,
            head_width=head_width,
            causal=causal,
            window=window,
            qk_norm=qk_norm,
            qk_norm_kind=qk_norm_kind,
            qk_norm_all=qk_norm_all,
            scale=scale,
            softcap=softcap,
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
        enters = norm_in and pre_norm and not post_norm
        self.norm_in = make_norm() if enters else None
        # The norm after attention; its name is part of the checkpoint format.
        self.norm_attention = make_norm() if pre_norm else None
        self.norm_mlp = make_norm() if norm_out or (pre_norm and not enters) else None
        self.branch_attention, self.branch_mlp = (make_norm() if branch_norm else None for _ in range(2))
        self.norm_after = True  # or the one that its h is sent to runs norm_mlp: a pipeline's next stage
        self.compare_alone()

    @property
    def last_norm(self) -> LayerNorm | None:
        """The norm that ends the block, where the block itself runs it."""
        return self.norm_mlp if self.norm_after else None

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
        either = self.post_norm or not self.pre_norm
        check(not alone or enters or either, "TransformerBlock: without norm_in it takes (h, normed)")
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
        if self.parallel:
            h, n, recompute = parallel_residual(self, h, normed, cache=cache, **attending)
            return h if alone else (h, Normed(n, recompute))
        a, m = self.norm_attention, self.last_norm
        vectors = [self.attention.out.bias, *_vectors(a), self.mlp.fc2.bias, *_vectors(m)]
        if self.norm_in is not None:
            vectors += _vectors(self.norm_in)
        if self.branch_norm:
            vectors += [*_vectors(self.branch_attention), *_vectors(self.branch_mlp)]
        out_bias, wa, ba, fc2_bias, wm, bm, *rest = replicated(self.tp, *vectors)
        how: dict[str, Any] = dict(ranks=self.tp.row_shards, recompute=self._again)
        if normed is not None:
            n, recompute = normed.n, self._keep(normed.recompute)
        elif self.norm_in is not None:
            h, n, recompute = norm_in(h, *rest[:2], eps=self.norm_in.eps, norm=self.norm_in.kind, **how)
        else:
            n, recompute = h, None
        parts = self.attention.parts(n, recompute=recompute, cache=cache, **attending)
        like = self.branch_attention if a is None else a
        assert like is not None  # pre_norm or branch_norm
        kind: dict[str, Any] = dict(eps=like.eps, norm=like.kind)
        add: dict[str, Any] = dict(
            p=self.dropout if self.training else 0.0,
            rng=rng,
            first_row=self.tp.row_rank * len(h),
            batch=batch,
            post_norm=self.post_norm,
            **kind,
            **how,
        )
        site = self.sites.after_attention
        if self.branch_norm:
            parts, out_bias = _normed(parts, out_bias, *rest[-4:-2], **kind), None
        h, n, recompute = reduce_bias_dropout_add_norm(parts, out_bias, h, wa, norm_bias=ba, site=site, **add)
        keep = self.saving == "fastest"
        parts, site = self.mlp.parts(n, recompute, keep=keep), self.sites.after_mlp
        if self.branch_norm:
            parts, fc2_bias = _normed(parts, fc2_bias, *rest[-2:], **kind), None
        h, n, recompute = reduce_bias_dropout_add_norm(parts, fc2_bias, h, wm, norm_bias=bm, site=site, **add)
        return h if alone else (h, Normed(n, recompute))

    def _by_parts(
        self, h: Tensor, normed: Normed | None, *, key_mask: Tensor | None, **attending: Any
    ) -> Tensor | tuple[Tensor, Normed]:
        """Runs the block as the composition of its modules, each by its __call__: values to rounding, masks bitwise."""
        batch, rng = attending["batch"], attending["rng"]
        drop: dict[str, Any] = dict(p=self.dropout if self.training else 0.0, rng=rng, batch=batch)
        drop["first_row"] = self.tp.row_rank * len(h)

        def add(x: Tensor, branch: LayerNorm | None, site: int) -> Tensor:
            x = x if branch is None else branch(x).to(x.dtype)
            return reduce_bias_dropout_add_norm(x, residual=h, site=site, **drop)[0]

        if normed is not None:
            n = normed.rows
        else:
            n = h if self.norm_in is None else self.norm_in(h)
        x = self.attention(n, attention_mask=key_mask, **attending)
        before, h = h, add(x, self.branch_attention, self.sites.after_attention)
        read = before if self.parallel else h
        n = read if self.norm_attention is None else self.norm_attention(read).to(x.dtype)
        h = n if self.post_norm else h
        x = self.mlp(n)
        h = add(x, self.branch_mlp, self.sites.after_mlp)
        n = h if self.last_norm is None else self.last_norm(h).to(x.dtype)
        h = n if self.post_norm else h
        return h if normed is None else (h, Normed(expanded("TransformerBlock", n, self.tp)))

    def _is_one_node(self, h: Tensor, normed: Normed | None) -> bool:
        """Whether the block runs as one node: on one rank, where nothing stands between its ops or is recomputed."""
        return (
            self.tp.size == 1
            and self.saving == "fastest"
            and not (self.parallel or self.branch_norm)
            and (normed is None or normed.recompute is None)
            and not torch.compiler.is_compiling()
            and not deferring()
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
            mlp["fc1"], mlp["fc2"], own.get("norm_mlp") if self.norm_after else None,
        ):  # fmt: skip
            tensors += (None, None) if module is None else (_parameter(module, "weight"), _parameter(module, "bias"))
        return Parameters(*tensors)

    def _one_node(self, h: Tensor, normed: Normed | None, *, rng: Tensor | None, **attending: Any) -> Any:
        first, a, batch, sites = self.norm_in, self.norm_attention, attending["batch"], self.sites
        assert a is not None  # without branch norms there is one
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

    @property
    def _again(self) -> bool:
        """Whether n is recomputed in backward."""
        return self.saving == "smallest"

    def _keep(self, recompute: Recompute | None) -> Recompute | None:
        return recompute if self._again else None


def _vectors(norm: LayerNorm | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if norm is None else (norm.weight, norm.bias)


def _normed(
    parts: Tensor, bias: Tensor | None, weight: Tensor, norm_bias: Tensor | None, *, eps: float, norm: str
) -> Tensor:
    """parts [R, m, D] -> norm(sum_r parts_r + bias) [m, D]"""
    options: dict[str, Any] = dict(eps=eps, norm=norm, post_norm=True)
    return reduce_bias_dropout_add_norm(parts, bias, weight=weight, norm_bias=norm_bias, **options)[0]


def _parameter(module: nn.Module, name: str) -> Tensor | None:
    """Returns a parameter from the module's dictionary, which spares the host nn.Module's attribute access; or, where a
    parametrization has taken its place, the attribute."""
    own = module._parameters
    return local(own[name] if name in own else getattr(module, name))
