"""What a caller hears while tokens come, and how he stops them: a streamer, and ``on_token``."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..agreement import channel
from ..kernels.runtime.rules import described
from ..together import raise_together

_STOPS, _FAILED = 1, 2  # what a rank says of itself


class Listener:
    """A rank's streamer and ``on_token``.  Every rank makes one; only some may have a streamer.

    ``none``: no rank hears anything.  An error that one rank's raise is an error on every rank, and so is a streamer
    that is none.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, streamer: Any, on_token: Callable[[Tensor], bool | None] | None
    ):
        self.group, self.streamer, self.on_token = group, streamer, on_token
        self.none = not self._together(self._has_any)

    def _has_any(self) -> bool:
        s = self.streamer
        if s is not None and not (callable(getattr(s, "put", None)) and callable(getattr(s, "end", None))):
            raise ValueError(
                f"generate: streamer must have put(tokens) and end(), as transformers' have, got {described(s)}"
            )
        if self.on_token is not None and not callable(self.on_token):
            raise ValueError(f"generate: on_token must be callable with tokens [B], got {described(self.on_token)}")
        return s is not None or self.on_token is not None

    def prompt(self, ids: Tensor) -> None:
        """Hands the prompts [B, S] to the streamer."""
        if not self.none:
            self._together(lambda: self._put(ids))

    def tokens(self, token: Tensor) -> bool:
        """Hands the new tokens [B] on, and returns whether any rank stops."""
        return not self.none and self._together(lambda: self._put(token) or self._asked(token))

    def end(self) -> None:
        if not self.none:
            self._together(lambda: self.streamer is not None and self.streamer.end())

    def _put(self, ids: Tensor) -> bool:
        if self.streamer is not None:
            self.streamer.put(ids.to("cpu", copy=True))
        return False

    def _asked(self, token: Tensor) -> bool:
        return self.on_token is not None and bool(self.on_token(token.clone()))

    def _together(self, action: Callable[[], Any]) -> bool:
        """Whether ``action`` is true on any rank; what one raises, all raise."""
        between = channel(self.group)
        if between is None:
            return bool(action())
        said, error = 0, None
        try:
            said = _STOPS * bool(action())
        except Exception as e:
            said, error = _FAILED, e
        every = between.exchange(torch.tensor([said], device="cpu"))
        if (every == _FAILED).any():
            raise_together(error, (self.group,))
        return bool(every.any())
