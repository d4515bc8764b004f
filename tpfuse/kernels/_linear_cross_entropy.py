"""The Triton side of linear_cross_entropy: the logits exist only as tiles in registers.

Forward is one GEMM whose epilogue keeps four numbers a row of each tile (max, sum of exp, target logit, sum of logits); a second kernel
merges a row's tiles.  Backward goes through the vocabulary in chunks of ELEMENTS / M tokens.  For each chunk one GEMM makes the logits
again and, in its epilogue, their gradient, 16 bits wide; a second contracts it with all rows of x, which is dW of these tokens, and a
third with W, which is added to dx.  Why chunks of a vocabulary, and not one kernel for all or chunks of rows:
  - A kernel that contracts its own tile needs [BM, D] accumulators, which do not fit, or makes the logits again for each part of D.
  - A row of dW is then one sum over all rows in the fp32 accumulator of one GEMM, rounded once: chunks of rows would need an fp32 copy of
    dW (402 MB at V = 128K, D = 768: more than a tenth of what torch needs).  What is carried from chunk to chunk is dx, fp32 [M, D].
  - Nothing is added atomically, and no sum depends on how many programs run.
Tiles of 128 x 128 leave room for two programs on a multiprocessor: one's exponentials run under the other's matrix instructions.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ._cross_entropy import LOWEST, row_gradient
from ._device import load, swizzle
from ._fused_norm import REDUCE, _reduce_kernel
from ._launch import launch, target
from ._op import Cost, moved
from ._triton import TensorDescriptor, tl, triton
from ._tuning import tuned

# ---- device functions ----


@triton.jit
def _logits(x, w, bias_ptr, row, column, V, D, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """[BM, BN] of x W' + b, in fp32"""
    z = tl.zeros((BM, BN), tl.float32)
    for k in tl.range(0, D, BK):
        z = tl.dot(x.load([row, k]), w.load([column, k]).T, z, input_precision="ieee")
    if bias_ptr is not None:
        columns = column + tl.arange(0, BN)
        z += load(bias_ptr, columns, columns < V)[None, :]
    return z


# ---- kernels ----


@triton.jit
def _logits_stats_kernel(
    x, w,  # descriptors of [M, D], [V, D] in
    bias_ptr,  # [V] in
    labels_ptr,  # [M] in, int64
    partial_ptr,  # [4, T, M] out, fp32, T the tiles of a row
    M, V, D, plane, first,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr, SMOOTHING: tl.constexpr,
):  # fmt: skip
    m, n = swizzle(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(V, BN), GROUP_M)
    z = _logits(x, w, bias_ptr, m * BM, n * BN, V, D, BM, BN, BK)
    rows, columns = (m * BM + tl.arange(0, BM)).to(tl.int64), n * BN + tl.arange(0, BN)
    live, there = rows < M, (columns < V)[None, :]
    label = tl.load(labels_ptr + rows, mask=live, other=-1) - first
    wanted = columns[None, :] == tl.where((label >= 0) & (label < V), label, -1).to(tl.int32)[:, None]
    padded = tl.where(there, z, float("-inf"))
    top = tl.maximum(tl.max(padded, 1), LOWEST)
    total = tl.sum(tl.exp(padded - top[:, None]), 1)
    at = partial_ptr + n.to(tl.int64) * M + rows
    tl.store(at, top, mask=live)
    tl.store(at + plane, total, mask=live)
    tl.store(at + plane + plane, tl.sum(tl.where(wanted, z, 0.0), 1), mask=live)
    if SMOOTHING:
        tl.store(at + plane + plane + plane, tl.sum(tl.where(there, z, 0.0), 1), mask=live)


@triton.jit
def _merge_kernel(
    partial_ptr,  # [4, T, M] in, fp32
    stats_ptr,  # [M, 4] out, fp32
    M, T, plane,  # T M
    ROWS: tl.constexpr, TILES: tl.constexpr, SMOOTHING: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = rows < M
    top, total = tl.full([TILES, ROWS], LOWEST, tl.float32), tl.zeros([TILES, ROWS], tl.float32)
    target, sums = tl.zeros([TILES, ROWS], tl.float32), tl.zeros([TILES, ROWS], tl.float32)
    for start in tl.range(0, T, TILES):
        tiles = start + tl.arange(0, TILES)
        mask, at = (tiles < T)[:, None] & live[None, :], tiles.to(tl.int64)[:, None] * M + rows[None, :]
        one = tl.load(partial_ptr + at, mask=mask, other=LOWEST)
        higher = tl.maximum(top, one)
        total = total * tl.exp(top - higher) + load(partial_ptr, at + plane, mask) * tl.exp(one - higher)
        top = higher
        target += load(partial_ptr, at + plane + plane, mask)
        if SMOOTHING:
            sums += load(partial_ptr, at + plane + plane + plane, mask)
    highest = tl.max(top, 0)
    stats_ptr += rows * 4
    tl.store(stats_ptr, highest, mask=live)
    tl.store(stats_ptr + 1, tl.sum(total * tl.exp(top - highest[None, :]), 0), mask=live)
    tl.store(stats_ptr + 2, tl.sum(target, 0), mask=live)
    tl.store(stats_ptr + 3, tl.sum(sums, 0), mask=live)


@triton.jit
def _dlogits_kernel(
    x, w,  # descriptors of [M, D], [V, D] in
    bias_ptr,  # [V] in
    labels_ptr, lse_ptr,  # [M] in
    dloss_ptr,  # [M] in, stride stride_dloss
    dz_ptr,  # [M, V] out, strides (stride_dz, 1)
    dbias_ptr,  # [tiles of rows, V] out, fp32
    M, V, D, stride_dz, stride_dloss, first, ignore_index, smoothing, z_loss, one_over_vocab,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """V and ``first`` are the chunk's."""
    m, n = swizzle(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(V, BN), GROUP_M)
    z = _logits(x, w, bias_ptr, m * BM, n * BN, V, D, BM, BN, BK)
    rows, columns = (m * BM + tl.arange(0, BM)).to(tl.int64), n * BN + tl.arange(0, BN)
    live = rows < M
    label, lse, d, scale = row_gradient(labels_ptr, lse_ptr, dloss_ptr, rows, live, V, stride_dloss, first, ignore_index, z_loss)
    dz = tl.exp(z - lse[:, None]) * scale[:, None] - (d * smoothing * one_over_vocab)[:, None]
    dz = tl.where(columns[None, :] == label[:, None], dz - (d * (1.0 - smoothing))[:, None], dz)
    mask = live[:, None] & (columns < V)[None, :]
    tl.store(dz_ptr + rows[:, None] * stride_dz + columns[None, :], dz.to(dz_ptr.dtype.element_ty), mask=mask)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + m.to(tl.int64) * V + columns, tl.sum(tl.where(live[:, None], dz, 0.0), 0), mask=columns < V)


@triton.jit
def _contract_kernel(
    a,  # descriptor of [M, K] in; of [K, M] where TRANSPOSED
    b,  # descriptor of [K, N] in
    add_ptr,  # [M, N] in, fp32; may be out
    out_ptr,  # [M, N] out
    M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """out = a b + add"""
    m, n = swizzle(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), GROUP_M)
    rows, columns = (m * BM + tl.arange(0, BM)).to(tl.int64), n * BN + tl.arange(0, BN)
    mask, at = (rows < M)[:, None] & (columns < N)[None, :], rows[:, None] * N + columns[None, :]
    if add_ptr is not None:
        acc = load(add_ptr, at, mask)
    else:
        acc = tl.zeros((BM, BN), tl.float32)
    for k in tl.range(0, K, BK):
        if TRANSPOSED:
            tile = a.load([k, m * BM]).T
        else:
            tile = a.load([m * BM, k])
        acc = tl.dot(tile, b.load([k, n * BN]), acc, input_precision="ieee")
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=mask)


# ---- launch parameters ----

ELEMENTS = 1 << 26  # logits that exist at a time: 128 MB in 16 bits, large enough that a GEMM over them fills a GPU
LEAST_COLUMNS = 512
MERGE = dict(ROWS=16, TILES=64, num_warps=4)


def vocabulary_chunks(rows: int, vocab: int, elements: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of the fewest equal chunks of a vocabulary with at most ``elements`` logits (at least LEAST_COLUMNS columns)."""
    most = max(elements // max(rows, 1), LEAST_COLUMNS)
    columns = -(-vocab // -(-vocab // most))
    columns = -(-columns // 128) * 128
    return ((start, min(start + columns, vocab)) for start in range(0, vocab, columns))


def _config(kernel: str, x: Tensor, M: int, N: int, K: int) -> dict[str, int]:
    arch = target(x.device).arch
    if x.dtype == torch.float32:
        default = dict(BM=64, BN=64, BK=16, GROUP_M=8, num_warps=8, num_stages=2)
    elif arch.startswith("gfx"):
        default = dict(BM=128, BN=128, BK=64, GROUP_M=8, num_warps=4, num_stages=2)
    elif arch.startswith("sm_8"):
        default = dict(BM=128, BN=128, BK=32, GROUP_M=8, num_warps=8, num_stages=3)
    else:  # at 128 registers a thread two programs share a multiprocessor: dx would take 130, bias and smoothing together take 146
        default = dict(BM=128, BN=128, BK=64, GROUP_M=8, num_warps=8, num_stages=3) | (dict(maxnreg=128) if kernel == "dx" else {})
    return tuned(f"linear_cross_entropy_{kernel}", arch, x.dtype, (M, N, K), default)


# ---- launchers ----


def _vectors(*vectors: Tensor | None) -> list[Tensor | None]:
    return [None if v is None else v.contiguous() for v in vectors]


def _aligned(t: Tensor) -> Tensor:
    """Rows that begin at multiples of 16 bytes, as descriptors demand; columns of zeros change no product."""
    t = F.pad(t, (0, -t.shape[1] % 8)) if t.shape[1] % 8 else t.contiguous()
    return t if t.data_ptr() % 16 == 0 else t.clone()


def _descriptor(t: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(t, t.shape, t.stride(), [rows, columns])


def _tiles(config: dict[str, int], M: int, N: int) -> int:
    return -(-M // config["BM"]) * -(-N // config["BN"])


def stats_launch(x: Tensor, w: Tensor, b: Tensor | None, labels: Tensor, first: int, smoothing: bool) -> Tensor:
    """The launcher of linear_cross_entropy_stats."""
    (M, V), device = (len(x), len(w)), x.device
    stats = x.new_empty(M, 4, dtype=torch.float32)
    if M == 0:
        return stats
    x, w, (b, labels) = _aligned(x), _aligned(w), _vectors(b, labels)
    D = x.shape[1]
    c = _config("stats", x, M, V, D)
    T = -(-V // c["BN"])
    partial = x.new_empty(4, T, M, dtype=torch.float32)
    operands = _descriptor(x, c["BM"], c["BK"]), _descriptor(w, c["BN"], c["BK"])
    tensors = *operands, b, labels, partial
    launch(_logits_stats_kernel, (_tiles(c, M, V),), device, *tensors, M, V, D, T * M, first, SMOOTHING=smoothing, **c)
    launch(_merge_kernel, (-(-M // MERGE["ROWS"]),), device, partial, stats, M, T, T * M, SMOOTHING=smoothing, **MERGE)
    return stats


def bwd_launch(
    x: Tensor, w: Tensor, b: Tensor | None, labels: Tensor, lse: Tensor, dloss: Tensor, first: int, vocab: int, ignore_index: int,
    smoothing: float, z_loss: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The launcher of linear_cross_entropy_bwd."""
    (M, width), V, device = x.shape, len(w), x.device
    db = x.new_empty(0 if b is None else V, dtype=torch.float32)
    if M == 0:
        return torch.zeros_like(x), torch.zeros_like(w), db.zero_()
    x, w, (b, labels, lse) = _aligned(x), _aligned(w), _vectors(b, labels, lse)
    D = x.shape[1]
    dx, dw = x.new_empty(M, D), x.new_empty(V, D)
    chunks = list(vocabulary_chunks(M, V, ELEMENTS))
    columns = chunks[0][1]
    dz = x.new_empty(M, -(-columns // 8) * 8)
    total = dx if dx.dtype == torch.float32 or len(chunks) == 1 else x.new_empty(M, D, dtype=torch.float32)
    for start, stop in chunks:
        n, own = stop - start, w[start:stop]
        c = _config("dlogits", x, M, n, D)
        partial = None if b is None else x.new_empty(-(-M // c["BM"]), n, dtype=torch.float32)
        tensors = _descriptor(x, c["BM"], c["BK"]), _descriptor(own, c["BN"], c["BK"]), None if b is None else b[start:stop]
        numbers = M, n, D, dz.stride(0), dloss.stride(0), first + start, ignore_index, smoothing, z_loss, 1 / vocab
        launch(_dlogits_kernel, (_tiles(c, M, n),), device, *tensors, labels, lse, dloss, dz, partial, *numbers, **c)
        if b is not None:
            launch(_reduce_kernel, (-(-n // REDUCE["A"]), 1), device, partial, db[start:stop], len(partial), n, **REDUCE)
        c = _config("dw", x, n, D, M)
        operands = _descriptor(dz[:, :n], c["BK"], c["BM"]), _descriptor(x, c["BK"], c["BN"])
        launch(_contract_kernel, (_tiles(c, n, D),), device, *operands, None, dw[start:stop], n, D, M, TRANSPOSED=True, **c)
        c = _config("dx", x, M, D, n)
        operands = _descriptor(dz[:, :n], c["BM"], c["BK"]), _descriptor(own, c["BK"], c["BN"])
        adding = None if start == 0 else total, dx if stop == V else total
        launch(_contract_kernel, (_tiles(c, M, D),), device, *operands, *adding, M, D, n, TRANSPOSED=False, **c)
    return (dx, dw, db) if D == width else (dx[:, :width].contiguous(), dw[:, :width].contiguous(), db)


# ---- what they move ----


def stats_cost(args: tuple, outputs: tuple) -> Cost:
    x, w, b, labels, _, smoothing = args
    (M, D), V = x.shape, len(w)
    partial = (4 if smoothing else 3) * 4 * M * -(-V // _config("stats", x, M, V, D)["BN"]) if M else 0
    return Cost(moved(x, w, b, labels) + partial, partial + moved(*outputs), 2 * M * V * D)


def bwd_cost(args: tuple, outputs: tuple) -> Cost:
    x, w, b, labels, lse, dloss = args[:6]
    (M, D), V, read, written = x.shape, len(w), 0, moved(*outputs)
    chunks = list(vocabulary_chunks(M, V, ELEMENTS)) if M else []
    for start, stop in chunks:
        n = stop - start
        dz = M * n * x.element_size()
        read += moved(x, labels, lse, dloss) + dz + moved(x) + dz  # the two beside W of dlogits, dW and dx
        written += dz
        if b is not None:
            partial = 4 * n * -(-M // _config("dlogits", x, M, n, D)["BM"])
            read, written = read + partial, written + partial
    carried = 4 * M * D * max(len(chunks) - 1, 0)
    return Cost(read + 2 * moved(w) * bool(M) + moved(b) + carried, written + carried, 6 * M * V * D)
