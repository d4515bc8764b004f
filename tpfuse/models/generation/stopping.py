"""When a sequence ends: by a token, by a string, or by a criterion of the caller's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...kernels.runtime.errors import check
from ...kernels.runtime.rules import WHOLE, check_number, described, quoted
from ...parallel import TensorParallel
from ...ranks.messages import attempt, raise_together
from .exchange import exchange
from .sampling import callables
from .stop_strings import StopStrings

_FAILED = 2  # where a criterion of a rank has raised an error


def end_tokens(ids: int | Iterable[int] | Tensor | None) -> list[int]:
    """Returns the ids that end a sequence, of which one beyond the vocabulary never comes; ValueError for no ids."""
    ids = ids.tolist() if isinstance(ids, Tensor) else ids
    ends: list[Any] = list(ids) if isinstance(ids, Iterable) else [] if ids is None else [ids]
    for end in ends:
        check_number("generate: eos_token_id", end, WHOLE)
    return ends


def is_end(tokens: Tensor, ends: Sequence[int]) -> Tensor:
    """Returns bool: the tokens that are one of ``ends``, at least one; numbers, so that nothing is copied to a GPU."""
    return functools.reduce(torch.logical_or, (tokens == end for end in ends))


def until_all_ended(tokens: Tensor, ends: Sequence[int], prompt: int) -> Tensor:
    """Returns tokens [B, prompt + new] without the columns that follow those in which the last sequence ended."""
    ended = is_end(tokens[:, prompt:], ends).cumsum(1) > 0
    return tokens[:, : prompt + int((~ended.all(0)).sum()) + 1]


class Stopping:
    """Called with ids [B, S], returns [B]: whether a stop string or a criterion ends each, on any rank.

    ``idle``: there is neither.  A criterion may say it of all sequences by one bool.
    """

    def __init__(self, criteria: Any, stop_strings: Any, tokenizer: Any):
        self.criteria: tuple[Callable[..., Any], ...] = callables("stopping_criteria", criteria)
        self.strings: StopStrings | None = None
        if stop_strings is not None:
            strings = [stop_strings] if isinstance(stop_strings, str) else stop_strings
            valid = (
                isinstance(strings, list | tuple)
                and all(isinstance(s, str) and s for s in strings)
                and len(strings) > 0
            )
            check(
                valid,
                "generate: stop_strings must be a string or a list of strings, none of them empty, got"
                f" {quoted(stop_strings)}",
            )
            check(
                callable(tokenizer) and hasattr(tokenizer, "convert_tokens_to_string"),
                "generate: stop_strings needs tokenizer=, the one of transformers that the prompt was made by, got"
                f" {described(tokenizer)}",
            )
            self.strings = StopStrings(tokenizer, list(strings))

    @property
    def idle(self) -> bool:
        return self.strings is None and not self.criteria

    def __call__(self, ids: Tensor, tp: TensorParallel) -> Tensor:
        if tp.size == 1:
            return self._ended(ids)
        ended, error = attempt(lambda: self._ended(ids).byte())
        mine = ended[0] if ended else torch.full_like(ids[:, 0], _FAILED, dtype=torch.uint8)
        flags = exchange(tp, ids.device).gather(mine)  # a clock, or a tokenizer, may differ
        if (flags == _FAILED).any():
            raise_together(error, (tp.group,))
        return (flags != 0).any(0)

    def _ended(self, ids: Tensor) -> Tensor:
        ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        if self.strings is not None:
            ended |= torch.tensor(self.strings(ids), device=ids.device)
        for criterion in self.criteria:
            answer = criterion(ids, None)
            if not (isinstance(answer, bool) or (isinstance(answer, Tensor) and answer.shape in ((), ended.shape))):
                raise ValueError(
                    f"generate: stopping_criteria must return a bool, or bools [{len(ids)}], got {described(answer)}"
                    f" from a {type(criterion).__name__}"
                )
            ended |= answer.to(ended.device).bool() if isinstance(answer, Tensor) else answer
        return ended
