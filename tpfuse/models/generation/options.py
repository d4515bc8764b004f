"""transformers' arguments of ``generate``, by its own list of them: those that are read, and those that change no
token.

Any other must have a value that means nothing.  ``python -m bench.defaults`` writes the list, GenerationConfig's
attributes with transformers' defaults, and a test holds it to the installed release: what it adds is refused until
somebody has read it.
"""

from __future__ import annotations

import json
import pathlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from ...kernels.runtime.errors import check
from ...kernels.runtime.rules import described
from .processors import BORROWED, FILTERS

OFF = dict(guidance_scale=1.0, penalty_alpha=0.0)  # these are null by default, and mean nothing at these values
DEFAULTS: Mapping[str, Any] = json.loads(pathlib.Path(__file__).with_suffix(".json").read_text()) | OFF


class GenerationOptions(TypedDict, total=False):
    """The arguments that ``generate`` reads itself; None is as if it was not given."""

    max_new_tokens: int | None
    max_length: int | None
    max_time: float | None
    eos_token_id: int | Sequence[int] | None
    pad_token_id: int | None
    stop_strings: str | Sequence[str] | None
    do_sample: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    num_return_sequences: int | None
    num_beams: int | None
    length_penalty: float | None
    early_stopping: bool | str | None
    return_dict_in_generate: bool | None
    output_scores: bool | None
    output_logits: bool | None
    prompt_lookup_num_tokens: int | None
    max_matching_ngram_size: int | None
    num_assistant_tokens: int | None
    num_assistant_tokens_schedule: str | None
    assistant_confidence_threshold: float | None


BUILT = {*GenerationOptions.__annotations__, *BORROWED}
# Other ways in which transformers guesses tokens, which its model then confirms: the tokens are the same without.
GUESSED = {"assistant_early_exit", "assistant_tokenizer", "use_mtp"}
# Outputs beside the tokens, which transformers' record alone has.
REPORTED = {"output_attentions", "output_hidden_states"}
# Where a text begins, caches and compilation, and how an assistant with other tokens guesses.
SILENT = set(
    "bos_token_id decoder_start_token_id use_cache cache_implementation cache_config max_cache_len prefill_chunk_size"
    " low_memory compile_config disable_compile continuous_batching_config is_assistant assistant_lookbehind"
    " target_lookbehind diversity_penalty _from_model_config transformers_version".split()
)


def settled(options: Mapping[str, Any], *configs: Any) -> dict[str, Any]:
    """Returns the arguments of ``generate`` that say something: those of a call, and what it leaves out of generation
    configs, of which the last counts most.

    None in a call switches off what a config says.  A config may have keys of somebody's own, which are ignored as
    transformers ignores them.  NotImplementedError, which names it, for an argument that is not built.
    """
    merged: dict[str, Any] = {}
    for config in configs:
        check(
            isinstance(config, Mapping) or hasattr(config, "to_dict"),
            f"generate: generation_config must be transformers' GenerationConfig or a mapping, got {described(config)}",
        )
        values = config if isinstance(config, Mapping) else config.to_dict()
        merged |= {key: value for key, value in values.items() if key in DEFAULTS and value is not None}
    if not options.get("do_sample", merged.get("do_sample")):
        merged = {key: value for key, value in merged.items() if key not in FILTERS}
    merged |= options
    if not merged.get("do_sample") and merged.get("temperature") == 0:  # says greedy once more
        del merged["temperature"]
    values = {
        key: value
        for key, value in merged.items()
        if key in GenerationOptions.__annotations__ or not _neutral(key, value)
    }
    silent = SILENT | (set() if values.get("return_dict_in_generate") else REPORTED)
    unbuilt = [key for key in values if key not in BUILT | GUESSED | silent]
    if unbuilt:
        raise NotImplementedError(f"generate: {', '.join(unbuilt)} is not built")
    if guessed := [key for key in values if key in GUESSED]:
        warnings.warn(f"generate: {', '.join(guessed)} changes no token, and is not built", stacklevel=6)
    if values.get("top_k") == 0:  # all of them
        del values["top_k"]
    return {key: value for key, value in values.items() if key in BUILT and value is not None}


def _neutral(key: str, value: Any) -> bool:
    default = DEFAULTS.get(key)
    return value is None or value is False or (not isinstance(value, bool) and value == default)
