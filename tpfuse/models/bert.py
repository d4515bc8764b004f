"""BERT (Devlin et al. 2018, arXiv:1810.04805) under tensor, sequence and data parallelism: body, pooler, masked-LM head.

ids [B, S] -> lookup, exchange -> embed_finish (post-norm): h = n -> blocks (post-norm) -> h [m, D]
body     collect -> last_hidden_state [B, S, D], the same on every rank      pooler   tanh(W h[:, 0] + b)
masked LM   norm(gelu(W h + b)) on this rank's rows -> head [M, V/R] -> loss
"""

import torch
from torch import Tensor, nn

from ..collectives import collect
from ..kernels._op import check
from ..kernels.cross_entropy import IGNORE, check_ids
from ..kernels.embedding import embed_finish
from ..kernels.linear import linear
from ..kernels.norm import norm_in
from ..layers import TransformerBlock, VocabParallelEmbedding
from ..layers._module import ParallelModule, local, on_rows, replicated
from ..layers.block import Normed
from ..layers.norm import LayerNorm
from ..parallel import TensorParallel
from . import huggingface
from ._model import Model, Output, Rows
from .config import BertConfig
from .head import LMHead, Table
from .huggingface import Source


class _Dense(ParallelModule):
    """A replicated linear layer, for rows of this rank or for what is the same on every rank."""

    def __init__(self, width: int, tp: TensorParallel, init_std: float):
        super().__init__(tp)
        self.add_parameter("weight", (width, width), None, init_std)
        self.add_parameter("bias", (width,), None, "zeros")


class Bert(Model):
    """A BERT encoder.  ``masked_lm`` adds the head that predicts tokens, ``pooler`` the pooled output (None: where there is no head,
    which has no use for it).

    ``Bert.from_pretrained`` takes the pooler or the head that the files hold, unless told.
    """

    config_class = BertConfig

    def __init__(
        self,
        config: BertConfig,
        *,
        tp: TensorParallel | None = None,
        dp=None,
        seed: int = 0,
        saving: str = "fastest",
        pooler: bool | None = None,
        masked_lm: bool = False,
    ):
        pooler = not masked_lm if pooler is None else pooler
        super().__init__(config, tp=tp, dp=dp, seed=seed, saving=saving, pooler=pooler, masked_lm=masked_lm)
        c, tp = config, self.tp
        with torch.device("meta"):
            self.embedding = VocabParallelEmbedding(c.vocab_size, c.hidden_size, tp=tp, init_std=c.init_std)
            self.positions = Table(c.max_positions, c.hidden_size, tp, c.init_std)
            self.types = Table(c.type_vocab_size, c.hidden_size, tp, c.init_std)
            self.norm_in = LayerNorm(c.hidden_size, c.eps, tp=tp)
            self.blocks = nn.ModuleList(
                TransformerBlock(
                    c.hidden_size,
                    c.num_heads,
                    c.ffn_size,
                    tp=tp,
                    layer=layer,
                    causal=False,
                    activation=c.activation,
                    eps=c.eps,
                    dropout=c.dropout,
                    attention_dropout=c.attention_dropout,
                    post_norm=True,
                    saving=saving,
                    init_std=c.init_std,
                )
                for layer in range(c.num_layers)
            )
            self.pooler = _Dense(c.hidden_size, tp, c.init_std) if pooler else None
            self.transform, self.transform_norm, self.head = None, None, None
            if masked_lm:
                self.transform = _Dense(c.hidden_size, tp, c.init_std)
                self.transform_norm = LayerNorm(c.hidden_size, c.eps, tp=tp)
                self.head = LMHead(c.vocab_size, c.hidden_size, tp=tp, bias=True, tied=c.tie_embeddings, init_std=c.init_std)
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
        """input_ids int64 [B, S], the same on every tensor-parallel rank -> Output.

        Without a masked-LM head: ``last_hidden_state`` [B, S, D] and, with a pooler, ``pooler_output`` [B, D].  With one: ``loss``
        where there are ``labels`` [B, S] (aligned, not shifted; -100 is ignored), ``logits`` [B, S, V/R] where there are none or
        ``return_logits`` is true.  ``attention_mask`` [B, S] is nonzero where a token may be seen.
        """
        check(cu_seqlens is None and max_seqlen is None, "Bert: packed sequences (cu_seqlens, max_seqlen) are not built")
        wants = labels is not None or return_logits
        check(
            self.head is not None or not wants, "Bert: labels and return_logits need the masked-LM head; make the model with masked_lm=True"
        )
        aligned = dict(labels=labels, attention_mask=attention_mask, position_ids=position_ids, token_type_ids=token_type_ids)
        self._check_inputs(input_ids, **aligned)
        rows = Rows(*input_ids.shape, self.tp)
        rng = self._rng(input_ids, step, first_sample)
        h, normed = self._embed(rows, input_ids, position_ids, token_type_ids, rng)
        mask = self._key_mask(attention_mask)
        for block in self.blocks:
            h, normed = block(h, normed, batch=rows.batch, seq=rows.seq, rng=rng, attention_mask=mask)
        if self.head is None:
            hidden = rows.back(collect(h, self.tp) if self.tp.sequence_parallel else h)
            return Output(last_hidden_state=hidden, pooler_output=None if self.pooler is None else self._pool(hidden))
        tied = local(self.embedding.weight) if self.config.tie_embeddings else None
        labels = None if labels is None else rows.all(labels, IGNORE)
        keep = labels is None or bool(return_logits)
        loss, logits = self.head.loss_and_logits(self._transform(h), tied, labels, loss_normalizer, keep, self.saving == "smallest")
        return Output(loss, rows.back(logits) if keep else None)

    def _embed(self, rows: Rows, ids: Tensor, position_ids: Tensor | None, type_ids: Tensor | None, rng: Tensor | None):
        c = self.config
        if position_ids is None:
            position_ids = torch.arange(rows.seq, device=ids.device).expand(rows.batch, -1)
        type_ids = torch.zeros_like(ids) if type_ids is None else type_ids
        if not torch.compiler.is_compiling():
            for name, x, most in (
                ("input_ids", ids, c.vocab_size),
                ("position_ids", position_ids, c.max_positions),
                ("token_type_ids", type_ids, c.type_vocab_size),
            ):
                check_ids(f"Bert: {name}", x, most)
        weight, bias = replicated(self.tp, self.norm_in.weight, self.norm_in.bias)
        h, n, _ = embed_finish(
            self.embedding.parts(rows.all(ids, -1)),
            position_weight=on_rows(local(self.positions.weight), self.tp),
            positions=rows.local(position_ids, 0),
            type_weight=on_rows(local(self.types.weight), self.tp),
            types=rows.local(type_ids, 0),
            weight=weight,
            norm_bias=bias,
            p=c.embedding_dropout if self.training else 0.0,
            rng=rng,
            first_row=rows.first,
            batch=rows.batch,
            eps=c.eps,
            post_norm=True,
            ranks=self.tp.row_shards,
        )
        return h, Normed(n)

    def _pool(self, hidden: Tensor) -> Tensor:
        """[B, S, D] -> [B, D], the same on every rank"""
        return torch.tanh(linear(hidden[:, 0], local(self.pooler.weight), local(self.pooler.bias)))

    def _transform(self, h: Tensor) -> Normed:
        """[m, D] -> norm(act(W h + b)), on this rank's rows"""
        dense = [on_rows(local(p), self.tp) for p in (self.transform.weight, self.transform.bias)]
        norm = replicated(self.tp, self.transform_norm.weight, self.transform_norm.bias)
        _, n, remake = norm_in(linear(h, *dense, self.config.activation), *norm, eps=self.config.eps, ranks=self.tp.row_shards)
        return Normed(n, remake if self.saving == "smallest" else None)

    # ---- Hugging Face names ----

    base_prefix, head_prefixes = "bert.", ("cls.",)

    @classmethod
    def _options_from(cls, files: huggingface.Files) -> dict:
        names = files.names(cls.base_prefix)
        return dict(pooler=None if "pooler.dense.weight" in names else False, masked_lm="cls.predictions.transform.dense.weight" in names)

    def sources(self) -> dict[str, Source]:
        """Every parameter of the whole model -> the tensors of a BERT file that it is made of."""
        linear = lambda name: {"weight": Source(f"{name}.weight", "o i -> o i"), "bias": Source(f"{name}.bias", "o -> o")}  # noqa: E731
        norm = lambda name: {"weight": Source(f"{name}.weight", "d -> d"), "bias": Source(f"{name}.bias", "d -> d")}  # noqa: E731
        table = lambda name: {"weight": Source(f"{name}.weight", "v d -> v d")}  # noqa: E731
        modules = {
            "embedding": table("embeddings.word_embeddings"),
            "positions": table("embeddings.position_embeddings"),
            "types": table("embeddings.token_type_embeddings"),
            "norm_in": norm("embeddings.LayerNorm"),
            "pooler": linear("pooler.dense"),
            "transform": linear("cls.predictions.transform.dense"),
            "transform_norm": norm("cls.predictions.transform.LayerNorm"),
            "head": {"bias": Source("cls.predictions.bias", "v -> v")},
        }
        if not self.config.tie_embeddings:  # transformers then adds decoder.bias, and keeps an idle cls.predictions.bias
            bias = Source("cls.predictions.decoder.bias", "v -> v", also="cls.predictions.bias")
            modules["head"] = table("cls.predictions.decoder") | {"bias": bias}
        for i in range(self.config.num_layers):
            ours, theirs = f"blocks.{i}", f"encoder.layer.{i}"
            qkv = lambda leaf, theirs=theirs: tuple(f"{theirs}.attention.self.{n}.{leaf}" for n in ("query", "key", "value"))  # noqa: E731
            modules |= {
                f"{ours}.attention.qkv": {
                    "weight": Source(qkv("weight"), "(h e) d -> h 1 e d"),
                    "bias": Source(qkv("bias"), "(h e) -> h 1 e"),
                },
                f"{ours}.attention.out": linear(f"{theirs}.attention.output.dense"),
                f"{ours}.norm_attention": norm(f"{theirs}.attention.output.LayerNorm"),
                f"{ours}.mlp.fc1": linear(f"{theirs}.intermediate.dense"),
                f"{ours}.mlp.fc2": linear(f"{theirs}.output.dense"),
                f"{ours}.norm_mlp": norm(f"{theirs}.output.LayerNorm"),
            }
        return {f"{module}.{leaf}": source for module, leaves in modules.items() for leaf, source in leaves.items()}

    def hf_config(self) -> dict:
        return {"architectures": ["BertModel" if self.head is None else "BertForMaskedLM"]}

    def hf_name(self, name: str) -> str:
        return name if self.head is None else super().hf_name(name)

    def ignorable(self) -> tuple[str, ...]:
        """Tensors a file may hold that this model has no use for: a buffer, the next-sentence head, heads left out, copies."""
        names = [r"embeddings\.position_ids", r"cls\.seq_relationship\.(weight|bias)"]
        names.append(r"cls\.predictions\.decoder\.(weight|bias)" if self.config.tie_embeddings else r"cls\.predictions\.bias")
        if self.head is None:
            names.append(r"cls\.predictions\..*")
        if self.pooler is None:
            names.append(r"pooler\..*")
        return tuple(names)
