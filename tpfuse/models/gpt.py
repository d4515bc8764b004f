"""GPT-2 (Radford et al. 2019) under tensor, sequence and data parallelism.

    ids [B, S] -> rows [M] -> lookup, exchange -> embed_finish: h, n -> blocks (h, n) -> n [R, m, D] -> head [M, V/R] -> loss

The first norm belongs to the embedding, and each block owns the norm after its GEMM pairs: the last block's is the final norm.
"""

import torch
from torch import Tensor, nn

from ..kernels._op import check
from ..kernels.cross_entropy import IGNORE, check_ids
from ..kernels.embedding import embed_finish
from ..layers import TransformerBlock, VocabParallelEmbedding
from ..layers._module import local, on_rows, replicated
from ..layers.block import Normed
from ..layers.norm import LayerNorm
from ..parallel import TensorParallel
from ._model import Model, Output, Rows
from .config import GPTConfig
from .generate import generate
from .head import LMHead, Table
from .huggingface import Source


class GPT(Model):
    """A GPT-2 language model.  ``GPT(config, tp=tp, dp=None, seed=0)``; weights are the same bits at every split.

    ``saving``: "fastest" or "smallest" (what is kept for backward).  ValueError, on every rank, for a config that cannot be split, or
    one that the ranks do not agree on.
    """

    config_class = GPTConfig

    def __init__(self, config: GPTConfig, *, tp: TensorParallel | None = None, dp=None, seed: int = 0, saving: str = "fastest"):
        super().__init__(config, tp=tp, dp=dp, seed=seed, saving=saving)
        c, tp = config, self.tp
        with torch.device("meta"):
            self.embedding = VocabParallelEmbedding(c.vocab_size, c.hidden_size, tp=tp, init_std=c.init_std)
            self.positions = Table(c.max_positions, c.hidden_size, tp, c.init_std)
            self.norm_in = LayerNorm(c.hidden_size, c.eps, tp=tp)
            self.blocks = nn.ModuleList(
                TransformerBlock(
                    c.hidden_size,
                    c.num_heads,
                    c.ffn_size,
                    tp=tp,
                    layer=layer,
                    causal=True,
                    activation=c.activation,
                    eps=c.eps,
                    dropout=c.dropout,
                    attention_dropout=c.attention_dropout,
                    norm_in=False,
                    saving=saving,
                    init_std=c.init_std,
                    out_init_std=c.init_std / (2 * c.num_layers) ** 0.5,
                )
                for layer in range(c.num_layers)
            )
            self.head = LMHead(c.vocab_size, c.hidden_size, tp=tp, bias=False, tied=c.tie_embeddings, init_std=c.init_std)
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

        ``labels`` [B, S] are aligned with input_ids and shifted here; -100 is ignored.  ``loss_normalizer`` divides the summed loss
        (default: the valid labels of this call).  ``logits`` [B, S, V/R] come where there are no labels or ``return_logits`` is true.
        ``step`` (default: the model's counter) and ``first_sample`` (default: dp rank x B) choose the dropout masks.
        """
        check(token_type_ids is None, "GPT: a GPT-2 model has no token types, so token_type_ids must be None")
        check(cu_seqlens is None and max_seqlen is None, "GPT: packed sequences (cu_seqlens, max_seqlen) are not built")
        self._check_inputs(input_ids, labels=labels, attention_mask=attention_mask, position_ids=position_ids)
        rows = Rows(*input_ids.shape, self.tp)
        rng = self._rng(input_ids, step, first_sample)
        h, normed = self._embed(rows, input_ids, position_ids, rng)
        mask = self._key_mask(attention_mask)
        for block in self.blocks:
            h, normed = block(h, normed, batch=rows.batch, seq=rows.seq, rng=rng, attention_mask=mask)
        logits = self._logits(normed)
        loss = None
        if labels is not None:
            shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE)
            loss = self.head.loss(logits, rows.all(shifted, IGNORE), loss_normalizer)
        return Output(loss, rows.back(logits) if labels is None or return_logits else None)

    def _embed(self, rows: Rows, ids: Tensor, position_ids: Tensor | None, rng: Tensor | None) -> tuple[Tensor, Normed]:
        c = self.config
        if position_ids is None:
            position_ids = torch.arange(rows.seq, device=ids.device).expand(rows.batch, -1)
        if not torch.compiler.is_compiling():
            check_ids("GPT: input_ids", ids, c.vocab_size)
            check_ids("GPT: position_ids", position_ids, c.max_positions)
        weight, bias = replicated(self.tp, self.norm_in.weight, self.norm_in.bias)
        h, n, remake = embed_finish(
            self.embedding.parts(rows.all(ids, -1)),
            position_weight=on_rows(local(self.positions.weight), self.tp),
            positions=rows.local(position_ids, 0),
            weight=weight,
            norm_bias=bias,
            p=c.embedding_dropout if self.training else 0.0,
            rng=rng,
            first_row=rows.first,
            batch=rows.batch,
            eps=c.eps,
            ranks=self.tp.row_shards,
        )
        return h, Normed(n, remake if self.saving == "smallest" else None)

    def _logits(self, normed: Normed) -> Tensor:
        return self.head(normed, local(self.embedding.weight) if self.config.tie_embeddings else None)

    generate = generate

    # ---- Hugging Face names ----

    base_prefix, head_prefixes = "transformer.", ("lm_head.",)

    def sources(self) -> dict[str, Source]:
        """Every parameter of the whole model -> the tensors of a GPT-2 file that it is made of."""
        linear = lambda name: {"weight": Source(f"{name}.weight", "i o -> o i"), "bias": Source(f"{name}.bias", "o -> o")}  # noqa: E731
        norm = lambda name: {"weight": Source(f"{name}.weight", "d -> d"), "bias": Source(f"{name}.bias", "d -> d")}  # noqa: E731
        modules = {
            "embedding": {"weight": Source("wte.weight", "v d -> v d")},
            "positions": {"weight": Source("wpe.weight", "p d -> p d")},
            "norm_in": norm("h.0.ln_1"),
            "head": {} if self.config.tie_embeddings else {"weight": Source("lm_head.weight", "v d -> v d")},
        }
        last = self.config.num_layers - 1
        for i in range(self.config.num_layers):
            ours, theirs = f"blocks.{i}", f"h.{i}"
            modules |= {
                f"{ours}.attention.qkv": {
                    "weight": Source(f"{theirs}.attn.c_attn.weight", "d (t h e) -> h t e d"),
                    "bias": Source(f"{theirs}.attn.c_attn.bias", "(t h e) -> h t e"),
                },
                f"{ours}.attention.out": linear(f"{theirs}.attn.c_proj"),
                f"{ours}.mlp.fc1": linear(f"{theirs}.mlp.c_fc"),
                f"{ours}.mlp.fc2": linear(f"{theirs}.mlp.c_proj"),
                f"{ours}.norm_attention": norm(f"{theirs}.ln_2"),
                f"{ours}.norm_mlp": norm("ln_f" if i == last else f"h.{i + 1}.ln_1"),
            }
        return {f"{module}.{leaf}": source for module, leaves in modules.items() for leaf, source in leaves.items()}

    def hf_config(self) -> dict:
        return {"architectures": ["GPT2LMHeadModel"]}

    def ignorable(self) -> tuple[str, ...]:
        """Tensors a file may hold that this model has no use for: causal masks, and the tied head."""
        return (r"h\.\d+\.attn\.(masked_)?bias", *((r"lm_head\.weight",) if self.config.tie_embeddings else ()))
