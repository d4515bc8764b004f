"""GPT-2, Llama and its relatives (families/) under tensor, sequence and data parallelism.

    ids [B, S] -> rows [M] -> lookup, exchange -> embed_finish: h, n -> blocks (h, n) -> n [R, m, D]
    -> head [M, V/R] -> loss

The first norm belongs to the embedding, and each block owns the norm after its GEMM pairs: the last block's is the
final norm.  Without norms before attention and the MLP n is h, but behind the last block.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..kernels.losses.op import check_ids
from ..kernels.losses.options import IGNORE
from ..kernels.runtime.errors import check
from ..layers.balance import ExpertBalance, balance_loss, check_balance
from ..layers.expert_ranks import ExpertGroup
from ..layers.hooks import served
from ..layers.norm import norm_layer
from ..layers.wiring import Normed, enters
from ..parallel import TensorParallel
from ..pipeline.placement import Stage
from ..sequence_parallel.crossings import expanded
from .classify import Classifier, ClassifierHead, named_in
from .config.gpt import GPTConfig
from .embed import Lookup, embed
from .families import FAMILIES
from .files.names import head_weights
from .files.read import ModelDirectory
from .generation.generate import generate
from .head import LMHead
from .inputs import Inputs, check_asked, check_of_language, check_packed
from .model import Model, Output
from .rows import BatchRows
from .stack import make_block
from .stages import Batch


class GPT(Model):
    """A causal language model, whose weights are the same bits at every split.

    ``saving``: "fastest" or "smallest" (what is kept for backward).  ``recompute``: "selective" is saving="smallest",
    which makes again what is cheap; "full" keeps each block's input alone and runs the block again.  ValueError, on
    every rank, for a config that cannot be split, or one that the ranks do not agree on.

    ``lm_head=False`` makes the base decoder, transformers' LlamaModel or GPT2Model, whose output is
    ``last_hidden_state``.  ``GPT.from_pretrained`` makes it too where config.json names that class and the head has a
    weight of its own that no file has, unless ``lm_head`` is given.  ``classifier`` puts the head of a
    :class:`Classifier` in its place, whose logits and labels those of a call then are; a directory of a class that
    classifies brings it.

    ``experts``: mesh["dp", "tp"], over whose ranks experts are divided, beside ``dp=mesh["dp"]``; by default over those
    of ``tp``.  Every replica then makes the same calls, of as many rows as it has.  A bare backward() leaves complete
    gradients of experts, those of the mean of the replicas' losses: what :func:`tpfuse.data_parallel`, or ``reduce`` of
    a MainGrad, makes of all others.  Where the loss is a mean over all labels of all replicas, ``loss_normalizer`` is
    therefore their number over the number of replicas, as under data parallelism without it.  With ``stage`` they are
    sums, since the loss of a pipeline's step is one over all replicas.

    ``balance``: a :class:`tpfuse.layers.ExpertBalance`, the loss that keeps experts equally busy, which a call with
    labels adds to the cross entropy; default: transformers', where config.json asks for it.  It is weighed as the cross
    entropy is: by the labels of each sequence, over ``loss_normalizer``.
    """

    config_class = GPTConfig
    config: GPTConfig
    head: LMHead | None

    def __init__(
        self,
        config: GPTConfig,
        *,
        tp: TensorParallel | None = None,
        dp: dist.ProcessGroup | DeviceMesh | None = None,
        seed: int = 0,
        saving: str | None = None,
        recompute: str | None = None,
        lm_head: bool = True,
        classifier: Classifier | None = None,
        balance: ExpertBalance | None = None,
        experts: ExpertGroup | None = None,
        stage: Stage | tuple[Any, ...] | None = None,
    ):
        lm_head = lm_head and classifier is None
        if balance is None and config.balanced and lm_head:
            balance = ExpertBalance("batch", config.balance_coefficient)
        super().__init__(
            config, tp=tp, dp=dp, seed=seed, saving=saving, recompute=recompute, stage=stage, classifier=classifier,
            lm_head=lm_head, balance=balance, experts=experts,
        )  # fmt: skip
        check(experts is None or config.num_experts is not None, "GPT: experts= needs experts, got num_experts=None")
        c, tp, stages = config, self.tp, self.stages
        self.balance = balance
        if balance is not None:
            check_balance("GPT", balance)
            layers = 0 if c.num_experts is None else c.num_layers - len(set(c.mlp_layers))
            check(layers > 0, f"GPT: balance={balance} needs experts, which no layer of this config has")
            check(lm_head, f"GPT: balance={balance} needs the language-model head, whose loss it is added to")
            check(
                stage is None or balance.kind == "sequence",
                "GPT: over pipeline stages balance must be of kind 'sequence', a sum over layers, got"
                f" {balance.kind!r}",
            )
        check(
            tp.batch_invariant is None or not c.depends_on_length(),
            "GPT: rotary positions by a call's length (dynamic, longrope) are not built for batch_invariant",
        )
        with torch.device("meta"):
            self._make_embedding(c.hidden_size**0.5 if c.scaled_embedding else None)
            self.positions = self._make_table(c.learned_positions)
            make_norm = lambda: norm_layer(c.norm_shape, c.hidden_size, tp=tp)
            self.input_norm = make_norm() if enters(c.wiring) and stages.has_first else None
            self.blocks = stages.make_blocks(
                lambda layer: make_block(c, layer, tp=tp, saving=self.saving, experts=self.groups.experts),
                make_norm if enters(c.wiring) else None,
            )
            self.head = self._make_head(bias=False, softcap=c.logit_softcap) if lm_head and stages.has_last else None
            self.classifier = ClassifierHead("GPT", classifier, c, tp) if classifier is not None else None
        self._choose_recompute(recompute)
        self._materialize()

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
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
        logits_to_keep: int | Tensor | None = None,
        headless: bool = False,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        reduction: str = "mean",
    ) -> Output:
        """Runs the model: input_ids int64 [B, S], whole and the same on every tensor- and
        context-parallel rank -> Output.

        Args:
            input_ids: token ids.
            inputs_embeds: in their place, rows [B, S, D] as the embedding would give them, whole and the same on every
                tensor-parallel rank; so is their gradient.
            labels: int64 [B, S], aligned with input_ids; -100 is ignored.  They are shifted here (never across a packed
                document's bound), but not those of a classifier: per token [B, S], per sequence [B], or numbers [B, L].
            shift_labels: in their place, int64 [B, S], of each position the token that follows it, or -100.
            attention_mask: bool or integer [B, S], nonzero where a token may be seen.
            position_ids: int64 [B, S]; default: 0, 1, ... in each sequence, and in each packed document.
            token_type_ids: must be None.
            cu_seqlens: int32 [N + 1]: the bounds of packed documents, 0 first, with B = 1.  No document sees another;
                what lies beyond the last is padding.
            max_seqlen: the longest document, which max_positions limits (not S).
            loss_normalizer: divides the summed loss; default: the valid labels of this call.
            step: chooses the dropout masks; default: the model's counter.
            first_sample: chooses the dropout masks too; default: dp rank x B.
            return_logits: logits [B, S, V/R] come where there are no labels, or where this is true.
            output_hidden_states: hidden_states come, [B, S, D] each, collected over the ranks: the embedding's output,
                then each block's, the last behind the final norm.
            logits_to_keep: without labels, the positions whose logits come: the last so many (0: all), positions [K] or
                [B, K], or bool [B, S], of which they are [N, V/R].
            headless: last_hidden_state comes in place of what a head makes of it.
            label_smoothing: the share of the target that is spread over the whole vocabulary, in [0, 1).
            z_loss: the weight of the squared logsumexp that is added to the loss.
            reduction: "mean", "sum", or "none" for the loss of each label, [B, S], aligned with ``labels``: that of
                labels[b, s] stands at [b, s], 0 where it counts nothing (at a sequence's first token too).

        ValueError, on every rank, for an input that the model does not take or that is not as above.
        """
        inputs = Inputs(
            input_ids=input_ids, inputs_embeds=inputs_embeds, labels=labels, shift_labels=shift_labels,
            attention_mask=attention_mask, position_ids=position_ids, token_type_ids=token_type_ids,
            cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, loss_normalizer=loss_normalizer, step=step,
            first_sample=first_sample, return_logits=return_logits, output_hidden_states=output_hidden_states,
            logits_to_keep=logits_to_keep, headless=headless, label_smoothing=label_smoothing, z_loss=z_loss,
            reduction=reduction,
        )  # fmt: skip
        self._admit(inputs)
        batch = self._begin(inputs)
        h, normed = self._embedded(batch)
        h, normed, states = self._run_blocks(h, normed, batch)
        output = self._finish(h, normed, batch, states)
        return self._end(output, inputs.step)

    def _begin(self, inputs: Inputs) -> Batch:
        """Checks a call, and makes its rows and the record that all blocks get."""
        check(inputs.token_type_ids is None, "GPT: there are no token types, so token_type_ids must be None")
        cure = "the language-model head; make the model with lm_head=True"
        check_asked("GPT", inputs, self.stages.head or self.classifier is not None, cure)
        check_of_language("GPT", inputs, self.stages.head)
        batch = self._batch(inputs, check_packed("GPT", inputs))
        sums = self.balance is not None and inputs.labelled and not inputs.headless
        return batch._replace(call=batch.call._replace(router_sums=sums))

    def _targets(self, inputs: Inputs) -> Tensor | None:
        """Returns the label of each position, that of the token behind it."""
        return inputs.shift_labels if inputs.labels is None else _shifted(inputs.labels, inputs.cu_seqlens)

    def _embedded(self, batch: Batch) -> tuple[Tensor, Normed]:
        """Returns h and n of the first block."""
        return self._embed(batch.rows, batch.inputs.tokens, batch.inputs.position_ids, batch.call.rng)

    def _finish(self, h: Tensor, normed: Normed, batch: Batch, states: tuple[Tensor, ...] | None) -> Output:
        """Runs the head, the classifier or the pooler on h and n of the last block."""
        inputs, rows, rng = batch.inputs, batch.rows, batch.call.rng
        if self.classifier is not None and not inputs.headless:
            return Output(*self.classifier.score_rows(normed.rows, rows, inputs, rng), hidden_states=states)
        if self.head is None or inputs.headless:
            return Output(last_hidden_state=rows.collected(normed.rows), hidden_states=states)
        targets, keep = self._targets(inputs), inputs.logits_to_keep
        if keep is not None:
            last, rows = rows.select(normed.rows, keep)
            normed = Normed(expanded("GPT", last, self.tp))
        labels = None if targets is None else rows.all(targets, IGNORE)
        loss, logits = self.head.loss_and_logits(
            normed,
            labels,
            weight=self._tied(),
            options=self._normalized(inputs, targets).loss_options,
            keep=labels is None or bool(inputs.return_logits),
            small=self.saving == "smallest" and not served(self.head),
        )
        if loss is not None and loss.dim():
            loss = rows.back(loss)
            if inputs.labels is not None:  # the loss of a label stands where the token before it is
                loss = nn.functional.pad(loss[:, :-1], (1, 0))
        logits = None if logits is None else rows.back(logits)
        if logits is not None and isinstance(keep, Tensor) and keep.dtype == torch.bool:
            logits = logits[0]
        balance = self._balance_loss(normed.sums, inputs)
        if loss is not None and balance is not None and inputs.reduction != "none":
            loss = loss + balance
        return Output(loss, logits, hidden_states=states, balance_loss=balance)

    def _balance_loss(self, sums: tuple[Tensor, ...], inputs: Inputs) -> Tensor | None:
        """Returns the loss of the router's sums of layers, over what the cross entropy is divided by."""
        if self.balance is None or not sums:
            return None
        targets = self._targets(inputs)
        assert targets is not None  # sums are asked for where there are labels
        normalizer = 1.0 if inputs.reduction == "sum" else inputs.loss_normalizer
        weights = _label_counts(targets, inputs.cu_seqlens)
        return balance_loss(sums, self.balance, weights=weights, normalizer=normalizer, tp=self.tp)

    def _embed(
        self, rows: BatchRows, tokens: Tensor, position_ids: Tensor | None, rng: Tensor | None
    ) -> tuple[Tensor, Normed]:
        """Embeds tokens: ids [B, S], or rows [B, S, D] in their place -> h and n of the first block."""
        c, ids = self.config, tokens if tokens.dim() == 2 else None
        if not torch.compiler.is_compiling():
            if ids is not None:
                check_ids("GPT: input_ids", ids, c.vocab_size)
            if position_ids is not None:
                check_ids("GPT: position_ids", position_ids, c.position_bound)
        positions: Lookup | None = None
        if self.positions is not None:
            if position_ids is None:
                position_ids = torch.arange(rows.seq, device=tokens.device).expand(rows.batch, -1)
            positions = Lookup(self.positions, rows.local(position_ids, 0))
        x, drop = rows.share(tokens) if ids is None else rows.all(ids, -1), self._embedding_dropout(rows, rng)
        return embed(
            self.embedding, self.input_norm, x, drop, positions=positions, recompute=self.recompute is not None
        )

    generate = generate

    @classmethod
    def _has_head(cls, options: Mapping[str, Any]) -> bool:
        return options.get("lm_head", True) and options.get("classifier") is None

    @classmethod
    def _options_from(cls, files: ModelDirectory, options: Mapping[str, Any]) -> dict[str, Any]:
        family = FAMILIES[files.config["model_type"]]  # the config has been read
        base = files.config.get("architectures") == [family.base_architecture]
        headed = (
            not head_weights(family).isdisjoint(files.raw_names())
            or cls.config_class.from_hf(files.config).tie_embeddings
        )
        classifier = None if "lm_head" in options else named_in(files.config, family)
        return dict(lm_head=headed or not base, classifier=classifier)


def _shifted(labels: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Returns the next token's label at each position; none at the end of a document."""
    shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE)
    if cu_seqlens is None:
        return shifted
    seq = labels.shape[1]
    bounds = cu_seqlens.long().clamp(max=seq)
    following = torch.arange(1, seq + 1, device=labels.device)
    bound = torch.zeros(seq + 1, dtype=torch.bool, device=labels.device).index_fill_(0, bounds[1:], True)
    return shifted.masked_fill(bound[1:] | (following > bounds[-1]), IGNORE)


def _label_counts(targets: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """targets [B, S] -> the number of labels of each sample, or of each packed document, int64 [N]"""
    labels = targets != IGNORE
    if cu_seqlens is None:
        return labels.sum(1)
    before = nn.functional.pad(labels[0].cumsum(0), (1, 0))[cu_seqlens.long().clamp(max=labels.shape[1])]
    return before.diff()
