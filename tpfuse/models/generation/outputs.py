"""Outputs of ``generate`` beside the tokens, in transformers' classes: the scores and logits of every step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from .processors import transformers_class


class Record(NamedTuple):
    """A tensor [rows, V] a step: the scores by which tokens were chosen, and the model's logits; None: not kept."""

    scores: list[Tensor] | None
    logits: list[Tensor] | None

    def add(self, scores: Tensor, logits: Tensor) -> None:
        for steps, tensor in ((self.scores, scores), (self.logits, logits)):
            if steps is not None:
                steps.append(tensor.clone())


def record_of(options: Mapping[str, Any]) -> Record | None:
    """Returns where to record what ``options`` want; None where they want tokens alone, as by transformers' rule
    without ``return_dict_in_generate``."""
    if not options.get("return_dict_in_generate"):
        return None
    return Record(*([] if options.get(key) else None for key in ("output_scores", "output_logits")))


def result(record: Record, tokens: Tensor, steps: int) -> Any:
    """Returns transformers' record of sampled or greedy ``tokens``, of which the last ``steps`` are new."""
    scores, logits = (None if kept is None else tuple(kept[:steps]) for kept in record)
    cls = transformers_class("GenerateDecoderOnlyOutput", "return_dict_in_generate")
    return cls(sequences=tokens, scores=scores, logits=logits)


def beam_result(record: Record, tokens: Tensor, sums: Tensor, rows: Tensor) -> Any:
    """Returns transformers' record of beams: their ``sums`` [B], the rows [B, new] that each went on from."""
    scores, logits = (None if kept is None else tuple(kept) for kept in record)
    cls = transformers_class("GenerateBeamDecoderOnlyOutput", "return_dict_in_generate")
    final = None if scores is None else sums
    return cls(sequences=tokens, sequences_scores=final, scores=scores, logits=logits, beam_indices=rows)
