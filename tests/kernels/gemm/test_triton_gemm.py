"""The Triton side of linear: both paths, the fused GEMMs and torch's GEMM with one pass, equal the reference; the path
that each call takes."""

import pytest
import torch

from tests.kernels.interpreter_bytes import assert_declared, count_bytes
from tpfuse.kernels.gemm import triton_gemm as _gemm
from tpfuse.kernels.gemm.activation import GATED, PLAIN, width
from tpfuse.kernels.gemm.op import linear_dgrad, linear_dgrad_act, linear_fwd, linear_wgrad
from tpfuse.kernels.gemm.triton_gemm import path
from tpfuse.kernels.runtime import launch as _launch
from tpfuse.kernels.runtime import tuning as _tuning
from tpfuse.kernels.runtime.op import least

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's word for a sigmoid of 0
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PATHS = "fused", "torch"
OPS = linear_fwd, linear_dgrad, linear_dgrad_act, linear_wgrad
ALL = *PLAIN, *GATED
# M, N, K, with tiles of 16 x 32 x 16 and two programs: ragged tiles and five turns by descriptors; by pointers, since
# rows do not start at multiples of 16 bytes; one of everything; one column and a deep sum; no rows; nothing to sum.
SHAPES = [(40, 72, 40), (33, 35, 17), (1, 1, 1), (5, 1, 40), (0, 8, 8), (4, 8, 0)]


pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture
def take(monkeypatch):
    """``take("fused")``: which path every call takes from now on."""

    def take(path):
        monkeypatch.setattr(_gemm, "tuned", lambda kernel, arch, dtype, shape, default: default | dict(path=path))
        for op in OPS:
            op.launch.forget()  # on a GPU, what was recorded on the other path

    take("fused")
    return take


@pytest.fixture
def variants(monkeypatch):
    """Whether each launched GEMM took descriptors."""
    seen, start = [], _launch._start

    def spy(kernel, grid, device, args, config):
        if "TMA" in config:
            seen.append(config["TMA"])
        return start(kernel, grid, device, args, config)

    monkeypatch.setattr(_launch, "_start", spy)
    return seen


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def calls(M, N, K, activation="none", dtype=torch.float32, bias=True):
    """(op, arguments) of the forward x [M, K] w' [K, W N], W = 2 where gated, and what leads back through it and a GEMM
    behind it."""
    x, w, b = (
        random(M, K, dtype=dtype),
        random(N * width(activation), K, dtype=dtype),
        random(N * width(activation)) if bias else None,
    )
    z, dy = random(M, N * width(activation), dtype=dtype), random(M, N * width(activation), dtype=dtype)
    summed = torch.float32 if bias else None
    yield linear_fwd, (x, w, b, activation)
    if activation == "none":
        yield linear_dgrad, (dy, w)
        yield linear_wgrad, (dy, x, dtype, summed)
    else:
        yield linear_dgrad_act, (random(M, K, dtype=dtype), random(K, N, dtype=dtype), z, activation, bias, summed)


def assert_same(got, want, **tolerance):
    got, want = ((t,) if isinstance(t, torch.Tensor) else t for t in (got, want))
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, **tolerance or dict(rtol=2e-5, atol=2e-5), check_stride=True)


@pytest.mark.parametrize("taken", PATHS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "activation", [*PLAIN, "swiglu", *(pytest.param(a, marks=pytest.mark.slow) for a in ("geglu", "geglu_tanh"))]
)
def test_launchers(take, variants, activation, shape, taken):
    take(taken)
    for bias in (True, False):
        for op, arguments in calls(*shape, activation, bias=bias):
            assert_same(op.launch(*arguments), op.reference(*arguments))
    assert (True in variants) == (taken == "fused" and shape == SHAPES[0]) and (taken == "fused" or not variants)


@pytest.mark.parametrize("taken", PATHS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("activation", ["none", "gelu", "swiglu"])
def test_low_precision(take, activation, dtype, taken):
    """error(kernel, fp64) <= 2 error(reference in the same dtype, fp64) + 1e-6, by descriptors and by pointers."""
    take(taken)
    for shape in SHAPES[:2]:
        for op, arguments in calls(*shape, activation, dtype):
            double = [
                a.double() if isinstance(a, torch.Tensor) else torch.float64 if a is dtype else a for a in arguments
            ]
            results = op.launch(*arguments), op.reference(*arguments), op.reference(*double)
            for a, b, x in zip(*((r,) if isinstance(r, torch.Tensor) else r for r in results), strict=True):
                if a.numel():
                    assert a.dtype == b.dtype and (a - x).abs().max() <= 2 * (b - x).abs().max() + 1e-6


@pytest.mark.slow
def test_descriptors_and_pointers_give_the_same_bits(take, variants, monkeypatch):
    every = [c for activation in ("none", "gelu_tanh", "swiglu") for c in calls(*SHAPES[0], activation, torch.bfloat16)]
    by_descriptors = [op.launch(*arguments) for op, arguments in every]
    monkeypatch.setattr(_gemm, "has_tma", lambda arch: False)
    for (op, arguments), want in zip(every, by_descriptors, strict=True):
        assert_same(op.launch(*arguments), want, rtol=0, atol=0)
    assert variants == [True] * len(every) + [False] * len(every)


def test_the_number_of_programs_changes_no_bit(take, monkeypatch):
    """Nor the bias gradient's: its partial sums belong to tiles."""
    every = [
        c for activation in ("none", "gelu_tanh") for c in calls(*SHAPES[0], activation) if c[0] is not linear_wgrad
    ]
    results = []
    for programs in (1, 2, 5, 132):
        monkeypatch.setattr(_launch, "_target", lambda device, n=programs: _launch.Target("cpu", n))
        results.append([op.launch(*arguments) for op, arguments in every])
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            assert_same(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_an_activation_rebuilt_is_the_first_one(take, activation):
    """It is taken of z as rounded, on either path."""
    (_, forward), (_, backward) = calls(*SHAPES[0], activation, torch.bfloat16)
    for taken in PATHS:
        take(taken)
        y, z = linear_fwd.launch(*forward)
        assert torch.equal(linear_dgrad_act.launch(*backward[:2], z, activation, True, None)[2], y)


@pytest.mark.parametrize("taken", PATHS)
def test_strides(take, variants, taken):
    """Transposed operands, columns of a wider matrix, one row for all, a base between multiples of 16 bytes."""
    take(taken)
    M, N, K = SHAPES[0]
    w, b, z = random(K, N).t(), random(2 * N)[::2], random(N, M).t()
    for x in (random(M, K + 8)[:, :K], random(M, K + 1)[:, 1:], random(K, M).t(), random(1, K).expand(M, K)):
        assert_same(linear_fwd.launch(x, w, b, "gelu"), linear_fwd.reference(x, w, b, "gelu"))
        assert_same(linear_dgrad.launch(x, w.t()), x @ w.t())
        assert_same(linear_wgrad.launch(x, z, x.dtype, x.dtype), linear_wgrad.reference(x, z, x.dtype, x.dtype))
        assert_same(
            linear_dgrad_act.launch(x, w.t(), z, "relu", True, x.dtype),
            linear_dgrad_act.reference(x, w.t(), z.contiguous(), "relu", True, x.dtype),
        )
    assert set(variants) == (set() if taken == "torch" else {True, False})


def test_offsets_beyond_2_to_the_31(take):
    for stride in (1 << 30) + 8, (1 << 30) + 1:  # by descriptors, by pointers
        far = torch.empty(3 * stride, dtype=torch.float16, device=DEVICE).as_strided((3, 16), (stride, 1))
        near = far.copy_(random(3, 16)).contiguous()
        w = random(16, 16, dtype=torch.float16)
        assert_same(linear_dgrad.launch(far, w), linear_dgrad.launch(near, w), rtol=0, atol=0)


# ---- what a call declares, and which path it takes ----


def every_call(dtype=torch.bfloat16):
    return [
        c
        for activation in ("none", "gelu_tanh", "swiglu")
        for bias in (True, False)
        for c in calls(*SHAPES[0], activation, dtype, bias)
    ]


def test_the_fused_path_moves_what_it_declares(take):
    for op, arguments in every_call():
        assert_declared(op, arguments)


def test_the_other_path_moves_what_it_declares(take):
    """Torch's GEMM is not seen by the counter: it reads its operands and writes its result, once each."""
    take("torch")
    for op, arguments in every_call():
        with count_bytes() as moved:
            outputs = op.launch(*arguments)
        cost = op.cost(arguments, outputs)
        a, b = arguments[:2]
        (M, K), N = a.shape if op is not linear_wgrad else a.t().shape, len(b) if op is linear_fwd else b.shape[1]
        gemm = least((a, b, arguments[2] if op is linear_fwd else None), (a.new_empty(M, N),))
        assert (moved.read + gemm.read, moved.written + gemm.written) == (cost.read, cost.written), op.name
        assert cost.flops == 2 * M * N * K


def test_flops_are_those_of_the_gemm_on_either_path(take):
    for op, arguments in every_call():
        outputs = op.reference(*arguments)
        fused = op.cost(arguments, outputs)
        take("torch")
        assert fused.flops == op.cost(arguments, outputs).flops >= 2 * 40 * 72 * 40
        assert fused.read + fused.written <= sum(op.cost(arguments, outputs)[:2])
        take("fused")


def test_torch_unless_measured(monkeypatch):
    large, other = (4096, 4096, 1024), (8192, 4096, 1024)
    for op in OPS:
        assert path(op.name, "gelu", "sm_90", torch.bfloat16, large) == "torch"
    monkeypatch.setattr(
        _tuning, "_table", lambda: {"sm_90": {"linear_fwd gelu": {"bf16 4096x4096x1024": {"path": "fused", "BN": 128}}}}
    )
    taken = {shape: path("linear_fwd", "gelu", "sm_90", torch.bfloat16, shape) for shape in (large, other)}
    assert taken == {large: "fused", other: "torch"}
    assert path("linear_fwd", "relu", "sm_90", torch.bfloat16, large) == "torch"
    assert _gemm.parameters("linear_fwd", "gelu", "sm_90", torch.bfloat16, large) == _gemm.TILES["sm_90"] | dict(
        path="fused", BN=128
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(512, 1024, 256), (1000, 1000, 1000), (333, 77, 129), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("activation", ALL)
def test_on_a_gpu(take, activation, shape, dtype):
    """Compiled: error(kernel, fp64) <= 2 error(torch's path, fp64) + a rounding of the largest value."""
    for op, arguments in calls(*shape, activation, dtype):
        double = [a.double() if isinstance(a, torch.Tensor) else torch.float64 if a is dtype else a for a in arguments]
        take("fused")
        ours = op.launch(*arguments)
        again = op.launch(*arguments)
        take("torch")
        theirs, exact = op.launch(*arguments), op.reference(*double)
        for a, twice, b, x in zip(
            *((r,) if isinstance(r, torch.Tensor) else r for r in (ours, again, theirs, exact)), strict=True
        ):
            assert torch.equal(a, twice)
            if a.numel():
                limit = 2 * (b - x).abs().max() + torch.finfo(a.dtype).eps * x.abs().max()
                assert (a - x).abs().max() <= limit


@pytest.mark.parametrize("taken", PATHS)
@pytest.mark.parametrize("activation", ["gelu_tanh", "swiglu"])
def test_results_in_places_that_are_given(take, taken, activation):
    """As the bodies of overlapped ops give them."""
    take(taken)
    _, (_, args) = calls(*SHAPES[0], activation)
    want = linear_dgrad_act.launch(*args)
    places = torch.full_like(want[0], 7), torch.full_like(want[2], 7)
    got = linear_dgrad_act.launch(*args, False, *places)
    assert torch.equal(places[0], want[0]) and torch.equal(places[1], want[2]) and torch.equal(got[1], want[1])
    again = linear_dgrad_act.cpu(*args, False, *(torch.full_like(p, 7) for p in places))
    assert_same(again, linear_dgrad_act.reference(*args))
