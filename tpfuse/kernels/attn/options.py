"""The arguments of attention as records, what is checked of them, and how many scores they leave."""

from typing import Final, NamedTuple

import torch
from torch import Tensor

from ..losses.op import check_ids
from ..runtime.errors import check
from ..runtime.launch import target
from ..runtime.rules import COUNT, POSITIVE, WHOLE, check_number, check_numbers, described

INF = float("inf")
LOG2E = 1.4426950408889634
_NUMBERS = dict(batch=COUNT, seq=WHOLE, max_seqlen=COUNT, window=COUNT, scale=POSITIVE, softcap=POSITIVE)
GPU_WIDTH = 256  # columns of a head that the kernels hold: tiles of 512 do not fit shared memory


class Options(NamedTuple):
    """The arguments of attention_fwd and attention_bwd after their own tensors.

    The first TENSORS fields are tensors.
    """

    key_mask: Tensor | None = None  # bool [B, S]
    cu_seqlens: Tensor | None = None  # int32 [N + 1]
    bias: Tensor | None = None  # [H or 1, S, S]
    cos: Tensor | None = None  # [P, W / 2]
    sin: Tensor | None = None
    positions: Tensor | None = None  # int64 [S B]
    rng: Tensor | None = None  # int64 [3]
    batch: int = 1
    seq: int = 0
    max_seqlen: int | None = None
    causal: bool = False
    window: int | None = None
    scale: float = 1.0
    softcap: float | None = None
    interleaved: bool = False
    p: float = 0.0
    site: int = 0
    first_head: int = 0
    leaves: int = 0  # of the heads, whose bits then do not depend on those beside them; 0: none (runtime/leaves.py)
    tile: int = 0  # queries of a tile, where a query's bits depend on nothing beside it (tiles.py)


TENSORS: Final = 7


class QueryChunk(NamedTuple):
    """The positions of a call's queries, where they are not all, and the keys and values of all positions."""

    kv: Tensor  # [M, G, 2, E], row s B + b: k and v of each group
    start: int  # position of the first query
    queries: int  # positions with queries

    @property
    def end(self) -> int:
        return self.start + self.queries


class DecodeOptions(NamedTuple):
    """The arguments of attention_decode after q, k and v."""

    key_mask: Tensor | None  # bool [B, L]
    lengths: Tensor | None  # int32 [B]
    window: int | None
    scale: float
    softcap: float | None


def query_positions(options: Options, chunk: QueryChunk | None) -> slice:
    """Returns the positions of a call's queries: all without a chunk."""
    return slice(0, options.seq) if chunk is None else slice(chunk.start, chunk.end)


def keys_in_range(options: Options, start: int, end: int) -> tuple[int, int]:
    """Returns the first key that causal and window let any query at positions ``start`` to ``end`` see, and the one
    behind the last."""
    span = options.seq if options.window is None else min(options.window, options.seq)
    return max(0, start - span + 1), end if options.causal else min(end + span - 1, options.seq)


def scores(x: Tensor, options: Options, chunk: QueryChunk | None = None) -> tuple[int, int]:
    """Returns how many scores causal and window leave of x, which is qkv or a chunk's q, and how many are computed.

    A product over the first is 2 E flops each; a triangle of n rows counts n^2 / 2, as is customary.  The second is
    counted in tiles of 128 queries with the keys that any of them sees.  Documents are not known from shapes.
    """
    rows, computed = query_positions(options, chunk), 0
    for start in range(rows.start, rows.stop, 128):
        end = min(start + 128, rows.stop)
        begin, stop = keys_in_range(options, start, end)
        computed += (end - start) * (stop - begin)
    return scores_left(x, options, chunk), _heads(x, options, chunk) * computed


def scores_left(x: Tensor, options: Options, chunk: QueryChunk | None = None) -> int:
    """Returns the first number of :func:`scores`, of any length in one graph of torch.compile."""
    S, rows = options.seq, query_positions(options, chunk)
    span = S if options.window is None else min(options.window, S)

    def twice_before(position: int) -> int:
        """Returns twice the number of scores of the queries before ``position`` with keys up to their own."""
        reach = min(span, position)
        return reach * (2 * position - reach + 1)

    left = twice_before(rows.stop) - twice_before(rows.start)
    if options.causal:
        left -= min(span, rows.stop) - min(span, rows.start)
    else:  # keys behind a query are those before it, counted from the other end; its own is counted twice
        left += twice_before(S - rows.start) - twice_before(S - rows.stop) - 2 * (rows.stop - rows.start)
    return _heads(x, options, chunk) * (left // 2)


def _heads(x: Tensor, options: Options, chunk: QueryChunk | None) -> int:
    """Returns the query heads of all samples."""
    return options.batch * x.shape[1] * (x.shape[2] - (2 if chunk is None else 0))


# ---- checks ----


def takes_key_mask(dtype: torch.dtype) -> bool:
    """Returns whether a mask of ``dtype`` is nonzero where a key may be seen; a floating mask may be additive, and so 0
    there."""
    return not (dtype.is_floating_point or dtype.is_complex)


def as_key_mask(name: str, mask: Tensor | None) -> Tensor | None:
    """Returns a mask of keys as bool; ValueError for one whose numbers may be additive."""
    if mask is None or mask.dtype == torch.bool:
        return mask
    if not takes_key_mask(mask.dtype):
        raise ValueError(
            f"{name} must be bool or integer, nonzero where a key may be seen, not additive, got {described(mask)}"
        )
    return mask.bool()


def check_width(x: Tensor) -> None:
    """Raises ValueError, before anything is launched, for heads [..., E] too wide for the kernels of a GPU."""
    E = x.shape[-1]
    fits = E <= GPU_WIDTH or target(x.device).arch == "cpu"
    check(fits, f"attention: on a GPU a head has at most {GPU_WIDTH} columns (fp64 excepted), got {E}")


def check_chunk(q: Tensor, chunk: QueryChunk, options: Options) -> None:
    """Raises the ValueError of ``attention_of_queries`` for shapes, positions and options that break its rules."""
    kv, batch, seq, name = chunk.kv, options.batch, options.seq, "attention_of_queries"
    alike = q.dim() == kv.dim() == 4 and kv.shape[1:] == (q.shape[1], 2, q.shape[3]) and min(q.shape[2:]) >= 1
    if not alike or q.dtype != kv.dtype:
        raise ValueError(
            f"{name}: q must be [m, G, Q, E] and kv [M, G, 2, E], of one dtype, got {described(q)} and {described(kv)}"
        )
    check_numbers(name, dict(first_query=chunk.start, queries=chunk.queries), dict(first_query=WHOLE, queries=WHOLE))
    check_options((len(kv), q.shape[1], q.shape[2] + 2, q.shape[3]), options)
    if chunk.end > seq:
        raise ValueError(f"{name}: first_query + queries = {chunk.start} + {chunk.queries} are more than seq = {seq}")
    if chunk.queries * batch > len(q):
        raise ValueError(f"{name}: queries x batch = {chunk.queries} x {batch} rows are more than q's {len(q)}")


def default_seq(rows: int, batch: int) -> int:
    """Returns the positions of a sample; ValueError where ``rows`` are no multiple of ``batch``."""
    if type(batch) is not int or batch < 1:
        check_number("attention: batch", batch, COUNT)
    if rows % batch:
        raise ValueError(f"attention: qkv's {rows} rows must be a multiple of batch = {batch}, or seq given")
    return rows // batch


def check_options(shape: tuple[int, ...], options: Options) -> None:
    """Raises the ValueError of ``attention`` on qkv of ``shape`` for options that break its rules."""
    (M, G, slots, E), batch, seq = shape, options.batch, options.seq
    check_numbers("attention", {name: getattr(options, name) for name in _NUMBERS}, _NUMBERS)
    if seq * batch > M:  # a message made in advance would cost more than the check
        raise ValueError(f"attention: seq x batch = {seq} x {batch} rows are more than qkv's {M}")
    bias, cu_seqlens = options.bias, options.cu_seqlens
    if options.key_mask is not None:
        _check_tensor("key_mask", options.key_mask, torch.bool, (batch, seq))
    if cu_seqlens is not None:
        check(batch == 1, f"attention: cu_seqlens needs batch = 1, got {batch}")
        _check_tensor("cu_seqlens", cu_seqlens, torch.int32, (max(cu_seqlens.numel(), 1),))
    check(options.max_seqlen is None or cu_seqlens is not None, "attention: max_seqlen needs cu_seqlens")
    if bias is not None:
        check(not bias.requires_grad, "attention: bias is not differentiated; give it detached")
        check(bias.is_floating_point(), f"attention: bias must be floating, got {bias.dtype}")
        heads = 1 if bias.dim() and len(bias) == 1 else G * (slots - 2)
        _check_tensor("bias", bias, bias.dtype, (heads, seq, seq))
    _check_rotation(E, options)


def _check_tensor(name: str, t: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    check(
        t.shape == shape and t.dtype == dtype,
        f"attention: {name} must be {str(dtype)[6:]} {shape}, got {t.dtype} {tuple(t.shape)}",
    )


def _check_rotation(E: int, options: Options) -> None:
    cos, sin, positions, seq = options.cos, options.sin, options.positions, options.seq
    check((cos is None) == (sin is None), "attention: cos and sin go together")
    if positions is not None:
        check(cos is not None, "attention: positions need cos and sin")
        _check_tensor("positions", positions, torch.int64, (seq * options.batch,))
    if cos is not None and sin is not None:
        alike = cos.dim() == 2 and cos.shape == sin.shape and cos.is_floating_point() and cos.dtype == sin.dtype
        if not alike:
            got = f"{cos.dtype} {tuple(cos.shape)} and {sin.dtype} {tuple(sin.shape)}"
            raise ValueError(f"attention: cos and sin must be floating [positions, W / 2], alike, got {got}")
        rows, columns = cos.shape
        if 2 * columns > E:
            raise ValueError(f"attention: cos turns {2 * columns} columns, a head has {E}")
        if positions is None and rows < seq:
            raise ValueError(f"attention: cos has {rows} rows for {seq} positions; give at least {seq}, or positions")
        if positions is not None:
            check_ids("attention: positions", positions, rows)
