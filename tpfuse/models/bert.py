"""BERT (Devlin et al. 2018, arXiv:1810.04805) and its relatives under tensor, sequence and data parallelism.

ids [B, S] -> lookup, exchange -> embed_finish (post-norm): h = n -> blocks (post-norm, or pre-norm) -> n [m, D]
body     collect -> last_hidden_state [B, S, D], the same on every rank      pooler   tanh(W n[:, 0] + b)
masked LM   norm(gelu(W n + b)) on this rank's rows -> head [M, V/R] -> loss
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..kernels.losses.op import check_ids
from ..kernels.losses.options import IGNORE
from ..kernels.norm import norm_in
from ..kernels.runtime.errors import check
from ..layers.hooks import served
from ..layers.module import replicated
from ..layers.norm import LayerNorm
from ..layers.wiring import Normed, enters
from ..parallel import TensorParallel
from ..pipeline.placement import Stage
from .classify import Classifier, ClassifierHead, named_in
from .config.bert import BertConfig
from .embed import Lookup, embed
from .families import FAMILIES, SEQUENCE
from .files.read import ModelDirectory
from .head import LMHead, ReplicatedLinear, WholeNorm
from .inputs import Inputs, check_asked, check_packed
from .model import Model, Output
from .stack import make_block
from .stages import Batch


class Bert(Model):
    """An encoder of BERT's kind: BERT, or by its config RoBERTa, DistilBERT or ModernBERT.

    ``masked_lm`` adds the head that predicts tokens, ``classifier`` that of a :class:`Classifier`, ``pooler`` the
    pooled output (default: where a head per sequence reads it, or there is no head and the family has one).
    ``Bert.from_pretrained`` takes the pooler or the head that the files hold, unless given: with ``masked_lm`` no head
    that classifies.
    ``saving`` and ``recompute`` are GPT's.  Without a head the output is ``last_hidden_state`` and, with a pooler,
    ``pooler_output``; with one, loss and logits.
    """

    config_class = BertConfig
    config: BertConfig
    transform: ReplicatedLinear | None
    transform_norm: LayerNorm | None
    head: LMHead | None

    def __init__(
        self,
        config: BertConfig,
        *,
        tp: TensorParallel | None = None,
        dp: dist.ProcessGroup | DeviceMesh | None = None,
        seed: int = 0,
        saving: str | None = None,
        recompute: str | None = None,
        pooler: bool | None = None,
        masked_lm: bool = False,
        classifier: Classifier | None = None,
        stage: Stage | tuple[Any, ...] | None = None,
    ):
        check(not (masked_lm and classifier is not None), "Bert: give masked_lm or classifier, both came")
        transforms = classifier is not None and config.hf.head(classifier.per).transform
        needed = classifier is not None and classifier.per == SEQUENCE and not transforms
        if pooler is None:
            pooler = needed or (config.hf.pooler and not (masked_lm or classifier is not None))
        check(needed or not pooler or config.hf.pooler, f"Bert: a {config.family} model has no pooler, got pooler=True")
        check(pooler or not needed, "Bert: Classifier(per='sequence') reads the pooler, got pooler=False")
        super().__init__(
            config, tp=tp, dp=dp, seed=seed, saving=saving, recompute=recompute, stage=stage, classifier=classifier,
            pooler=pooler, masked_lm=masked_lm,
        )  # fmt: skip
        c, tp, stages = config, self.tp, self.stages
        with torch.device("meta"):
            self._make_embedding()
            self.positions = self._make_table(c.learned_positions)
            self.types = self._make_table(c.type_vocab_size)
            make_norm = lambda: LayerNorm(c.hidden_size, c.eps, c.norm_bias, tp=tp)
            if stages.has_first:
                self.input_norm = make_norm()
            else:
                self.register_module("input_norm", None)
            self.blocks = stages.make_blocks(
                lambda layer: make_block(c, layer, tp=tp, saving=self.saving), make_norm if enters(c.wiring) else None
            )
            pooler, masked_lm = pooler and stages.has_last, masked_lm and stages.has_last
            width = c.hidden_size
            self.pooler = ReplicatedLinear(width, width, tp=tp, init_std=c.init_std, of_rows=False) if pooler else None
            self.transform, self.transform_norm = None, None
            if masked_lm or transforms:
                of_rows = masked_lm or (classifier is not None and classifier.per != SEQUENCE)
                self.transform = ReplicatedLinear(
                    width, width, tp=tp, init_std=c.init_std, of_rows=of_rows, bias=c.head_bias,
                    activation=c.head_activation or c.activation,
                )  # fmt: skip
                norm = LayerNorm if of_rows else WholeNorm
                self.transform_norm = norm(width, c.eps, c.norm_bias, tp=tp)
            self.head = self._make_head(bias=True) if masked_lm else None
            self.classifier = ClassifierHead("Bert", classifier, c, tp) if classifier is not None else None
        self._choose_recompute(recompute)
        self._materialize()

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
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
        output_hidden_states: bool | None = None,
        headless: bool = False,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        reduction: str = "mean",
    ) -> Output:
        """Runs the model: input_ids int64 [B, S], whole and the same on every tensor- and
        context-parallel rank -> Output.

        The arguments are :meth:`GPT.forward`'s, and these:

        Args:
            labels: int64 [B, S], aligned with input_ids and not shifted; -100 is ignored.  Of a classifier per sequence
                [B], or numbers [B, L].
            position_ids: int64 [B, S]; default: 0, 1, ..., or with ``positions_skip_padding`` the tokens counted.
            token_type_ids: int64 [B, S], of a model with token types; default 0.
            cu_seqlens: int32 [N + 1], the bounds of packed documents, where positions are rotary (ModernBERT).
            max_seqlen: the longest of them.

        ValueError, on every rank, for an input that the model does not take or that is not as above.
        """
        inputs = Inputs(
            input_ids=input_ids, inputs_embeds=inputs_embeds, labels=labels, attention_mask=attention_mask,
            position_ids=position_ids, token_type_ids=token_type_ids, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen,
            loss_normalizer=loss_normalizer, step=step, first_sample=first_sample, return_logits=return_logits,
            output_hidden_states=output_hidden_states, headless=headless, label_smoothing=label_smoothing,
            z_loss=z_loss, reduction=reduction,
        )  # fmt: skip
        self._admit(inputs)
        batch = self._begin(inputs)
        h, normed = self._embedded(batch)
        h, normed, states = self._run_blocks(h, normed, batch)
        output = self._finish(h, normed, batch, states)
        return self._end(output, inputs.step)

    def _begin(self, inputs: Inputs) -> Batch:
        """Checks a call, and makes its rows and the record that all blocks get."""
        cure = "the masked-LM head; make the model with masked_lm=True"
        check_asked("Bert", inputs, self.stages.head or self.classifier is not None, cure)
        no_types = "there are no token types, so token_type_ids must be None"
        check(bool(self.config.type_vocab_size) or inputs.token_type_ids is None, f"Bert: {no_types}")
        alone = inputs.cu_seqlens is None and inputs.max_seqlen is None
        check(
            alone or self.config.rope is not None,
            "Bert: packed sequences (cu_seqlens, max_seqlen) are not built where positions are learned",
        )
        return self._batch(inputs, check_packed("Bert", inputs))

    def _embedded(self, batch: Batch) -> tuple[Tensor, Normed]:
        """Returns h and n of the first block."""
        c, inputs, rows = self.config, batch.inputs, batch.rows
        ids, position_ids, type_ids = inputs.input_ids, inputs.position_ids, inputs.token_type_ids
        if position_ids is None and self.positions is not None:
            position_ids = self._default_positions(inputs)
        if type_ids is None and self.types is not None:
            type_ids = torch.zeros(inputs.shape, dtype=torch.int64, device=inputs.tokens.device)
        if not torch.compiler.is_compiling():
            for name, x, most in (
                ("input_ids", ids, c.vocab_size),
                ("position_ids", position_ids, c.position_bound),
                ("token_type_ids", type_ids, c.type_vocab_size),
            ):
                if x is not None:
                    check_ids(f"Bert: {name}", x, most)
        positions = types = None
        if self.positions is not None and position_ids is not None:
            positions = Lookup(self.positions, rows.local(position_ids, 0))
        if self.types is not None and type_ids is not None:
            types = Lookup(self.types, rows.local(type_ids, 0))
        x = rows.share(inputs.tokens) if ids is None else rows.all(ids, -1)
        drop = self._embedding_dropout(rows, batch.call.rng)
        return embed(self.embedding, self.input_norm, x, drop, positions=positions, types=types, post_norm=True)

    def _balance_loss(self, sums: tuple[Tensor, ...], inputs: Inputs) -> None:
        """There are no experts."""

    def _finish(self, h: Tensor, normed: Normed, batch: Batch, states: tuple[Tensor, ...] | None) -> Output:
        """Runs the head, the classifier or the pooler on h and n of the last block."""
        inputs, rows, rng = batch.inputs, batch.rows, batch.call.rng
        if not self.config.post_norm:
            h = normed.rows
        if inputs.headless:
            return Output(last_hidden_state=rows.collected(h), hidden_states=states)
        if self.classifier is not None and self.classifier.of_rows:
            x = h if self.transform is None else self._transform(h).rows
            return Output(*self.classifier.score_rows(x, rows, inputs, rng), hidden_states=states)
        if self.classifier is not None:
            pooled = self._pool(rows.collected(h), inputs, rng)
            assert pooled is not None  # the head has one
            return Output(*self.classifier.score_pooled(pooled, inputs, rng), hidden_states=states)
        if self.head is None:
            hidden = rows.collected(h)
            return Output(last_hidden_state=hidden, pooler_output=self._pool(hidden, inputs), hidden_states=states)
        labels = None if inputs.labels is None else rows.all(inputs.labels, IGNORE)
        loss, logits = self.head.loss_and_logits(
            self._transform(h),
            labels,
            weight=self._tied(),
            options=self._normalized(inputs, inputs.labels).loss_options,
            keep=labels is None or bool(inputs.return_logits),
            small=self.saving == "smallest" and not served(self.head),
        )
        loss = loss if loss is None or not loss.dim() else rows.back(loss)
        return Output(loss, None if logits is None else rows.back(logits), hidden_states=states)

    def _default_positions(self, inputs: Inputs) -> Tensor:
        """int64 [B, S]: 0, 1, ..., or with ``positions_skip_padding`` from ``first_position`` on."""
        c, (batch, seq), device = self.config, inputs.shape, inputs.tokens.device
        if c.positions_skip_padding and inputs.input_ids is not None:
            real = inputs.input_ids.ne(c.first_position - 1)
            return real.cumsum(1) * real + (c.first_position - 1)
        return torch.arange(c.first_position, c.first_position + seq, device=device).expand(batch, -1)

    def _pool(self, hidden: Tensor, inputs: Inputs, rng: Tensor | None = None) -> Tensor | None:
        """[B, S, D] -> [B, D], the same on every rank; None without a pooler"""
        if self.classifier is None:
            return None if self.pooler is None else torch.tanh(self.pooler(hidden[:, 0]))
        mask, x = inputs.key_mask, hidden[:, 0]
        if self.config.pooling == "mean":
            weight = hidden.new_ones(inputs.shape) if mask is None else mask.to(hidden.dtype)
            x = (hidden * weight[..., None]).sum(1) / weight.sum(1, keepdim=True)
        x = self.classifier.before_pooling(x, rng)
        if self.transform is not None and self.transform_norm is not None:
            return self.transform_norm(self.transform(x))
        assert self.pooler is not None  # a head that has no transform has one
        return self.classifier.below.activation(self.pooler(x))

    def _transform(self, h: Tensor) -> Normed:
        """[m, D] -> norm(act(W h + b)), on this rank's rows"""
        assert self.transform is not None and self.transform_norm is not None  # they come with the head
        x = self.transform(h)
        if served(self.transform_norm):
            return Normed(self.transform_norm(x))
        gamma, beta = replicated(self.tp, self.transform_norm.weight, self.transform_norm.bias)
        ranks, recompute = self.tp.row_shards, self.saving == "smallest"
        _, n, recipe = norm_in(
            x, gamma, beta, eps=self.config.eps, ranks=ranks, recompute=recompute, leaves=self.tp.row_leaves
        )
        return Normed(n, recipe)

    # ---- files ----

    @classmethod
    def _has_head(cls, options: Mapping[str, Any]) -> bool:
        return bool(options.get("masked_lm"))

    @classmethod
    def _options_from(cls, files: ModelDirectory, options: Mapping[str, Any]) -> dict[str, Any]:
        family = FAMILIES[files.config["model_type"]]  # the config has been read
        if "masked_lm" not in options and (classifier := named_in(files.config, family)) is not None:
            return dict(classifier=classifier)
        names, sources = files.names(family.base_prefix), family.sources(cls.config_class.from_hf(files.config))
        stored = lambda name: name in sources and sources[name].names[0] in names
        return dict(pooler=None if stored("pooler.weight") else False, masked_lm=stored("transform.weight"))
