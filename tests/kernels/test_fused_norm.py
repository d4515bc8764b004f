"""The Triton side of reduce_bias_dropout_add_norm: launcher == reference under the interpreter, or compiled on a GPU."""

import itertools

import pytest
import torch

from tests.kernels.interpreter_bytes import assert_declared
from tests.kernels.kernel_rules import DEVICE, assert_accurate_launch, assert_same, far_apart, like, narrow, on_a_gpu
from tpfuse.kernels import _fused_norm as F
from tpfuse.kernels import _fused_norm_bwd as B
from tpfuse.kernels._philox import make_rng
from tpfuse.kernels.reduce_bias_dropout_add_norm import reduce_bias_dropout_add_norm_bwd as bwd
from tpfuse.kernels.reduce_bias_dropout_add_norm import reduce_bias_dropout_add_norm_fwd as fwd
from tpfuse.sequence_parallel.plain import reduce_parts

pytestmark = pytest.mark.usefixtures("poisoned")

ALL = dict(bias=True, residual=True, norm=True, beta=True, dropout=True, rms=False)
LEFT_OUT = [{}, *({k: not v} for k, v in ALL.items() if k != "norm"), dict(norm=False, beta=False), dict(rms=True, beta=False)]
# Several rows a program, the last program ragged; two tiles (768 = 512 + 256) and more rows than programs; a ragged tile.
SHAPES = [(1, 3, 5), (3, 35, 100), (2, 5, 768), (2, 2, 1000)]
WIDE = [(2, 2, 9000), (2, 2, 17000)]  # two-pass backward; chunked forward
PARTS = [{}, dict(rms=True, beta=False), dict(norm=False, beta=False)]
SITE, FIRST, BATCH = 7, 11, 3


def forward_arguments(R, m, D, dtype=torch.float32, p=0.3, **left_out):
    has = ALL | left_out
    parts, residual = torch.randn(R, m, D, device=DEVICE).to(dtype), torch.randn(m, D, device=DEVICE).to(dtype)
    bias, gamma, beta = torch.randn(3, D, device=DEVICE).unbind(0)
    some = dict(bias=bias, residual=residual, norm=gamma, beta=beta)
    tensors = [t if has[k] else None for k, t in some.items()]
    rng = make_rng(3, 2, 5, DEVICE) if has["dropout"] else None
    return parts, *tensors, rng, p, SITE, FIRST, BATCH, 1e-5, has["rms"]


def backward_arguments(arguments, post=False, dn=True, dh=True):
    parts, bias, residual, gamma, beta, rng, p, *coordinates, _, rms = arguments
    h, _, mean, rstd = fwd.reference(*arguments)
    saved = (h, mean, rstd, gamma) if gamma is not None else (None,) * 4
    incoming = (like(parts) if dn else None, like(h) if dh else None)
    has = bias is not None, beta is not None, None if residual is None else residual.dtype, parts.dtype
    return *incoming, *saved, rng, p, *coordinates, rms, post, *has


def assert_both(arguments):
    """Forward, and backward pre-norm and post-norm."""
    assert_same(F.fwd_launch(*arguments), fwd.reference(*arguments))
    for post in (False, True)[: 2 if arguments[3] is not None else 1]:
        both = backward_arguments(arguments, post)
        assert_same(B.bwd_launch(*both), bwd.reference(*both))


@pytest.mark.parametrize("left_out", LEFT_OUT, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward(shape, left_out):
    arguments = forward_arguments(*shape, **left_out)
    assert_same(F.fwd_launch(*arguments), fwd.reference(*arguments))


@pytest.mark.parametrize("left_out", LEFT_OUT, ids=str)
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_backward(shape, left_out):
    arguments = forward_arguments(*shape, **left_out)
    for post, (dn, dh) in itertools.product((False, True), ((True, True), (True, False), (False, True))):
        if arguments[3] is not None or not post:
            both = backward_arguments(arguments, post, dn, dh)
            assert_same(B.bwd_launch(*both), bwd.reference(*both))


@pytest.mark.parametrize("left_out", PARTS, ids=str)
@pytest.mark.parametrize("shape", [(2, 5, 768), (2, 2, 1000)], ids=str)
def test_tiles_of_a_row(shape, left_out):
    assert_both(forward_arguments(*shape, **left_out))


@pytest.mark.parametrize("shape", WIDE, ids=str)
def test_wide_rows(shape):
    assert_both(forward_arguments(*shape))


@pytest.mark.slow
@pytest.mark.parametrize("left_out", PARTS, ids=str)
@pytest.mark.parametrize("D", [5120, 9000, 12288, 16384, 17000, 32768, 65537])
def test_widths(D, left_out):
    assert_both(forward_arguments(2, 2, D, **left_out))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 5, 768), (1, 3, 100), pytest.param((2, 2, 17000), marks=pytest.mark.slow)], ids=str)
def test_low_precision(shape, dtype):
    arguments = forward_arguments(*shape, dtype=dtype)
    assert_accurate_launch(fwd, arguments)
    assert_accurate_launch(bwd, backward_arguments(arguments))


def test_no_rows():
    assert_both(forward_arguments(2, 0, 8))


def test_one_element():
    """Its x_hat is 0, where the reference has the rounding error of x rstd - mean rstd."""
    arguments = forward_arguments(1, 1, 1)
    assert_accurate_launch(fwd, arguments)
    assert_accurate_launch(bwd, backward_arguments(arguments))


def test_strides():
    """One shard expanded with stride 0; transposed parts and gradients; offsets beyond 2^31 elements, forward and backward."""
    arguments = list(forward_arguments(3, 4, 16, dtype=torch.float16))
    both = list(backward_arguments(arguments))
    for strided in (lambda x: x[:1].expand(3, -1, -1), lambda x: x.mT.contiguous().mT, lambda x: far_apart(x, 1 << 30)):
        for op, given in ((fwd, arguments), (bwd, both)):
            given[0] = strided(given[0])
            for a, b in zip(op.launch(*given), op.launch(given[0].contiguous(), *given[1:]), strict=True):
                assert torch.equal(a, b)
    both[1], both[2] = both[1].mT.contiguous().mT, both[2].mT.contiguous().mT
    for a, b in zip(bwd.launch(*both), bwd.launch(*(t.contiguous() if isinstance(t, torch.Tensor) else t for t in both)), strict=True):
        assert torch.equal(a, b)


def test_huge_rows():
    """A row offset beyond 2^31 elements within one part."""
    arguments = list(forward_arguments(1, 3, 16, dtype=torch.float16))
    near = arguments[0]
    arguments[0] = far_apart(near.movedim(0, 1), 1 << 30).movedim(0, 1)
    assert arguments[0].stride(1) * 2 >= 1 << 31
    for a, b in zip(F.fwd_launch(*arguments), F.fwd_launch(near, *arguments[1:]), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("shards", [2, 4, 8])
def test_masks_do_not_depend_on_the_shard(shards):
    """Shards of rows, put together, are bitwise the whole, and the whole's mask is the reference's; another site's is not."""
    whole = forward_arguments(1, 8, 100)
    h, n, *_ = F.fwd_launch(*whole)
    cut = []
    for rows in torch.arange(8).chunk(shards):
        part = list(whole)
        part[0], part[2], part[8] = whole[0][:, rows], whole[2][rows], FIRST + int(rows[0])
        cut.append(F.fwd_launch(*part)[:2])
    assert torch.equal(torch.cat([a for a, _ in cut]), h) and torch.equal(torch.cat([b for _, b in cut]), n)
    dropped = h == whole[2]
    assert torch.equal(dropped, fwd.reference(*whole)[0] == whole[2]) and 0.2 < dropped.float().mean() < 0.4
    other = list(whole)
    other[7] = SITE + 1
    assert not torch.equal(F.fwd_launch(*other)[0], h)


@pytest.mark.parametrize("D", [100, pytest.param(9000, marks=pytest.mark.slow)])
def test_peers(D):
    """Parts and gradients in buffers of their own, told by their addresses: bitwise what one tensor gives."""
    arguments = forward_arguments(3, 4, D, dtype=torch.float16)
    both = backward_arguments(arguments)
    for op, given in ((fwd, arguments), (bwd, both)):
        buffers = [part.clone() for part in given[0]]
        peers = F.Peers(torch.tensor([b.data_ptr() for b in buffers], device=DEVICE), 4, D, torch.float16)
        want = op.launch(*given)
        for a, b in zip(op.launch(peers, *given[1:]), want, strict=True):
            assert torch.equal(a, b)
        buffers[2] += 1  # it is these that are read
        assert not torch.equal(op.launch(peers, *given[1:])[0], want[0])


@pytest.mark.parametrize("D", [100, pytest.param(9000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("call", ["launch", "cpu", "reference", "__call__"])
def test_out(D, call):
    """dparts goes into rows of a given buffer, and nothing beside them is touched."""
    arguments = backward_arguments(forward_arguments(2, 3, D))
    buffer = torch.full((3, D + 8), 7.0, device=DEVICE)
    run = getattr(bwd, call)
    want, (none, *rest) = run(*arguments), run(*arguments, buffer[:, :D])
    assert none.numel() == 0 and torch.equal(buffer[:, :D], want[0]) and (buffer[:, D:] == 7).all()
    assert all(torch.equal(a, b) for a, b in zip(rest, want[1:], strict=True))


def test_out_of_other_columns():
    with pytest.raises(ValueError, match="columns of out must lie side by side"):
        B.bwd_launch(*backward_arguments(forward_arguments(1, 3, 8)), torch.empty(8, 3, device=DEVICE).T)


@pytest.mark.parametrize("shape", [(3, 5, 100), (2, 3, 9000), (2, 2, 17000)], ids=str)
def test_reduce_parts(shape):
    parts = torch.randn(shape, device=DEVICE)
    assert torch.equal(reduce_parts.launch(parts), reduce_parts.reference(parts))


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("left_out", [{}, dict(norm=False, beta=False, bias=False)], ids=str)
def test_declared_bytes(monkeypatch, wide, left_out):
    """A wide row's h is read twice forward, and what enters its norm's backward twice backward."""
    narrow(monkeypatch, wide)
    D = 768
    arguments = forward_arguments(2, 4, D, dtype=torch.bfloat16, **left_out)
    assert_declared(fwd, arguments)
    assert_declared(reduce_parts, arguments[:1])
    both = backward_arguments(arguments)
    assert_declared(bwd, both)
    assert_declared(bwd, (*both, torch.empty(4, D, dtype=torch.bfloat16, device=DEVICE)))
    if arguments[3] is not None:
        assert_declared(bwd, backward_arguments(arguments, post=True))
        assert_declared(bwd, backward_arguments(arguments, dn=False))
        assert_declared(bwd, backward_arguments(arguments, post=True, dn=False))


@pytest.mark.parametrize("D", [1, 127, 128, 129, 768, 1000, 1024, 1536, 5120, 8192, 8193, 12288, 16384])
def test_tiles_cover_a_row(D):
    A, b = F.tiles(D)
    assert A + b >= D and 8192 >= A >= b and A & (A - 1) == 0 and b & (b - 1) == 0
    assert A + b < 2 * D or D < 128


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("D", [64, 768, 1000, 1024, 4096, 5120, 8192, 12288, 16384, 32768, 65537])
def test_on_a_gpu(D, dtype):
    """Compiled, at the widths that have launch parameters of their own; the masks bitwise."""
    arguments = forward_arguments(2, 67, D, dtype=dtype)
    on_a_gpu(fwd, arguments)
    on_a_gpu(bwd, backward_arguments(arguments))
    on_a_gpu(reduce_parts, arguments[:1])
    h, residual = fwd.launch(*arguments)[0], arguments[2]
    assert torch.equal(h == residual, fwd.reference(*arguments)[0] == residual)
