"""Greedy generation with a KV cache: the prompt in one pass, then one token of every prompt at a time.

Decoding runs on the same path as training: a batch's rows are padded to a multiple of the row shards, so each new token costs the same two
messages a GEMM pair, with or without sequence parallelism.
"""

import torch
from torch import Tensor

from ..collectives import all_gather
from ..kernels._op import check
from ..kernels.cross_entropy import check_ids
from ..layers._cache import KVCache
from ._model import Rows


@torch.no_grad()
def generate(
    model,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    attention_mask: Tensor | None = None,
    eos_token_id: int | None = None,
    pad_token_id: int | None = None,
) -> Tensor:
    """The most likely continuation, token by token; ties go to the lowest id, so in fp32 every tensor-parallel size gives the same.

    input_ids int64 [B, S]; prompts of unequal length are padded on either side, with ``attention_mask`` [B, S] 0 there.  Returns
    [B, S + new], each prompt moved to end at column S (padding on its left, as transformers has it).  A sequence ends at
    ``eos_token_id`` and goes on as ``pad_token_id`` (default: eos); generation stops when all have ended.  Dropout is off.
    """
    model._check_inputs(input_ids, attention_mask=attention_mask)
    B, S = input_ids.shape
    most, vocab = model.config.max_positions, model.config.vocab_size
    check(max_new_tokens >= 1, f"generate: max_new_tokens must be at least 1, got {max_new_tokens}")
    check(S + max_new_tokens <= most, f"generate: {S} + {max_new_tokens} tokens are more than the model's max_positions={most}")
    check(S > 0, "generate: the prompt is empty")
    pad = pad_token_id if pad_token_id is not None else (eos_token_id if eos_token_id is not None else 0)
    mask = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    check(bool(mask.any(1).all()), "generate: a prompt has no token")
    order = torch.sort(mask.int(), dim=1, stable=True).indices  # padding first, tokens in their order
    ids, mask = input_ids.gather(1, order), mask.gather(1, order)
    check_ids("generate: input_ids", ids[mask], vocab)
    ids = ids.masked_fill(~mask, pad)

    training = model.training
    model.eval()
    try:
        seen = torch.cat([mask, mask.new_ones(B, max_new_tokens)], 1)
        caches = [KVCache(seen) for _ in model.blocks]
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        done = torch.zeros(B, dtype=torch.bool, device=ids.device)
        tokens, out = ids, [ids]
        for _ in range(max_new_tokens):
            token = _next(model, tokens, positions, mask, caches).masked_fill(done, pad)
            out.append(token[:, None])
            if eos_token_id is not None:
                done |= token == eos_token_id
                if done.all():
                    break
            tokens, positions = token[:, None], positions[:, -1:] + 1
        return torch.cat(out, 1)
    finally:
        model.train(training)


def _next(model, ids: Tensor, positions: Tensor, mask: Tensor, caches: list[KVCache]) -> Tensor:
    """One pass over ids [B, S] -> the most likely next token [B]."""
    rows = Rows(*ids.shape, model.tp)
    h, normed = model._embed(rows, ids.clamp(0, model.config.vocab_size - 1), positions, None)  # a pad token may be any number
    mask = None if ids.shape[1] == 1 and caches[0].length else mask
    for block, cache in zip(model.blocks, caches, strict=True):
        h, normed = block(h, normed, batch=rows.batch, seq=rows.seq, attention_mask=mask, cache=cache)
    logits = rows.back(model._logits(normed))[:, -1]
    value, index = logits.max(-1)  # the first of equals
    best = torch.stack([value.double(), (index + model.head.first).double()])
    every = best[None] if model.tp.size == 1 else all_gather(best, model.tp.size, model.tp.group_name)
    rank = every[:, 0].argmax(0)
    return every[:, 1].gather(0, rank[None])[0].long()
