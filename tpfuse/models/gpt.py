"""GPT-2 (Radford et al. 2019) and the Llama family (Llama, Mistral, Qwen2, Qwen3) under tensor, sequence and data parallelism.

    ids [B, S] -> rows [M] -> lookup, exchange -> embed_finish: h, n -> blocks (h, n) -> n [R, m, D] -> head [M, V/R] -> loss

The first norm belongs to the embedding, and each block owns the norm after its GEMM pairs: the last block's is the final norm.
"""

import torch
from torch import Tensor, nn

from ..kernels._op import check
from ..kernels.cross_entropy import IGNORE, check_ids
from ..kernels.embedding import embed_finish
from ..kernels.rope import rope_table
from ..layers import TransformerBlock, VocabParallelEmbedding
from ..layers._module import local, on_rows, replicated
from ..layers.attention import Rope
from ..layers.block import Normed
from ..layers.norm import LayerNorm, RMSNorm
from ..parallel import TensorParallel
from ._model import Model, Output, Rows
from ._names import gpt2_sources, llama_sources
from .config import FAMILIES, GPTConfig
from .generate import generate
from .head import LMHead, Table
from .huggingface import Source


class GPT(Model):
    """A causal language model.  ``GPT(config, tp=tp, dp=None, seed=0)``; weights are the same bits at every split.

    ``saving``: "fastest" or "smallest" (what is kept for backward).  ValueError, on every rank, for a config that cannot be split, or
    one that the ranks do not agree on.
    """

    config_class = GPTConfig

    def __init__(self, config: GPTConfig, *, tp: TensorParallel | None = None, dp=None, seed: int = 0, saving: str = "fastest"):
        super().__init__(config, tp=tp, dp=dp, seed=seed, saving=saving)
        c, tp = config, self.tp
        with torch.device("meta"):
            self.embedding = VocabParallelEmbedding(c.vocab_size, c.hidden_size, tp=tp, init_std=c.init_std)
            self.positions = None if c.rope else Table(c.max_positions, c.hidden_size, tp, c.init_std)
            self.norm_in = (RMSNorm if c.norm == "rms" else LayerNorm)(c.hidden_size, c.eps, tp=tp)
            self.blocks = nn.ModuleList(
                TransformerBlock(
                    c.hidden_size,
                    c.num_heads,
                    c.ffn_size,
                    num_kv_heads=c.kv_heads,
                    head_width=c.head_size,
                    tp=tp,
                    layer=layer,
                    causal=True,
                    window=window,
                    qk_norm=c.qk_norm,
                    activation=c.activation,
                    gated=c.gated,
                    norm=c.norm,
                    eps=c.eps,
                    dropout=c.dropout,
                    attention_dropout=c.attention_dropout,
                    qkv_bias=c.qkv_bias,
                    out_bias=c.out_bias,
                    mlp_bias=c.mlp_bias,
                    norm_in=False,
                    saving=saving,
                    init_std=c.init_std,
                    out_init_std=c.init_std / (2 * c.num_layers) ** 0.5 if c.family == "gpt2" else None,
                )
                for layer, window in enumerate(c.windows)
            )
            self.head = LMHead(c.vocab_size, c.hidden_size, tp=tp, bias=False, tied=c.tie_embeddings, init_std=c.init_std)
        self._tables: dict[tuple, tuple[Tensor, Tensor]] = {}
        self._materialize()

    def forward(
        self,
        input_ids: Tensor,
        *,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        loss_normalizer: float | Tensor | None = None,
        step: int | Tensor | None = None,
        first_sample: int | Tensor | None = None,
        return_logits: bool | None = None,
    ) -> Output:
        """input_ids int64 [B, S], the same on every tensor-parallel rank -> Output(loss, logits).

        Packed documents: B = 1, ``cu_seqlens`` int32 [N + 1] their bounds (0 first; what lies beyond the last is padding), ``max_seqlen``
        the longest, which max_positions limits (not S).  None sees another, positions begin at 0 in each, no label crosses a bound.
        ``labels`` [B, S] are aligned with input_ids and shifted here; -100 is ignored.  ``loss_normalizer`` divides the summed loss
        (default: the valid labels of this call).  ``logits`` [B, S, V/R] come where there are no labels or ``return_logits`` is true.
        ``step`` (default: the model's counter) and ``first_sample`` (default: dp rank x B) choose the dropout masks.
        """
        check(token_type_ids is None, "GPT: there are no token types, so token_type_ids must be None")
        packed = {}
        if cu_seqlens is not None:
            packed = dict(cu_seqlens=cu_seqlens, max_seqlen=_check_packed(cu_seqlens, max_seqlen, *input_ids.shape))
            position_ids = packed_positions(cu_seqlens, input_ids.shape[1])[None] if position_ids is None else position_ids
        aligned = dict(labels=labels, attention_mask=attention_mask, position_ids=position_ids)
        self._check_inputs(input_ids, packed.get("max_seqlen"), **aligned)
        rows = Rows(*input_ids.shape, self.tp)
        rng = self._rng(input_ids, step, first_sample)
        h, normed = self._embed(rows, input_ids, position_ids, rng)
        rope, mask = self._rope(rows, position_ids, input_ids.device), self._key_mask(attention_mask)
        for block in self.blocks:
            h, normed = block(h, normed, batch=rows.batch, seq=rows.seq, rng=rng, attention_mask=mask, rope=rope, **packed)
        if labels is not None:
            labels = rows.all(_shifted(labels, cu_seqlens), IGNORE)
        keep = labels is None or bool(return_logits)
        loss, logits = self.head.loss_and_logits(normed, self._tied(), labels, loss_normalizer, keep, self.saving == "smallest")
        return Output(loss, rows.back(logits) if keep else None)

    def _embed(self, rows: Rows, ids: Tensor, position_ids: Tensor | None, rng: Tensor | None) -> tuple[Tensor, Normed]:
        c = self.config
        if not torch.compiler.is_compiling():
            check_ids("GPT: input_ids", ids, c.vocab_size)
            if position_ids is not None:
                check_ids("GPT: position_ids", position_ids, c.max_positions)
        table = {}
        if self.positions is not None:
            if position_ids is None:
                position_ids = torch.arange(rows.seq, device=ids.device).expand(rows.batch, -1)
            table = dict(position_weight=on_rows(local(self.positions.weight), self.tp), positions=rows.local(position_ids, 0))
        weight, bias = replicated(self.tp, self.norm_in.weight, self.norm_in.bias)
        h, n, remake = embed_finish(
            self.embedding.parts(rows.all(ids, -1)),
            weight=weight,
            norm_bias=bias,
            p=c.embedding_dropout if self.training else 0.0,
            rng=rng,
            first_row=rows.first,
            batch=rows.batch,
            eps=c.eps,
            rms=c.norm == "rms",
            ranks=self.tp.row_shards,
            **table,
        )
        return h, Normed(n, remake if self.saving == "smallest" else None)

    def _rope(self, rows: Rows, position_ids: Tensor | None, device: torch.device) -> Rope | None:
        """The tables, and each row's place in them."""
        c = self.config
        if c.rope is None:
            return None
        length, stretch = rows.seq if position_ids is None else c.max_positions, None
        if c.rope.get("rope_type") == "dynamic":
            stretch = rows.seq if position_ids is None else int(position_ids.max()) + 1
        key = device, length, stretch
        if key not in self._tables:  # one is kept: training has one length, generation one
            self._tables = {key: rope_table(c.head_size, length, **c.rope_arguments, seq_len=stretch, device=device)}
        positions = None if position_ids is None else rows.all(position_ids, 0)[: rows.batch * rows.seq]
        return Rope(*self._tables[key], positions)

    def _tied(self) -> Tensor | None:
        return local(self.embedding.weight) if self.config.tie_embeddings else None

    generate = generate

    # ---- Hugging Face names ----

    @property
    def base_prefix(self) -> str:
        return "transformer." if self.config.family == "gpt2" else "model."

    head_prefixes = ("lm_head.",)

    def sources(self) -> dict[str, Source]:
        """Every parameter of the whole model -> the tensors of a Hugging Face file that it is made of."""
        return (gpt2_sources if self.config.family == "gpt2" else llama_sources)(self.config, dict(self.named_parameters()))

    def hf_config(self) -> dict:
        return {"architectures": [FAMILIES[self.config.family].architecture]}

    def ignorable(self) -> tuple[str, ...]:
        """Tensors a file may hold that this model has no use for: causal masks, rotary frequencies, and the tied head."""
        buffers = r"h\.\d+\.attn\.(masked_)?bias", r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
        return (*buffers, *((r"lm_head\.weight",) if self.config.tie_embeddings else ()))


def _shifted(labels: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The next token's label at each place; none at the end of a document."""
    shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE)
    if cu_seqlens is None:
        return shifted
    after = torch.arange(1, labels.shape[1] + 1, device=labels.device)
    return shifted.masked_fill(torch.isin(after, cu_seqlens[1:]) | (after > cu_seqlens[-1]), IGNORE)


def packed_positions(cu_seqlens: Tensor, seq: int) -> Tensor:
    """int64 [seq]: the place of each token in its document; 0 in what lies beyond the last."""
    at, bounds = torch.arange(seq, device=cu_seqlens.device), cu_seqlens.long()
    return (at - bounds[torch.searchsorted(bounds, at, right=True) - 1]).masked_fill(at >= bounds[-1], 0)


def _check_packed(cu_seqlens: Tensor, max_seqlen: int | None, batch: int, seq: int) -> int:
    """The longest document, given or found; ValueError for bounds that are not."""
    check(batch == 1, f"GPT: packed documents (cu_seqlens) are one row of tokens, input_ids [1, S]; got a batch of {batch}")
    fits = cu_seqlens.dim() == 1 and len(cu_seqlens) >= 2 and cu_seqlens.dtype == torch.int32
    check(fits, f"GPT: cu_seqlens must be int32 [N + 1], N >= 1, got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}")
    if not torch.compiler.is_compiling() and cu_seqlens.device.type == "cpu":
        bounds = cu_seqlens.tolist()
        rising = bounds[0] == 0 and bounds[-1] <= seq and all(a <= b for a, b in zip(bounds, bounds[1:]))
        check(rising, f"GPT: cu_seqlens must rise from 0 to at most {seq}, got {bounds}")
        longest = max(b - a for a, b in zip(bounds, bounds[1:]))
        check(max_seqlen is None or max_seqlen >= longest, f"GPT: max_seqlen={max_seqlen}, and the longest document has {longest} tokens")
        return longest if max_seqlen is None else max_seqlen
    return seq if max_seqlen is None else max_seqlen
