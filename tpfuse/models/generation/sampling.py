"""Choice of the next token: the most likely one, or one drawn from those that a few filters leave.

Sampling is Gumbel-max: argmax_v x_v / T - log(-log u_v), with u_v by Philox of (seed, the token's place in its
sequence, the prompt's number, which of its continuations this is, global vocabulary id v), so no random state is kept,
and the split, padding and the batch's other prompts do not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.runtime.op import acc_dtype
from ...kernels.runtime.philox import make_rng, uniform, uniform_of
from ...kernels.runtime.rules import described
from ...ranks.messages import attempt, raise_together
from .exchange import exchange
from .model import CausalModel
from .outputs import Record
from .processors import Processor

FEW = 4  # times as many tokens in the vocabulary as may be chosen, from which on these are picked


class Sampling(NamedTuple):
    """The arguments of sampling; as in :func:`generate`."""

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int = 0


class Scores:
    """logits [B, V/R] of every rank -> scores [B, V], the same on every rank, through the penalty and processors."""

    def __init__(
        self, model: CausalModel, ids: Tensor, mask: Tensor, penalty: float, processors: tuple[Processor, ...]
    ):
        self.tp, self.vocab, self.processors = model.tp, model.config.vocab_size, processors
        self.gather = exchange(model.tp, ids.device).gather
        self.penalty = penalty
        self.present = torch.zeros(len(ids), self.vocab, dtype=torch.bool, device=ids.device)
        self.present.scatter_(1, torch.where(mask, ids, ids[:, -1:]), True)  # every prompt's last is a token of it
        self.nan, self.unusable = torch.zeros(2, dtype=torch.bool, device=ids.device)

    def repeat(self, n: int) -> None:
        """Makes ``n`` rows of each."""
        self.present = self.present.repeat_interleave(n, 0)

    def gathered(self, logits: Tensor) -> Tensor:
        """[B, V/R] -> fp64 [B, V]"""
        if self.tp.size > 1:
            width = self.tp.slice_size(self.vocab)  # the last rank may have fewer
            padded = torch.nn.functional.pad(logits, (0, width - logits.shape[1]))
            logits = self.gather(padded).permute(1, 0, 2).flatten(1)[:, : self.vocab]
        scores = logits.double()
        self.nan |= scores.isnan().any()
        return scores

    def processed(self, scores: Tensor, ids: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Scores [B, V] through the penalty, then the processors, which get ``ids`` and scores of ``dtype``."""
        penalty = self.penalty
        if penalty != 1:
            scores = torch.where(self.present, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
        if not self.processors:
            return scores
        assert ids is not None
        processed, error = attempt(lambda: self._by_processors(scores.to(dtype), ids))
        failed = torch.tensor([error is not None], device=ids.device)
        if (self.gather(failed.byte()) if self.tp.size > 1 else failed).any():
            raise_together(error, (self.tp.group,))
        return processed[0].double()

    def _by_processors(self, scores: Tensor, ids: Tensor) -> Tensor:
        shape = scores.shape
        for processor in self.processors:
            scores = processor(ids, scores)
            if not isinstance(scores, Tensor) or scores.shape != shape:
                raise ValueError(
                    f"generate: a logits_processor must return scores {tuple(shape)}, got {described(scores)} from a"
                    f" {type(processor).__name__}"
                )
        return scores

    def agreed(self, choice: Tensor) -> Tensor:
        """Returns the first rank's choice, where what was chosen by is the caller's and may differ over the ranks."""
        return choice if self.tp.size == 1 or not self.processors else self.gather(choice)[0].clone()

    def check(self) -> None:
        """Raises RuntimeError where a logit was NaN, and where there was no token to draw; a GPU is waited for."""
        if self.nan:
            raise RuntimeError("generate: the model's logits are NaN; tpfuse.watch(model) finds the op they come from")
        if self.unusable:
            raise RuntimeError(
                "generate: no token can be drawn: behind processors and filters all scores of a prompt are -inf, or one"
                " is NaN or infinite"
            )


class Noise:
    """Gumbel noise of every token, by the number of the prompt and which of its continuations this is."""

    def __init__(self, seed: int, ids: Tensor):
        self.rng = make_rng(seed, 0, 0, "cpu")  # the host reads it for each token
        self.sample = torch.arange(len(ids), device=ids.device)
        self.draw = torch.zeros_like(self.sample)

    def repeat(self, n: int) -> None:
        self.draw = torch.arange(n, device=self.sample.device).repeat(len(self.sample))
        self.sample = self.sample.repeat_interleave(n)

    def added(self, scores: Tensor, position: Tensor) -> Tensor:
        """scores [rows, V] of the tokens at ``position`` [rows] -> fp64 [rows, V]; on a CPU numbers are drawn for those
        alone that may be chosen, where these are few."""
        if scores.is_cpu:
            row, token = (scores != -torch.inf).nonzero(as_tuple=True)
            if FEW * len(row) < scores.numel():
                drawn = uniform_of(self.rng, position[row], self.sample[row], token, draw=self.draw[row])
                noisy = torch.full(scores.shape, -torch.inf, dtype=drawn.dtype)
                noisy[row, token] = scores[row, token] - drawn.log_().neg_().log_()
                return noisy
        drawn = uniform(self.rng, position, self.sample, scores.shape[-1], draw=self.draw)
        return scores - drawn.log_().neg_().log_()


class Chooser:
    """logits [B, V/R] of every rank -> the next token [B], the same on every rank."""

    def __init__(
        self, model: CausalModel, ids: Tensor, mask: Tensor, sampling: Sampling, processors: tuple[Processor, ...] = ()
    ):
        assert model.head is not None  # checked
        self.head, self.sampling = model.head, sampling
        self.scores = Scores(model, ids, mask, penalty=sampling.repetition_penalty, processors=processors)
        self.noise = Noise(sampling.seed, ids)
        self.record: Record | None = None

    def repeat(self, n: int) -> None:
        """Makes ``n`` rows of each, which are samples of their own whatever n is."""
        self.scores.repeat(n)
        self.noise.repeat(n)

    def __call__(self, logits: Tensor, position: Tensor, ids: Tensor | None = None) -> Tensor:
        """``position`` [B] of the new token; ``ids`` [B, S] before it, for processors."""
        s = self.sampling
        if not (s.do_sample or self.record) and s.repetition_penalty == 1 and not self.scores.processors:
            return self._most_likely(logits)
        whole, dtype = self.scores.gathered(logits), acc_dtype(logits)
        scores = self.scores.processed(whole, ids, dtype=dtype)
        if s.do_sample:
            scores = keep_likely(scores / s.temperature, s.top_k, s.top_p, s.min_p)
        if self.record is not None:
            self.record.add(scores.to(dtype), whole.to(dtype))
        if s.do_sample:
            drawn = self.noise.added(scores, position).argmax(-1)
            token = self.scores.agreed(drawn.where(scores.amax(-1).isfinite(), -1))
            self.scores.unusable |= (token < 0).any()
            token = token.clamp(min=0)
        else:
            token = self.scores.agreed(scores.argmax(-1))  # the first of equals
        self.scores.present.scatter_(1, token[:, None], True)
        return token

    def _most_likely(self, logits: Tensor) -> Tensor:
        """Returns the most likely token; two numbers per prompt travel."""
        value, index = logits.max(-1)  # the first of equals
        best = torch.stack([value.double(), (index + self.head.first).double()])
        candidates = best[None] if self.scores.tp.size == 1 else self.scores.gather(best)
        self.scores.nan |= candidates[:, 0].isnan().any()  # a maximum is NaN where any logit is
        rank = candidates[:, 0].argmax(0)
        return candidates[:, 1].gather(0, rank[None])[0].long()


def keep_likely(scores: Tensor, top_k: int | None, top_p: float | None, min_p: float | None = None) -> Tensor:
    """Returns scores [B, V] with -inf where a token is not to be drawn.

    The ``top_k`` highest stay, of these the fewest whose probability is at least ``top_p`` together, and of these those
    whose probability is at least ``min_p`` of the highest; the highest always stays, and so do scores equal to the last
    that stays.
    """
    if top_k is not None and top_k < scores.shape[-1]:
        scores = scores.masked_fill(scores < scores.topk(top_k).values[:, -1:], -torch.inf)
    if top_p is not None and top_p < 1:
        ordered = _descending(scores)
        probs = ordered.softmax(-1)
        above = probs.cumsum(-1) - probs  # what is more likely
        count = ((above < top_p).sum(-1, keepdim=True) - 1).clamp(min=0)  # of NaN none is more likely
        scores = scores.masked_fill(scores < ordered.gather(1, count), -torch.inf)
    if min_p is not None and min_p > 0:
        probs = scores.softmax(-1)
        scores = scores.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), -torch.inf)
    return scores


def _descending(scores: Tensor) -> Tensor:
    """Returns scores [B, V] in order, on a CPU without those that no row draws from, where these are most."""
    if scores.is_cpu:
        count = max(int((scores != -torch.inf).sum(-1).max()), 1)
        if FEW * count < scores.shape[-1]:
            return scores.topk(count).values
    return scores.sort(-1, descending=True).values


def callables(name: str, argument: Any) -> tuple[Callable[..., Any], ...]:
    """Returns what an argument of ``generate`` holds: callables, of which a list of transformers' is one too.

    ValueError, which names the argument, for anything else.
    """
    functions = tuple(argument if isinstance(argument, Iterable) else () if argument is None else (argument,))
    if not all(map(callable, functions)):
        raise ValueError(
            f"generate: {name} must be callables (input_ids, scores), as transformers' are, got {described(argument)}"
        )
    return functions
