"""transformers' own processors of scores and its criterion of time, made of the arguments of ``generate`` by its rules.

transformers is imported where one of these arguments is given.  Its processors come in its order: ``TABLE``, what a
caller gives, and behind them, of sampled tokens, ``FILTERS``; then ``renormalize_logits``.  So where one is made, those
of which the library has its own (the penalty, temperature, top_k, top_p, min_p) are made too, in their places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

Processor = Callable[[Tensor, Tensor], Tensor]  # ids [B, S] and scores [B, V] -> scores [B, V]


class PromptRows(NamedTuple):
    """The sequences that processors see: ``ids`` [rows, S] with padding on their left, and how many ``new`` tokens
    come at most."""

    ids: Tensor
    mask: Tensor
    new: int
    ends: list[int]
    beams: int

    @property
    def columns(self) -> int:
        return self.ids.shape[1]

    @property
    def eos(self) -> Tensor | None:
        return torch.tensor(self.ends, device=self.ids.device) if self.ends else None

    @property
    def padding(self) -> Tensor:
        """[rows]: the columns before a prompt."""
        return self.mask.int().argmax(1)

    @property
    def least(self) -> int:
        """The tokens that a filter leaves: of beams one more than the ends."""
        return 1 if self.beams == 1 else max(2, len(self.ends) + 1)


class Recipe(NamedTuple):
    """A class of transformers, and its arguments for the value of an option."""

    name: str
    arguments: Callable[[Any, PromptRows], tuple[Any, ...]] = lambda value, rows: (value,)
    needs_end: bool = False  # it does nothing where no token ends a sequence


TABLE = {
    "sequence_bias": Recipe("SequenceBiasLogitsProcessor"),
    "encoder_repetition_penalty": Recipe("EncoderRepetitionPenaltyLogitsProcessor", lambda v, rows: (v, rows.ids)),
    "repetition_penalty": Recipe("RepetitionPenaltyLogitsProcessor", lambda v, rows: (v, rows.padding)),
    "no_repeat_ngram_size": Recipe("NoRepeatNGramLogitsProcessor"),
    "encoder_no_repeat_ngram_size": Recipe("EncoderNoRepeatNGramLogitsProcessor", lambda v, rows: (v, rows.ids)),
    "bad_words_ids": Recipe("NoBadWordsLogitsProcessor", lambda v, rows: (v, rows.eos)),
    "min_length": Recipe("MinLengthLogitsProcessor", lambda v, rows: (v, rows.eos, rows.ids.device), needs_end=True),
    "min_new_tokens": Recipe(
        "MinNewTokensLengthLogitsProcessor",
        lambda v, rows: (rows.columns, v, rows.eos, rows.ids.device),
        needs_end=True,
    ),
    "prefix_allowed_tokens_fn": Recipe("PrefixConstrainedLogitsProcessor", lambda v, rows: (v, rows.beams)),
    "forced_bos_token_id": Recipe("ForcedBOSTokenLogitsProcessor"),
    "forced_eos_token_id": Recipe(
        "ForcedEOSTokenLogitsProcessor", lambda v, rows: (rows.columns + rows.new, v, rows.ids.device)
    ),
    "remove_invalid_values": Recipe("InfNanRemoveLogitsProcessor", lambda v, rows: ()),
    "exponential_decay_length_penalty": Recipe(
        "ExponentialDecayLengthPenalty", lambda v, rows: (v, rows.eos, rows.columns), needs_end=True
    ),
    "suppress_tokens": Recipe("SuppressTokensLogitsProcessor", lambda v, rows: (v, rows.ids.device)),
    "begin_suppress_tokens": Recipe(
        "SuppressTokensAtBeginLogitsProcessor", lambda v, rows: (v, rows.columns, rows.ids.device)
    ),
}
_LEAVES = lambda v, rows: (v, -float("inf"), rows.least)
FILTERS = {
    "temperature": Recipe("TemperatureLogitsWarper"),
    "top_h": Recipe("TopHLogitsWarper"),
    "top_k": Recipe("TopKLogitsWarper", _LEAVES),
    "top_p": Recipe("TopPLogitsWarper", _LEAVES),
    "min_p": Recipe("MinPLogitsWarper", _LEAVES),
    "typical_p": Recipe("TypicalLogitsWarper", _LEAVES),
    "epsilon_cutoff": Recipe("EpsilonLogitsWarper", _LEAVES),
    "eta_cutoff": Recipe("EtaLogitsWarper", _LEAVES),
}
LAST = {"renormalize_logits": Recipe("LogitNormalization", lambda v, rows: ())}
OWN = {"repetition_penalty", "temperature", "top_k", "top_p", "min_p"}  # of which the library has its own
BORROWED = (TABLE.keys() | FILTERS.keys() | LAST.keys()) - OWN


def needs_transformers(options: Mapping[str, Any]) -> bool:
    """Returns whether ``options``, which all say something, need transformers' processors."""
    sampled = options.get("do_sample", False)
    needed = BORROWED - (set() if sampled else FILTERS.keys())
    # a filter of sampled beams leaves more tokens than the library's own does
    beams = OWN - {"repetition_penalty"} if sampled and options.get("num_beams", 1) != 1 else set()
    return not options.keys().isdisjoint(needed | beams)


def processors_of(options: Mapping[str, Any], rows: PromptRows, custom: tuple[Processor, ...]) -> tuple[Processor, ...]:
    """Returns transformers' processors of these options, with a caller's own among them.

    ImportError where transformers is not installed, and what its classes raise for values that they do not take.
    """

    def of(table: Mapping[str, Recipe]) -> Iterator[Processor]:
        for key, entry in table.items():
            if key in options and (rows.ends or not entry.needs_end):
                yield transformers_class(entry.name, key)(*entry.arguments(options[key], rows))

    filters = of(FILTERS) if options.get("do_sample") else ()
    return (*of(TABLE), *custom, *filters, *of(LAST))


def transformers_class(name: str, argument: str) -> Any:
    """Returns a class of transformers' generation; ImportError, which names the argument, where it is not installed."""
    try:
        return getattr(import_module("transformers.generation"), name)
    except ModuleNotFoundError as error:
        raise ImportError(f"generate: {argument} is made by transformers' {name}: pip install transformers") from error
