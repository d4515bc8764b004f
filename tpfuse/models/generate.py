"""Generation with a KV cache: the prompt in one pass, then one token of every prompt at a time, greedy or sampled.

Decoding runs on the same path as training: a batch's rows are padded to a multiple of the row shards, so each new
token costs the same two messages a GEMM pair, with or without sequence parallelism.

Sampling is Gumbel-max: argmax_v x_v / T - log(-log u_v), with u_v by Philox of (seed, the token's place in its
sequence, the prompt's number, global vocabulary id v), so no random state is kept, and the split, padding and batch
do not matter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..agreement import any_rank
from ..kernels.cross_entropy.op import check_ids
from ..kernels.runtime.errors import check
from ..kernels.runtime.philox import make_rng, uniform
from ..kernels.runtime.rules import COUNT, INT64, SEED, WHOLE, check_number, check_numbers, described, limited
from ..layers.cache import KVCache
from ..layers.module import check_gathered
from ..shared_memory import exchange
from .direct import Direct, applies
from .inputs import Inputs, check_tokens
from .rows import Rows

if TYPE_CHECKING:
    from .gpt import GPT


class Sampling(NamedTuple):
    """How the next token is chosen; as in :func:`generate`."""

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int = 0


_FACTOR = limited("be positive, in [1e-37, 1e37]", lambda v: 1e-37 <= v <= 1e37)  # beyond, scores in fp64 may overflow
_NUMBERS = {
    "max_new_tokens": COUNT,
    "temperature": _FACTOR,
    "top_k": COUNT,
    "top_p": limited("lie in (0, 1]", lambda v: 0 < v <= 1),
    "repetition_penalty": _FACTOR,
    "seed": SEED,
}


@torch.no_grad()
def generate(
    model: GPT,
    input_ids: Tensor | None = None,
    *,
    inputs_embeds: Tensor | None = None,
    max_new_tokens: int,
    attention_mask: Tensor | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    on_token: Callable[[Tensor], bool | None] | None = None,
) -> Tensor:
    """Continues every prompt, token by token.  Ties go to the lowest id, so in fp32 every split gives the same tokens.

    input_ids int64 [B, S]; prompts of unequal length are padded on either side, with ``attention_mask`` [B, S] 0 there.
    Returns [B, S + new], each prompt moved to end at column S (padding on its left, as transformers has it).  A
    sequence ends at an ``eos_token_id`` and goes on as ``pad_token_id`` (default: the first eos); generation stops when
    all have ended.  Dropout is off.

    ``do_sample`` draws from softmax(logits / ``temperature``), of the ``top_k`` most likely tokens, and of the fewest
    whose probability is at least ``top_p`` together.  ``repetition_penalty`` divides the logit of a token that was
    there before, or multiplies a negative one (Keskar et al. 2019, arXiv:1909.05858).  ``on_token(tokens [B])`` is
    called with every new column; true on any rank stops.

    ValueError for arguments that break these rules.  RuntimeError where a logit is NaN: on a CPU at once, on a GPU when
    it is next asked whether all sequences have ended, which without ``eos_token_id`` is never.
    """
    check(model.head is not None, "generate: the model has no language-model head; make it with lm_head=True")
    check(inputs_embeds is None, "generate: inputs_embeds is not built; a prompt is input_ids")
    sampling = Sampling(
        do_sample=do_sample,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    check_gathered("generate", model.embedding)
    asked = dict(input_ids=input_ids, attention_mask=attention_mask, max_new_tokens=max_new_tokens, on_token=on_token)
    model._compare("generate", dict(asked, eos=eos_token_id, pad=pad_token_id, **sampling._asdict()))
    if input_ids is None:
        raise ValueError("generate: give input_ids [B, S]")
    check_tokens(type(model).__name__, input_ids)
    check(input_ids.shape[1] > 0, "generate: the prompt is empty")
    inputs = Inputs(input_ids, attention_mask=attention_mask)
    model._check_inputs(inputs)
    (B, S), most, vocab = input_ids.shape, model.config.max_positions, model.config.vocab_size
    check_numbers("generate", sampling._asdict() | dict(max_new_tokens=max_new_tokens), _NUMBERS)
    check(isinstance(do_sample, bool), f"generate: do_sample must be True or False, got {described(do_sample)}")
    check(
        S + max_new_tokens <= most,
        f"generate: {S} + {max_new_tokens} tokens are more than the model's max_positions={most}",
    )
    ends = _end_tokens(eos_token_id)
    if pad_token_id is not None:
        check_number("generate: pad_token_id", pad_token_id, INT64)
    pad = pad_token_id if pad_token_id is not None else (ends[0] if ends else 0)
    mask = torch.ones_like(input_ids, dtype=torch.bool) if inputs.key_mask is None else inputs.key_mask
    check(attention_mask is None or bool(mask.any(1).all()), "generate: a prompt has no token")
    order = torch.sort(mask.int(), dim=1, stable=True).indices  # padding first, tokens in their order
    ids, mask = input_ids.gather(1, order), mask.gather(1, order)
    check_ids("generate: input_ids", ids.masked_fill(~mask, 0), vocab)
    ids = ids.masked_fill(~mask, pad)
    between = 1 if on_token is not None else _tokens_between(ids.device)
    choose = _Chooser(model, ids, mask, sampling)

    training = model.training
    model.eval()
    try:
        seen = torch.cat([mask, mask.new_ones(B, max_new_tokens)], 1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        forward = _forward(model, ids, seen, padded=attention_mask is not None, new=max_new_tokens)
        done = torch.zeros(B, dtype=torch.bool, device=ids.device)
        tokens, out = ids, [ids]
        for count in range(1, max_new_tokens + 1):
            logits = forward(tokens, positions)
            token = choose(logits, positions[:, -1] + 1).masked_fill(done, pad)
            if count % between == 0 and (ends or ids.is_cpu):  # a GPU is waited for below anyway
                choose.check_scores()
            out.append(token[:, None])
            if on_token is not None and any_rank(model.tp.group, bool(on_token(token))):
                break
            if ends:
                done |= _among(token, ends)
                if count % between == 0 and done.all():
                    break
            tokens, positions = token[:, None], positions[:, -1:] + 1
        if not ends:
            return torch.cat(out, 1)
        choose.check_scores()
        return _until_all_ended(torch.cat(out, 1), ends, prompt=S)
    finally:
        model.train(training)


def _end_tokens(given: int | Iterable[int] | None) -> list[int]:
    """Returns the ids that end a sequence, of which one beyond the vocabulary never comes; ValueError for no ids."""
    many = isinstance(given, Iterable) and not isinstance(given, Tensor)
    ends: list[Any] = list(given) if many else [] if given is None else [given]  # type: ignore[arg-type]
    for end in ends:
        check_number("generate: eos_token_id", end, WHOLE)
    return ends


def _tokens_between(device: torch.device) -> int:
    """Returns after how many tokens generation asks again whether all sequences have ended.

    A GPU is waited for with each question; those that come too late are cut off.
    """
    return 1 if device.type == "cpu" else 8


def _among(tokens: Tensor, ends: Sequence[int]) -> Tensor:
    """Returns which tokens are one of ``ends``, at least one; numbers, so that nothing is copied to a GPU."""
    return functools.reduce(torch.logical_or, (tokens == end for end in ends))


def _until_all_ended(tokens: Tensor, ends: Sequence[int], prompt: int) -> Tensor:
    """Returns tokens [B, prompt + new] without the columns that follow those in which the last sequence ended."""
    ended = _among(tokens[:, prompt:], ends).cumsum(1) > 0
    return tokens[:, : prompt + int((~ended.all(0)).sum()) + 1]


Forward = Callable[[Tensor, Tensor], Tensor]  # ids and their positions [B, n] -> logits of the last ones [B, V/R]


def _forward(model: GPT, ids: Tensor, seen: Tensor, *, padded: bool, new: int) -> Forward:
    """Returns a model's forward pass with a KV cache for ``seen`` [B, L], of which each call goes on where the last one
    ended: first the prompt ``ids`` [B, S], then ``new`` tokens one by one."""
    if not any_rank(model.tp.group, not applies(model, ids)):  # a hook on one rank is one on all
        return Direct(model, seen, padded=padded, prompt=ids.shape[1], new=new)
    caches = [KVCache(seen, padded=padded) for _ in model.blocks]
    return functools.partial(_by_layers, model, caches)


def _by_layers(model: GPT, caches: list[KVCache], ids: Tensor, positions: Tensor) -> Tensor:
    """One pass on the path of training, over every feature that a model's layers have."""
    rows, first = Rows(ids.shape, model.tp), caches[0].length == 0
    valid = ids.clamp(0, model.config.vocab_size - 1)  # a pad token may be any number
    h, normed = model._embed(rows, valid, positions, None)
    seen = caches[0].mask
    call: dict[str, Any] = dict(batch=rows.batch, seq=rows.seq)
    call["rope"] = model._rope(rows, positions, ids.device, below=seen.shape[1])
    call["attention_mask"] = seen[:, : rows.seq] if first and caches[0].padded else None
    for block, cache in zip(model.blocks, caches, strict=True):
        h, normed = block(h, normed, cache=cache, **call)
    assert model.head is not None  # checked
    return rows.back(model.head.logits(normed, model._tied()))[:, -1]


class _Chooser:
    """logits [B, V/R] of every rank -> the next token [B], the same on every rank."""

    def __init__(self, model: GPT, ids: Tensor, mask: Tensor, sampling: Sampling):
        assert model.head is not None  # checked
        self.tp, self.head, self.vocab = model.tp, model.head, model.config.vocab_size
        self.gather = exchange(model.tp, ids.device).gather
        self.sampling = sampling
        self.rng = make_rng(sampling.seed, 0, 0, "cpu")  # the host reads it for each token
        self.seen = torch.zeros(len(ids), self.vocab, dtype=torch.bool, device=ids.device)
        self.seen.scatter_(1, torch.where(mask, ids, ids[:, -1:]), True)  # every prompt's last is a token of it
        self.nan = torch.zeros((), dtype=torch.bool, device=ids.device)

    def __call__(self, logits: Tensor, position: Tensor) -> Tensor:
        s = self.sampling
        if not s.do_sample and s.repetition_penalty == 1:
            return self._most_likely(logits)
        scores, penalty = self._whole(logits).double(), s.repetition_penalty
        self.nan |= scores.isnan().any()
        scores = torch.where(self.seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
        if s.do_sample:
            scores = keep_likely(scores / s.temperature, s.top_k, s.top_p)
            sample = torch.arange(len(scores), device=scores.device)
            scores = scores - uniform(self.rng, position, sample, self.vocab).log_().neg_().log_()
        token = scores.argmax(-1)  # the first of equals
        self.seen.scatter_(1, token[:, None], True)
        return token

    def check_scores(self) -> None:
        """Raises RuntimeError where a logit was NaN; a GPU is waited for."""
        if self.nan:
            raise RuntimeError("generate: the model's logits are NaN; tpfuse.watch(model) finds the op they come from")

    def _whole(self, logits: Tensor) -> Tensor:
        """[B, V/R] -> [B, V]"""
        if self.tp.size == 1:
            return logits
        width = -(-self.vocab // self.tp.size)  # the last rank may have fewer
        padded = torch.nn.functional.pad(logits, (0, width - logits.shape[1]))
        return self.gather(padded).permute(1, 0, 2).flatten(1)[:, : self.vocab]

    def _most_likely(self, logits: Tensor) -> Tensor:
        """Returns the most likely token; two numbers per prompt travel."""
        value, index = logits.max(-1)  # the first of equals
        best = torch.stack([value.double(), (index + self.head.first).double()])
        every = best[None] if self.tp.size == 1 else self.gather(best)
        self.nan |= every[:, 0].isnan().any()  # a maximum is NaN where any logit is
        rank = every[:, 0].argmax(0)
        return every[:, 1].gather(0, rank[None])[0].long()


def keep_likely(scores: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """Returns scores [B, V] with -inf where a token is not to be drawn.

    The ``top_k`` highest stay, and of these the fewest whose probability is at least ``top_p`` together; the highest
    always stays, and so do scores equal to the last that stays.
    """
    if top_k is not None and top_k < scores.shape[-1]:
        scores = scores.masked_fill(scores < scores.topk(top_k).values[:, -1:], -torch.inf)
    if top_p is not None and top_p < 1:
        ordered = scores.sort(-1, descending=True).values
        probs = ordered.softmax(-1)
        before = probs.cumsum(-1) - probs  # what is more likely
        last = (before < top_p).sum(-1, keepdim=True) - 1
        scores = scores.masked_fill(scores < ordered.gather(1, last), -torch.inf)
    return scores
