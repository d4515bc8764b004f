"""GPT-2 and the Llama family (Llama, Mistral, Qwen2, Qwen3) under tensor, sequence and data parallelism.

    ids [B, S] -> rows [M] -> lookup, exchange -> embed_finish: h, n -> blocks (h, n) -> n [R, m, D]
    -> head [M, V/R] -> loss

The first norm belongs to the embedding, and each block owns the norm after its GEMM pairs: the last block's is the
final norm.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..interop.huggingface.source import Source
from ..kernels.cross_entropy.op import check_ids
from ..kernels.cross_entropy.options import IGNORE
from ..kernels.norm import embed_finish
from ..kernels.rope_table import rope_table
from ..kernels.runtime.launch import next_power_of_2
from ..layers import TransformerBlock, VocabParallelEmbedding
from ..layers.attention import Rope
from ..layers.block import Normed
from ..layers.module import local, on_rows, replicated
from ..layers.norm import norm_layer
from ..parallel import TensorParallel
from .config import GPTConfig
from .generate import generate
from .head import LMHead, Table
from .inputs import Inputs, check_packed
from .model import Model, Output, Rows

_TABLE = 8192  # rows of a table of rotary positions at least: a longer call seldom makes another


class GPT(Model):
    """A causal language model, whose weights are the same bits at every split.

    ``saving``: "fastest" or "smallest" (what is kept for backward).  ValueError, on every rank, for a config that
    cannot be split, or one that the ranks do not agree on.
    """

    config_class = GPTConfig
    refused = {"token_type_ids": "there are no token types, so token_type_ids must be None"}
    config: GPTConfig
    head: LMHead

    def __init__(
        self,
        config: GPTConfig,
        *,
        tp: TensorParallel | None = None,
        dp: dist.ProcessGroup | DeviceMesh | None = None,
        seed: int = 0,
        saving: str = "fastest",
    ):
        super().__init__(config, tp=tp, dp=dp, seed=seed, saving=saving)
        c, tp = config, self.tp
        with torch.device("meta"):
            self.embedding = VocabParallelEmbedding(c.vocab_size, c.hidden_size, tp=tp, init_std=c.init_std)
            self.positions = None if c.rope else Table(c.max_positions, c.hidden_size, tp, c.init_std)
            self.norm_in = norm_layer(c.norm, c.hidden_size, c.eps, tp=tp)
            self.blocks = nn.ModuleList(
                TransformerBlock(
                    c.hidden_size,
                    c.num_heads,
                    c.ffn_width,
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
                    out_init_std=c.init_std / (2 * c.num_layers) ** 0.5 if c.hf.scaled_residuals else None,
                )
                for layer, window in enumerate(c.windows)
            )
            head: dict[str, Any] = dict(bias=False, tied=c.tie_embeddings, init_std=c.init_std)
            self.head = LMHead(c.vocab_size, c.hidden_size, tp=tp, **head)
        self._tables: dict[bool, tuple[tuple[Any, ...], tuple[Tensor, Tensor]]] = {}
        self._materialize()

    def _run(self, inputs: Inputs) -> Output:
        ids, longest, below = inputs.input_ids, check_packed("GPT", inputs), None
        if inputs.cu_seqlens is not None and inputs.position_ids is None:
            below = ids.shape[1]
            inputs = inputs._replace(position_ids=packed_positions(inputs.cu_seqlens, ids.shape[1])[None])
        self._check_inputs(inputs, longest=longest)
        rows, rng = Rows(ids.shape, self.tp), self._rng(inputs)
        h, normed = self._embed(rows, ids, inputs.position_ids, rng)
        call: dict[str, Any] = dict(batch=rows.batch, seq=rows.seq, rng=rng, attention_mask=inputs.key_mask)
        if inputs.cu_seqlens is not None:
            call |= dict(cu_seqlens=inputs.cu_seqlens, max_seqlen=longest)
        call["rope"] = self._rope(rows, inputs.position_ids, ids.device, below)
        for block in self.blocks:
            h, normed = block(h, normed, **call)
        labels = None
        if inputs.labels is not None:
            labels = rows.all(_shifted(inputs.labels, inputs.cu_seqlens), IGNORE)
        loss, logits = self.head.loss_and_logits(
            normed,
            labels,
            weight=self._tied(),
            options=inputs.loss_options,
            keep=labels is None or bool(inputs.return_logits),
            small=self.saving == "smallest",
        )
        if loss is not None and loss.dim():  # that of a label stands where the token before it is
            loss = nn.functional.pad(rows.back(loss)[:, :-1], (1, 0))
        return Output(loss, None if logits is None else rows.back(logits))

    def _embed(self, rows: Rows, ids: Tensor, position_ids: Tensor | None, rng: Tensor | None) -> tuple[Tensor, Normed]:
        c = self.config
        if not torch.compiler.is_compiling():
            check_ids("GPT: input_ids", ids, c.vocab_size)
            if position_ids is not None:
                check_ids("GPT: position_ids", position_ids, c.max_positions)
        table: dict[str, Any] = {}
        if self.positions is not None:
            if position_ids is None:
                position_ids = torch.arange(rows.seq, device=ids.device).expand(rows.batch, -1)
            table["position_weight"] = on_rows(local(self.positions.weight), self.tp)
            table["positions"] = rows.local(position_ids, 0)
        weight, bias = replicated(self.tp, self.norm_in.weight, self.norm_in.bias)
        h, n, recompute = embed_finish(
            self.embedding.parts(rows.all(ids, -1)),
            weight=weight,
            norm_bias=bias,
            p=c.embedding_dropout if self.training else 0.0,
            rng=rng,
            first_row=rows.first,
            batch=rows.batch,
            eps=c.eps,
            norm=c.norm,
            ranks=self.tp.row_shards,
            **table,
        )
        return h, Normed(n, recompute if self.saving == "smallest" else None)

    def _rope(
        self, rows: Rows, position_ids: Tensor | None, device: torch.device, below: int | None = None
    ) -> Rope | None:
        """Returns the tables of rotary positions, and the row of theirs that each row has.

        ``below``: what all position_ids are less than, where the caller knows.  On a CPU they are asked; a GPU would
        have to be waited for, so its table then has all of max_positions.
        """
        c = self.config
        if c.rope is None:
            return None
        length = rows.seq
        if position_ids is not None:
            if torch.compiler.is_compiling():
                below = None
            elif below is None and device.type == "cpu":
                below = int(position_ids.max()) + 1
            length = c.max_positions
            if below is not None:
                length = min(max(next_power_of_2(below), _TABLE), length)
        stretch: int | None = None
        if c.stretched:
            stretch = rows.seq if position_ids is None else int(position_ids.max()) + 1
        # One is kept of each kind: of the length of all rows, and one that is long enough for the positions so far.
        kind, key = position_ids is None, (device, stretch, length if position_ids is None else None)
        kept = self._tables.get(kind)
        if kept is None or kept[0] != key or len(kept[1][0]) < length:
            tables = rope_table(c.head_size, length, **c.rope_arguments, seq_len=stretch, device=device)
            self._tables[kind] = kept = key, tables
        positions = None if position_ids is None else rows.all(position_ids, 0)[: rows.batch * rows.seq]
        return Rope(*kept[1], positions)

    generate = generate

    def sources(self) -> dict[str, Source]:
        return {name: s for name, s in super().sources().items() if name in dict(self.named_parameters())}

    def ignorable(self) -> tuple[str, ...]:
        return (*super().ignorable(), *((r"lm_head\.weight",) if self.config.tie_embeddings else ()))


def _shifted(labels: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Returns the next token's label at each position; none at the end of a document."""
    shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE)
    if cu_seqlens is None:
        return shifted
    seq = labels.shape[1]
    bounds = cu_seqlens.long().clamp(max=seq)
    after = torch.arange(1, seq + 1, device=labels.device)
    bound = torch.zeros(seq + 1, dtype=torch.bool, device=labels.device).index_fill_(0, bounds[1:], True)
    return shifted.masked_fill(bound[1:] | (after > bounds[-1]), IGNORE)


def packed_positions(cu_seqlens: Tensor, seq: int) -> Tensor:
    """Returns int64 [seq]: the position of each token in its document; 0 in what lies beyond the last."""
    token, bounds = torch.arange(seq, device=cu_seqlens.device), cu_seqlens.long()
    return (token - bounds[torch.searchsorted(bounds, token, right=True) - 1]).masked_fill(token >= bounds[-1], 0)
