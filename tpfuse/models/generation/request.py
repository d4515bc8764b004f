"""The arguments of ``generate``, checked: prompts moved to end at one column, how tokens are chosen, when they end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.losses.op import check_ids
from ...kernels.runtime.errors import check
from ...kernels.runtime.rules import COUNT, INT64, SEED, Rule, check_number, check_numbers, described, limited
from ..inputs import Inputs, check_tokens
from .model import CausalModel
from .options import DEFAULTS
from .sampling import Sampling
from .stopping import end_tokens

_FACTOR = limited("be positive, in [1e-37, 1e37]", lambda v: 1e-37 <= v <= 1e37)  # beyond, scores in fp64 may overflow
_NUMBERS: dict[str, Rule] = {
    "max_new_tokens": COUNT,
    "max_length": COUNT,
    "temperature": _FACTOR,
    "top_k": COUNT,
    "top_p": limited("lie in (0, 1]", lambda v: 0 < v <= 1),
    "min_p": limited("lie in [0, 1]", lambda v: 0 <= v <= 1),
    "repetition_penalty": _FACTOR,
    "num_return_sequences": limited("lie in 1 to 65535", lambda v: 1 <= v < 1 << 16, integer=True),
}


class Length(NamedTuple):
    """The arguments that say how many tokens come, of how many sequences, and with what; as in :func:`generate`."""

    max_new_tokens: int | None = None
    max_length: int | None = None
    num_return_sequences: int = 1
    eos_token_id: int | Sequence[int] | None = None
    pad_token_id: int | None = None
    return_log_probs: bool = False


class Generation(NamedTuple):
    """What ``generate(return_log_probs=True)`` returns: ``sequences`` [B, S + new], and the log-probability of each new
    token under the model, [B, new]."""

    sequences: Tensor
    log_probs: Tensor


class GenerationRequest(NamedTuple):
    """Prompts [B, S] that end at column S, with what follows them."""

    ids: Tensor
    mask: Tensor  # bool: what is no padding
    padded: bool  # whether an attention mask was given
    new: int  # tokens at most
    ends: list[int]
    pad: int | None  # None: an ended sequence goes on as the model continues it
    sampling: Sampling
    sequences: int  # of each prompt
    log_probs: bool  # whether those of the new tokens are returned

    @property
    def positions(self) -> Tensor:
        """[B, S]"""
        return (self.mask.cumsum(1) - 1).clamp(min=0)

    @property
    def padding(self) -> Tensor:
        """[B]: the columns before a prompt."""
        return self.mask.int().argmax(1)

    @property
    def visible(self) -> Tensor:
        """[B, S + new]: the columns that may be seen."""
        return torch.cat([self.mask, self.mask.new_ones(len(self.mask), self.new)], 1)


def checked(
    model: CausalModel, prompt: tuple[Tensor | None, Tensor | None], sampling: Sampling, beams: int, length: Length
) -> GenerationRequest:
    """Returns the request for ``prompt``, ids and their mask [B, S].

    ValueError, which names the argument, for what no model takes.
    """
    input_ids, attention_mask = prompt
    if input_ids is None:
        raise ValueError("generate: give input_ids [B, S]")
    check_tokens(type(model).__name__, input_ids)
    check(input_ids.shape[1] > 0, "generate: the prompt is empty")
    inputs = Inputs(input_ids, attention_mask=attention_mask)
    model._check_inputs(inputs)
    check_numbers("generate", sampling._asdict() | length._asdict(), _NUMBERS)
    check_number("generate: seed", sampling.seed, SEED)
    sample, sequences = sampling.do_sample, length.num_return_sequences
    check(isinstance(sample, bool), f"generate: do_sample must be True or False, got {described(sample)}")
    returned = length.return_log_probs
    check(isinstance(returned, bool), f"generate: return_log_probs must be True or False, got {described(returned)}")
    check(
        not (returned and beams > 1),
        f"generate: return_log_probs is of sampled or greedy tokens, got num_beams={beams}",
    )
    check(
        sequences <= beams or (sample and beams == 1),
        f"generate: num_return_sequences={sequences} is more than num_beams={beams}; without beams it needs"
        " do_sample=True",
    )
    S, most, vocab = input_ids.shape[1], model.config.most_positions, model.config.vocab_size
    new = _new_tokens(length, S, model.config.max_positions)
    check(
        most is None or S + new <= most, f"generate: {S} + {new} tokens are more than the model's max_positions={most}"
    )
    ends, pad = end_tokens(length.eos_token_id), length.pad_token_id
    if pad is not None:
        check_number("generate: pad_token_id", pad, INT64)
    pad = pad if pad is not None else (ends[0] if ends else None)
    mask = torch.ones_like(input_ids, dtype=torch.bool) if inputs.key_mask is None else inputs.key_mask
    check(attention_mask is None or bool(mask.any(1).all()), "generate: a prompt has no token")
    order = torch.sort(mask.int(), dim=1, stable=True).indices  # padding first, tokens in their order
    ids, mask = input_ids.gather(1, order), mask.gather(1, order)
    check_ids("generate: input_ids", ids.masked_fill(~mask, 0), vocab)
    filler = torch.where((ids < 0) | (ids >= vocab), 0, ids) if pad is None else torch.full_like(ids, pad)
    return GenerationRequest(
        torch.where(mask, ids, filler),  # without a pad_token_id padding is as it was given
        mask,
        padded=attention_mask is not None,
        new=new,
        ends=ends,
        pad=pad,
        sampling=sampling,
        sequences=sequences,
        log_probs=length.return_log_probs,
    )


def _new_tokens(length: Length, prompt: int, most: int) -> int:
    """Returns how many tokens may come behind a prompt: unless something else is said transformers' 20, and no more
    than up to max_positions, ``most``, be positions rotary or not."""
    if length.max_new_tokens is not None:
        return length.max_new_tokens
    if length.max_length is None:
        check(
            prompt < most,
            f"generate: the prompt has {prompt} tokens, and the model max_positions={most}; give max_new_tokens or"
            " max_length",
        )
        usual: int = DEFAULTS["max_length"]
        return min(usual, most - prompt)
    check(
        prompt < length.max_length,
        f"generate: max_length={length.max_length} counts the prompt too, which has {prompt} tokens",
    )
    return length.max_length - prompt
