"""Generation's forward passes: ids and their positions go in, logits of the last ones come out, keys and values stay in
a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..agreement import any_rank
from ..layers.cache import KVCache, Place
from .direct import Direct, applies
from .request import Request
from .rows import Rows

if TYPE_CHECKING:
    from .gpt import GPT


class Pass:
    """A model with a cache, of which each call goes on where the last one ended: first the prompts, then tokens.

    ``direct``: the CPU's own, whose host knows the length of the cache.
    """

    def __init__(self, run: Callable[[Tensor, Tensor], Tensor], caches: list[KVCache], *, direct: bool):
        self.run, self.caches, self.direct = run, caches, direct
        self.place: Place | None = None

    def __call__(self, ids: Tensor, positions: Tensor) -> Tensor:
        """ids and their positions [B, n] -> this rank's logits [B, V/R] of the last ones."""
        if self.place is not None:
            self.place.advance()
        return self.run(ids, positions)

    def fix(self) -> None:
        """Behind the prompts: from now on every call has one token, and is the same to the host."""
        if not self.direct:
            first = self.caches[0]
            self.place = Place(len(first.mask), first.length, first.mask.device)
            for cache in self.caches:
                cache.fix(self.place)

    def repeat(self, n: int) -> None:
        """Makes ``n`` rows of each, behind the prompts: the next call has so many."""
        mask = self.caches[0].mask.repeat_interleave(n, 0)
        for cache in self.caches:
            cache.repeat(n, mask)

    def reorder(self, rows: Tensor, first: int) -> None:
        """Lets row b go on from what row ``rows[b]`` was, from the position ``first`` on."""
        for cache in self.caches:
            cache.reorder(rows, first)


def pass_of(model: GPT, request: Request) -> Pass:
    """Returns the forward pass of a model for prompts and the tokens that follow: a collective."""
    seen, padded = request.seen, request.padded
    if not any_rank(model.tp.group, not applies(model, request.ids)):  # a hook on one rank is one on all
        direct = Direct(model, seen, padded=padded, prompt=request.ids.shape[1], new=request.new)
        return Pass(direct, direct.caches, direct=True)
    caches = [KVCache(seen, padded=padded) for _ in model.blocks]
    return Pass(lambda ids, positions: by_layers(model, caches, ids, positions), caches, direct=False)


def by_layers(model: GPT, caches: list[KVCache], ids: Tensor, positions: Tensor) -> Tensor:
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
    return rows.back(model.head(normed, model._tied()))[:, -1]
