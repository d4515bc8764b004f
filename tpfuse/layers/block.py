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

The order of these steps is the entry "pre" of WIRINGS (wiring.py), which has the other kinds of blocks too.
"""

from typing import Any

import torch
from torch import Tensor

from ..kernels.attn.options import as_key_mask
from ..kernels.experts.records import Routing
from ..kernels.norm import check_kind
from ..kernels.runtime.captures import captures, capturing
from ..kernels.runtime.deferred import deferring
from ..kernels.runtime.errors import check
from ..kernels.runtime.function import is_observed
from ..kernels.runtime.op import autocasts
from ..kernels.runtime.philox import Mask, active_rng, threshold
from ..parallel import TensorParallel
from .attention import ParallelAttention
from .cache import KVCache
from .call import Call, Rope, Ropes, required
from .expert_ranks import ExpertGroup, expert_ranks
from .hooks import hooked
from .linear import ColumnParallelLinear
from .mlp import ParallelMLP
from .module import ParallelModule, check_rows
from .moe import ParallelMoE
from .norm import LayerNorm, norm_layer
from .one_node import Constants, Layer, one_node, parameters_of
from .shapes import INIT, AttentionShape, Init, MLPShape, MoEShape, NormShape, mlp_or_experts
from .wiring import (
    ALONE,
    NORM_IN,
    NORM_OUT,
    PLACES,
    WIRINGS,
    ByParts,
    Fused,
    Join,
    Normed,
    norm_names,
    run,
    steps_at,
    without_last_norm,
)  # fmt: skip

SAVING = "fastest", "smallest"
# The order in which norms become parameters, which optimizers number.
NORMS = NORM_IN, "attention_norm", NORM_OUT, "attention_branch_norm", "mlp_branch_norm"


class TransformerBlock(ParallelModule):
    """One block: attention and MLP with their norms and residuals.

    ``wiring`` is the order of its steps, an entry of tpfuse.layers.wiring.WIRINGS: "pre" (GPT-2, Llama), "post"
    (BERT), "sandwich" (Gemma 2), "branch" (OLMo 2) or "parallel" (GPT-NeoX).  ``place``: a block "alone" maps x to x
    and can stand in any model; "inner" and "last" blocks of a stack map (h, n) to (h, n), where the n that leaves is
    the input of the next block, and of the last one the final norm of h.

    ``layer`` numbers the dropout masks.  ``saving``: "fastest" keeps n and the activation for backward (32
    bytes per row and width over R in 16 bit), "smallest" recomputes them (20).  ``dropout`` acts after attention and
    MLP, ``attention_dropout`` on the probabilities.  ``norm_bias``: whether LayerNorms have a bias.  With
    ``num_experts`` the MLP is a :class:`ParallelMoE` of so many gated MLPs without biases, chosen by ``routing``,
    divided among the ranks of ``experts`` if that is given (mesh["dp", "tp"]: experts over replicas), with
    ``shared_size`` beside one of this width that every row has, and ``shared_gate`` its gate.  The others are
    arguments of :class:`ParallelAttention` and :class:`ParallelMLP`.  ValueError for an unknown wiring, place, norm or
    activation, and for sizes that cannot be split over the ranks.
    """

    repr_fields = "dropout", "wiring", "place", "saving"
    input_norm: LayerNorm | None
    attention_norm: LayerNorm | None
    mlp_norm: LayerNorm | None

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
        wiring: str = "pre",
        place: str = ALONE,
        num_experts: int | None = None,
        routing: Routing | None = None,
        shared_size: int | None = None,
        shared_gate: bool = False,
        experts: ExpertGroup | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        qk_norm_kind: str = "rms",
        qk_norm_all: bool = False,
        saving: str = "fastest",
        init_std: float = 0.02,
        out_init_std: float | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__(tp)
        attention = AttentionShape(
            hidden_size, num_heads, num_kv_heads, head_width, causal=causal, window=window, qk_norm=qk_norm,
            qk_norm_kind=qk_norm_kind, qk_norm_all=qk_norm_all, eps=eps, scale=scale, softcap=softcap,
            dropout=attention_dropout, bias=bias if qkv_bias is None else qkv_bias,
            out_bias=bias if out_bias is None else out_bias,
        )  # fmt: skip
        ffn_size = 4 * hidden_size if ffn_size is None else ffn_size
        mlp_bias = bias if mlp_bias is None else mlp_bias
        mlp = mlp_or_experts(
            "TransformerBlock", MLPShape(hidden_size, ffn_size, activation, gated, bias=mlp_bias), num_experts, routing,
            shared_size=shared_size, shared_gate=shared_gate,
        )  # fmt: skip
        self.place, self.wiring, self.dropout, self.saving = place, wiring, dropout, saving
        check(
            experts is None or num_experts is not None,
            "TransformerBlock: experts= divides experts among ranks and needs num_experts, got None",
        )
        init = Init(init_std, out_init_std, dtype, device)
        ranks = None if num_experts is None else expert_ranks("TransformerBlock", experts, self.tp)
        self._build(attention, mlp, NormShape(norm, eps, norm_bias), layer=layer, experts=ranks, init=init)
        self.compare_alone()

    @classmethod
    def of(
        cls,
        attention: AttentionShape,
        mlp: MLPShape | MoEShape,
        norm: NormShape,
        *,
        wiring: str = "pre",
        place: str = ALONE,
        layer: int = 0,
        dropout: float = 0.0,
        saving: str = "fastest",
        tp: TensorParallel | None = None,
        experts: TensorParallel | None = None,
        init: Init = INIT,
    ) -> "TransformerBlock":
        """Returns the block of these shapes, for a model that compares its calls itself."""
        block = cls.__new__(cls)
        ParallelModule.__init__(block, tp)
        block.place, block.wiring, block.dropout, block.saving = place, wiring, dropout, saving
        block._build(attention, mlp, norm, layer=layer, experts=experts, init=init)
        return block

    def _build(
        self,
        attention: AttentionShape,
        mlp: MLPShape | MoEShape,
        norm: NormShape,
        *,
        layer: int,
        experts: TensorParallel | None,
        init: Init,
    ) -> None:
        for name, value, choices in (
            ("saving", self.saving, SAVING), ("wiring", self.wiring, WIRINGS), ("place", self.place, PLACES),
        ):  # fmt: skip
            check(value in choices, f"TransformerBlock: {name} must be one of {', '.join(choices)}, got {value!r}")
        check_kind("TransformerBlock", norm.kind, norm.eps)
        threshold(self.dropout)
        self.width, self.layer = attention.hidden_size, layer
        self.norm_after = True
        self.attention = ParallelAttention.of(attention, tp=self.tp, layer=layer, init=init)
        self.mlp: ParallelMLP | ParallelMoE = (
            ParallelMoE.of(mlp, tp=self.tp, experts=experts, init=init)
            if isinstance(mlp, MoEShape)
            else ParallelMLP.of(mlp, tp=self.tp, init=init)
        )
        for name in (*NORMS, *sorted({*self.norms} - {*NORMS})):
            make = lambda: norm_layer(norm, self.width, tp=self.tp, dtype=init.dtype, device=init.device)
            setattr(self, name, make() if name in self.norms else None)

    @property
    def norm_after(self) -> bool:
        """True if the block runs its last norm; else its h is sent to a pipeline's next stage, which does."""
        return self._norm_after

    @norm_after.setter
    def norm_after(self, value: bool) -> None:
        steps = steps_at(self.wiring, self.place)
        self._norm_after, self.steps = value, steps if value else without_last_norm(steps)
        self.norms = tuple(norm_names(self.steps))  # in the order of their use

    @property
    def post_norm(self) -> bool:
        """True if the n that leaves is the residual stream itself."""
        end = self.steps[-1]
        return isinstance(end, Join) and end.stream

    def forward(
        self,
        h: Tensor,
        normed: Normed | None = None,
        *,
        batch: int | None = None,
        seq: int | None = None,
        rng: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        rope: Rope | Ropes | None = None,
        cache: KVCache | None = None,
        router_sums: bool = False,
        call: Call | None = None,
    ) -> Tensor | tuple[Tensor, Any]:
        """h [m, D], rows s * batch + b (without sequence parallelism [M, D]) -> [m, D]; with ``normed`` -> (h, normed).

        ``attention_mask`` [batch, seq], nonzero where a key may be seen.  ``seq``: rows beyond seq * batch are padding.
        ``cu_seqlens`` int32 [N + 1], the bounds of packed documents (batch 1), of which the longest has ``max_seqlen``
        positions.  ``rope``: rotary positions; of two, those of the block's kind.  ``rng`` int64 [3] = (seed, step,
        first_sample), needed where dropout is on.  ``router_sums``: a block alone with experts gives (h, sums), whose
        sums :func:`tpfuse.layers.balance_loss` takes.  ``call`` holds all of these instead.  ValueError for an h of
        other dimensions, rows that do not fit ``batch``, and sums of a block without experts that stands alone.
        """
        if call is None:
            mask = as_key_mask("TransformerBlock: attention_mask", attention_mask)
            call = Call(
                required("TransformerBlock", batch), seq, rng, mask, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen,
                rope=rope, cache=cache, router_sums=router_sums,
            )  # fmt: skip
        check_rows("TransformerBlock", h, self.width, tp=self.tp, batch=call.batch, seq=call.seq)
        alone = normed is None
        if alone != (self.place == ALONE):
            expected = "h" if self.place == ALONE else "(h, normed)"
            raise ValueError(f"TransformerBlock: with place={self.place!r} it takes {expected}")
        check(
            not (alone and call.router_sums) or self.mlp.has_router,
            "TransformerBlock: router_sums=True needs experts, got num_experts=None",
        )
        if call.keep != (self.saving == "fastest"):
            call = call._replace(keep=not call.keep)
        n = Normed(h) if normed is None else normed
        sums = n.sums
        if not hooked(self) and self._is_one_node(h, n, call):
            h, n = self._one_node(h, normed, call)
        else:
            runner = ByParts(self, h, call) if hooked(self) else Fused(self, self.steps, h, call)
            h, n = run(self.steps, runner, h, n)
            sums += runner.sums
        if not alone:
            return h, Normed(n.n, n.recompute, sums)
        return (h, sums[-1]) if call.router_sums else h

    def _is_one_node(self, h: Tensor, normed: Normed, call: Call) -> bool:
        """True if the block runs as one node: on one rank, where nothing stands between its ops or is recomputed, and
        no leaves share a kv head."""
        return (
            self.tp.call_size == 1
            and call.cache is None
            and call.keep
            and normed.recompute is None
            and not torch.compiler.is_compiling()
            and not deferring()
            and not (capturing() and captures(*self.parameters()))
            and not autocasts(h)
            and not is_observed()
            and self.attention.in_one
            and isinstance(self.attention.qkv, ColumnParallelLinear)
            and self.mlp.in_one
        )

    def _one_node(self, h: Tensor, normed: Normed | None, call: Call) -> tuple[Tensor, Normed]:
        modules: Any = self._modules
        attention, p = self.attention, self.dropout if self.training else 0.0
        rng = active_rng("TransformerBlock", p, call.rng)
        attention_mask, mlp_mask = (
            Mask(rng, p, call.site(name, self.layer, p), first_row=0, batch=call.batch) for name in ("attention", "mlp")
        )
        norms = tuple((name, modules[name].eps, modules[name].kind) for name in self.norms)
        constants = Constants(
            self.steps, norms, self.mlp.activation, attention_mask,
            mlp=mlp_mask, bitwise=self.tp.bitwise, batch_invariant=self.tp.batch_invariant,
        )  # fmt: skip
        layer = Layer(constants, attention.options(h.shape[0], call), *parameters_of(self, self.norms))
        return one_node(h.contiguous(), normed, layer)
