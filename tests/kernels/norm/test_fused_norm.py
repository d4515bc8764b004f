"""The Triton side of reduce_bias_dropout_add_norm: launcher == reference under the interpreter, or compiled on a
GPU."""

import itertools

import pytest
import torch
from torch.utils._pytree import tree_map_only

from tests.kernels.interpreter_bytes import assert_declared
from tests.kernels.kernel_rules import DEVICE, assert_accurate_launch, assert_same, far_apart, like, narrow, on_a_gpu
from tpfuse.kernels.norm import config, triton_backward
from tpfuse.kernels.norm.core import reduce_parts
from tpfuse.kernels.norm.records import POST, PRE, Add, NormVectors, Saved, Wanted
from tpfuse.kernels.norm.verbs import REDUCE_BIAS_DROPOUT_ADD_NORM
from tpfuse.kernels.runtime import launch as _launch
from tpfuse.kernels.runtime import partials
from tpfuse.kernels.runtime.counters import counters
from tpfuse.kernels.runtime.op import dtype_of, flatten
from tpfuse.kernels.runtime.philox import Mask, make_rng

pytestmark = pytest.mark.usefixtures("poisoned")

_, fwd, bwd = REDUCE_BIAS_DROPOUT_ADD_NORM

ALL = dict(bias=True, residual=True, norm=True, beta=True, dropout=True, rms=False)
LEFT_OUT = [
    {},
    *({k: not v} for k, v in ALL.items() if k != "norm"),
    dict(norm=False, beta=False),
    dict(rms=True, beta=False),
]
# Several rows a program, the last program ragged; two tiles (768 = 512 + 256) and more rows than programs; a ragged
# tile.
SHAPES = [(1, 3, 5), (3, 35, 100), (2, 5, 768), (2, 2, 1000)]
# two-pass backward; chunked forward
RARE = 9000, 12288, 16384, 32768  # widths of the same forms
WIDE = [(2, 2, 9000), pytest.param((2, 2, 17000), marks=pytest.mark.slow)]
PARTS = [{}, dict(rms=True, beta=False), dict(norm=False, beta=False)]
MASK = Mask(make_rng(3, 2, 5, DEVICE), 0.3, site=7, first_row=11, batch=3)


def forward_arguments(R, m, D, dtype=torch.float32, **left_out):
    has = ALL | left_out
    parts, residual = torch.randn(R, m, D, device=DEVICE).to(dtype), torch.randn(m, D, device=DEVICE).to(dtype)
    bias, gamma, beta = torch.randn(3, D, device=DEVICE).unbind(0)
    some = dict(bias=bias, residual=residual, norm=gamma, beta=beta)
    bias, residual, gamma, beta = (t if has[k] else None for k, t in some.items())
    norm = NormVectors(gamma, beta, 1e-5, "rms" if has["rms"] else "layer")
    return parts, Add(bias=bias, residual=residual), norm, MASK if has["dropout"] else Mask(), PRE


def backward_arguments(arguments, post=False, dn=True, dh=True):
    parts, add, norm, mask, _ = arguments
    h, _, mean, rstd = fwd.reference(*arguments)
    saved = (h, mean, rstd, norm.gamma) if norm.gamma is not None else (None,) * 4
    incoming = (like(parts) if dn else None, like(h) if dh else None)
    residual = None if add.residual is None else add.residual.dtype
    wanted = Wanted(dtype_of(add.bias), norm.beta is not None, residual, parts.dtype)
    return *incoming, Saved(*saved, norm.kind), mask, POST if post else PRE, wanted


def assert_both(arguments):
    """Forward, and backward pre-norm and post-norm."""
    assert_same(fwd.launch(*arguments), fwd.reference(*arguments))
    for post in (False, True)[: 2 if arguments[2].gamma is not None else 1]:
        both = backward_arguments(arguments, post)
        assert_same(bwd.launch(*both), bwd.reference(*both))


@pytest.mark.parametrize("left_out", LEFT_OUT, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward(shape, left_out):
    arguments = forward_arguments(*shape, **left_out)
    assert_same(fwd.launch(*arguments), fwd.reference(*arguments))


@pytest.mark.parametrize("left_out", LEFT_OUT, ids=str)
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_backward(shape, left_out):
    arguments = forward_arguments(*shape, **left_out)
    for post, (dn, dh) in itertools.product((False, True), ((True, True), (True, False), (False, True))):
        if arguments[2].gamma is not None or not post:
            both = backward_arguments(arguments, post, dn, dh)
            assert_same(bwd.launch(*both), bwd.reference(*both))


@pytest.mark.parametrize("left_out", PARTS, ids=str)
@pytest.mark.parametrize("shape", [(2, 5, 768), (2, 2, 1000)], ids=str)
def test_tiles_of_a_row(shape, left_out):
    assert_both(forward_arguments(*shape, **left_out))


@pytest.mark.parametrize("shape", WIDE, ids=str)
def test_wide_rows(shape):
    assert_both(forward_arguments(*shape))


@pytest.mark.slow
@pytest.mark.parametrize("left_out", PARTS, ids=str)
@pytest.mark.parametrize("D", [5120, 17000, 65537, *(pytest.param(D, marks=pytest.mark.rare) for D in RARE)])
def test_widths(D, left_out):
    assert_both(forward_arguments(2, 1, D, **left_out))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(2, 5, 768), (1, 3, 100), pytest.param((2, 2, 17000), marks=pytest.mark.slow)], ids=str
)
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


@pytest.mark.parametrize(
    "side, m, D",
    [
        *((side, 35, 100) for side in ("launch", "cpu", "reference")),
        ("cpu", 3, 1 << 16),
        pytest.param("launch", 3, 9000, marks=pytest.mark.slow),
    ],
)
def test_the_bias_gradient_in_the_dtype_asked_for(side, m, D):
    """It is the fp32 sum, rounded once, though the CPU adds blocks of rows."""
    given, run = backward_arguments(forward_arguments(1, m, D)), getattr(bwd, side)
    *others, wanted = given
    dbias = run(*others, wanted)[2]
    rounded, nothing = (run(*others, wanted._replace(bias=dtype))[2] for dtype in (torch.bfloat16, None))
    assert dbias.dtype == torch.float32 and rounded.dtype == torch.bfloat16 and nothing.shape == (0,)
    assert torch.equal(rounded, dbias.bfloat16())


@pytest.mark.parametrize("order", [PRE, POST])
@pytest.mark.parametrize("dn, beta", [(True, True), (True, False), (False, False)])
def test_vector_gradients_are_what_tracing_expects(dn, beta, order):
    """Shapes and dtypes of launcher, reference and fake, empty gradients included; gamma narrower than fp32."""
    dy, dh, saved, mask, _, wanted = backward_arguments(forward_arguments(2, 3, 16, beta=beta))
    saved = saved._replace(gamma=saved.gamma.bfloat16())
    given = dy if dn else None, dh, saved, mask, order, wanted
    on_meta = [t.to("meta") if isinstance(t, torch.Tensor) else t for t in flatten(given)]
    expected = [(t.dtype, t.shape) for t in bwd.overload(*on_meta)]
    for made in (bwd.launch(*given), bwd.reference(*given)):
        assert [(t.dtype, t.shape) for t in made] == expected


def test_strides():
    """One shard expanded with stride 0; transposed parts and gradients; offsets beyond 2^31 elements, forward and
    backward."""
    arguments = list(forward_arguments(3, 4, 16, dtype=torch.float16))
    both = list(backward_arguments(arguments))
    for strided in (lambda x: x[:1].expand(3, -1, -1), lambda x: x.mT.contiguous().mT, lambda x: far_apart(x, 1 << 30)):
        for op, given in ((fwd, arguments), (bwd, both)):
            given[0] = strided(given[0])
            for a, b in zip(op.launch(*given), op.launch(given[0].contiguous(), *given[1:]), strict=True):
                assert torch.equal(a, b)
    saved, turned = both[2], lambda x: x.mT.contiguous().mT
    both[1], both[2] = turned(both[1]), saved._replace(h=turned(saved.h))
    near = both[0].contiguous(), both[1].contiguous(), saved._replace(h=both[2].h.contiguous())
    for a, b in zip(bwd.launch(*both), bwd.launch(*near, *both[3:]), strict=True):
        assert torch.equal(a, b)


def test_huge_rows():
    """A row offset beyond 2^31 elements within one part."""
    arguments = list(forward_arguments(1, 3, 16, dtype=torch.float16))
    near = arguments[0]
    arguments[0] = far_apart(near.movedim(0, 1), 1 << 30).movedim(0, 1)
    assert arguments[0].stride(1) * 2 >= 1 << 31
    for a, b in zip(fwd.launch(*arguments), fwd.launch(near, *arguments[1:]), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("shards", [2, 4, 8])
def test_masks_do_not_depend_on_the_shard(shards):
    """Shards of rows, put together, are bitwise the whole, and the whole's mask is the reference's; another site's is
    not."""
    whole = parts, add, norm, _, order = forward_arguments(1, 8, 100)
    h, n, *_ = fwd.launch(*whole)
    cut = []
    for rows in torch.arange(8).chunk(shards):
        part, mask = add._replace(residual=add.residual[rows]), MASK._replace(first_row=MASK.first_row + int(rows[0]))
        cut.append(fwd.launch(parts[:, rows], part, norm, mask, order)[:2])
    assert torch.equal(torch.cat([a for a, _ in cut]), h) and torch.equal(torch.cat([b for _, b in cut]), n)
    dropped = h == add.residual
    assert torch.equal(dropped, fwd.reference(*whole)[0] == add.residual) and 0.2 < dropped.float().mean() < 0.4
    other = MASK._replace(site=MASK.site + 1)
    assert not torch.equal(fwd.launch(parts, add, norm, other, order)[0], h)


@pytest.mark.parametrize("wide", [False, True])
def test_rows_in_two_pieces(monkeypatch, wide):
    """Forward and both backwards are those of two launches, bitwise but for the vectors' gradients."""
    narrow(monkeypatch, wide)
    parts, add, norm, _, order = forward_arguments(2, 7, 100)
    pieces = [(slice(0, 7), MASK._replace(split=3, second_row=50))]
    pieces += [(slice(0, 3), MASK), (slice(3, 7), MASK._replace(first_row=50))]
    gradients, made = None, []
    for rows, mask in pieces:
        arguments = parts[:, rows], add._replace(residual=add.residual[rows]), norm, mask, order
        h, n, *_ = fwd.launch(*arguments)
        results = [h, n]
        for post in (False, True):
            dn, dh, *saved = backward_arguments(arguments, post)
            gradients = gradients or (dn, dh)
            dn, dh = gradients[0][:, rows].contiguous(), gradients[1][rows].contiguous()
            results += bwd.launch(dn, dh, *saved)[:2]
        made.append(results)
    for whole, *cut in zip(*made, strict=True):
        assert torch.equal(torch.cat(cut), whole)


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
        bwd.launch(*backward_arguments(forward_arguments(1, 3, 8)), torch.empty(8, 3, device=DEVICE).T)


SHAPES = [(3, 5, 100), (2, 3, 9000), (2, 2, 17000), (4, 7), (3, 3072), (2, 3, 5, 8), (2,), (2, 0), (2, 0, 3)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
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
    if arguments[2].gamma is not None:
        assert_declared(bwd, backward_arguments(arguments, post=True))
        assert_declared(bwd, backward_arguments(arguments, dn=False))
        assert_declared(bwd, backward_arguments(arguments, post=True, dn=False))


@pytest.mark.parametrize("D", [1, 127, 128, 129, 192, 312, 768, 1000, 1024, 1536, 5120, 8192, 8193, 12288, 16384])
def test_tiles_cover_a_row(D):
    A, b = config.tiles(D)
    assert A + b >= D and 8192 >= A >= b and A & (A - 1) == 0 and b & (b - 1) == 0
    assert A + b < 2 * D or D < 128
    rows = config.fwd_config(D)["ROWS"], config.bwd_config(D, "sm_90")["ROWS"]
    assert all(n & (n - 1) == 0 for n in rows)  # of a tile, as Triton has them


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("D", [64, 768, 1000, 1024, 4096, 5120, 8192, 12288, 16384, 32768, 65537])
def test_on_a_gpu(D, dtype):
    """Compiled, at the widths that have launch parameters of their own; the masks bitwise."""
    arguments = forward_arguments(2, 67, D, dtype=dtype)
    on_a_gpu(fwd, arguments)
    on_a_gpu(bwd, backward_arguments(arguments))
    on_a_gpu(reduce_parts, arguments[:1])
    h, residual = fwd.launch(*arguments)[0], arguments[1].residual
    assert torch.equal(h == residual, fwd.reference(*arguments)[0] == residual)


# ---- forms of backward that no call takes before they are measured ----


def measured(monkeypatch, **parameters):
    """Backward as a measured table would have it, and the parameters of every kernel it starts."""
    started, start = [], _launch._start

    def listen(kernel, grid, device, args, config):
        started.append((kernel.fn.__name__, config))
        return None if device.type == "meta" else start(kernel, grid, device, args, config)

    known = lambda default: {name: value for name, value in parameters.items() if name in default}
    monkeypatch.setattr(triton_backward, "tuned", lambda *asked, default: default | known(default))
    monkeypatch.setattr(_launch, "_start", listen)
    bwd.launch.forget()  # on a GPU, what was recorded before
    return started


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("left_out", PARTS, ids=str)
def test_rows_ahead(monkeypatch, wide, left_out):
    """The same bits."""
    narrow(monkeypatch, wide)
    both = backward_arguments(forward_arguments(2, 20, 100, **left_out))
    want = bwd.launch(*both)
    started = measured(monkeypatch, STAGES=2)
    assert all(map(torch.equal, bwd.launch(*both), want))
    assert [config["STAGES"] for name, config in started if name == "_bwd_kernel"] == [2] * (not wide)


@pytest.mark.parametrize("D", [1024, 20480])
@pytest.mark.parametrize("early", [False, True])
def test_partials_are_summed_by_a_kernel_that_may_start_early(monkeypatch, early, D):
    """Both kernels know of it, and the driver: the second waits on the GPU, not for its launch."""
    started = measured(monkeypatch, EARLY=early)
    both = backward_arguments(forward_arguments(2, 70, D, dtype=torch.bfloat16))
    with _launch.pretending("sm_90"):
        bwd.launch(*tree_map_only(torch.Tensor, lambda t: t.to("meta"), both))
    (_, first), (name, second) = started[-2:]
    assert name == "_reduce_vectors_kernel" and first["EARLY"] is second["EARLY"] is early
    assert second.get("launch_pdl", False) is early and "launch_pdl" not in first


def without_a_bias(m, D, dtype=torch.float32, **left_out):
    """Arguments of backward that have a norm and no bias gradient."""
    return forward_arguments(2, m, D, dtype=dtype, bias=False, **left_out)


@pytest.mark.parametrize(
    "shape, left_out",
    [
        ((17, 72), {}),
        ((2, 128), dict(rms=True, beta=False)),
        pytest.param((2, 128), dict(dropout=False, residual=False), marks=pytest.mark.slow),
        ((0, 72), {}),
    ],
    ids=str,
)
def test_once(monkeypatch, shape, left_out):
    """Rows of four tiles, the last ragged or not; more rows than programs, fewer, none."""
    narrow(monkeypatch, True)
    started = measured(monkeypatch, ONCE=True)
    arguments = without_a_bias(*shape, **left_out)
    for post, dn, dh in ((False, True, True), (True, True, False), (True, False, True)):
        both = backward_arguments(arguments, post, dn, dh)
        started.clear()
        assert_same(bwd.launch(*both), bwd.reference(*both))
        assert [name for name, _ in started] == ["bwd_once_kernel", "_reduce_vectors_kernel"]


@pytest.mark.parametrize("left_out", [{}, dict(rms=True, beta=False)], ids=str)
def test_once_moves_what_it_declares(monkeypatch, left_out):
    """What enters is read once, though a program asks for it again; the same bits in every run."""
    narrow(monkeypatch, True)
    both = backward_arguments(without_a_bias(4, 256, dtype=torch.bfloat16, **left_out))
    twice = assert_declared(bwd, both)
    measured(monkeypatch, ONCE=True)
    once = assert_declared(bwd, both)
    dn, _, saved, *_ = both
    assert twice.read - once.read > dn.nbytes + saved.h.nbytes and once.loads > once.read
    assert all(map(torch.equal, bwd.launch(*both), bwd.launch(*both)))


@pytest.mark.parametrize("left_out", [{}, dict(norm=False, beta=False, bias=False)], ids=str)
def test_what_takes_two_passes_all_the_same(monkeypatch, left_out):
    """A bias gradient, for which registers do not suffice; no norm."""
    narrow(monkeypatch, True)
    started = measured(monkeypatch, ONCE=True)
    both = backward_arguments(forward_arguments(2, 5, 100, **left_out))
    assert_same(bwd.launch(*both), bwd.reference(*both))
    assert "bwd_columns_kernel" in dict(started) and "bwd_once_kernel" not in dict(started)


@pytest.mark.parametrize("D, once", [(8192, False), (8200, True), (16384, True), (16392, False)])
@pytest.mark.parametrize("chosen", [False, True])
def test_which_widths_go_once(monkeypatch, chosen, D, once):
    """Only where a measured table says so."""
    started = measured(monkeypatch, ONCE=chosen)
    both = tree_map_only(torch.Tensor, lambda t: t.to("meta"), backward_arguments(without_a_bias(2, D)))
    with _launch.pretending("sm_90"):
        bwd.launch(*both)
    assert ("bwd_once_kernel" in dict(started)) == (once and chosen)


@pytest.mark.slow
@pytest.mark.parametrize("left_out", [{}, dict(rms=True, beta=False)], ids=str)
@pytest.mark.parametrize("D", [9000, 16384])
def test_wide_rows_once(monkeypatch, D, left_out):
    measured(monkeypatch, ONCE=True)
    both = backward_arguments(without_a_bias(3, D, **left_out))
    assert_same(bwd.launch(*both), bwd.reference(*both))
    low = backward_arguments(without_a_bias(3, D, dtype=torch.bfloat16, **left_out))
    assert_accurate_launch(bwd, low)


@pytest.mark.parametrize(
    "shape, left_out",
    [
        ((2, 70, 100), {}),
        ((2, 70, 768), {}),
        ((1, 70, 100), dict(rms=True, beta=False)),
        ((1, 70, 100), dict(norm=False, beta=False)),
        ((1, 3, 100), dict(bias=False, residual=False, dropout=False)),
        ((1, 0, 8), {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("group", [1, 2, 16])
def test_the_last_programs_sum(monkeypatch, group, shape, left_out):
    """In one kernel, also the bias gradient; groups of programs, the last ragged or not, one of all, one of each."""
    monkeypatch.setattr(partials, "GROUP", group)
    started = measured(monkeypatch, LAST=True)
    arguments = forward_arguments(*shape, **left_out)
    for post in (False, True)[: 2 if arguments[2].gamma is not None else 1]:
        both = backward_arguments(arguments, post)
        for _ in range(2):  # the counters are 0 again
            started.clear()
            assert_same(bwd.launch(*both), bwd.reference(*both))
            assert [name for name, _ in started] == ["_bwd_kernel"]
            assert not counters(torch.device(DEVICE)).any()


def test_without_a_vector_there_is_nothing_to_sum(monkeypatch):
    started = measured(monkeypatch, LAST=True)
    arguments = backward_arguments(forward_arguments(1, 3, 8, norm=False, beta=False, bias=False))
    assert_same(bwd.launch(*arguments), bwd.reference(*arguments))
    assert [name for name, _ in started] == ["_bwd_kernel"] and started[0][1]["EARLY"] is False


def test_on_amd_the_last_programs_do_not_sum(monkeypatch):
    """Their compiler does not hold an atomic add back until other wavefronts' stores are done."""
    started = measured(monkeypatch, LAST=True)
    both = tree_map_only(torch.Tensor, lambda t: t.to("meta"), backward_arguments(forward_arguments(1, 70, 64)))
    for arch, kernels in (("sm_80", 1), ("sm_90", 1), ("gfx942", 2)):
        started.clear()
        with _launch.pretending(arch):
            bwd.launch(*both)
        assert len(started) == kernels, arch
