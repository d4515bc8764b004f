"""What launchers hand to attention's kernels: its arguments as records, and where they come from."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from ..runtime.launch import describable, next_power_of_2
from ..runtime.philox import scale, threshold
from ..runtime.triton import TensorDescriptor
from .options import LOG2E, TENSORS, Options, QueryChunk, query_positions

_WINDOW = 1 << 30  # whose sum with a position has 32 bits


class Tensors(NamedTuple):
    """The tensors of Options."""

    key_mask_ptr: Tensor | None  # [B, S]
    cu_ptr: Tensor | None  # [documents + 1]
    bias_ptr: Tensor | None  # [H or 1, S, S]
    cos_ptr: Tensor | None  # [P, HALF]
    sin_ptr: Tensor | None
    positions_ptr: Tensor | None  # [S B]
    rng_ptr: Tensor | None  # [3]


class Strides(NamedTuple):
    """From sample to sample, position to position and group to group of q, k or v."""

    b: int
    s: int
    g: int


class ChunkRows(NamedTuple):
    """The positions of a chunk's queries, which q, o, lse and their gradients have rows of alone, and the keys."""

    k_ptr: Tensor  # [M, G, .., E_QK], the last dimension contiguous
    strides: Strides  # of k
    start: int  # position of the first query
    end: int  # position behind the last


class Steps(NamedTuple):
    """From position to position of what is written and of do, all samples of a position side by side; from the host,
    because inside a kernel their products would be 32 bits wide."""

    o: int  # [M, H E], and do
    dqkv: int  # [M, G, Q + 2, E]; of a chunk dq [m, G, Q, E] or dkv [M, G, 2, E]
    rotated: int  # [S B, G, Q + 1, BLOCK_E]; of a chunk q [n B, G, Q, BLOCK_E] or k [S B, G, 1, BLOCK_E]


class Numbers(NamedTuple):
    """The numbers of Options, as kernels use them."""

    stride_bias: int  # from head to head
    window: int | None
    scale: float
    unit: float  # brings scores into units of log 2
    softcap: float | None
    site_head: int  # site << 16, and the first head
    threshold: int  # T << 16
    keep_scale: float


class Static(NamedTuple):
    """What a kernel is compiled for, besides its blocks."""

    E: int  # columns of a head
    E_QK: int  # columns of q and k, which are BLOCK_E once they are rotated ahead
    BLOCK_E: int  # a power of two, at least 16
    HALF: int  # columns of cos
    INTERLEAVED: bool
    CAUSAL: bool = False
    STEPS: int = 0  # halvings that find a document
    SELECT: bool = False  # see selects in triton_backward.py
    REST: int = 0  # columns behind BLOCK_E, see split in triton_forward.py


_WHOLE = 16  # elements: strides that are multiples of it are known to the compiler


def needs_padding(E: int, options: Options) -> bool:
    """Returns whether strides of heads [.., E], which depend on how many there are, decide how tiles are laid out, and
    so the order of a sum over E, which with leaves it may not."""
    return options.leaves > 0 and E % _WHOLE > 0


def padded(x: Tensor) -> Tensor:
    """Returns heads [.., E] with columns of zeros up to a multiple of 16."""
    return F.pad(x, (0, -x.shape[-1] % _WHOLE))


def dense_heads(qkv: Tensor) -> Tensor:
    return qkv if qkv.stride(3) == 1 and qkv.stride(2) == qkv.shape[3] else qkv.contiguous()


def strides_of(x: Tensor, batch: int) -> Strides:
    return Strides(x.stride(0), x.stride(0) * batch, x.stride(1))


def steps_of(x: Tensor, batch: int, static: Static, *, chunk: bool = False) -> Steps:
    """Returns the steps of what is made of qkv [M, G, Q + 2, E], or of a ``chunk``'s q, k or kv [M, G, slots, E]."""
    _, G, slots, E = x.shape
    groups = batch * G
    if chunk:
        return Steps(o=groups * slots * E, dqkv=groups * slots * E, rotated=groups * slots * static.BLOCK_E)
    return Steps(o=groups * (slots - 2) * E, dqkv=groups * slots * E, rotated=groups * (slots - 1) * static.BLOCK_E)


def described(tensors: Sequence[Tensor], options: Options, boxes: Sequence[list[int]]) -> tuple[Any, ...] | None:
    """Returns descriptors, with these boxes, of tensors [M, ...] as [S, columns], the samples of a position side by
    side; None where the copy engine cannot hold one of them: its columns have 32 bits."""
    views = [_by_position(x, options) for x in tensors]
    if not all(describable(view) and view.shape[1] < 1 << 31 for view in views):
        return None
    return tuple(TensorDescriptor.from_tensor(view, box) for view, box in zip(views, boxes, strict=True))


def _by_position(x: Tensor, options: Options) -> Tensor:
    step = options.batch * x.stride(0)
    farthest = sum((n - 1) * stride for n, stride in zip(x.shape[1:], x.stride()[1:], strict=True))
    return x.as_strided((options.seq, (options.batch - 1) * x.stride(0) + farthest + 1), (step, 1))


def chunk_rows(chunk: QueryChunk, k: Tensor, batch: int) -> ChunkRows:
    """Returns a chunk as kernels take it, which read ``k``: its kv, or its keys rotated ahead."""
    return ChunkRows(k, strides_of(k, batch), chunk.start, chunk.end)


def query_tiles(options: Options, chunk: QueryChunk | None, block: int) -> int:
    """Returns how many tiles of ``block`` positions, counted from position 0, hold queries."""
    rows = query_positions(options, chunk)
    return -(-rows.stop // block) - rows.start // block if rows.stop > rows.start else 0


def tensors_of(options: Options) -> Tensors:
    return Tensors(*(None if t is None else t.contiguous() for t in options[:TENSORS]))


def numbers_of(options: Options) -> Numbers:
    bias = options.bias
    return Numbers(
        stride_bias=0 if bias is None or len(bias) == 1 else options.seq**2,
        window=None if options.window is None else min(options.window, _WINDOW),
        scale=options.scale,
        unit=options.scale * LOG2E if options.softcap is None and bias is None else LOG2E,
        softcap=options.softcap,
        site_head=(options.site << 16) + options.first_head,
        threshold=threshold(options.p) << 16,
        keep_scale=scale(options.p),
    )


def documents_of(options: Options) -> int:
    return 0 if options.cu_seqlens is None else options.cu_seqlens.numel() - 1


def static_of(qkv: Tensor, options: Options) -> Static:
    E, half = qkv.shape[3], 0 if options.cos is None else options.cos.shape[1]
    return Static(E=E, E_QK=E, BLOCK_E=max(next_power_of_2(E), 16), HALF=half, INTERLEAVED=options.interleaved)


def attending(static: Static, qk: Tensor, options: Options) -> Static:
    """Returns ``static`` for a kernel that attends: to columns of ``qk``, under the options' masks."""
    return static._replace(E_QK=qk.shape[3], CAUSAL=options.causal, STEPS=_steps(options))


def _steps(options: Options) -> int:
    """Returns how often a search among the documents' bounds halves them: 4 times for up to 14 documents, 8 for up to
    254, 16, 32.

    Their number changes from batch to batch, and kernels are not to be compiled again each time; a loop that runs as
    often as it must (a ``while``) makes the kernels around it spill.
    """
    if options.cu_seqlens is None:
        return 0
    return max(4, next_power_of_2(options.cu_seqlens.numel().bit_length()))
