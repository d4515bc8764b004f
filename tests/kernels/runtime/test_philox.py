"""The random numbers: golden vectors of a format that never changes, three twins bit for bit, and statistics."""

import math
import zlib

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter

from tests.kernels.runtime.philox_kernel import mask_kernel, words_kernel
from tpfuse.kernels.runtime import philox as P
from tpfuse.kernels.runtime.triton import AVAILABLE

needs_triton = pytest.mark.skipif(not AVAILABLE, reason="needs triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOW = 0xFFFFFFFF


def words_of(rng_seed, n):
    """[6, n] of 32-bit words: counters and key, the extremes among them."""
    words = np.random.default_rng(rng_seed).integers(0, 1 << 32, (6, n), dtype=np.uint64)
    words[:, 0], words[:, 1], words[:, 2], words[:, 3] = 0, LOW, 0x80000000, 0x7FFFFFFF
    return words


def oracle(c0, c1, c2, c3, k0, k1, rounds=7):
    """Philox-4x32 in Python's own integers, from the paper's figure."""
    for _ in range(rounds):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & LOW, (a >> 32) ^ c3 ^ k1, a & LOW
        k0, k1 = (k0 + 0x9E3779B9) & LOW, (k1 + 0xBB67AE85) & LOW
    return c0, c1, c2, c3


def oracle_lane(seed, step, position, site, head, column, sample):
    key = oracle(step & LOW, step >> 32 & LOW, 0, 0, seed & LOW, seed >> 32 & LOW)[:2]
    words = oracle(position, site << 16 | head, column // 8, sample & LOW, *key)
    return words[column % 8 // 2] >> 16 * (column % 2) & 0xFFFF


def keep_rows(rng, rows, columns, p, site, first_row, batch, dtype):
    return P.keep_rows(P.Mask(rng, p, site, first_row, batch), rows, columns, dtype)


# ---- golden vectors ----

ZEROS = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]  # Random123's answer for ten rounds
LANES = "9982 ec30 8038 34d6 9731 8201 49fa 4a04 bc9b 52f9 783f e705 19f0 7604 8ed3 3fce"
BITS = "1110110010010010"


def test_random123():
    zero = torch.tensor(0)
    assert [int(word) for word in P.philox((zero, zero, zero, zero), (0, 0), 10)] == ZEROS
    assert [int(word) for word in P.philox_numpy((0, 0, 0, 0), (0, 0), 10)] == ZEROS
    assert list(oracle(0, 0, 0, 0, 0, 0, 10)) == ZEROS
    assert [int(word) for word in P.philox_numpy((0, 0, 0, 0), (0, 0))] != ZEROS  # seven rounds are another function


def test_golden_mask():
    assert P.mask_key(P.make_rng(1, 0, 2)) == (0xF422B57B, 0x780E92B0, 2)
    lanes = [f"{oracle_lane(1, 0, position=5, site=3, head=0, column=c, sample=2):04x}" for c in range(16)]
    assert " ".join(lanes) == LANES
    # Position 5 of sample 2 is row 2 of a batch that starts there, and row 17 of a batch of three.
    for rng, first_row, batch in ((P.make_rng(1, 0, 2), 5, 1), (P.make_rng(1, 0), 17, 3)):
        mask = keep_rows(rng, 1, 16, 0.5, 3, first_row, batch, torch.int64)
        assert "".join(map(str, mask[0].tolist())) == BITS
    assert "".join(map(str, keep_rows(P.make_rng(1, 0), 1, 16, 0.5, 4, 17, 3, torch.int64)[0].tolist())) != BITS


@pytest.mark.parametrize("make", ["torch", pytest.param("device", marks=needs_triton)])
def test_a_lane_at_the_threshold_is_kept(make):
    """The golden lanes one by one, with T equal to each and one above."""
    rng = P.make_rng(1, 0, 2)
    draw = device_mask if make == "device" else lambda *args: keep_rows(*args, torch.int8)
    for column, lane in enumerate(int(word, 16) for word in LANES.split()):
        for T, kept in ((lane, 1), (lane + 1, 0)):
            assert draw(rng, 1, 16, T / 65536, 3, 5, 1)[0, column] == kept


def test_golden_normal():
    flat = np.array([0, 1, 2, 12345, (1 << 33) + 1])
    golden = [-0.20646729687096743, 0.42918714889130516, 0.4388079833724637, -0.579349911121741, -0.9884986546843898]
    assert P.normal(0, "transformer.h.0.attn.qkv.weight", flat).tolist() == pytest.approx(
        golden, rel=1e-14
    )  # libraries differ in a last bit
    for seed, name in ((7, "a"), ((1 << 64) - 3, "b")):
        key = oracle(LOW, LOW, 0, 0, seed & LOW, seed >> 32)[:2]
        for index, value in zip(flat.tolist(), P.normal(seed, name, flat)):
            r = oracle(index // 2 & LOW, index // 2 >> 32, zlib.crc32(name.encode()), 0, *key)
            u1, u2 = (((r[i] << 21 | r[i + 1] >> 11) + 0.5) / 2**53 for i in (0, 2))
            exact = math.sqrt(-2 * math.log(u1)) * (math.sin if index % 2 else math.cos)(2 * math.pi * u2)
            assert value == pytest.approx(exact, rel=1e-14, abs=1e-15)


# ---- the twins ----


@pytest.mark.parametrize("rounds", [7, 10])
def test_torch_is_numpy_is_the_paper(rounds):
    words = words_of(0, 64)
    exact = np.array([oracle(*map(int, column), rounds=rounds) for column in words.T], np.uint64).T
    for i, column in enumerate(words.T):
        *counter, k0, k1 = map(int, column)
        got = P.philox([torch.tensor(word) for word in counter], (k0, k1), rounds)
        assert [int(word) for word in got] == exact[:, i].tolist()
    assert np.array_equal(np.stack(P.philox_numpy(words[:4], words[4:], rounds)), exact)


@needs_triton
@pytest.mark.parametrize("rounds", [7, 10])
def test_device_words(rounds):
    words = words_of(1, 64)
    bits = torch.from_numpy(words.astype(np.uint32).view(np.int32)).to(DEVICE)
    out = torch.empty(4, 64, dtype=torch.int32, device=DEVICE)
    words_kernel[(1,)](bits, out, 64, rounds)
    exact = np.array([oracle(*map(int, column), rounds=rounds) for column in words.T], np.uint64).T
    assert np.array_equal(out.cpu().numpy().view(np.uint32), exact)


SEEDS = [(1, 0, 2), ((1 << 64) - 5, -1, 7), (1 << 63, (1 << 40) + 1, (1 << 32) - 1), (-1, 3, (5 << 32) + 9)]


def device_mask(rng, rows, columns, p, site, first_row, batch, head=0):
    out = torch.full((rows, columns), 9, dtype=torch.int8, device=DEVICE)
    words = rows, columns, first_row, batch, site << 16 | head, P.threshold(p) << 16
    mask_kernel[(-(-rows // 8), -(-columns // 16))](rng.to(DEVICE), out, *words, BLOCK_M=8, BLOCK_N=16)
    return out.cpu()


# 13 columns end inside a call of Philox; 9 x 37 ragged in both directions; site 65535 sets the sign bit of c1; a late
# shard; the least and the largest threshold
@needs_triton
@pytest.mark.parametrize("seed", SEEDS, ids=str)
@pytest.mark.parametrize(
    "rows, columns, p, site, first_row, batch",
    [(3, 13, 0.1, 3, 0, 1), (9, 37, 0.5, 65535, 11, 3), (2, 8, 2e-5, 0, 5, 2), (1, 1, 0.99998, 1, 0, 1)],
)
def test_device_mask(seed, rows, columns, p, site, first_row, batch):
    rng = P.make_rng(*seed)
    mask = keep_rows(rng, rows, columns, p, site, first_row, batch, torch.int8)
    assert torch.equal(device_mask(rng, rows, columns, p, site, first_row, batch), mask)
    exact = [
        [oracle_lane(*seed[:2], r // batch, site, 0, c, seed[2] + r % batch) >= P.threshold(p) for c in range(columns)]
        for r in range(first_row, first_row + rows)
    ]
    assert torch.equal(mask.bool(), torch.tensor(exact))


@needs_triton
def test_device_mask_of_a_head():
    """Attention's coordinates: rows are query positions, columns key positions; four words that broadcast against each
    other."""
    rng, arange = P.make_rng(9, 4), torch.arange
    key = P.mask_key(rng)[:2]
    site_head = (2 << 16 | 3) + arange(2)[:, None, None]
    masks = P.keep(key, arange(10)[:, None], site_head, 10, arange(3)[:, None, None, None], 0.3, torch.int8)
    assert masks.shape == (3, 2, 10, 10)
    for head in range(2):
        assert torch.equal(
            device_mask(rng, 30, 10, 0.3, 2, 0, 3, head=3 + head).view(10, 3, 10).movedim(1, 0), masks[:, head]
        )
    assert not torch.equal(masks[:, 0], masks[:, 1])


# ---- a mask knows nothing of how the work was split ----


def test_rows_in_two_pieces():
    """Those of two masks of one piece; and of any rows from one on."""
    rng, draw = P.make_rng(3, 1, 10), lambda mask, rows: P.keep_rows(mask, rows, 21, torch.int8)
    one = lambda first_row, rows: draw(P.Mask.of("f", rng, 0.4, site=5, first_row=first_row, batch=3), rows)
    two = P.Mask.of("f", rng, 0.4, site=5, first_row=P.RowPieces(7, split=4, second_row=40), batch=3)
    whole = torch.cat([one(7, 4), one(40, 6)])
    assert torch.equal(draw(two, 10), whole) and not torch.equal(whole, one(7, 10))
    for start in range(10):
        assert torch.equal(draw(two.from_row(start), 10 - start), whole[start:])
        assert torch.equal(draw(P.Mask(rng, 0.4, 5, 7, 3).from_row(start), 10 - start), one(7, 10)[start:])
    assert P.Mask.of("f", rng, 0.4, site=5, first_row=7, batch=3) == P.Mask(rng, 0.4, 5, 7, 3)


def test_invariant_to_the_split():
    rows, columns, batch = 12, 21, 3
    draw = lambda rng, rows, first_row, batch: keep_rows(rng, rows, columns, 0.4, 5, first_row, batch, torch.int8)
    whole = draw(P.make_rng(3, 1, 10), rows, 0, batch)
    assert torch.equal(
        torch.cat([draw(P.make_rng(3, 1, 10), 5, first, batch)[: rows - first] for first in (0, 5, 10)]), whole
    )
    samples = [
        draw(P.make_rng(3, 1, 10 + b), rows // batch, 0, 1) for b in range(batch)
    ]  # a batch of three, one at a time
    assert torch.equal(torch.stack(samples, 1).flatten(0, 1), whole)
    # and it knows everything else
    for other in (P.make_rng(4, 1, 10), P.make_rng(3, 2, 10), P.make_rng(3, 1, 11)):
        assert not torch.equal(draw(other, rows, 0, batch), whole)
    assert not torch.equal(draw(P.make_rng(3, 1, 10), rows, 1, batch), whole)


def test_keep_rows_in_chunks():
    """65536 columns are made two rows at a time; the first of them do not depend on that, nor on how many follow."""
    rng = P.make_rng(1, 0)
    assert torch.equal(
        keep_rows(rng, 5, 1 << 16, 0.1, 1, 7, 2, torch.bool)[:, :100],
        keep_rows(rng, 5, 100, 0.1, 1, 7, 2, torch.bool),
    )
    for rows, columns in ((0, 8), (3, 0)):
        assert keep_rows(rng, rows, columns, 0.1, 1, 0, 1, torch.float32).shape == (rows, columns)


def test_numpy_and_torch_draw_the_same_mask(monkeypatch):
    """Few elements, or one thread, are numpy's on a CPU; many on several threads are torch's."""
    arange, site_head = (lambda n: torch.arange(n)[:, None]), torch.tensor(9 << 16)
    draw = lambda n: P.keep((3, 7), arange(n), site_head, 85, arange(n) - 5, 0.3, torch.int8, first=3)
    drawn, rounds = [], P._rounds_numpy
    monkeypatch.setattr(P, "_rounds_numpy", lambda *args: drawn.append(1) or rounds(*args))
    for n, threads, by_torch in ((100, 1, False), (100, 4, False), (P.SHARE // 8, 1, False), (P.SHARE // 8, 4, True)):
        drawn.clear()
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        mask = draw(n)
        torch.set_num_threads(before)
        assert bool(drawn) is not by_torch and torch.equal(mask[:50], draw(50))
        if not by_torch:
            whole = mask
    assert torch.equal(mask, whole) and 0.65 < mask.float().mean() < 0.75


# ---- thresholds and the rng tensor ----


def test_threshold():
    assert [P.threshold(p) for p in (0.0, 0, 1e-9, 2**-17, 0.1, 0.5, 1 - 2**-16)] == [0, 0, 0, 1, 6554, 32768, 65535]
    assert P.scale(0.5) == 2 and P.scale(0) == 1 and P.scale(0.1) == 65536 / (65536 - 6554)
    for p in (1.0, 0.9999999, 1 - 2**-17, -0.1, -1e-30, math.nan, math.inf, 2):
        with pytest.raises(ValueError, match=r"p must lie in \[0, 1 - 2\*\*-17\), got " + str(p)):
            P.threshold(p)
    assert P.threshold(math.nextafter(1 - 2**-17, 0)) == 65535


def test_make_rng():
    assert P.make_rng((1 << 64) - 1, torch.tensor(-1), torch.tensor(1 << 40)).tolist() == [-1, -1, 1 << 40]
    for bad in (None, torch.zeros(3), torch.zeros(2, dtype=torch.int64)):
        with pytest.raises(ValueError, match="f: dropout needs rng, an int64 tensor"):
            P.check_rng("f", bad)


def test_a_step_is_no_constant():
    """A step and a first sample that are tensors do not recompile; an integer does, every time or once and for all."""
    counter = CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(lambda step: P.make_rng(1, step, step + 5), backend=counter, fullgraph=True)
    for step in range(3):
        assert compiled(torch.tensor(step)).tolist() == [1, step, step + 5]
    assert counter.frame_count == 1


# ---- statistics: everything is deterministic, so the bounds (five standard deviations) hold or do not ----

N = 1 << 18


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_share_kept(p):
    keep, T = keep_rows(P.make_rng(0, 0), 512, 512, p, 1, 0, 4, torch.float64), P.threshold(p)
    mean = 1 - T / 65536
    for axis, n in ((0, 512), (1, 512), ((0, 1), N)):
        assert ((keep.mean(axis) - mean).abs() < 5 * math.sqrt(mean * (1 - mean) / n)).all()


NEIGHBOURS = {
    "seed": lambda draw: draw(seed=2),
    "step": lambda draw: draw(step=1),
    "site": lambda draw: draw(site=2),
    "sample": lambda draw: draw(first_sample=1),
    "position": lambda draw: draw(first_row=1),
    "column": lambda draw: draw(columns=513)[:, 1:],
    "a lane group on": lambda draw: draw(columns=520)[:, 8:],
}


@pytest.mark.parametrize("neighbour", NEIGHBOURS)
def test_neighbours_are_independent(neighbour):
    def draw(seed=1, step=0, first_sample=0, site=1, first_row=0, columns=512):
        return (
            keep_rows(P.make_rng(seed, step, first_sample), 512, columns, 0.5, site, first_row, 1, torch.float64) - 0.5
        )

    def correlation(a, b):
        return 4 * (a * b).mean().abs() * math.sqrt(N)  # in standard deviations

    assert correlation(draw(), NEIGHBOURS[neighbour](draw)) < 5
    assert correlation(draw(), draw()) > 100  # it can fail


def test_words_are_uniform():
    """Chi-square of every byte of every word over consecutive counters: 255 degrees of freedom, sd 22.6."""
    words = P.philox((torch.arange(N), torch.tensor(1 << 16), torch.tensor(0), torch.tensor(0)), (1, 0))
    for word in words:
        for shift in (0, 8, 16, 24):
            counts = torch.bincount(word.expand(N) >> shift & 255, minlength=256).double()
            assert abs(((counts - N / 256) ** 2 / (N / 256)).sum() - 255) < 5 * 22.6


def test_normal_is_normal():
    x = np.sort(P.normal(0, "w", np.arange(N)))
    assert abs(x.mean()) < 5 / math.sqrt(N) and abs(x.var() - 1) < 5 * math.sqrt(2 / N)
    cdf = 0.5 * (1 + torch.erf(torch.from_numpy(x) / math.sqrt(2)))
    assert (cdf - torch.arange(N) / N).abs().max() * math.sqrt(N) < 1.95  # Kolmogorov-Smirnov at 0.1 %
    other = P.normal(0, "v", np.arange(N))
    assert abs((P.normal(0, "w", np.arange(N)) * other).mean()) < 5 / math.sqrt(N)


def test_any_slice_of_a_weight_by_itself():
    """Bitwise, down to one element: vector and scalar code of the host's mathematics must agree."""
    whole = P.normal(0, "w", np.arange(300))
    for a, e in ((100, 200), (1, 2), (7, 24), (299, 300)):
        assert np.array_equal(P.normal(0, "w", np.arange(a, e)), whole[a:e])
