"""The Triton side of linear_cross_entropy: the logits exist only as tiles in registers.

The forward pass is one GEMM whose epilogue keeps four numbers a row of each tile (max, sum of exp, target logit, sum of
logits); a second kernel merges a row's tiles.  The backward pass goes through the vocabulary in chunks of ELEMENTS / M
tokens.  For each chunk one GEMM recomputes the logits and, in its epilogue, computes their gradient, 16 bits wide; a
second contracts it with all rows of x, which is dW of these tokens, and a third with W, which is added to dx.  These
two are torch's (cuBLAS), or ``_contract_kernel``: where that was measured to be faster, and on AMD, since torch has a
GEMM from 16 bits to fp32 for CUDA only.

Chunks of the vocabulary are better than one kernel for all of it, and than chunks of rows:
  - A kernel that contracts its own tile needs [BM, D] accumulators, too large for registers, or recomputes the logits
    for each part of D.
  - A row of dW is one sum over all rows in the fp32 accumulator of one GEMM, rounded once.  Chunks of rows would need
    an fp32 copy of dW (402 MB at V = 128K, D = 768: more than a tenth of what torch needs).  Only dx is carried from
    chunk to chunk, as fp32 [M, D].
  - Nothing is added atomically, and no sum depends on how many programs run.
Tiles of 128 x 128 leave room for two programs on a multiprocessor: one's exponentials run under the other's matrix
instructions.
"""

import functools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..runtime.device import load, swizzle
from ..runtime.launch import launch, target
from ..runtime.leaves import placed
from ..runtime.partials import reduce_partials
from ..runtime.triton import TensorDescriptor, tl, triton
from ..runtime.tuning import LaunchConfig, tuned
from .options import Linear, Loss, Rows
from .triton import LOWEST, row_gradient

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
    live, inside = rows < M, (columns < V)[None, :]
    label = tl.load(labels_ptr + rows, mask=live, other=-1) - first
    is_label = columns[None, :] == tl.where((label >= 0) & (label < V), label, -1).to(tl.int32)[:, None]
    padded = tl.where(inside, z, float("-inf"))
    top = tl.maximum(tl.max(padded, 1), LOWEST)
    total = tl.sum(tl.exp(padded - top[:, None]), 1)
    partial_ptr += n.to(tl.int64) * M + rows
    tl.store(partial_ptr, top, mask=live)
    tl.store(partial_ptr + plane, total, mask=live)
    tl.store(partial_ptr + plane + plane, tl.sum(tl.where(is_label, z, 0.0), 1), mask=live)
    if SMOOTHING:
        tl.store(partial_ptr + plane + plane + plane, tl.sum(tl.where(inside, z, 0.0), 1), mask=live)


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
        mask, offsets = (tiles < T)[:, None] & live[None, :], tiles.to(tl.int64)[:, None] * M + rows[None, :]
        tile_top = tl.load(partial_ptr + offsets, mask=mask, other=LOWEST)
        higher = tl.maximum(top, tile_top)
        total = total * tl.exp(top - higher) + load(partial_ptr, offsets + plane, mask) * tl.exp(tile_top - higher)
        top = higher
        target += load(partial_ptr, offsets + plane + plane, mask)
        if SMOOTHING:
            sums += load(partial_ptr, offsets + plane + plane + plane, mask)
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
    row_ptrs,  # Rows of pointers [M] in: labels int64, lse fp32, dloss fp32 with stride stride_dloss
    dz_ptr,  # [M, V] out, strides (stride_dz, 1)
    dbias_ptr,  # [tiles of rows, V] out, fp32
    M, V, D, stride_dz, stride_dloss, loss, one_over_vocab,  # loss: Loss
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """V and the loss's first token are the chunk's."""
    m, n = swizzle(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(V, BN), GROUP_M)
    z = _logits(x, w, bias_ptr, m * BM, n * BN, V, D, BM, BN, BK)
    rows, columns = (m * BM + tl.arange(0, BM)).to(tl.int64), n * BN + tl.arange(0, BN)
    live = rows < M
    label, lse, d, scale = row_gradient(row_ptrs, stride_dloss, rows, live, V, loss)
    dz = tl.exp(z - lse[:, None]) * scale[:, None] - (d * loss.label_smoothing * one_over_vocab)[:, None]
    dz = tl.where(columns[None, :] == label[:, None], dz - (d * (1.0 - loss.label_smoothing))[:, None], dz)
    mask = live[:, None] & (columns < V)[None, :]
    tl.store(dz_ptr + rows[:, None] * stride_dz + columns[None, :], dz.to(dz_ptr.dtype.element_ty), mask=mask)
    if dbias_ptr is not None:
        sums = tl.sum(tl.where(live[:, None], dz, 0.0), 0)
        tl.store(dbias_ptr + m.to(tl.int64) * V + columns, sums, mask=columns < V)


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
    mask, offsets = (rows < M)[:, None] & (columns < N)[None, :], rows[:, None] * N
    if add_ptr is not None:
        acc = load(add_ptr, offsets + columns[None, :], mask)
    else:
        acc = tl.zeros((BM, BN), tl.float32)
    for k in tl.range(0, K, BK):
        if TRANSPOSED:
            tile = a.load([k, m * BM]).T
        else:
            tile = a.load([m * BM, k])
        acc = tl.dot(tile, b.load([k, n * BN]), acc, input_precision="ieee")
    # The columns come before the rows here, after them above: one 64-bit offset an element, shared by the load and this
    # store, would stay in registers through the loop, and Triton 3.6 spills some of them under the cap of 128.
    tl.store(out_ptr + columns[None, :] + offsets, acc.to(out_ptr.dtype.element_ty), mask=mask)


# ---- launch parameters ----

ELEMENTS = 1 << 26  # logits that exist at a time: 128 MB in 16 bits, large enough that a GEMM over them fills a GPU
LEAST_COLUMNS = 512
MERGE = dict(ROWS=16, TILES=64, num_warps=4)


def vocabulary_chunks(rows: int, vocab: int, elements: int) -> Iterator[tuple[int, int]]:
    """Yields (start, stop) of the fewest equal chunks of a vocabulary with at most ``elements`` logits each, but at
    least LEAST_COLUMNS columns."""
    most = max(elements // max(rows, 1), LEAST_COLUMNS)
    columns = -(-vocab // -(-vocab // most))
    columns = -(-columns // 128) * 128
    return ((start, min(start + columns, vocab)) for start in range(0, vocab, columns))


def config_of(kernel: str, x: Tensor, shape: tuple[int, int, int], fixed: bool = False) -> LaunchConfig:
    """Returns the launch parameters of a GEMM of shape (M, N, K); of dW and dx its path too, "torch" or "fused", which
    it is where ``fixed``."""
    arch, default = target(x.device).arch, LaunchConfig()
    if x.dtype == torch.float32:
        default = dict(BM=64, BN=64, BK=16, GROUP_M=8, num_warps=8, num_stages=2)
    elif arch.startswith("gfx"):
        default = dict(BM=128, BN=128, BK=64, GROUP_M=8, num_warps=4, num_stages=2)
    elif arch.startswith("sm_8"):
        default = dict(BM=128, BN=128, BK=32, GROUP_M=8, num_warps=8, num_stages=3)
    else:
        default = dict(BM=128, BN=128, BK=64, GROUP_M=8, num_warps=8, num_stages=3)
        if kernel == "dx":  # it would take 130 registers; at 128 a thread two programs share a multiprocessor
            default["maxnreg"] = 128
    if kernel in ("dw", "dx"):
        default["path"] = "fused" if fixed or arch.startswith("gfx") else "torch"
    if fixed:
        return default
    return tuned(f"linear_cross_entropy_{kernel}", arch, x.dtype, shape, default=default)


# ---- launchers ----


def _aligned(t: Tensor) -> Tensor:
    """Returns t with rows that begin at multiples of 16 bytes, as descriptors demand; columns of zeros change no
    product."""
    t = F.pad(t, (0, -t.shape[1] % 8)) if t.shape[1] % 8 else t.contiguous()
    return t if t.data_ptr() % 16 == 0 else t.clone()


def _descriptor(t: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(t, t.shape, t.stride(), [rows, columns])


def _tiles(config: dict[str, int], M: int, N: int) -> int:
    return -(-M // config["BM"]) * -(-N // config["BN"])


def stats_launch(layer: Linear, labels: Tensor, loss: Loss) -> Tensor:
    """The launcher of linear_cross_entropy_stats."""
    x, w, b = layer
    M, V, smoothing = len(x), len(w), loss.label_smoothing > 0
    stats = x.new_empty(M, 4, dtype=torch.float32)
    if M == 0:
        return stats
    x, w = _aligned(x), _aligned(w)
    D = x.shape[1]
    c = config_of("stats", x, (M, V, D))
    T = -(-V // c["BN"])
    partial = x.new_empty(4, T, M, dtype=torch.float32)
    launch(
        _logits_stats_kernel, (_tiles(c, M, V),), x.device,
        x=_descriptor(x, c["BM"], c["BK"]), w=_descriptor(w, c["BN"], c["BK"]), bias_ptr=placed(b),
        labels_ptr=labels.contiguous(), partial_ptr=partial, M=M, V=V, D=D, plane=T * M, first=loss.first_token,
        SMOOTHING=smoothing, **c,
    )  # fmt: skip
    launch(
        _merge_kernel, (-(-M // MERGE["ROWS"]),), x.device,
        partial_ptr=partial, stats_ptr=stats, M=M, T=T, plane=T * M, SMOOTHING=smoothing, **MERGE,
    )  # fmt: skip
    return stats


def bwd_launch(layer: Linear, rows: Rows, loss: Loss, fixed: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """The launcher of linear_cross_entropy_bwd."""
    x, w, _ = layer
    D = x.shape[1] + -x.shape[1] % 8
    dw = torch.zeros_like(w) if len(x) == 0 else x.new_empty(len(w), D)
    dx, db = _bwd(
        layer, rows, loss, lambda dz, x, tokens: _contract("dw", dz, x, out=dw[tokens], fixed=fixed), fixed=fixed
    )
    return dx, dw if dw.shape == w.shape else _columns(dw, w.shape[1]), db


def bwd_add_launch(layer: Linear, rows: Rows, loss: Loss, out: Tensor, fixed: bool = False) -> tuple[Tensor, Tensor]:
    """The launcher of linear_cross_entropy_bwd_add."""

    def add(dz: Tensor, x: Tensor, tokens: slice) -> None:
        total = out[tokens]
        if x.shape[1] == out.shape[1]:
            _contract("dw", dz, x, out=total, add=total, fixed=fixed)
        else:  # with columns of zeros
            product = total.new_empty(len(total), x.shape[1])
            _contract("dw", dz, x, out=product, fixed=fixed)
            total.add_(product[:, : out.shape[1]])

    return _bwd(layer, rows, loss, add, fixed=fixed)


def _bwd(
    layer: Linear, rows: Rows, loss: Loss, wgrad: Callable[[Tensor, Tensor, slice], None], *, fixed: bool
) -> tuple[Tensor, Tensor]:
    """-> dx and db; ``wgrad`` is called with dz of each chunk, x as aligned and the chunk's tokens."""
    x, w, b = layer
    (M, width), V = x.shape, len(w)
    db = x.new_empty(0 if b is None else V, dtype=torch.float32)
    if M == 0:
        return torch.zeros_like(x), db.zero_()
    x, w, b = _aligned(x), _aligned(w), placed(b)
    rows = Rows(rows.labels.contiguous(), rows.lse.contiguous(), rows.dloss)
    D = x.shape[1]
    dx = x.new_empty(M, D)
    chunks = list(vocabulary_chunks(M, V, ELEMENTS))
    columns = chunks[0][1]
    dz = x.new_empty(M, -(-columns // 8) * 8)
    total = dx if dx.dtype == torch.float32 or len(chunks) == 1 else x.new_empty(M, D, dtype=torch.float32)
    for start, stop in chunks:
        tokens, dz_chunk = slice(start, stop), dz[:, : stop - start]
        chunk = Linear(x, w[tokens], None if b is None else b[tokens])
        _dlogits(chunk, rows, loss._replace(first_token=loss.first_token + start), dz=dz_chunk, db=db[tokens])
        wgrad(dz_chunk, x, tokens)
        out, add = dx if stop == V else total, None if start == 0 else total
        _contract("dx", dz_chunk, w[tokens], out=out, add=add, fixed=fixed)
    return dx if D == width else _columns(dx, width), db


def _columns(t: Tensor, width: int) -> Tensor:
    """Returns a copy of the first columns; of one row, contiguous() would be a view whose stride is the whole row."""
    return t[:, :width].clone(memory_format=torch.contiguous_format)


def _dlogits(layer: Linear, rows: Rows, loss: Loss, *, dz: Tensor, db: Tensor) -> None:
    """Fills a chunk's dz [M, V] and, where there is a bias, db [V]."""
    x, w, b = layer
    (M, D), V = x.shape, len(w)
    c = config_of("dlogits", x, (M, V, D))
    partial = None if b is None else x.new_empty(-(-M // c["BM"]), V, dtype=torch.float32)
    launch(
        _dlogits_kernel, (_tiles(c, M, V),), x.device,
        x=_descriptor(x, c["BM"], c["BK"]), w=_descriptor(w, c["BN"], c["BK"]), bias_ptr=b, row_ptrs=rows,
        dz_ptr=dz, dbias_ptr=partial, M=M, V=V, D=D, stride_dz=dz.stride(0), stride_dloss=rows.dloss.stride(0),
        loss=loss, one_over_vocab=1 / loss.vocab_size, **c,
    )  # fmt: skip
    if partial is not None:
        reduce_partials(partial, out=db)


def _contract(
    kernel: str, dz: Tensor, b: Tensor, *, out: Tensor, add: Tensor | None = None, fixed: bool = False
) -> None:
    """out = dz b + add for kernel "dx", out = dz' b + add for "dw".  ``add`` is fp32, and may be overwritten."""
    (M, N), K, transposed = out.shape, len(b), kernel == "dw"
    c = config_of(kernel, b, (M, N, K), fixed)
    if c.pop("path") == "torch":
        total = out if add is None else add
        _multiply(dz.t() if transposed else dz, b, out=total, adding=add is not None)
        if total is not out:
            out.copy_(total)
        return
    block = (c["BK"], c["BM"]) if transposed else (c["BM"], c["BK"])
    launch(
        _contract_kernel, (_tiles(c, M, N),), out.device,
        a=_descriptor(dz, *block), b=_descriptor(b, c["BK"], c["BN"]), add_ptr=add, out_ptr=out,
        M=M, N=N, K=K, TRANSPOSED=transposed, **c,
    )  # fmt: skip


def _multiply(a: Tensor, b: Tensor, *, out: Tensor, adding: bool) -> None:
    """out = a b, or out += a b, by torch, in fp32 inside; ``out`` may be fp32 where a and b have 16 bits."""
    wider: dict[str, torch.dtype] = {}
    if a.device.type == "cpu":  # under the interpreter
        # Only CUDA has GEMMs with outputs of another dtype, and oneDNN's on AMX multiplies what a strided row is padded
        # with by zero: uninitialised memory may hold NaN.
        a, b = a.to(out.dtype).contiguous(), b.to(out.dtype)
    elif out.dtype != a.dtype:
        wider = dict(out_dtype=out.dtype)
    product = functools.partial(torch.addmm, out) if adding else torch.mm
    product(a, b, out=out, **wider)
