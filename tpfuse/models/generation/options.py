"""transformers' arguments of ``generate``, by its own list of them: those that are read, and those that change no
token.

Any other must have a value that means nothing.  ``python -m bench.defaults`` writes the list, GenerationConfig's
attributes with transformers' defaults, and a test holds it to the installed release: what it adds is refused until
somebody has read it.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

OFF = dict(guidance_scale=1.0, penalty_alpha=0.0)  # these are null by default, and mean nothing at these values
DEFAULTS: Mapping[str, Any] = json.loads(pathlib.Path(__file__).with_suffix(".json").read_text()) | OFF
SAMPLED = {"temperature", "top_k", "top_p", "min_p"}  # which greedy tokens do not read
BUILT = set(
    "do_sample temperature top_k top_p min_p repetition_penalty stop_strings num_return_sequences num_beams"
    " length_penalty early_stopping eos_token_id pad_token_id max_new_tokens max_length".split()
)
# Where a text begins, caches and compilation, how an assistant guesses, and outputs beside the tokens.
SILENT = set(
    "bos_token_id decoder_start_token_id use_cache cache_implementation cache_config max_cache_len prefill_chunk_size"
    " low_memory compile_config disable_compile continuous_batching_config use_mtp is_assistant num_assistant_tokens"
    " num_assistant_tokens_schedule assistant_confidence_threshold assistant_lookbehind target_lookbehind"
    " assistant_ensemble_weight speculation_type max_matching_ngram_size output_attentions output_hidden_states"
    " diversity_penalty _from_model_config transformers_version".split()
)


def settled(options: Mapping[str, Any], *configs: Any) -> dict[str, Any]:
    """Returns the arguments of ``generate`` that say something: those of a call, and what it leaves out of generation
    configs, of which the last counts most.

    None in a call switches off what a config says.  A config may have keys of somebody's own, which are ignored as
    transformers ignores them.  NotImplementedError, which names it, for an argument that is not built.
    """
    merged: dict[str, Any] = {}
    for config in configs:
        values = config if isinstance(config, Mapping) else config.to_dict()
        merged |= {key: value for key, value in values.items() if key in DEFAULTS and value is not None}
    if not options.get("do_sample", merged.get("do_sample")):
        merged = {key: value for key, value in merged.items() if key not in SAMPLED}
    merged |= options
    unbuilt = [key for key, value in merged.items() if key not in BUILT | SILENT and not _neutral(key, value)]
    if unbuilt:
        raise NotImplementedError(f"generate: {', '.join(unbuilt)} is not built")
    return {key: value for key, value in merged.items() if key in BUILT and value is not None}


def _neutral(key: str, value: Any) -> bool:
    default = DEFAULTS.get(key)
    return value is None or value is False or (not isinstance(value, bool) and value == default)
