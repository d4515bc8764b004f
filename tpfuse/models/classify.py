"""Heads that classify sequences or tokens, as transformers' ForSequenceClassification and ForTokenClassification.

    per token                  W dropout(n) + b on this rank's rows, collected -> [B, S, L]
    per sequence, a decoder    of W n on this rank's rows, collected, the row of each last token -> [B, L]
    per sequence, an encoder   W dropout(pooled) + b -> [B, L], pooled as its family has it (families/family.py)

W [L, D] is replicated: L numbers a row travel in place of D, and logits, loss and gradients are whole on every rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.losses.op import check_ids, cross_entropy
from ..kernels.losses.options import IGNORE
from ..kernels.norm import dropout
from ..kernels.runtime import rules
from ..kernels.runtime.errors import check
from ..kernels.runtime.op import acc_dtype, scalar
from ..kernels.runtime.philox import FirstRow
from ..layers.sites import CLASSIFIER, POOLER
from ..parallel import TensorParallel
from .config.model import ModelConfig
from .families import PER, SEQUENCE, TOKEN, Family
from .files.source import Source
from .head import ReplicatedLinear
from .inputs import Inputs, readable
from .rows import BatchRows

REGRESSION, SINGLE, MULTI = PROBLEMS = "regression", "single_label_classification", "multi_label_classification"
_FIELDS: dict[str, rules.Rule] = dict(
    num_labels=rules.integer(),
    per=rules.one_of(PER),
    problem_type=rules.optional(rules.one_of(PROBLEMS)),
    dropout=rules.optional(rules.number(0, 1, "[)")),
    pad_token_id=rules.optional(rules.integer(least=-1)),
)
_KEYS: dict[str, rules.Rule] = dict(
    num_labels=rules.optional(rules.integer()),
    id2label=rules.optional(rules.instance("an object", Mapping)),
    problem_type=rules.optional(rules.one_of(PROBLEMS)),
    classifier_dropout=rules.optional(rules.number(0, 1, "[)")),
    seq_classif_dropout=rules.optional(rules.number(0, 1, "[)")),
    hidden_dropout=rules.optional(rules.number(0, 1, "[)")),
    pad_token_id=rules.optional(rules.integer(least=-1)),
    token_classification_bias=rules.optional(rules.boolean),
)


@dataclass(frozen=True)
class Classifier:
    """A classification head: ``GPT(config, classifier=Classifier(3))``.

    Args:
        num_labels: L.
        per: "sequence" or "token".
        problem_type: the loss of a head per sequence, "regression" (squared error), "single_label_classification"
            (cross-entropy) or "multi_label_classification" (binary cross-entropy).  None: by the labels of a call, as
            in transformers: regression where there is one label, single-label where they are int64, else multi-label.
        dropout: on what the head reads.  None: transformers' default, which is BERT's and RoBERTa's ``dropout``, and
            0.1 in a decoder's head per token; its head per sequence has none.
        pad_token_id: in a decoder per sequence, the token that counts as padding behind or before a sequence, whose
            last other token is read.  None: the last token that ``attention_mask`` shows.

    ValueError for a value that breaks its rule, or that the model has no use for.
    """

    num_labels: int
    per: str = SEQUENCE
    problem_type: str | None = None
    dropout: float | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        rules.check_rules("Classifier", vars(self), _FIELDS)
        single = self.problem_type in (None, SINGLE)
        check(self.per == SEQUENCE or single, f"Classifier: per='token' is {SINGLE}, got {self.problem_type!r}")
        several = self.num_labels > 1 or self.problem_type != SINGLE or self.per == TOKEN
        check(several, f"Classifier: {SINGLE} has at least 2 labels, got num_labels={self.num_labels}")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], family: Family, per: str) -> "Classifier":
        """Returns the head that a config.json describes; ValueError for a value that is none, or not built.

        A missing key counts as transformers' default of it.
        """
        config = {**family.defaults, **config}
        rules.check_rules("Classifier", config, _KEYS)
        check(
            per == SEQUENCE or config.get("token_classification_bias") in (True, None),
            "Classifier: token_classification_bias=False is not built; only True is",
        )
        names, count = config.get("id2label"), config.get("num_labels")
        if names is not None and count not in (None, len(names)):
            raise ValueError(f"Classifier: num_labels={rules.quoted(count)}, and id2label has {len(names)}")
        values: dict[str, Any] = dict(num_labels=count or 2 if names is None else len(names), per=per)
        if per == SEQUENCE:
            values["problem_type"] = config.get("problem_type")
        values["dropout"] = _dropout_in(config, family, per)
        if per == SEQUENCE and family.causal:
            values["pad_token_id"] = config.get("pad_token_id")
        return cls(**values)

    def to_hf(self, family: Family, previous: Mapping[str, Any], p: float) -> dict[str, Any]:
        """Returns the head's part of config.json; the names of labels are those of ``previous``, where it has them.

        ``p``: of the dropout that the head has, which is written where ``previous`` says another.
        """
        config: dict[str, Any] = {"architectures": [family.classes[self.per].architecture]}
        if len(previous.get("id2label") or ()) != self.num_labels:
            names = {str(i): f"LABEL_{i}" for i in range(self.num_labels)}
            config |= dict(id2label=names, label2id={name: int(i) for i, name in names.items()})
        key = family.head(self.per).dropout_key
        if key is None and self.dropout is not None:
            raise ValueError(
                f"Classifier: {config['architectures'][0]} has no dropout of its own, got dropout={self.dropout}"
            )
        stands = _dropout_in({**family.defaults, **previous}, family, self.per)
        value = p if self.dropout is None and stands not in (None, p) else self.dropout
        fields = dict(problem_type=self.problem_type, pad_token_id=self.pad_token_id) | {key or "": value}
        config |= {key: value for key, value in fields.items() if value is not None}
        # what another head left there
        return config | {key: getattr(self, key) for key in ("num_labels", "problem_type") if key in previous}


def _dropout_in(config: Mapping[str, Any], family: Family, per: str) -> float | None:
    """Returns the dropout of a head that a config.json names; None where it names none."""
    if per == SEQUENCE and family.causal:
        return None
    hidden, key = config.get("hidden_dropout") if family.causal else None, family.head(per).dropout_key
    return hidden if key is None or config.get(key) is None else config[key]


class ClassifierHead(ReplicatedLinear):
    """The head of a :class:`Classifier`; its call is logits of rows."""

    repr_fields = "classifier", "in_features", "out_features"

    def __init__(self, name: str, classifier: Classifier, config: ModelConfig, tp: TensorParallel):
        sequences, causal = classifier.per == SEQUENCE, config.hf.causal
        if classifier.per not in config.hf.classes:
            who = f"a {config.family} model of transformers"
            raise ValueError(f"{name}: {who} has no class that classifies per {classifier.per}")
        drops, p = not (sequences and causal), classifier.dropout
        check(drops or p is None, f"{name}: a decoder's Classifier(per='sequence') has no dropout, got {p}")
        pads = sequences and causal
        check(
            pads or classifier.pad_token_id is None,
            f"{name}: Classifier(pad_token_id={classifier.pad_token_id}) is for decoders, per='sequence'",
        )
        sizes = config.hidden_size, classifier.num_labels
        super().__init__(*sizes, tp=tp, init_std=config.init_std, of_rows=causal or not sequences, bias=drops)
        self.name, self.family, self.classifier = name, config.hf, classifier
        self.below = config.hf.head(classifier.per)
        default = config.dropout if self.below.dropout is None else self.below.dropout
        self.p = (0.1 if causal else default) * drops if p is None else p

    def forward(self, x: Tensor, rng: Tensor | None = None, first_row: FirstRow = 0, batch: int = 1) -> Tensor:
        """x [m, D] -> [m, L]"""
        if self.training and rng is not None:
            x = dropout(x, self.p, rng=rng, site=CLASSIFIER, first_row=first_row, batch=batch)
        return super().forward(x)

    def before_pooling(self, x: Tensor, rng: Tensor | None) -> Tensor:
        """The rows of first tokens [B, D] as the pooler reads them."""
        if self.below.dropped and self.training and rng is not None:
            x = dropout(x, self.p, rng=rng, site=POOLER, batch=x.shape[0])
        return x

    # ---- a call ----

    def check_call(self, inputs: Inputs) -> None:
        """Raises ValueError for labels that are not the head's, packed sequences, or padding of unknown place."""
        c, tokens = self.classifier, inputs.tokens
        if c.per == SEQUENCE:
            check(
                inputs.cu_seqlens is None,
                f"{self.name}: cu_seqlens packs several sequences into a row, and Classifier(per='sequence') reads one"
                " a row; give them padded, each a row of its own",
            )
            if self.family.causal and c.pad_token_id is None and inputs.attention_mask is None and len(tokens) > 1:
                raise ValueError(
                    f"{self.name}: where sequences end is not known; give attention_mask, or Classifier(pad_token_id=)"
                )
        if inputs.labels is not None:
            self._check_labels(inputs.labels, inputs)

    def _check_labels(self, labels: Any, inputs: Inputs) -> None:
        c, (batch, seq), device = self.classifier, inputs.shape, inputs.tokens.device
        problem = self.problem(labels)
        shapes: list[tuple[int, ...]] = [(batch, seq)] if c.per == TOKEN else [(batch,), (batch, 1)]
        if c.per == SEQUENCE and problem != SINGLE and c.num_labels > 1:
            shapes = [(batch, c.num_labels)]
        fits = isinstance(labels, Tensor) and tuple(labels.shape) in shapes and labels.device == device
        kind = "int64" if problem == SINGLE else "numbers"
        if not fits or (problem == SINGLE and labels.dtype != torch.int64) or labels.is_complex():
            place = f" on {device}" * (device.type != "cpu")
            raise ValueError(
                f"{self.name}: labels of {problem} must be {kind} {' or '.join(map(str, shapes))}{place}, got"
                f" {rules.described(labels)}"
            )
        if problem == SINGLE:
            if readable():
                check_ids(f"{self.name}: labels", labels, c.num_labels, IGNORE)
        else:
            for key in ("label_smoothing", "z_loss"):
                check(not getattr(inputs, key), f"{self.name}: {key} is of {SINGLE}, and the labels are of {problem}")

    def problem(self, labels: Any) -> str:
        c = self.classifier
        if c.per == TOKEN:
            return SINGLE
        if c.problem_type is not None:
            return c.problem_type
        if c.num_labels == 1:
            return REGRESSION
        return SINGLE if getattr(labels, "dtype", None) in (torch.int64, torch.int32) else MULTI

    def score_rows(
        self, x: Tensor, rows: BatchRows, inputs: Inputs, rng: Tensor | None
    ) -> tuple[Tensor | None, Tensor]:
        """This rank's x [m, D] -> the loss where there are labels, and logits [B, S, L] or [B, L]"""
        logits = rows.collected(self(x, rng, rows.first, rows.batch))
        if self.classifier.per == SEQUENCE:
            samples = torch.arange(rows.batch, device=logits.device)
            logits = logits[samples, last_tokens(inputs, self.classifier.pad_token_id)]
        return self._loss(logits, inputs), logits

    def score_pooled(self, x: Tensor, inputs: Inputs, rng: Tensor | None) -> tuple[Tensor | None, Tensor]:
        """x [B, D], the same on every rank -> the loss where there are labels, and logits [B, L]"""
        logits = self(x, rng, batch=x.shape[0])
        return self._loss(logits, inputs), logits

    def _loss(self, logits: Tensor, inputs: Inputs) -> Tensor | None:
        labels = inputs.labels
        if labels is None:
            return None
        problem = self.problem(labels)
        if problem == SINGLE:
            return cross_entropy(logits, labels.view(logits.shape[:-1]), **inputs.loss_options)
        logits = logits.to(acc_dtype(logits))
        kind = nn.functional.mse_loss if problem == REGRESSION else nn.functional.binary_cross_entropy_with_logits
        losses = kind(logits, labels.view(logits.shape).to(logits.dtype), reduction="none")
        if inputs.reduction == "none":
            return losses.view(labels.shape)
        if inputs.reduction == "sum":
            return losses.sum()
        normalizer = inputs.loss_normalizer
        return losses.mean() if normalizer is None else losses.sum() / scalar(normalizer, losses.dtype, losses.device)

    # ---- files ----

    def sources(self) -> dict[str, Source]:
        """Returns the tensors of a Hugging Face file, by the names of parameters in the model."""
        patterns = dict(weight="o i -> o i", bias="o -> o")
        modules = dict(classifier=self.hf_module) | (dict(pooler=self.below.dense) if self.below.dense else {})
        return {
            f"{name}.{leaf}": Source.one(f"{hf_name}.{leaf}", patterns[leaf])
            for name, hf_name in modules.items()
            for leaf in (self.specs if name == "classifier" else patterns)
        }

    @property
    def hf_module(self) -> str:
        """The name of the module in transformers' class."""
        return self.family.classes[self.classifier.per].module


def last_tokens(inputs: Inputs, pad: int | None) -> Tensor:
    """Returns int64 [B]: the last position that is no padding, by its token where ``pad`` says which, else by the mask.

    Without either it is the last of all; where all is padding it is 0.
    """
    batch, seq = inputs.shape
    positions = torch.arange(seq, device=inputs.tokens.device).expand(batch, seq)
    by_token = pad is not None and inputs.input_ids is not None
    real = inputs.input_ids != pad if by_token else inputs.key_mask
    return (positions if real is None else positions * real).amax(-1)


def named_in(config: Mapping[str, Any], family: Family) -> Classifier | None:
    """Returns the head of the class that a config.json names; None where that class does not classify."""
    for per, entry in family.classes.items():
        if config.get("architectures") == [entry.architecture]:
            return Classifier.from_hf(config, family, per)
    return None
