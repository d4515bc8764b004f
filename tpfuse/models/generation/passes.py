"""Generation's forward passes: ids and their positions go in, logits of the last ones come out, keys and values stay in
a cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ...kernels.attn.options import as_key_mask
from ...layers.cache import CachePosition, KVCache
from ...layers.call import Call
from ...ranks.agreement import any_rank
from ..rows import BatchRows
from .direct import Direct, applies
from .model import CausalModel
from .request import GenerationRequest

PIECE = 2048  # rows


class Pass:
    """A model with a cache, of which each call goes on where the last one ended: first the prompts, then tokens.

    ``pieces``: in how many the prompts are read.  ``direct``: the CPU's own, whose host knows the length of the cache.
    ``alike``: whether the host does the same for every token.
    """

    alike = True

    def __init__(self, run: Callable[..., Tensor], caches: list[KVCache], *, pieces: int, direct: bool):
        self.run, self.caches, self.pieces, self.direct = run, caches, pieces, direct
        self.place: CachePosition | None = None

    def __call__(self, ids: Tensor, positions: Tensor) -> Tensor:
        """ids and their positions [B, n] -> this rank's logits [B, V/R] of the last ones."""
        if self.place is not None:
            self.place.advance()
        return self.run(ids, positions)

    def verify(self, ids: Tensor, positions: Tensor) -> Tensor:
        """ids and their positions [B, n], behind the prompts -> logits [B, n, V/R] of all of them."""
        return self.run(ids, positions, verifies=True)

    def back(self, columns: int) -> None:
        """Forgets what was read behind the first ``columns``; only where the host knows the length of the cache."""
        for cache in self.caches:
            cache.length = columns

    def read(self, request: GenerationRequest, on_prompt: Callable[[int, int], None]) -> Tensor:
        """Returns the prompts' logits [B, V/R]; calls ``on_prompt(columns read, columns)`` behind each piece."""
        ids, count = request.ids, 0
        for piece, positions in zip(*(t.tensor_split(self.pieces, 1) for t in (ids, request.positions)), strict=True):
            logits = self(piece, positions)
            count += piece.shape[1]
            on_prompt(count, ids.shape[1])
        return logits

    def fix(self) -> None:
        """Behind the prompts: from now on every call has one token, and is the same to the host."""
        if not self.direct:
            cache = self.caches[0]
            self.place = CachePosition(len(cache.mask), cache.length, cache.mask.device)
            for cache in self.caches:
                cache.fix(self.place)

    def repeat(self, n: int) -> None:
        """Makes ``n`` rows of each, behind the prompts: the next call has so many."""
        mask = self.caches[0].mask.repeat_interleave(n, 0)
        for cache in self.caches:
            cache.repeat(n, mask)

    def reorder(self, rows: Tensor, column: int) -> None:
        """Lets row b go on from what row ``rows[b]`` was, from the position ``column`` on."""
        for cache in self.caches:
            cache.reorder(rows, column)


class _Switching(Pass):
    """The pass of a model whose rotary positions are others in calls of more than ``limit`` positions.

    The keys in a cache are rotated by the tables of their time, so all tokens go once more through the model,
    with a new cache, when the first sequence passes that length.
    """

    alike = False

    def __init__(self, make: Callable[[Tensor, Tensor], Pass], request: GenerationRequest, limit: int):
        super().__init__(self._go_on, [], pieces=1, direct=True)
        self.make, self.limit, self.visible = make, limit, request.visible
        self.now: Pass | None = None
        self.switched, self.longest = False, 0
        self.ids = self.positions = request.ids[:, :0]

    def _go_on(self, ids: Tensor, positions: Tensor) -> Tensor:
        if self.now is not None and self.switched:
            return self.now(ids, positions)
        self.longest = int(positions.max()) + 1 if self.now is None else self.longest + 1
        self.switched = self.longest > self.limit
        self.ids, self.positions = torch.cat([self.ids, ids], 1), torch.cat([self.positions, positions], 1)
        if self.now is None or self.switched:
            self.now, ids, positions = self.make(self.visible, self.ids), self.ids, self.positions
        return self.now(ids, positions)

    def repeat(self, n: int) -> None:
        assert self.now is not None  # the prompts have been read
        self.now.repeat(n)
        repeated = (x.repeat_interleave(n, 0) for x in (self.visible, self.ids, self.positions))
        self.visible, self.ids, self.positions = repeated

    def reorder(self, rows: Tensor, column: int) -> None:
        assert self.now is not None
        self.now.reorder(rows, column)
        self.ids, self.positions = self.ids[rows], self.positions[rows]


def pass_of(model: CausalModel, request: GenerationRequest, guesses: int = 0) -> Pass:
    """Returns the forward pass of a model for prompts and the tokens that follow, each with so many ``guesses`` behind
    it: a collective."""
    direct = not any_rank(model.tp.group, not applies(model, request.ids))  # a hook on one rank is one on all
    pieces, switch = pieces_of(model, request), model.config.switches_at

    def make(visible: Tensor, ids: Tensor) -> Pass:
        if direct:
            prompt, new = -(-ids.shape[1] // pieces), visible.shape[1] - ids.shape[1]
            run = Direct(model, visible, padded=request.padded, prompt=prompt, new=new, guesses=guesses)
            return Pass(run, run.caches, pieces=pieces, direct=True)
        caches = [KVCache(visible, padded=request.padded) for _ in model.blocks]
        return Pass(partial(by_layers, model, caches), caches, pieces=pieces, direct=False)

    if switch is None or request.visible.shape[1] <= switch or int(request.positions.max()) >= switch:
        return make(request.visible, request.ids)
    return _Switching(make, request, switch)


def pieces_of(model: CausalModel, request: GenerationRequest) -> int:
    """Returns in how many pieces the prompts are read: what a layer computes of one is there at a time, and not of all,
    which is many times the cache.  One where rotary positions depend on the prompt's length."""
    ids = request.ids
    changing = model.config.depends_on_length(request.visible.shape[1])
    return 1 if changing else min(-(-ids.numel() // PIECE), ids.shape[1])


def by_layers(
    model: CausalModel, caches: list[KVCache], ids: Tensor, positions: Tensor, *, verifies: bool = False
) -> Tensor:
    """One pass on the path of training, over every feature that a model's layers have."""
    rows, cache = BatchRows(ids.shape, model.tp), caches[0]
    valid = ids.clamp(0, model.config.vocab_size - 1)  # a pad token may be any number
    h, normed = model._embed(rows, valid, positions, None)
    rope = model._rope(rows, positions, ids.device, below=cache.mask.shape[1])
    mask = cache.mask[:, : rows.seq] if cache.length == 0 and cache.padded else None
    call = Call(rows.batch, rows.seq, key_mask=as_key_mask("attention_mask", mask), rope=rope)
    for block, cache in zip(model.blocks, caches, strict=True):
        h, normed = block(h, normed, call=call._replace(cache=cache))
    assert model.head is not None  # checked
    logits = rows.back(model.head.logits(normed, model._tied()))
    return logits if verifies else logits[:, -1]
