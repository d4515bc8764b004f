"""Beam search by transformers' rules: of every prompt the best few sequences so far go on, and the best that have ended
are kept.

    candidates   the max(2, 1 + eos tokens) x num_beams highest sums of log-probabilities, over all beams and tokens
    run on       the num_beams highest that have not ended
    are kept     the num_beams highest, of those kept so far and of the num_beams first candidates those that have
                 ended, by sum / length ** length_penalty, length being that of the new tokens with the eos

The search of a prompt ends where all its kept sequences are better than the best running beam can become: by
early_stopping=False that beam's sum at its length now, by "never" at the length that flatters it most; by True as soon
as num_beams have ended.  The last token ends every sequence.

With ``do_sample`` the candidates are drawn, without replacement, from softmax(sums of log-probabilities): those of the
highest sums with Gumbel noise, the highest first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.runtime.op import acc_dtype
from ...kernels.runtime.rules import COUNT, Rule, check_number, described, limited
from .outputs import Record, beam_result
from .passes import Pass
from .request import GenerationRequest
from .sampling import Noise, Scores
from .stopping import Stopping, is_end

_NEVER = -1e9  # a score that is none
_PENALTY: Rule = limited("lie in [-50, 50]", lambda v: -50 <= v <= 50)  # beyond, a length to this power may overflow


class Beams(NamedTuple):
    """The arguments of beam search; as in :func:`generate`."""

    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    def check(self) -> None:
        """Raises ValueError, which names the argument, for what no search takes."""
        check_number("generate: num_beams", self.num_beams, COUNT)
        check_number("generate: length_penalty", self.length_penalty, _PENALTY)
        early = self.early_stopping
        if not (isinstance(early, bool) or (isinstance(early, str) and early == "never")):
            raise ValueError(f"generate: early_stopping must be True, False or 'never', got {described(early)}")


class _Hypotheses(NamedTuple):
    """The best sequences of each prompt that have ended."""

    text: Tensor  # [B, n, S + new]
    path: Tensor  # int64 [B, n, new]: the row of each step that a token went on from; -1 behind the last
    scores: Tensor  # fp64 [B, n], falling
    ended: Tensor  # bool [B, n]; others are no sequences
    new: Tensor  # int64 [B, n]: tokens

    def best(self, new: _Hypotheses) -> _Hypotheses:
        """Returns the n highest of both."""
        joined = [torch.cat(pair, 1) for pair in zip(self, new, strict=True)]
        top = joined[2].topk(self.scores.shape[1]).indices
        return _Hypotheses(*(_rows(x, top) for x in joined[:2]), *(x.gather(1, top) for x in joined[2:]))


class Search:
    """The beams of every prompt.  ``text`` [B n, S + new] and ``token`` [B n, 1] are those that run on."""

    def __init__(self, request: GenerationRequest, beams: Beams, scores: Scores, record: Record | None = None):
        self.record, self.noise = record, None
        if request.sampling.do_sample:
            self.noise = Noise(request.sampling.seed, request.ids)
            self.noise.repeat(beams.num_beams)
        self.position = request.positions[:, -1].repeat_interleave(beams.num_beams)  # of the prompts' last tokens
        ids, self.n = request.ids, beams.num_beams
        (self.batch, self.prompt), self.beams, self.scores = ids.shape, beams, scores
        self.ends, self.new = request.ends, request.new
        self.fill = 0 if request.pad is None else request.pad
        self.text = torch.cat([ids, ids.new_full((self.batch, self.new), self.fill)], 1).repeat_interleave(self.n, 0)
        self.running = torch.zeros(self.batch, self.n, dtype=torch.float64, device=ids.device)
        self.running[:, 1:] = _NEVER  # at first all beams are one
        nothing = torch.zeros_like(self.running, dtype=torch.bool)
        text = self.text.view(self.batch, self.n, -1)
        self.path = text.new_full((self.batch, self.n, self.new), -1)
        worst = torch.full_like(self.running, _NEVER)
        self.hypotheses = _Hypotheses(text, self.path, worst, ended=nothing, new=nothing.long())
        self.open = torch.ones(self.batch, 1, dtype=torch.bool, device=ids.device)
        self.all_ended = torch.zeros((), dtype=torch.bool, device=ids.device)

    def take(self, logits: Tensor, count: int, stopping: Stopping) -> tuple[Tensor, Tensor]:
        """Chooses the ``count``th token of every beam by logits [B n, V/R] -> tokens [B n, 1], and of which row [B n]
        each goes on."""
        top, beam, token = self._candidates(logits, self.text[:, : self.prompt + count - 1], count)
        text, path = _rows(self.text.view(self.batch, self.n, -1), beam), _rows(self.path, beam)
        text[:, :, self.prompt + count - 1] = token
        path[:, :, count - 1] = beam + self.n * torch.arange(self.batch, device=top.device)[:, None]
        hits = self._hits(text[:, :, : self.prompt + count], token, stopping)
        if count == self.new:
            hits = torch.ones_like(hits)
        go = (top + hits * _NEVER).topk(self.n).indices
        was_open, running = self.open, (top + hits * _NEVER).gather(1, go)
        leading = torch.arange(top.shape[1], device=top.device) < self.n
        ended = hits & leading
        full = self.hypotheses.ended.all(1, keepdim=True) & (self.beams.early_stopping is True)
        scores = top / float(count) ** self.beams.length_penalty
        scores = scores + _NEVER * full + _NEVER * ~was_open + _NEVER * ~ended
        new = torch.full_like(token, count)
        self.hypotheses = self.hypotheses.best(_Hypotheses(text, path, scores, ended, new=new))
        self.running, self.text, self.path = running, _rows(text, go).flatten(0, 1), _rows(path, go)
        self.open = was_open & self._improvable(count)
        self.all_ended = hits.all()
        rows = self.path[:, :, count - 1]
        tokens = token.gather(1, go).view(-1, 1)
        self.scores.present = self.scores.present[rows.flatten()].scatter_(1, tokens, True)
        return tokens, rows.flatten()

    def over(self) -> bool:
        """Returns whether no sequence can change any more; a GPU is waited for."""
        enough = self.hypotheses.ended.all() & (self.beams.early_stopping is True)
        return bool(~self.open.any() | enough | self.all_ended)

    def best(self, sequences: int) -> Any:
        """Returns the ``sequences`` best of each prompt [B x sequences, S + new], as long as the longest; or
        transformers' record of them."""
        text, path, scores, _, new = (x[:, :sequences].flatten(0, 1) for x in self.hypotheses)
        longest = int(new.max())
        tokens = text[:, : self.prompt + longest]
        return tokens if self.record is None else beam_result(self.record, tokens, scores, path[:, :longest])

    def _candidates(self, logits: Tensor, ids: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the sums of the candidates, of which beam each goes on, and by which token: [B, candidates] each."""
        whole, dtype = self.scores.gathered(logits), acc_dtype(logits)
        scores = self.scores.processed(whole.log_softmax(-1), ids, dtype=dtype)
        if self.record is not None:
            self.record.add(scores.to(dtype), whole.to(dtype))
        running = self.running.view(-1, 1)
        sums = (scores + running).view(self.batch, -1)
        count = min(max(2, 1 + len(self.ends)) * self.n, sums.shape[1])
        if self.noise is None:
            top, index = sums.topk(count)
        else:
            index = self.noise.added(scores + running, self.position + step).view(self.batch, -1).topk(count).indices
            top = sums.gather(1, index).where(sums.amax(-1, keepdim=True).isfinite(), torch.nan)
        top, index = self.scores.agreed(torch.stack([top, index.double()]))
        if self.noise is not None:
            self.scores.unusable |= top.isnan().any()
        index = index.long()
        return top, index // scores.shape[-1], index % scores.shape[-1]

    def _hits(self, text: Tensor, token: Tensor, stopping: Stopping) -> Tensor:
        """Returns bool [B, candidates]: the candidates that have ended."""
        hits = is_end(token, self.ends) if self.ends else torch.zeros_like(token, dtype=torch.bool)
        return hits if stopping.idle else hits | stopping(text.flatten(0, 1), self.scores.tp).view(token.shape)

    def _improvable(self, count: int) -> Tensor:
        """Returns bool [B, 1]: whether the best running beam may become better than one of the hypotheses."""
        penalty = self.beams.length_penalty
        longest = self.new if self.beams.early_stopping == "never" and penalty > 0 else count
        bound = self.running[:, :1] / float(longest) ** penalty
        worst = torch.where(self.hypotheses.ended, self.hypotheses.scores.amin(1, keepdim=True), _NEVER)
        return (bound > worst).any(1, keepdim=True)


def search(request: GenerationRequest, beam_search: Search, *, forward: Pass, stopping: Stopping, interval: int) -> Any:
    """Returns the best sequences [B x sequences, S + new]; every ``interval`` tokens the search ends if no better ones
    can come."""
    beams, scores, prompt = beam_search.beams, beam_search.scores, request.ids.shape[1]
    logits = forward.read(request, lambda *_: None).repeat_interleave(beams.num_beams, 0)
    forward.repeat(beams.num_beams)
    scores.repeat(beams.num_beams)
    position = request.positions[:, -1:].repeat_interleave(beams.num_beams, 0)
    for count in range(1, request.new + 1):
        tokens, rows = beam_search.take(logits, count, stopping)
        if count == request.new:
            break
        if count % interval == 0:
            scores.check()
            if beam_search.over():
                break
        forward.reorder(rows, prompt)
        position = position + 1
        logits = forward(tokens, position)
    scores.check()
    return beam_search.best(request.sequences)


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """x [B, m, L] and index [B, k] -> [B, k, L]"""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[2]))
