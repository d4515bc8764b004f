"""Philox-4x32-7 (Salmon et al. 2011): the library's only randomness, a pure function of (seed, step, site, global coordinates).

    round:  (c0, c1, c2, c3) <- (hi(B c2) ^ c1 ^ k0, lo(B c2), hi(A c0) ^ c3 ^ k1, lo(A c0));   k0 += W0, k1 += W1
    key     (k0, k1) = first two words of philox(step lo, step hi, 0, 0) under (seed lo, seed hi)
    mask    c = (position, site << 16 | head, column // 8, sample);  column is 16-bit lane column % 8 of the four words, low half
            first; kept where the unsigned lane >= T = floor(65536 p + 1/2), scaled by 65536 / (65536 - T)
    sample  c = (position, 65535 << 16, token id // 4, sample);  word id % 4, as (word + 1/2) / 2^32
    weight  c = (flat // 2 lo, flat // 2 hi, crc32(name), 0), step -1;  Box-Muller in fp64, even index cos, odd sin

Three twins, bit-equal: torch (masks on any device), numpy (weights, on the host), Triton (device functions).  Row and column
words stay apart for two rounds, so these run on vectors.  These formats are stored in every checkpoint and never change.
"""

import functools
import zlib

import numpy as np
import torch
from torch import Tensor

from ._triton import tl, triton

ROUNDS = 7
_A, _B, _W0, _W1, _LO = 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85, 0xFFFFFFFF
_FLIP = -0x7FFF7FFF7FFF8000  # 0x8000 in every 16-bit lane: turns an unsigned comparison into a signed one


# ---- thresholds ----


def threshold(p: float) -> int:
    """T of 16 bits: an element is dropped where its lane < T.  p in [0, 1) with T < 65536, or a ValueError."""
    t = int(65536 * p + 0.5) if 0 <= p < 1 else 65536
    if t >= 65536:
        raise ValueError(f"dropout: p must lie in [0, 1 - 2**-17), got {p}")
    return t


def scale(p: float) -> float:
    """What a kept element is multiplied by: exact for the p that 16 bits can hold."""
    return 65536 / (65536 - threshold(p))


def make_rng(seed: int, step: int | Tensor, first_sample: int | Tensor = 0, device: torch.device | str | None = None) -> Tensor:
    """The ``rng`` argument of every op with dropout: int64 [3] = (seed, step, first_sample), made once a call.

    ``step`` and ``first_sample`` may be 0-d tensors, which keeps CUDA graphs and torch.compile free of host constants.
    """
    if seed >= 1 << 63:
        seed -= 1 << 64  # a 64-bit seed is kept as two's complement
    words = [torch.as_tensor(word, dtype=torch.int64, device=device) for word in (seed, step, first_sample)]
    return torch.stack(words)


def check_rng(name: str, rng: Tensor | None) -> None:
    if rng is None or rng.shape != (3,) or rng.dtype != torch.int64:
        got = None if rng is None else f"{rng.dtype} {tuple(rng.shape)}"
        raise ValueError(f"{name}: dropout needs rng, an int64 tensor (seed, step, first_sample), got {got}")


# ---- torch ----


def philox(c0, c1, c2, c3, k0: int, k1: int, rounds: int = ROUNDS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four int64 tensors (or ints) that broadcast, holding 32-bit words -> four int64 tensors of 32-bit words."""
    c0, c1, c2, c3 = _philox(c0, c1, c2, c3, k0, k1, rounds)
    return c0, c1 & _LO, c2, c3 & _LO


def _philox(c0, c1, c2, c3, k0: int, k1: int, rounds: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same, with something else in the high halves of c1 and c3."""
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


def mask_key(rng: Tensor) -> tuple[int, int, int]:
    """rng -> (k0, k1, first_sample) as Python ints; on a GPU this waits for the device, so only references call it."""
    seed, step, first_sample = rng.tolist()
    return *_mask_key(seed, step), first_sample


@functools.lru_cache(maxsize=64)
def _mask_key(seed: int, step: int) -> tuple[int, int]:
    words = (torch.tensor(word, device="cpu") for word in (step & _LO, (step >> 32) & _LO, 0, 0))
    k0, k1, _, _ = philox(*words, seed & _LO, (seed >> 32) & _LO)
    return int(k0), int(k1)


def keep(
    key: tuple[int, int],
    position: Tensor,
    site_head: Tensor,
    columns: int,
    sample: Tensor,
    p: float,
    dtype: torch.dtype,
    out: Tensor | None = None,
    first: int = 0,
) -> Tensor:
    """0/1 of shape [..., columns] in ``dtype``.  Words are int64 tensors [..., 1] that broadcast; columns count from ``first``."""
    block = torch.arange(first // 8, -(-(first + columns) // 8), device=position.device)
    c0, c1, c2, c3 = _philox(position & _LO, site_head & _LO, block, sample & _LO, *key, ROUNDS)
    words = torch.empty(*c0.shape, 2, dtype=torch.int64, device=c0.device)
    torch.bitwise_or(c0, c1.bitwise_left_shift_(32), out=words[..., 0])
    torch.bitwise_or(c2, c3.bitwise_left_shift_(32), out=words[..., 1])
    words ^= _FLIP
    lanes = words.view(torch.int16).flatten(-2)[..., first % 8 : first % 8 + columns]
    out = torch.empty(lanes.shape, dtype=dtype, device=lanes.device) if out is None else out
    return torch.ge(lanes, threshold(p) - 32768, out=out)


def keep_rows(rng: Tensor, rows: int, columns: int, p: float, site: int, first_row: int, batch: int, dtype: torch.dtype) -> Tensor:
    """The 0/1 mask [rows, columns] of an op on rows: local row i is position (first_row + i) // batch of sample
    first_sample + (first_row + i) % batch."""
    k0, k1, first_sample = mask_key(rng)
    row = torch.arange(first_row, first_row + rows, device=rng.device)[:, None]
    out = torch.empty(rows, columns, dtype=dtype, device=rng.device)
    step = max(1, (1 << 17) // max(columns, 1))  # rows whose int64 temporaries stay in the cache
    site_head = torch.tensor(site << 16, device=rng.device)
    for i in range(0, rows, step):
        r = row[i : i + step]
        keep((k0, k1), r // batch, site_head, columns, first_sample + r % batch, p, dtype, out[i : i + step])
    return out


SAMPLING_SITE = 65535


def uniform(rng: Tensor, position: Tensor, sample: Tensor, vocab: int) -> Tensor:
    """fp64 [B, vocab] in (0, 1), for sampling: of global token id v, 32 bits, word v % 4 of counter (position, site << 16, v // 4, sample).

    position, sample int64 [B]
    """
    k0, k1, first_sample = mask_key(rng)
    block = torch.arange(-(-vocab // 4), device=position.device)
    site = torch.tensor(SAMPLING_SITE << 16, device=position.device)
    words = philox(position[:, None] & _LO, site, block, (first_sample + sample)[:, None] & _LO, k0, k1)
    words = torch.stack([w.expand(len(position), len(block)) for w in words], -1).flatten(1)[:, :vocab]
    return (words.double() + 0.5) / 2.0**32


# ---- numpy: weights are made on the host, whatever the default device is ----


def philox_numpy(c0, c1, c2, c3, k0: int, k1: int, rounds: int = ROUNDS) -> tuple[np.ndarray, ...]:
    """The same on uint64 arrays holding 32-bit words."""
    lo, half = np.uint64(_LO), np.uint64(32)
    c0, c1, c2, c3 = (np.asarray(c, np.uint64) for c in (c0, c1, c2, c3))
    for _ in range(rounds):
        a, b = c0 * np.uint64(_A), c2 * np.uint64(_B)
        c0, c1, c2, c3 = (b >> half) ^ c1 ^ np.uint64(k0), b & lo, (a >> half) ^ c3 ^ np.uint64(k1), a & lo
        k0, k1 = (k0 + _W0) & _LO, (k1 + _W1) & _LO
    return c0, c1, c2, c3


def normal(seed: int, name: str, flat: np.ndarray) -> np.ndarray:
    """fp64 N(0, 1) for the elements ``flat`` (int64, row-major index in the full tensor) of the parameter ``name``."""
    with np.errstate(over="ignore"):
        k0, k1 = (int(k) for k in philox_numpy(_LO, _LO, 0, 0, seed & _LO, (seed >> 32) & _LO)[:2])
        flat = np.asarray(flat, np.uint64)
        pair = flat >> np.uint64(1)
        r0, r1, r2, r3 = philox_numpy(pair & np.uint64(_LO), pair >> np.uint64(32), zlib.crc32(name.encode()), 0, k0, k1)
    u1, u2 = (((hi << np.uint64(21) | lo >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53 for hi, lo in ((r0, r1), (r2, r3)))
    angle = 2 * np.pi * u2
    return np.sqrt(-2 * np.log(u1)) * np.where(flat & np.uint64(1), np.sin(angle), np.cos(angle))


# ---- Triton device functions (uint32 only: tl.philox on int64 counters silently becomes Philox-4x64) ----


@triton.jit
def philox_device(c0, c1, c2, c3, k0, k1, ROUNDS: tl.constexpr = 7):
    """Words and keys uint32, all of one shape -> four uint32.  A 64-bit product compiles to one IMAD.WIDE; umulhi + mul to two."""
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
    """rng_ptr -> int64 (seed, step, first_sample)  ->  k0, k1, first_sample lo, all uint32 scalars."""
    seed = tl.load(rng_ptr)
    step = tl.load(rng_ptr + 1)
    zero = (step * 0).to(tl.uint32)
    k0, k1, _, _ = philox_device(step.to(tl.uint32), (step >> 32).to(tl.uint32), zero, zero, seed.to(tl.uint32), (seed >> 32).to(tl.uint32))
    return k0, k1, tl.load(rng_ptr + 2).to(tl.uint32)


@triton.jit
def keep_device(k0, k1, position, site_head, column, sample, threshold):
    """Boolean tile: ``column`` natural columns, words uint32 that broadcast; ``threshold`` is T << 16."""
    return keep_lane_device(k0, k1, position, site_head, column // 8, column % 8, sample, threshold)


@triton.jit
def keep_lane_device(k0, k1, position, site_head, block, lane, sample, threshold):
    """The same for column 8 block + lane, for tiles whose columns lie in an order of their own.

    The lane is rotated, not shifted, into the top half, so that what lies below it cannot change the comparison with T << 16.
    """
    zero = block * 0 + position * 0 + sample * 0 + site_head * 0
    r0, r1, r2, r3 = philox_device(zero + position, zero + site_head, zero + block, zero + sample, k0, k1)
    lane = zero + lane
    word = tl.where(lane < 4, tl.where(lane < 2, r0, r1), tl.where(lane < 6, r2, r3))
    return tl.where((lane & 1) == 1, word, (word << 16) | (word >> 16)) >= threshold
