"""Guesses of the tokens to come, of which one forward pass says how many are right: prompt lookup and assistants.

A pass over the newest token and n guesses gives the logits behind each of them.  As long as the guesses come true these
are the logits of n + 1 passes of one token, so each token is chosen by them as it is without guesses: with the same
penalty, processors, and noise of (seed, position, row).  Greedy or sampled, the tokens are those of generation without
guesses.  Behind a wrong guess the cache forgets what it has read.

The rows of a batch share the columns of the cache: they go on as far as the guesses of all of them are right.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ...kernels.runtime.errors import check
from ...kernels.runtime.rules import COUNT, Rule, check_numbers, limited
from ...layers.module import check_gathered
from ...parallel import TensorParallel
from ..config.gpt import GPTConfig
from .exchange import exchange
from .model import CausalModel
from .options import DEFAULTS
from .passes import Pass, pass_of
from .request import GenerationRequest
from .sampling import Chooser, Sampling
from .step import TokenStep

_NGRAM = 2  # transformers' length of the longest n-gram that is looked up
_RULES: dict[str, Rule] = {
    "prompt_lookup_num_tokens": COUNT,
    "max_matching_ngram_size": COUNT,
    "num_assistant_tokens": COUNT,
    "assistant_confidence_threshold": limited("lie in [0, 1]", lambda v: 0 <= v <= 1),
}


class Guesser(Protocol):
    """Guesses the next tokens of every row, at most ``most``."""

    most: int

    def __call__(self, text: Tensor, most: int, done: Tensor) -> Tensor:
        """text [B, S], of which the rows that are not ``done`` [B] count -> [B, n] with n <= ``most``."""


class Guessing(NamedTuple):
    """The arguments that say who guesses; as in :func:`generate`."""

    assistant_model: Any = None
    prompt_lookup_num_tokens: int | None = None
    max_matching_ngram_size: int | None = None
    num_assistant_tokens: int | None = None
    num_assistant_tokens_schedule: str | None = None
    assistant_confidence_threshold: float | None = None

    def checked(self, model: CausalModel, request: GenerationRequest, beams: int) -> Guessing:
        """Returns the arguments with all defaults, the assistant as the tpfuse model that it is.

        ValueError, which names the argument, for what nobody guesses by; NotImplementedError for what is not built.
        """
        assistant, lookup = self.assistant_model, self.prompt_lookup_num_tokens
        if assistant is None and lookup is None:
            return Guessing()
        if beams > 1:
            warnings.warn(f"generate: nothing is guessed with num_beams={beams}, as in transformers", stacklevel=3)
            return Guessing()
        check(
            assistant is None or lookup is None, "generate: give assistant_model or prompt_lookup_num_tokens, both came"
        )
        config, values = getattr(assistant, "generation_config", None), self._asdict()
        defaults = {**DEFAULTS, "max_matching_ngram_size": _NGRAM}
        for key in Guessing._fields[2:]:
            choices = values[key], getattr(config, key, None), defaults[key]
            values[key] = next(value for value in choices if value is not None)
        check_numbers("generate", values, _RULES)
        if values["num_assistant_tokens_schedule"] != "constant" and assistant is not None:
            raise NotImplementedError(
                "generate: of num_assistant_tokens_schedule 'constant' is built, got"
                f" {values['num_assistant_tokens_schedule']!r}"
            )
        _check_positions("the model", model, request)
        if assistant is not None:
            values["assistant_model"] = _checked_assistant(model, assistant, request)
        return Guessing(**values)

    def guesser(self, tp: TensorParallel, request: GenerationRequest, sampling: Sampling) -> Guesser | None:
        """Returns who guesses for a model that is split over ``tp``, if somebody does: a collective."""
        if self.assistant_model is not None:
            return Assistant(self, tp, request, sampling)
        return None if self.prompt_lookup_num_tokens is None else PromptLookup(self, request)


class GuessingStep(TokenStep):
    """A step that runs guesses of the next tokens through the model too, and has their logits when they come true."""

    def __init__(
        self, request: GenerationRequest, forward: Pass, choose: Chooser, prompt_logits: Tensor, guess: Guesser
    ):
        super().__init__(request, forward, choose, prompt_logits)
        self.guess, self.columns = guess, self.prompt  # of the text, with the newest token
        self.guesses = self.text[:, :0]
        self.pending = prompt_logits[:, None]  # [B, 1 + n, V/R]: behind the newest token and behind each guess

    def logits(self) -> Tensor:
        self.columns += 1
        if self.guesses.shape[1] > 0 and bool((self.guesses[:, :1] == self.token).all()):
            self.guesses, self.pending = self.guesses[:, 1:], self.pending[:, 1:]
        else:
            left, done = self.text.shape[1] - self.columns, self.done & (self.pad is not None)
            guesses = self.guess(self.text[:, : self.columns], left - 1, done)
            self.guesses = guesses.masked_fill(done[:, None], self.pad or 0)
            self.forward.back(self.columns - 1)
            ids = torch.cat([self.token, self.guesses], 1)
            positions = self.position + torch.arange(ids.shape[1], device=ids.device)
            self.pending = self.forward.verify(ids, positions)
        return self.pending[:, 0]


class PromptLookup:
    """Guesses what followed where the last tokens of a row stood before, by transformers' rules: the longest n-gram
    that did, of ``size`` tokens at most, where it stood first."""

    def __init__(self, guessing: Guessing, request: GenerationRequest):
        self.most: int = guessing.prompt_lookup_num_tokens or 0
        self.size = guessing.max_matching_ngram_size or _NGRAM
        self.starts = request.padding.repeat_interleave(request.sequences).tolist()

    def __call__(self, text: Tensor, most: int, done: Tensor) -> Tensor:
        most, running = min(most, self.most), [i for i, ended in enumerate(done.tolist()) if not ended]
        rows = {i: self._following(text[i, self.starts[i] :], most) for i in running}
        guesses = text.new_zeros(len(text), min(map(len, rows.values()), default=0))
        for i, row in rows.items():
            guesses[i] = row[: guesses.shape[1]]
        return guesses

    def _following(self, row: Tensor, most: int) -> Tensor:
        for n in range(min(self.size, len(row) - 1), 0, -1):
            same = (row[:-1].unfold(0, n, 1) == row[-n:]).all(1)
            if same.any():
                start = int(same.int().argmax()) + n
                return row[start : start + most]
        return row[:0]


class Assistant:
    """Guesses what a smaller model would choose, greedily or by the same noise, until it is not sure.

    It knows nothing of penalty and processors, which may count their calls.  ``read`` [B, n] is what its cache holds.
    """

    def __init__(self, guessing: Guessing, tp: TensorParallel, request: GenerationRequest, sampling: Sampling):
        model, n = guessing.assistant_model, request.sequences
        self.tp, self.alone = tp, model.tp.size < tp.size
        self.most: int = guessing.num_assistant_tokens or 0
        self.threshold = guessing.assistant_confidence_threshold
        self.choose = Chooser(model, request.ids, request.mask, sampling._replace(repetition_penalty=1.0))
        self.forward = pass_of(model, request)
        self.forward.read(request, lambda *_: None)
        self.read, self.starts = (x.repeat_interleave(n, 0) for x in (request.ids, request.padding))
        if n > 1:
            self.forward.repeat(n)
            self.choose.repeat(n)

    def __call__(self, text: Tensor, most: int, done: Tensor) -> Tensor:
        most, columns = min(most, self.most), text.shape[1]
        if most == 0:
            return text[:, :0]
        common = min(self.read.shape[1], columns - 1)
        right = (self.read[:, :common] == text[:, :common]).all(0)
        start = int(right.int().cumprod(0).sum())
        self.forward.back(start)
        positions = (torch.arange(start, columns, device=text.device) - self.starts[:, None]).clamp(min=0)
        ids, guesses = text[:, start:], text[:, :0]
        while guesses.shape[1] < most:
            logits = self.forward.verify(ids, positions)[:, -1]
            positions = positions[:, -1:] + 1
            ids = self.choose(logits, positions[:, 0])[:, None]
            guesses = torch.cat([guesses, ids], 1)
            if self._unsure(logits, ids[:, 0], done):
                break
        self.read = torch.cat([text, guesses[:, :-1]], 1)
        return self._agreed(guesses, most) if self.alone else guesses

    def _unsure(self, logits: Tensor, token: Tensor, done: Tensor) -> bool:
        if not self.threshold:
            return False
        log_probs = self.choose.head.log_probs(logits, token)
        return bool((log_probs < math.log(self.threshold)).logical_and(~done).any())

    def _agreed(self, guesses: Tensor, most: int) -> Tensor:
        """Returns the first rank's guesses, where each rank has an assistant of its own."""
        padded = F.pad(guesses, (0, most - guesses.shape[1]), value=-1)
        agreed = exchange(self.tp, guesses.device).gather(padded)[0]
        return agreed[:, : int((agreed[0] >= 0).sum())].clone()


def _checked_assistant(model: CausalModel, module: Any, request: GenerationRequest) -> CausalModel:
    """Returns the tpfuse model of an assistant; ValueError for one that cannot guess the model's tokens."""
    name = "generate: assistant_model"
    assistant: Any = getattr(module, "parallel", module)
    check(
        isinstance(getattr(assistant, "config", None), GPTConfig),
        f"{name} must be a GPT, or a module that tpfuse.parallelize was given, got a {type(module).__name__}",
    )
    assistant.stages.check_whole(name)
    check(assistant.head is not None, f"{name} has no language-model head; make it with lm_head=True")
    check_gathered("generate", assistant.embedding)
    vocab, own_vocab, most = model.config.vocab_size, assistant.config.vocab_size, assistant.config.most_positions
    check(own_vocab == vocab, f"{name} must have the model's vocabulary of {vocab} tokens, got {own_vocab}")
    columns = request.visible.shape[1]
    check(
        most is None or columns <= most,
        f"{name} has max_positions={most}, fewer than the {columns} tokens of prompt and text",
    )
    device = assistant.embedding.weight.device
    check(device == request.ids.device, f"{name} must be on {request.ids.device} as the model, got {device}")
    check(
        assistant.tp.size == 1 or _ranks(assistant.tp) == _ranks(model.tp),
        f"{name} must be split over the model's ranks {_ranks(model.tp)} or over none, got {_ranks(assistant.tp)}",
    )
    assistant._compare("generate", dict(input_ids=request.ids))
    _check_positions("assistant_model", assistant, request)
    return cast(CausalModel, assistant)


def _check_positions(name: str, model: CausalModel, request: GenerationRequest) -> None:
    """Raises NotImplementedError where a pass over several tokens would rotate them otherwise than passes over one."""
    columns, stretch, switch = request.visible.shape[1], model.config.stretches_past, model.config.switches_at
    changes = stretch is not None and stretch < columns
    changes |= switch is not None and switch < columns and int(request.positions.max()) < switch
    if changes:
        raise NotImplementedError(
            f"generate: guesses (prompt_lookup_num_tokens, assistant_model) are not built where the rotary positions of"
            f" {name} change on the way: past {stretch or switch} tokens, and prompt and text have {columns}"
        )


def _ranks(tp: TensorParallel) -> list[int]:
    return [] if tp.group is None else dist.get_process_group_ranks(tp.group)
