"""A caller's streamer, ``on_prompt`` and ``on_token``, which hear prompts and tokens and may stop these."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ...kernels.runtime.rules import described
from ...ranks.messages import attempt, channel, raise_together

_STOPS, _FAILED = 1, 2  # status of a rank


class Listener:
    """A rank's streamer and callables.  Every rank makes one; only some may have a streamer, or ``on_prompt``.

    ``idle``: no rank hears anything.  An error that one rank's raises is an error on every rank, and so is a streamer
    that is none.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        streamer: Any,
        on_token: Callable[[Tensor], bool | None] | None,
        on_prompt: Callable[[int, int], None] | None,
    ):
        self.group, self.streamer, self.on_token, self.on_prompt = group, streamer, on_token, on_prompt
        self.idle = not self._together(self._has_any)

    def _has_any(self) -> bool:
        s = self.streamer
        if s is not None and not (callable(getattr(s, "put", None)) and callable(getattr(s, "end", None))):
            raise ValueError(
                f"generate: streamer must have put(tokens) and end(), as transformers' have, got {described(s)}"
            )
        for name, function in (("on_token", self.on_token), ("on_prompt", self.on_prompt)):
            if function is not None and not callable(function):
                raise ValueError(f"generate: {name} must be callable, got {described(function)}")
        return any(heard is not None for heard in (s, self.on_token, self.on_prompt))

    def prompt(self, ids: Tensor) -> None:
        """Hands the prompts [B, S] to the streamer."""
        if not self.idle:
            self._together(lambda: self._put(ids))

    def read(self, count: int, columns: int) -> None:
        """Says how many of the prompts' columns have been read."""
        if not self.idle:
            self._together(lambda: self.on_prompt is not None and self.on_prompt(count, columns))

    def tokens(self, token: Tensor) -> bool:
        """Hands the new tokens [B] on, and returns whether any rank stops."""
        return not self.idle and self._together(lambda: self._put(token) or self._stops(token))

    def end(self) -> None:
        if not self.idle:
            self._together(lambda: self.streamer is not None and self.streamer.end())

    def _put(self, ids: Tensor) -> bool:
        if self.streamer is not None:
            self.streamer.put(ids.to("cpu", copy=True))
        return False

    def _stops(self, token: Tensor) -> bool:
        return self.on_token is not None and bool(self.on_token(token.clone()))

    def _together(self, action: Callable[[], Any]) -> bool:
        """Returns whether ``action`` is true on any rank; an error of one is raised on all."""
        peers = channel(self.group)
        if peers is None:
            return bool(action())
        result, error = attempt(lambda: _STOPS * bool(action()))
        statuses = peers.exchange("generate", result[0] if result else _FAILED)
        if (statuses == _FAILED).any():
            raise_together(error, (self.group,))
        return bool(statuses.any())
