"""Generation's forward pass on a CPU: the sums of the model's own, without row shards, autograd and what else training
needs, so that a token costs few calls of torch a layer.

Every rank has all rows s * batch + b (a token is one row a prompt, too few to share), its own heads, its own columns of
the MLP and its own slice of the vocabulary: one sum over the ranks for each GEMM pair.  Only the last position's rows
go through what follows the last layer's keys and values.  With ``TensorParallel(bitwise=V)`` what is summed is the
training forward's (leaves.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from ...kernels.attn.cpu import decode
from ...kernels.attn.op import attention
from ...kernels.gemm.prepared import Join as Joined
from ...kernels.gemm.prepared import Map, Plain, form_for
from ...kernels.lookup.op import embedding_fwd
from ...kernels.norm import KINDS
from ...kernels.runtime.op import acc_dtype
from ...layers import KVCache, TransformerBlock
from ...layers.cache import Seeing
from ...layers.call import Call, Ropes
from ...layers.hooks import hooked
from ...layers.linear import RowParallelLinear
from ...layers.module import local
from ...layers.norm import LayerNorm, SplitNorm
from ...layers.wiring import Branch, Join, Norm, norm_names, run
from ..rows import BatchRows
from . import leaves
from .exchange import Exchange, exchange
from .experts import DirectExperts
from .model import CausalModel

BLOCK = 128  # rows: more are worked on piece by piece, or in fewer passes


def applies(model: CausalModel, ids: Tensor) -> bool:
    """True if the weights may be used as they are: plain tensors of one dtype on a CPU, nothing beside or around them.

    Adapters, hooks, autocast, torch.compile, FSDP, onlookers of ops and layers of other kinds are for the model's own
    forward pass.
    """
    parameters = list(model.parameters())
    return (
        ids.is_cpu
        and all(p.is_cpu and not isinstance(p, DTensor) for p in parameters)
        and len({p.dtype for p in parameters}) == 1
        and not (torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling() or is_in_torch_dispatch_mode())
        and not hooked(cast(nn.Module, model))
        and all(map(_plain, model.blocks))
        and not any("parametrizations" in m._modules for m in model.modules())
    )


def _plain(block: nn.Module) -> bool:
    return (
        type(block) is TransformerBlock
        and block.attention.qkv.adapter is None
        and block.attention.out.adapter is None
        and (block.mlp.in_one or (block.mlp.has_router and block.tp.bitwise is None and block.mlp.adapter is None))
    )


class Direct:
    """A model with a KV cache for ``seen`` [B, L], a prompt that is read ``prompt`` columns at a time, and ``new``
    tokens, each with so many ``guesses`` behind it: a collective.

    ``seen`` says what may be seen of the cache's positions; ``padded``, whether it hides any.
    """

    def __init__(self, model: CausalModel, visible: Tensor, *, padded: bool, prompt: int, new: int, guesses: int = 0):
        assert model.head is not None  # checked
        tp = model.tp
        self.model, self.exchange = model, exchange(tp, visible.device)
        dtype = next(model.embedding.parameters()).dtype
        self.caches = [KVCache(visible, padded=padded) for _ in model.blocks]
        self.turnings = [_Turning(model, visible.shape[1], i) for i in range(len(model.config.ropes))]
        self.norm = _norm(model.input_norm) if model.input_norm is not None else None
        self.form: Plain = form_for(dtype, rows=len(visible) * (1 + guesses), times=new)
        if tp.bitwise is not None:
            self.form = leaves.LeafProducts(tp)
        tied, self.capped = model._tied(), model.head.capped
        form = self.form if tp.bitwise is None else leaves.LeafProducts(tp, model.head.columns)
        self.head = form.map(model.head.shard("weight") if tied is None else tied, model.head.shard("bias"))
        # The prompt's rows are many, so that the form of a token's may not be the best for them.
        start = self.form if self.form.any_rows else form_for(dtype, rows=len(visible) * prompt, times=1)
        self.layers = [_DirectLayer(block, self.exchange, start) for block in model.blocks]
        self.prompt: list[_DirectLayer] = [*self.layers[:-1], _LastLayer(model.blocks[-1], self.exchange, start)]
        if start is not self.form:
            self.layers = []

    def __call__(self, ids: Tensor, positions: Tensor, *, verifies: bool = False) -> Tensor:
        """ids and their positions [B, n], which go on where the last call ended -> this rank's logits [B, V/R] of the
        last ones; of all, [B, n, V/R], where it ``verifies`` guesses."""
        rows = positions.t().reshape(-1)
        valid_ids = ids.t().reshape(-1).clamp(0, self.model.config.vocab_size - 1)  # a pad token may be any number
        h = self._embedded(valid_ids, rows)
        turns: list[Turn | None] = [turning(positions) for turning in self.turnings] or [None]
        x = h if self.norm is None else self.norm(h)
        reads = not verifies and (ids.shape[1] > 1 or self.caches[0].length == 0)  # a prompt, or a piece of it
        for layer, cache in zip(self._stack(reads), self.caches, strict=True):
            h, x = layer(h, x, cache, turns[0 if layer.window is None else -1])
        logits = self.capped(self.head(x))
        return logits.unflatten(0, ids.t().shape).transpose(0, 1) if verifies else logits

    def _stack(self, reads: bool) -> list[_DirectLayer]:
        if reads:
            return self.prompt
        self.prompt = []
        if not self.layers:
            self.layers = [_DirectLayer(block, self.exchange, self.form) for block in self.model.blocks]
        return self.layers

    def _embedded(self, ids: Tensor, positions: Tensor) -> Tensor:
        start, learned = self.model.embedding, self.model.positions
        table = local(start.weight)
        if self.model.tp.size == 1:
            h = start.scaled(F.embedding(ids, table))
        else:
            h = self.exchange.sum(start.scaled(embedding_fwd(table, ids, start.first)))
        return h if learned is None else h + F.embedding(positions, local(learned.weight))


# ---- one layer ----


class _DirectLayer:
    """(h, x = norm(h)) of the layer's input -> the same of its output; rows s * batch + b."""

    def __init__(self, block: Any, exchange: Exchange, form: Plain):
        a, m = block.attention, block.mlp
        self.attention, self.by_leaves = a, a.tp.bitwise is not None
        self.slots, self.width, self.window = a.heads_per_group, a.head_width, a.window
        self.seeing = Seeing(a.window, a.scale, a.softcap)
        self.steps = block.steps
        self.norms = {name: _norm(getattr(block, name)) for name in norm_names(self.steps)}
        self.head_norms = None if a.q_norm is None else [_norm(norm, exchange) for norm in (a.q_norm, a.k_norm)]
        weight, bias = a.qkv.flat()
        self._project(weight, bias, form)
        self.up: Map = (
            DirectExperts(m, form) if m.has_router else form.mlp(local(m.fc1.weight), local(m.fc1.bias), m.activation)
        )
        self.joins: dict[str, Joined] = {}
        for step in self.steps:
            if isinstance(step, Join):
                norm = None if step.branch_norm is None else self.norms[step.branch_norm]
                projection = a.out if step.branch == "attention" else None if m.has_router else m.fc2
                self.joins[step.branch] = _joined(projection, exchange, form, norm)

    def _project(self, weight: Tensor, bias: Tensor | None, form: Plain) -> None:
        self.qkv = form.map(weight, bias)

    def __call__(self, h: Tensor, x: Tensor, cache: KVCache, turn: Turn | None) -> tuple[Tensor, Tensor]:
        return run(self.steps, _Positions(self, cache, turn), h, x)

    def attend(self, x: Tensor, cache: KVCache, turn: Turn | None) -> Tensor:
        """x [n B, D] -> o [n B, H/R E]"""
        qkv = self._heads(self.qkv(x), slice(self.slots), turn)
        batch = len(cache.mask)
        if self.by_leaves:
            mask = cache.mask[:, : len(x) // batch] if cache.padded else None
            return self.attention.attend_with_cache(qkv, cache, Call(batch, key_mask=mask))
        if len(x) == batch:
            cache.store(qkv[:, :, -2:].unsqueeze(3))
            return cache.see(qkv[:, :, :-2], self.seeing, decode=decode)
        n = len(x) // batch
        if cache.length > 0:
            return cache.attend(qkv, batch, n, self.seeing)
        cache.fill(qkv, batch, n)
        if cache.padded or self.seeing.softcap is not None or (self.window is not None and self.window < n):
            mask = cache.mask[:, :n] if cache.padded else None
            return attention(qkv, batch=batch, causal=True, key_mask=mask, **self.seeing._asdict())
        return _causal(qkv, cache.kv[:, :, :, :n], self.seeing.scale)

    def _heads(self, x: Tensor, slots: slice, turn: Turn | None) -> Tensor:
        """A projection's output -> the heads of these slots of each group [m, G/R, slots, E], normed and rotated."""
        start, end, _ = slots.indices(self.slots)
        heads = x.view(len(x), -1, end - start, self.width)
        if self.head_norms is not None:
            queries = max(self.slots - 2 - start, 0)
            q, k, _ = heads.split([queries, *((1, 1) if end == self.slots else (0, 0))], 2)
            for norm, heads_of_norm in zip(self.head_norms, (q, k), strict=True):
                heads_of_norm.copy_(norm(heads_of_norm))
        return heads if turn is None else turn(heads, slots)


class _Positions(NamedTuple):
    """The steps of a layer for new positions of a cache; a branch gives what its output projection reads."""

    layer: _DirectLayer
    cache: KVCache
    turn: Turn | None

    def norm(self, step: Norm, h: Tensor) -> tuple[Tensor, Tensor]:
        return h, self.layer.norms[step.norm](h)

    def branch(self, step: Branch, n: Tensor) -> Tensor:
        return self.layer.attend(n, self.cache, self.turn) if step.name == "attention" else self.layer.up(n)

    def join(self, step: Join, parts: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.layer.joins[step.branch](parts, h)
        n = h if step.norm is None else self.layer.norms[step.norm](h)
        return n if step.stream else h, n


class _LastLayer(_DirectLayer):
    """The last layer over the prompt: of all rows the keys and values, of the last position's everything else.

    With leaves attention, too, is of all rows: a GEMM of other columns may have other bits.
    """

    def _project(self, weight: Tensor, bias: Tensor | None, form: Plain) -> None:
        if self.by_leaves:
            super()._project(weight, bias, form)
            return
        w = weight.view(-1, self.slots, self.width, weight.shape[1])
        b = None if bias is None else bias.view(-1, self.slots, self.width)
        self.q = form.map(w[:, :-2].flatten(0, 2), None if b is None else b[:, :-2].flatten())
        self.kv = form.map(w[:, -2:].flatten(0, 2), None if b is None else b[:, -2:].flatten())

    def __call__(self, h: Tensor, x: Tensor, cache: KVCache, turn: Turn | None) -> tuple[Tensor, Tensor]:
        return super().__call__(h[-len(cache.mask) :], x, cache, turn)

    def attend(self, x: Tensor, cache: KVCache, turn: Turn | None) -> Tensor:
        batch, queries = len(cache.mask), self.slots - 2
        if self.by_leaves:
            return super().attend(x, cache, turn)[-batch:]
        assert turn is None or isinstance(turn, _Turn)
        cache.fill(self._heads(self.kv(x), slice(queries, None), turn), batch, len(x) // batch)
        q = self._heads(self.q(x[-batch:]), slice(queries), None if turn is None else turn.of_last(batch))
        return cache.see(q, self.seeing, decode=decode)


def _joined(layer: RowParallelLinear | None, exchange: Exchange, form: Plain, norm: Map | None) -> Joined:
    """Returns (x, h) -> h + norm(the sum over ranks of x W' + b); without a layer of x."""
    if layer is None:
        return lambda x, h: h + (exchange.sum(x) if norm is None else norm(exchange.sum(x)))
    weight, bias = local(layer.weight), local(layer.bias)
    if norm is not None:
        summed = form.partial(weight)

        def add(x: Tensor, h: Tensor) -> Tensor:
            y = exchange.sum(summed(x))
            return h + norm(y if bias is None else y + bias)

        return add
    if exchange.tp.bitwise is not None:
        return leaves.joined(layer, exchange, form)
    if exchange.tp.size == 1:
        return form.add(weight, bias)
    alone = form.partial(weight)

    def run(x: Tensor, h: Tensor) -> Tensor:
        h = h + exchange.sum(alone(x))
        return h if bias is None else h.add_(bias)

    return run


def _norm(norm: LayerNorm, exchange: Exchange | None = None) -> Map:
    """Returns the map of a norm; ``exchange``: that of one whose width is split over the ranks."""
    if norm.tp.bitwise is not None:
        return leaves.norm_of(norm)
    weight, bias, eps, kind = local(norm.weight), local(norm.bias), norm.eps, KINDS[norm.kind]
    if kind.centred:
        return lambda x: F.layer_norm(x, weight.shape, weight, bias, eps)
    scale = weight.to(acc_dtype(weight)) + kind.offset

    def rms(x: Tensor) -> Tensor:
        if len(x) <= BLOCK and not kind.offset:
            return F.rms_norm(x, weight.shape, weight, eps)
        acc = x.to(scale.dtype)
        norm = torch.linalg.vector_norm(acc, dim=-1, keepdim=True)  # one pass, nothing written
        rstd = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        normed = acc * rstd if acc is x else acc.mul_(rstd)
        return normed.mul_(scale).to(x.dtype)

    def split(x: Tensor) -> Tensor:
        """x [m, G', Q, E] of this rank's heads, or of none"""
        flat = x.flatten(1).to(scale.dtype)
        if not x.numel() or exchange is None:
            return x
        mean = exchange.sum(flat.square().mean(1)).div_(exchange.tp.size)
        return (flat * mean.add_(eps).rsqrt_()[:, None]).mul_(scale).to(x.dtype).view(x.shape)

    return split if isinstance(norm, SplitNorm) else rms


def _causal(qkv: Tensor, kv: Tensor, scale: float | None) -> Tensor:
    """qkv [n B, G, Q + 2, E], kv [B, G, 2, n, E] of the same -> o [n B, G Q E]"""
    (batch, groups, _, n, width), queries = kv.shape, qkv.shape[2] - 2
    q = qkv[:, :, :-2].unflatten(0, (n, batch)).permute(1, 2, 3, 0, 4).reshape(-1, queries, n, width)
    k, v = (t.reshape(-1, 1, n, width).expand(-1, queries, -1, -1) for t in kv.unbind(2))
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    return o.view(batch, groups, queries, n, width).permute(3, 0, 1, 2, 4).reshape(n * batch, -1)


# ---- rotary positions ----


class _Turn(NamedTuple):
    """cos and sin [m, 1, Q + 2, E] of every column of qkv (v turns by 0), and the column that each is paired with.

    What is turned is written over: new memory takes longer than the sums.
    """

    cos: Tensor
    sin: Tensor
    pairs: Tensor | None  # None: half a head away

    def __call__(self, heads: Tensor, slots: slice) -> Tensor:
        cos, sin = self.cos[:, :, slots], self.sin[:, :, slots]
        if len(heads) <= BLOCK:
            return self._turned(heads, cos, sin)
        keys = self.cos.shape[2] - 1 - (slots.start or 0)  # of these slots, those before v
        for x, *turns in zip(*(t[:, :, :keys].split(BLOCK) for t in (heads, cos, sin)), strict=True):
            x.copy_(self._turned(x, *turns))  # what stands between stays in the cache: a tenth of the time
        return heads

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        acc = x.to(cos.dtype)
        paired = acc.roll(x.shape[-1] // 2, -1) if self.pairs is None else acc.index_select(-1, self.pairs)
        return acc.mul_(cos).addcmul_(paired, sin).to(x.dtype)

    def of_last(self, rows: int) -> _Turn:
        return self._replace(cos=self.cos[-rows:], sin=self.sin[-rows:])


Turn = _Turn | leaves.Turn


class _Turning:
    """Looks the turns of rows up in tables of the model's, laid out for qkv."""

    def __init__(self, model: CausalModel, columns: int, kind: int):
        self.model, self.columns, self.which = model, columns, kind  # positions are less than columns
        start: Any = model.blocks[0]
        self.slots, self.width = start.attention.heads_per_group, model.config.head_size
        self.made_of: Tensor | None = None

    def __call__(self, positions: Tensor) -> Turn:
        """positions [B, n] -> the turns of rows [n B]"""
        rope = self.model._rope(BatchRows(positions.shape, self.model.tp), positions, positions.device, self.columns)
        assert rope is not None
        rope = rope[self.which] if isinstance(rope, Ropes) else rope
        assert rope.positions is not None
        if self.model.tp.bitwise is not None:
            return leaves.Turn(rope)
        if self.made_of is not rope.cos:
            self.made_of = rope.cos
            # The model's tables may be for thousands of positions more; but longrope's long ones come after the short.
            rows = slice(self.columns if self.model.config.switches_at is None else None)
            self.cos, self.sin, self.pairs = self._laid_out(rope.cos[rows], rope.sin[rows])
        return _Turn(self.cos[rope.positions], self.sin[rope.positions], self.pairs)

    def _laid_out(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        half, E = cos.shape[1], self.width
        dtype = acc_dtype(next(self.model.embedding.parameters()))
        turned = torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype)
        tables = []
        for table, fill in zip(turned, (1.0, 0.0)):
            table = F.pad(table, (0, E - 2 * half), value=fill)[:, None, None].repeat(1, 1, self.slots, 1)
            table[:, :, -1] = fill
            tables.append(table)
        columns = torch.arange(E)
        pairs = torch.cat([columns[half : 2 * half], columns[:half], columns[2 * half :]])
        return tables[0], tables[1], None if 2 * half == E else pairs
