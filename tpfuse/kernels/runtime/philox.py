"""Philox-4x32-7 (Salmon et al. 2011): the library's only randomness, a pure function of seed, step, site and the
element's place in the whole tensor.

    round:  (c0, c1, c2, c3) <- (hi(B c2) ^ c1 ^ k0, lo(B c2), hi(A c0) ^ c3 ^ k1, lo(A c0));   k0 += W0, k1 += W1
    key     (k0, k1) = first two words of philox(step lo, step hi, 0, 0) under (seed lo, seed hi)
    mask    c = (position, site << 16 | head, column // 8, sample);  column is 16-bit lane column % 8 of the four words,
            low half first; kept where the unsigned lane >= T = floor(65536 p + 1/2), scaled by 65536 / (65536 - T)
    sample  c = (position, 65535 << 16 | draw, token id // 4, sample);  word id % 4, as (word + 1/2) / 2^32
    weight  c = (flat // 2 lo, flat // 2 hi, crc32(name), 0), step -1;  Box-Muller in fp64, even index cos, odd sin

Three twins, bit-equal: torch (masks on any device), numpy (weights, and small masks of a CPU), Triton (device
functions).  Row and column words stay apart for two rounds, so these run on vectors.  These formats are stored in every
checkpoint and never change.
"""

import functools
import math
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .op import scalar
from .processor import SHARE
from .rules import COUNT, INT64, REALS, SEED, check_number, check_scalar, limited
from .triton import tl, triton

ROUNDS = 7
_A, _B, _W0, _W1, _LO = 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85, 0xFFFFFFFF
_FACTOR_A, _FACTOR_B, _LOW, _HALF = np.uint64(_A), np.uint64(_B), np.uint64(_LO), np.uint64(32)
SAMPLING_SITE = 65535  # which no mask has
_SITE = limited("lie in 0 to 65534", lambda v: 0 <= v < SAMPLING_SITE, integer=True)
_FLIP = -0x7FFF7FFF7FFF8000  # 0x8000 in every 16-bit lane: turns an unsigned comparison into a signed one


# ---- what a mask depends on ----


class RowPieces(NamedTuple):
    """The global rows of a tensor whose rows are two contiguous pieces of them: row i is ``first_row + i`` before
    ``split``, and ``second_row + i - split`` from there on."""

    first_row: int
    split: int
    second_row: int


FirstRow = int | RowPieces  # a number where the rows are one piece


def global_rows(first_row: FirstRow, rows: int, device: torch.device) -> Tensor:
    """Returns the global numbers of so many rows, int64."""
    if not isinstance(first_row, RowPieces):
        return torch.arange(first_row, first_row + rows, device=device)
    row = torch.arange(first_row.first_row, first_row.first_row + rows, device=device)
    row[first_row.split :] += first_row.second_row - first_row.split - first_row.first_row
    return row


class Mask(NamedTuple):
    """The elements that dropout keeps in rows [m, D]: global row r is position r // batch of sample first_sample + r %
    batch; row i is r = first_row + i, but from ``split`` on second_row + i - split."""

    rng: Tensor | None = None  # int64 [3] = (seed, step, first_sample); None: every element is kept
    p: float = 0.0  # the share that is dropped
    site: int = 0  # the number of this dropout in the model
    first_row: int = 0
    batch: int = 1
    split: int | None = None  # None: the rows are one piece
    second_row: int = 0

    @classmethod
    def of(cls, name: str, rng: Tensor | None, p: float, *, site: int, first_row: FirstRow, batch: int) -> "Mask":
        """Returns the mask of rows in one piece or two, NO_MASK where p drops nothing.  ValueError, of the function
        ``name``, for p outside [0, 1), and where it drops something without an rng, at no site or for no sample."""
        rng = active_rng(name, p, rng, site)
        if rng is None:
            return NO_MASK
        check_number(f"{name}: batch", batch, COUNT)
        if not isinstance(first_row, RowPieces):
            return cls(rng, p, site, first_row, batch)
        return cls(rng, p, site, first_row.first_row, batch, split=first_row.split, second_row=first_row.second_row)

    @property
    def rows(self) -> FirstRow:
        return self.first_row if self.split is None else RowPieces(self.first_row, self.split, self.second_row)

    def from_row(self, start: int) -> "Mask":
        split = self.split
        if split is None or start < split:
            return self._replace(first_row=self.first_row + start, split=None if split is None else split - start)
        return self._replace(first_row=self.second_row + start - split, split=None, second_row=0)


NO_MASK = Mask(p=0)  # an integer: a constant in every trace of torch.compile(dynamic=True), as a float of a name is not


class KernelMask(NamedTuple):
    """A :class:`Mask` of rows in one piece, as the Triton kernels on rows take it."""

    rng_ptr: Tensor | None
    first_row: int
    batch: int
    site_head: int  # site << 16
    threshold: int  # T << 16
    scale: float


class SplitKernelMask(NamedTuple):
    """A KernelMask of rows in two pieces.  A record of its own, so that for one piece nothing is compiled."""

    rng_ptr: Tensor | None
    first_row: int
    batch: int
    site_head: int
    threshold: int
    scale: float
    split: int
    jump: int  # added to the global rows from ``split`` on


def kernel_mask(mask: Mask) -> KernelMask | SplitKernelMask:
    T = threshold(mask.p)
    one = KernelMask(
        rng_ptr=None if mask.rng is None else mask.rng.contiguous(),
        first_row=mask.first_row,
        batch=mask.batch,
        site_head=mask.site << 16,
        threshold=T << 16,
        scale=scale(mask.p),
    )
    if mask.split is None:
        return one
    return SplitKernelMask(*one, split=mask.split, jump=mask.second_row - mask.split - mask.first_row)


# ---- thresholds ----


def threshold(p: float) -> int:
    """T of 16 bits: an element is dropped where its lane < T.  p in [0, 1) with T < 65536, or a ValueError."""
    t = int(65536 * p + 0.5) if isinstance(p, REALS) and 0 <= p < 1 else 65536
    if t >= 65536:
        raise ValueError(f"dropout: p must lie in [0, 1 - 2**-17), got {p}")
    return t


def scale(p: float) -> float:
    """The factor of a kept element; exact for the p that 16 bits can hold."""
    return 65536 / (65536 - threshold(p))


def make_rng(
    seed: int, step: int | Tensor, first_sample: int | Tensor = 0, device: torch.device | str | None = None
) -> Tensor:
    """Returns the ``rng`` argument of every op with dropout: int64 [3] = (seed, step, first_sample) on ``device``.

    Make it once per forward call of a model and hand it to every op.  The masks of two calls differ where any of the
    three differs; ``first_sample`` is the global number of the batch's first sample, so that data-parallel replicas and
    micro-batches draw different masks.  ``step`` and ``first_sample`` may be 0-d tensors, which keeps CUDA graphs and
    torch.compile free of host constants.  ``seed`` may take all 64 bits, the others are int64, of which masks count
    samples in 32 bits.  ValueError for other numbers and types (the value of a tensor is not read).
    """
    check_number("make_rng: seed", seed, SEED)
    for label, word in (("step", step), ("first_sample", first_sample)):
        check_scalar(f"make_rng: {label}", word, INT64, readable=False)
    if seed >= 1 << 63:
        seed -= 1 << 64  # a 64-bit seed is kept as two's complement
    return torch.stack([scalar(word, torch.int64, device) for word in (seed, step, first_sample)])


def check_rng(name: str, rng: Tensor | None) -> None:
    if not isinstance(rng, Tensor) or rng.shape != (3,) or rng.dtype != torch.int64:
        got = f"{rng.dtype} {tuple(rng.shape)}" if isinstance(rng, Tensor) else repr(rng)
        raise ValueError(f"{name}: dropout needs rng, an int64 tensor (seed, step, first_sample), got {got}")


def active_rng(name: str, p: float, rng: Tensor | None, site: int = 0) -> Tensor | None:
    """Returns rng where p drops anything, None otherwise; ValueError where p needs an rng that was not given, or at a
    site that no mask has."""
    if threshold(p) == 0:
        return None
    check_number(f"{name}: site", site, _SITE)
    check_rng(name, rng)
    return rng


# ---- torch ----


Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counter: Words, key: Sequence[int], rounds: int = ROUNDS) -> Words:
    """Returns four 32-bit words for a counter of four, int64 tensors that broadcast, and a key of two."""
    c0, c1, c2, c3 = _philox(counter, key, rounds)
    return c0, c1 & _LO, c2, c3 & _LO


def _philox(counter: Words, key: Sequence[int], rounds: int) -> Words:
    """Does the same, but leaves other bits in the high halves of c1 and c3."""
    if _is_small(counter):
        words = _rounds_numpy([word.numpy().view(np.uint64) for word in counter], key, rounds)
        c0, c1, c2, c3 = (torch.from_numpy(np.asarray(word).view(np.int64)) for word in words)
        return c0, c1, c2, c3
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for i in range(rounds):
        a, b = c0 * _A, c2 * _B  # int64 wraps, and the low 64 bits are right
        hi_a, hi_b = a >> 32, b >> 32
        if i < 3:  # shapes still grow: a word meets all four after three rounds
            c0, c2 = hi_b ^ c1, hi_a ^ c3
        else:
            c0, c2 = hi_b.bitwise_xor_(c1), hi_a.bitwise_xor_(c3)
        c0 ^= k0
        c2 ^= k1
        c0 &= _LO
        c2 &= _LO
        c1, c3 = b, a  # their high halves meet only xors above, and are cleared there
        k0, k1 = (k0 + _W0) & _LO, (k1 + _W1) & _LO
    return c0, c1, c2, c3


def _is_small(counter: Words) -> bool:
    """Returns whether numpy computes the words, faster than torch does on the one or two threads that it would use."""
    count = math.prod(np.broadcast_shapes(*(word.shape for word in counter)))
    return counter[0].is_cpu and 0 < count and (count < SHARE or torch.get_num_threads() <= 2)


def mask_key(rng: Tensor) -> tuple[int, int, int]:
    """Returns (k0, k1, first_sample) of rng as Python ints; on a GPU this waits for the device, so only references call
    it."""
    seed, step, first_sample = rng.tolist()
    return *_mask_key(seed, step), first_sample


@functools.lru_cache(maxsize=64)
def _mask_key(seed: int, step: int) -> tuple[int, int]:
    low, high, zero = (torch.tensor(word, device="cpu") for word in (step & _LO, (step >> 32) & _LO, 0))
    k0, k1, _, _ = philox((low, high, zero, zero), (seed & _LO, (seed >> 32) & _LO))
    return int(k0), int(k1)


def keep(
    key: Sequence[int],
    position: Tensor,
    site_head: Tensor,
    columns: int,
    sample: Tensor,
    p: float,
    dtype: torch.dtype,
    *,
    out: Tensor | None = None,
    first: int = 0,
) -> Tensor:
    """Returns 0 or 1 of shape [..., columns] in ``dtype``.  Words are int64 tensors [..., 1] that broadcast; columns
    count from ``first``."""
    block = torch.arange(first // 8, -(-(first + columns) // 8), device=position.device)
    c0, c1, c2, c3 = _philox((position & _LO, site_head & _LO, block, sample & _LO), key, ROUNDS)
    packed = torch.empty(*c0.shape, 2, dtype=torch.int64, device=c0.device)
    torch.bitwise_or(c0, c1.bitwise_left_shift_(32), out=packed[..., 0])
    torch.bitwise_or(c2, c3.bitwise_left_shift_(32), out=packed[..., 1])
    packed ^= _FLIP
    lanes = packed.view(torch.int16).flatten(-2)[..., first % 8 : first % 8 + columns]
    out = torch.empty(lanes.shape, dtype=dtype, device=lanes.device) if out is None else out
    return torch.ge(lanes, threshold(p) - 32768, out=out)


def keep_rows(mask: Mask, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Returns the mask of an op on rows, 0 or 1 of shape [rows, columns] in ``dtype``."""
    assert mask.rng is not None
    *key, first_sample = mask_key(mask.rng)
    device = mask.rng.device
    row = global_rows(mask.rows, rows, device)[:, None]
    out = torch.empty(rows, columns, dtype=dtype, device=device)
    step = max(1, (1 << 17) // max(columns, 1))  # rows whose int64 temporaries stay in the cache
    site_head = torch.tensor(mask.site << 16, device=device)
    for i in range(0, rows, step):
        r = row[i : i + step]
        position, sample = r // mask.batch, first_sample + r % mask.batch
        keep(key, position, site_head, columns, sample=sample, p=mask.p, dtype=dtype, out=out[i : i + step])
    return out


def uniform(rng: Tensor, position: Tensor, sample: Tensor, vocab: int, *, draw: Tensor | None = None) -> Tensor:
    """Returns fp64 [B, vocab] in (0, 1), for sampling: the 32 bits of global token id v are word v % 4 of counter
    (position, site << 16 | draw, v // 4, sample).  position, sample and draw (default 0; below 2^16: which of a
    sample's sequences this is) are int64 [B]; rng is read, so a caller who must not wait for a GPU keeps it on the CPU.
    """
    k0, k1, first_sample = mask_key(rng)
    block = torch.arange(-(-vocab // 4), device=position.device)
    site = scalar(SAMPLING_SITE << 16, torch.int64, position.device)
    site = site if draw is None else site | draw[:, None]
    counter = position[:, None] & _LO, site, block, (first_sample + sample)[:, None] & _LO
    packed = [word.expand(len(position), len(block)) for word in philox(counter, (k0, k1))]
    drawn = torch.stack(packed, -1).flatten(1)[:, :vocab]
    return (drawn.double() + 0.5) / 2.0**32


def uniform_of(rng: Tensor, position: Tensor, sample: Tensor, token: Tensor, *, draw: Tensor) -> Tensor:
    """Returns fp64 [n] in (0, 1): of :func:`uniform`'s numbers those of the global ids ``token``, each with the
    position, sample and draw of its row, all int64 [n]."""
    k0, k1, first_sample = mask_key(rng)
    counter = position & _LO, SAMPLING_SITE << 16 | draw, token // 4, (first_sample + sample) & _LO
    drawn = torch.stack(philox(counter, (k0, k1)), -1).gather(-1, token[:, None] % 4)[:, 0]
    return (drawn.double() + 0.5) / 2.0**32


# ---- numpy: weights are made on the host, whatever the default device is ----


def philox_numpy(counter: Sequence[Any], key: Sequence[int], rounds: int = ROUNDS) -> tuple[np.ndarray, ...]:
    """Does what :func:`philox` does, on uint64 arrays holding 32-bit words."""
    c0, c1, c2, c3 = _rounds_numpy([np.asarray(word, np.uint64) for word in counter], key, rounds)
    return c0, c1 & _LOW, c2, c3 & _LOW


def _rounds_numpy(counter: Sequence[np.ndarray], key: Sequence[int], rounds: int) -> tuple[np.ndarray, ...]:
    """Does what :func:`_philox` does; once the words have their last shape they are computed in memory of their own."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    shape = np.broadcast_shapes(*(word.shape for word in counter))
    place_a = place_b = None
    for i in range(rounds):
        a, b = np.multiply(c0, _FACTOR_A, out=place_a), np.multiply(c2, _FACTOR_B, out=place_b)
        if i and shape and c0.shape == c2.shape == shape:
            np.bitwise_xor(np.right_shift(b, _HALF, out=c0), c1, out=c0)
            np.bitwise_xor(np.right_shift(a, _HALF, out=c2), c3, out=c2)
            place_a, place_b = (c1, c3) if c1.shape == c3.shape == shape else (None, None)
        else:
            c0, c2 = (b >> _HALF) ^ c1, (a >> _HALF) ^ c3
        c0 ^= np.uint64(k0)
        c2 ^= np.uint64(k1)
        c0 &= _LOW
        c2 &= _LOW
        c1, c3 = b, a
        k0, k1 = (k0 + _W0) & _LO, (k1 + _W1) & _LO
    return c0, c1, c2, c3


def normal(seed: int, name: str, flat: np.ndarray) -> np.ndarray:
    """Returns fp64 N(0, 1) for the elements ``flat`` (int64, row-major index in the full tensor) of the parameter
    ``name``."""
    with np.errstate(over="ignore"):
        k0, k1 = (int(k) for k in philox_numpy((_LO, _LO, 0, 0), (seed & _LO, (seed >> 32) & _LO))[:2])
        flat = np.asarray(flat, np.uint64)
        pair = flat >> np.uint64(1)
        counter = pair & np.uint64(_LO), pair >> np.uint64(32), zlib.crc32(name.encode()), 0
        r0, r1, r2, r3 = philox_numpy(counter, (k0, k1))
    u1, u2 = (
        ((hi << np.uint64(21) | lo >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53
        for hi, lo in ((r0, r1), (r2, r3))
    )
    angle = 2 * np.pi * u2
    return np.sqrt(-2 * np.log(u1)) * np.where(flat & np.uint64(1), np.sin(angle), np.cos(angle))


# ---- Triton device functions (uint32 only: tl.philox on int64 counters silently becomes Philox-4x64) ----


@triton.jit
def philox_device(c0, c1, c2, c3, k0, k1, ROUNDS: tl.constexpr = 7):
    """Takes words and keys in uint32, all of one shape; returns four uint32.  A 64-bit product compiles to one
    IMAD.WIDE, umulhi + mul to two."""
    for _ in tl.static_range(ROUNDS):
        a = c0.to(tl.uint64) * 0xD2511F53
        b = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (b >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (a >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = b.to(tl.uint32)
        c3 = a.to(tl.uint32)
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def mask_key_device(rng_ptr):
    """Loads int64 (seed, step, first_sample); returns k0, k1 and the low half of first_sample, uint32 scalars."""
    seed = tl.load(rng_ptr)
    step = tl.load(rng_ptr + 1)
    zero = (step * 0).to(tl.uint32)
    k0, k1, _, _ = philox_device(
        step.to(tl.uint32), (step >> 32).to(tl.uint32), zero, zero, seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    )
    return k0, k1, tl.load(rng_ptr + 2).to(tl.uint32)


@triton.jit
def keep_device(k0, k1, position, site_head, column, sample, threshold):
    """Returns a boolean tile: ``column`` natural columns, words uint32 that broadcast; ``threshold`` is T << 16."""
    return keep_lane_device(k0, k1, position, site_head, column // 8, column % 8, sample, threshold)


@triton.jit
def keep_lane_device(k0, k1, position, site_head, block, lane, sample, threshold):
    """Does the same for column 8 block + lane, for tiles whose columns lie in an order of their own.

    The lane is rotated, not shifted, into the top half, so that what lies below it cannot change the comparison with
    T << 16.
    """
    zero = block * 0 + position * 0 + sample * 0 + site_head * 0
    r0, r1, r2, r3 = philox_device(zero + position, zero + site_head, zero + block, zero + sample, k0, k1)
    lane = zero + lane
    word = tl.where(lane < 4, tl.where(lane < 2, r0, r1), tl.where(lane < 6, r2, r3))
    return tl.where((lane & 1) == 1, word, (word << 16) | (word >> 16)) >= threshold
