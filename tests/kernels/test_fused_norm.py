"""The Triton side of reduce_bias_dropout_add_norm: launcher == reference under the interpreter, and what the compiler makes of it."""

import itertools

import pytest
import torch

from tests.kernels.compile_offline import compile_offline
from tpfuse.kernels import _fused_norm as K
from tpfuse.kernels._philox import make_rng
from tpfuse.kernels.reduce_bias_dropout_add_norm import reduce_bias_dropout_add_norm_bwd as bwd
from tpfuse.kernels.reduce_bias_dropout_add_norm import reduce_bias_dropout_add_norm_fwd as fwd

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ALL = dict(bias=True, residual=True, norm=True, beta=True, dropout=True, rms=False)
LEFT_OUT = [{}, *({k: not v} for k, v in ALL.items() if k != "norm"), dict(norm=False, beta=False), dict(rms=True, beta=False)]
# One tile; two tiles (768 = 512 + 256) of several row blocks; a ragged tile; several programs' strides; row registers' ends.
SHAPES = [(1, 3, 5), (2, 5, 768), (3, 35, 100), (2, 2, 1000)]
WIDE = [(2, 2, 9000), (2, 2, 17000)]  # two-pass backward; chunked forward
SITE, FIRST, BATCH = 7, 11, 3


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Every output is NaN before a kernel writes it."""
    new_empty = torch.Tensor.new_empty

    def poison(x, *size, **options):
        out = new_empty(x, *size, **options)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    monkeypatch.setattr(torch.Tensor, "new_empty", poison)


def forward_arguments(R, m, D, dtype=torch.float32, p=0.3, **left_out):
    has = ALL | left_out
    parts, residual = torch.randn(R, m, D, device=DEVICE).to(dtype), torch.randn(m, D, device=DEVICE).to(dtype)
    bias, gamma, beta = torch.randn(3, D, device=DEVICE)
    some = dict(bias=bias, residual=residual, norm=gamma, beta=beta)
    tensors = [t if has[k] else None for k, t in some.items()]
    rng = make_rng(3, 2, 5, DEVICE) if has["dropout"] else None
    return parts, *tensors, rng, p, SITE, FIRST, BATCH, 1e-5, has["rms"]


def backward_arguments(arguments, post=False, dn=True, dh=True):
    parts, bias, residual, gamma, beta, rng, p, *coordinates, _, rms = arguments
    h, _, mean, rstd = fwd.reference(*arguments)
    saved = (h, mean, rstd, gamma) if gamma is not None else (None,) * 4
    like = lambda x: torch.randn(x.shape, device=x.device).to(x.dtype)  # noqa: E731
    incoming = (like(parts) if dn else None, like(h) if dh else None)
    has = bias is not None, beta is not None, None if residual is None else residual.dtype, parts.dtype
    return *incoming, *saved, rng, p, *coordinates, rms, post, *has


def assert_same(got, want):
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5, check_stride=True)


@pytest.mark.parametrize("left_out", LEFT_OUT, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward(shape, left_out):
    arguments = forward_arguments(*shape, **left_out)
    assert_same(K.fwd_launch(*arguments), fwd.reference(*arguments))


@pytest.mark.parametrize("left_out", LEFT_OUT, ids=str)
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_backward(shape, left_out):
    arguments = forward_arguments(*shape, **left_out)
    for post, (dn, dh) in itertools.product((False, True), ((True, True), (True, False), (False, True))):
        if arguments[3] is not None or not post:
            both = backward_arguments(arguments, post, dn, dh)
            assert_same(K.bwd_launch(*both), bwd.reference(*both))


@pytest.mark.parametrize("left_out", [{}, dict(rms=True, beta=False), dict(norm=False, beta=False)], ids=str)
@pytest.mark.parametrize("shape", WIDE, ids=str)
def test_wide_rows(shape, left_out):
    arguments = forward_arguments(*shape, **left_out)
    assert_same(K.fwd_launch(*arguments), fwd.reference(*arguments))
    for post in (False, True)[: 2 if arguments[3] is not None else 1]:
        both = backward_arguments(arguments, post)
        assert_same(K.bwd_launch(*both), bwd.reference(*both))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 5, 768), (1, 3, 100)], ids=str)
def test_low_precision(shape, dtype):
    assert_accurate(forward_arguments(*shape, dtype=dtype))


def assert_accurate(arguments):
    """error(kernel, fp64) <= 2 error(reference in the same dtype, fp64) + 1e-6"""
    double = [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in arguments]
    both = backward_arguments(arguments)
    double_both = [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in both[:-2]] + [torch.float64] * 2
    for launch, op, given, exact in ((K.fwd_launch, fwd, arguments, double), (K.bwd_launch, bwd, both, double_both)):
        for got, theirs, truth in zip(launch(*given), op.reference(*given), op.reference(*exact), strict=True):
            if got.numel():
                error, allowed = (got.double() - truth).abs().max(), (theirs.double() - truth).abs().max()
                assert error <= 2 * allowed + 1e-6, (error, allowed)


def test_no_rows():
    arguments = forward_arguments(2, 0, 8)
    assert_same(K.fwd_launch(*arguments), fwd.reference(*arguments))
    both = backward_arguments(arguments)
    assert_same(K.bwd_launch(*both), bwd.reference(*both))


def test_one_element():
    """Its x_hat is 0, where the reference has the rounding error of x rstd - mean rstd."""
    assert_accurate(forward_arguments(1, 1, 1))


def test_strides():
    """One shard expanded with stride 0; a transposed input; offsets beyond 2^31 elements."""
    arguments = list(forward_arguments(3, 4, 16))
    arguments[0] = arguments[0][:1].expand(3, -1, -1)
    assert_same(K.fwd_launch(*arguments), fwd.reference(*arguments))
    arguments[0] = torch.randn(3, 16, 4, device=DEVICE).transpose(1, 2)
    assert_same(K.fwd_launch(*arguments), fwd.reference(*arguments))
    far = torch.empty((1 << 31) + 80, dtype=torch.float16, device=DEVICE).as_strided((3, 4, 16), ((1 << 30) + 8, 16, 1))
    far.copy_(torch.randn(3, 4, 16))
    half = list(forward_arguments(3, 4, 16, dtype=torch.float16))
    near = [far.contiguous(), *half[1:]]
    half[0] = far
    for a, b in zip(K.fwd_launch(*half), K.fwd_launch(*near), strict=True):
        assert torch.equal(a, b)


def test_masks_do_not_depend_on_the_shard():
    """Four shards of rows, put together, are the whole; another site is not."""
    whole = forward_arguments(1, 8, 100)
    h, n, *_ = K.fwd_launch(*whole)
    cut = []
    for r in range(4):
        rows = slice(2 * r, 2 * r + 2)
        part = list(whole)
        part[0], part[2], part[8] = whole[0][:, rows], whole[2][rows], FIRST + 2 * r
        cut.append(K.fwd_launch(*part)[:2])
    assert torch.equal(torch.cat([a for a, _ in cut]), h) and torch.equal(torch.cat([b for _, b in cut]), n)
    other = list(whole)
    other[7] = SITE + 1
    assert not torch.equal(K.fwd_launch(*other)[0], h)


@pytest.mark.parametrize("D", [1, 127, 128, 129, 768, 1000, 1024, 1536, 5120, 8192])
def test_tiles_cover_a_row(D):
    A, B = K.tiles(D)
    assert A + B >= D and A >= B and A & (A - 1) == 0 and B & (B - 1) == 0
    assert A + B < 2 * D or D < 128


# ---- what the compiler makes of it ----

POINTERS = dict(parts_ptr="*bf16", bias_ptr="*fp32", residual_ptr="*bf16", gamma_ptr="*fp32", beta_ptr="*fp32", rng_ptr="*i64")
POINTERS |= dict(h_ptr="*bf16", n_ptr="*bf16", mean_ptr="*fp32", rstd_ptr="*fp32", dn_ptr="*bf16", dh_ptr="*bf16", dparts_ptr="*bf16")
POINTERS |= dict(dresidual_ptr="*bf16", partial_ptr="*fp32", sums_ptr="*fp32", out_ptr="*fp32")
NUMBERS = dict.fromkeys(("M", "D", "P", "stride_r", "stride_m", "first_row", "batch", "site_head"), "i32")
NUMBERS |= dict(eps="fp32", scale="fp32", threshold="i64")


def report(kernel, **constexprs):
    warps = constexprs.pop("num_warps", 4)
    return compile_offline(f"tpfuse.kernels._fused_norm:{kernel}", POINTERS | NUMBERS, constexprs, 90, num_warps=warps)


@pytest.mark.parametrize(
    "D", [768, pytest.param(1024, marks=pytest.mark.slow), 4096, *(pytest.param(d, marks=pytest.mark.slow) for d in (5120, 8192))]
)
@pytest.mark.parametrize("R", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_rows_in_registers_do_not_spill(D, R):
    forward = report("_fwd_kernel", R=R, RMS=False, **K.fwd_config(D))
    backward = report("_bwd_kernel", R=R, RMS=False, POST=False, **K.bwd_config(D))
    assert forward.spill_bytes == 0
    # 8192 columns and eight ranks fill the 128 registers that 16 warps leave a thread: 24 bytes, read under Triton 3.8
    assert backward.spill_bytes <= (24 if (D, R) == (8192, 8) else 0)
    assert max(forward.shared_bytes, backward.shared_bytes) <= 227 << 10


@pytest.mark.slow
@pytest.mark.parametrize("R", [1, 8])
def test_wide_rows_do_not_spill(R):
    reports = [
        report("_fwd_kernel", R=R, RMS=False, **K.fwd_config(16384)),
        *(report("_fwd_chunks_kernel", R=R, RMS=False, **K.fwd_chunks_config(D)) for D in (32768, 65537)),
        report("_bwd_rows_kernel", R=R, RMS=False, POST=False, **K.BWD_ROWS),
        report("_bwd_columns_kernel", R=R, RMS=False, POST=False, **K.BWD_COLUMNS),
        report("_reduce_kernel", **K.REDUCE),
    ]
    assert all(r.spill_bytes == 0 for r in reports)


NO_NORM = dict.fromkeys(("gamma_ptr", "h_ptr", "mean_ptr", "rstd_ptr"))
WITHOUT = [
    ("_fwd_kernel", dict(R=2, RMS=False, batch=1, **K.fwd_config(768))),
    ("_fwd_kernel", dict(R=1, RMS=True, bias_ptr=None, residual_ptr=None, beta_ptr=None, rng_ptr=None, **K.fwd_config(768))),
    ("_fwd_kernel", dict(R=2, RMS=False, gamma_ptr=None, beta_ptr=None, M=1, **K.fwd_config(768))),
    ("_bwd_kernel", dict(R=2, RMS=False, POST=True, batch=1, dn_ptr=None, **K.bwd_config(768))),
    ("_bwd_kernel", dict(R=1, RMS=True, POST=False, dh_ptr=None, rng_ptr=None, dresidual_ptr=None, **K.bwd_config(768))),
    ("_bwd_kernel", dict(R=1, RMS=False, POST=False, M=1, **NO_NORM, **K.bwd_config(768))),
    ("_bwd_columns_kernel", dict(R=2, RMS=True, POST=False, **NO_NORM, **K.BWD_COLUMNS)),
    ("_reduce_kernel", dict(P=1, **K.REDUCE)),
]


@pytest.mark.slow
@pytest.mark.parametrize("kernel, constants", WITHOUT, ids=str)
def test_what_is_left_out_compiles(kernel, constants):
    """An absent tensor, and a number of 1, reach the compiler as constants, which the interpreter does not show."""
    assert report(kernel, **constants).spill_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("D", [768, 1024, 4096, 8192, 12288, 16384, 32768, 65537])
def test_on_a_gpu(D, dtype):
    """Compiled, at the widths that have launch parameters of their own."""
    arguments = forward_arguments(2, 64, D, dtype=dtype)
    both = backward_arguments(arguments)
    rounding = dict(rtol=2e-2, atol=2e-2) if dtype == torch.bfloat16 else dict(rtol=1e-4, atol=1e-4)
    for launch, op, given in ((K.fwd_launch, fwd, arguments), (K.bwd_launch, bwd, both)):
        for a, b in zip(launch(*given), op.reference(*given), strict=True):
            torch.testing.assert_close(a, b, **rounding)
