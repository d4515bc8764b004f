"""One token of every sequence: what a step reads and writes are tensors that stay where they are."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.runtime.op import acc_dtype
from .passes import Pass
from .request import GenerationRequest
from .sampling import Chooser
from .stopping import is_end


class TokenStep:
    """Goes on by one token; nothing of the host's changes from call to call, where the cache is fixed.

    ``text`` [B, S + new] holds the prompts and what has come, ``done`` [B] says whose sequences have ended, and
    ``token`` [B, 1] is the last one's.  ``prompt_logits`` [B, V/R] are the logits that the prompts give.
    ``log_probs`` [B, new], if they are asked for, are the new tokens' under the model, 0 behind a sequence's end.
    """

    def __init__(self, request: GenerationRequest, forward: Pass, choose: Chooser, prompt_logits: Tensor):
        self.prompt_logits, self.forward, self.choose = prompt_logits, forward, choose
        self.pad, self.ends = request.pad, request.ends
        ids, n = request.ids.repeat_interleave(request.sequences, 0), request.sequences
        rows, prompt = ids.shape
        self.text = torch.cat([ids, ids.new_zeros(rows, request.new)], 1)
        self.done = torch.zeros(rows, dtype=torch.bool, device=ids.device)
        self.token = ids[:, -1:].clone()
        self.position = request.positions[:, -1:].repeat_interleave(n, 0)  # of the last token
        self.column = torch.full((1,), prompt, device=ids.device)  # of the next one
        self.prompt = prompt
        dtype = acc_dtype(prompt_logits)
        self.log_probs = torch.zeros(rows, request.new, dtype=dtype, device=ids.device) if request.log_probs else None

    def __call__(self) -> None:
        self.take(self.logits())

    def logits(self) -> Tensor:
        """Runs the last token through the model."""
        return self.forward(self.token, self.position)

    def take(self, logits: Tensor, ids: Tensor | None = None) -> None:
        """Chooses the next token by logits [B, V/R]; ``ids`` [B, S] before it are for processors."""
        self.position += 1
        token = self.choose(logits, self.position[:, 0], ids)
        if self.log_probs is not None:
            log_probs = self.choose.head.log_probs(logits, token).masked_fill(self.done, 0)
            self.log_probs.index_copy_(1, self.column - self.prompt, log_probs[:, None])
        if self.pad is not None:
            token = token.masked_fill(self.done, self.pad)
        self.token.copy_(token[:, None])
        self.text.index_copy_(1, self.column, self.token)
        self.column += 1
        if self.ends:
            self.done |= is_end(token, self.ends)
