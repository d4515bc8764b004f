"""The Triton side of embed_finish: launcher == reference under the interpreter, or compiled on a GPU."""

import itertools

import pytest
import torch

from tests.kernels.interpreter_bytes import assert_declared
from tests.kernels.kernel_rules import DEVICE, assert_accurate_launch, assert_same, like, narrow, on_a_gpu
from tpfuse.kernels._philox import make_rng
from tpfuse.kernels.embedding import embed_finish_bwd as bwd
from tpfuse.kernels.embedding import embed_finish_fwd as fwd

pytestmark = pytest.mark.usefixtures("poisoned")

ALL = dict(position=True, type=True, norm=True, beta=True, dropout=True, rms=False)
LEFT_OUT = [{}, dict(position=False), dict(type=False), dict(beta=False), dict(dropout=False), dict(rms=True, beta=False)]
NO_NORM = dict(norm=False, beta=False)
WHERE = 0.3, 7, 11, 3


def forward_arguments(R, m, D, post=False, dtype=torch.float32, **left_out):
    has = ALL | left_out
    parts = torch.randn(R, m, D, device=DEVICE).to(dtype)
    positions, types = (torch.arange(n, device=DEVICE).repeat(m)[:m].flip(0) for n in (max(m - 1, 1), 2))
    tables = torch.randn(max(m - 1, 1), D, device=DEVICE), positions, torch.randn(2, D, device=DEVICE).to(dtype), types
    tables = [t if has[k] else None for t, k in zip(tables, ("position", "position", "type", "type"), strict=True)]
    gamma, beta = (v if has[k] else None for v, k in zip(torch.randn(2, D, device=DEVICE), ("norm", "beta"), strict=True))
    return parts, *tables, gamma, beta, make_rng(3, 2, 5, DEVICE) if has["dropout"] else None, *WHERE, 1e-5, has["rms"], post


def backward_arguments(arguments, dn=True, dh=True):
    parts, *_, gamma, beta, rng, p, site, first_row, batch, _, rms, post = arguments
    x, _, mean, rstd = fwd.reference(*arguments)
    saved = (x, mean, rstd, gamma) if gamma is not None else (None,) * 4
    incoming = like(parts) if dn else None, like(x) if dh else None
    return *incoming, *saved, rng, p, site, first_row, batch, rms, post, beta is not None, parts.dtype


def assert_both(arguments):
    assert_same(fwd.launch(*arguments), fwd.reference(*arguments))
    both = backward_arguments(arguments)
    assert_same(bwd.launch(*both), bwd.reference(*both))


# several rows a program and the last program ragged; two tiles; no rows; one element's gradients are all rounding
@pytest.mark.parametrize("left_out", LEFT_OUT, ids=str)
@pytest.mark.parametrize("post", [False, True])
def test_against_the_reference(post, left_out):
    arguments = forward_arguments(3, 35, 100, post, **left_out)
    assert_same(fwd.launch(*arguments), fwd.reference(*arguments))
    for dn, dh in ((True, True), (True, False), (False, True)):
        both = backward_arguments(arguments, dn, dh)
        assert_same(bwd.launch(*both), bwd.reference(*both))


@pytest.mark.parametrize("shape", [(2, 5, 768), (1, 0, 8), (2, 2, 9000)], ids=str)
@pytest.mark.parametrize("post", [False, True])
def test_widths(shape, post):
    assert_both(forward_arguments(*shape, post))


@pytest.mark.slow
@pytest.mark.parametrize("D", [5120, 12288, 16384, 17000, 32768, 65537])
@pytest.mark.parametrize("post", [False, True])
def test_more_widths(D, post):
    assert_both(forward_arguments(2, 2, D, post))


def test_without_norm():
    for D, dn, dh in ((100, True, True), (100, False, True), (9000, True, False)):
        arguments = forward_arguments(2, 3, D, **NO_NORM)
        assert_same(fwd.launch(*arguments), fwd.reference(*arguments))
        both = backward_arguments(arguments, dn, dh)
        assert_same(bwd.launch(*both), bwd.reference(*both))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("post", [False, True])
def test_low_precision(post, dtype):
    arguments = forward_arguments(2, 5, 100, post, dtype)
    assert_accurate_launch(fwd, arguments)
    assert_accurate_launch(bwd, backward_arguments(arguments))


@pytest.mark.parametrize("shards", [2, 4, 8])
@pytest.mark.parametrize("post", [False, True])
def test_masks_do_not_depend_on_the_shard(shards, post):
    parts, table, positions, _, _, *rest = forward_arguments(1, 8, 100, post, type=False)
    whole = fwd.launch(parts, table, positions, None, None, *rest)
    cut = []
    for rows in torch.arange(8).chunk(shards):
        shard = list(rest)
        shard[5] = WHERE[2] + int(rows[0])
        cut.append(fwd.launch(parts[:, rows], table, positions[rows], None, None, *shard))
    assert all(torch.equal(torch.cat(outputs), w) for outputs, w in zip(zip(*cut, strict=True), whole, strict=True))


def test_strided_tables():
    parts, table, positions, types, *rest = forward_arguments(2, 4, 16)
    strided = torch.cat([table, table], 1)[:, :16], torch.stack([positions, positions], 1)[:, 0]
    for a, b in zip(fwd.launch(parts, *strided, types, *rest), fwd.launch(parts, table, positions, types, *rest), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("wide", [False, True])
def test_declared_bytes(monkeypatch, wide):
    """Positions that all differ, as the declaration has it."""
    narrow(monkeypatch, wide)
    D = 256
    for post, dropout in itertools.product((False, True), (False, True)):
        parts, _, _, _, _, *rest = forward_arguments(2, 4, D, post, torch.bfloat16, dropout=dropout)
        tables = torch.randn(6, D, device=DEVICE), torch.arange(4, device=DEVICE), torch.randn(2, D, device=DEVICE), torch.arange(4) % 2
        arguments = parts, *(t.to(DEVICE) for t in tables), *rest
        assert_declared(fwd, arguments)
        for dn, dh in ((True, True), (False, True)):
            assert_declared(bwd, backward_arguments(arguments, dn, dh))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("D", [768, 1024, 8192, 16384, 32768])
def test_on_a_gpu(D, dtype):
    for post in (False, True):
        arguments = forward_arguments(2, 67, D, post, dtype)
        on_a_gpu(fwd, arguments)
        on_a_gpu(bwd, backward_arguments(arguments))
