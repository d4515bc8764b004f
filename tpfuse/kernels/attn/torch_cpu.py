"""torch's flash attention on a CPU, forward and backward: the path of plain calls where it is faster.

It computes what ``scale``, rotary positions, and ``causal`` or ``key_mask`` ask for.  Whatever else is asked for is
computed by cpu.py, also bits that depend on nothing beside a head (``leaves``), a query (``tile``) or a chunk of
queries: torch chooses its blocks by the number of positions.  ``python -m bench.kernels.cpu`` compares the two.
"""

import torch
from torch import Tensor

from ..runtime.processor import SUPPORTED, instructions, multiplies, multiplies_tiles
from .options import INF, Options
from .reference import rotate_both

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
# Positions that torch divides into blocks of 64 rows, and instructions with which cpu.py's of 128 are faster in fp32
# under a causal mask.
SMALL_BLOCKS = range(257, 768)
SLOW_SMALL_BLOCKS = ("AVX2",), ("AVX512", "avx512_bf16")
# Positions from which on they are of 64 rows, and no longer of 32; with AMX backward in bf16 is faster then.
FEWEST_ROWS = 192


def is_plain(qkv: Tensor, options: Options, *, backward: bool = False) -> bool:
    """Returns whether a call is torch's: the forward one, or with ``backward`` the one behind it."""
    features = options.cu_seqlens, options.bias, options.rng, options.window, options.softcap
    plain = all(option is None for option in features) and not (options.leaves or options.tile)
    plain = plain and not (options.causal and options.key_mask is not None)
    return plain and options.seq > 0 and options.batch > 0 and _is_faster(qkv.dtype, options, backward)


def _is_faster(dtype: torch.dtype, options: Options, backward: bool) -> bool:
    if dtype == torch.float32:
        return not (options.causal and options.seq in SMALL_BLOCKS and instructions() in SLOW_SMALL_BLOCKS)
    if dtype not in SUPPORTED or not multiplies(dtype):
        return False
    long = options.seq >= FEWEST_ROWS and dtype == torch.bfloat16
    return not backward or (long and multiplies_tiles())


def _by_sample(rows: Tensor, qkv: Tensor, options: Options) -> Tensor:
    """Returns rows of n slots a kv head, [M, G, n, E] or flat, as [B G, n, S, E], a view: a kv head of a sample is one
    of torch's samples, which all of its Q query heads share."""
    B, S = options.batch, options.seq
    rows = rows if len(rows) == S * B else rows[: S * B]
    return rows.reshape(S, B * qkv.shape[1], -1, qkv.shape[3]).permute(1, 2, 0, 3)


def _slots(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns those of q, k and v of [B G, Q + 2, S, E], views."""
    return x[:, :-2], x[:, -2:-1], x[:, -1:]


def _rotated(q: Tensor, k: Tensor, options: Options, back: bool = False) -> tuple[Tensor, Tensor]:
    """Returns q and k [B G, n, S, E] rotated, as they are without rotary positions."""
    if options.cos is None:
        return q, k
    q, k = (t.unflatten(0, (options.batch, -1)) for t in (q, k))
    q, k = rotate_both(q, k, options, slice(0, options.seq), back=back)
    return q.flatten(0, 1), k.flatten(0, 1)


def _operands(qkv: Tensor, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k and v [B G, Q, S, E], q and k rotated."""
    q, k, v = _slots(_by_sample(qkv, qkv, options))
    q, k = _rotated(q, k, options)
    return (q, k, v) if q.shape[1] == 1 else (q, k.expand_as(q), v.expand_as(q))


def _mask(qkv: Tensor, options: Options) -> Tensor | None:
    """Returns what is added to the scores [B G, 1, 1, S]: -inf where a key may not be seen."""
    if options.key_mask is None:
        return None
    hidden = ~options.key_mask.repeat_interleave(qkv.shape[1], 0)
    return qkv.new_zeros(hidden.shape).masked_fill_(hidden, -INF)[:, None, None]


def flash_fwd(qkv: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Returns what attention_fwd does."""
    (M, G, slots, E), B, S = qkv.shape, options.batch, options.seq
    mask = _mask(qkv, options)
    by_sample, lse = _FLASH(*_operands(qkv, options), 0.0, options.causal, attn_mask=mask, scale=options.scale)
    o = (qkv.new_zeros if M > S * B else qkv.new_empty)(M, G * (slots - 2) * E)
    _by_sample(o, qkv, options).copy_(by_sample)
    lse = lse.reshape(B, G * (slots - 2), S).contiguous()
    if options.key_mask is not None:
        lse = lse.masked_fill(~options.key_mask.any(1)[:, None, None], INF)
    return o, lse


def flash_bwd(do: Tensor, qkv: Tensor, o: Tensor, lse: Tensor, options: Options) -> Tensor:
    """Returns what attention_bwd does."""
    (M, G, slots, _), B, S = qkv.shape, options.batch, options.seq
    do, o = (_by_sample(t, qkv, options) for t in (do, o))
    q, k, v = _operands(qkv, options)
    lse, mask = lse.reshape(B * G, slots - 2, S), _mask(qkv, options)
    dq, dk, dv = _FLASH_BACKWARD(do, q, k, v, o, lse, 0.0, options.causal, attn_mask=mask, scale=options.scale)
    if slots > 3:
        dk, dv = (t.sum(1, keepdim=True) for t in (dk, dv))
    dqkv = (qkv.new_zeros if M > S * B else qkv.new_empty)(qkv.shape)
    dq, dk = _rotated(dq, dk, options, back=True)
    for place, grad in zip(_slots(_by_sample(dqkv, qkv, options)), (dq, dk, dv), strict=True):
        place.copy_(grad)
    return dqkv
