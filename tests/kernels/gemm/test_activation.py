"""The Triton side of activations: launcher == reference, plain and gated, and the bias gradient's partial sums."""

import pytest
import torch

from tests.kernels.interpreter_bytes import assert_declared
from tpfuse.kernels.gemm import triton_activation as _activation
from tpfuse.kernels.gemm.activation import ACTIVATIONS, GATED, width
from tpfuse.kernels.gemm.op import activation_bwd, activation_fwd
from tpfuse.kernels.gemm.triton_activation import column_sum_launch
from tpfuse.kernels.runtime import launch as _launch

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's word for a sigmoid of 0
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ACTIVATION = pytest.mark.parametrize("activation", (*ACTIVATIONS, *GATED))
# No rows, one element, several blocks of a flat walk, several programs of several turns (of 8 rows) and two chunks of
# 256 columns
SHAPES = [(0, 5), (1, 1), (3, 1280), (130, 300)]


pytestmark = pytest.mark.usefixtures("poisoned")


def arguments(rows, columns, activation, dtype=torch.float32, rebuild=True):
    z, dy = 2 * torch.randn(rows, columns * width(activation), device=DEVICE), torch.randn(rows, columns, device=DEVICE)
    return dy.to(dtype), z.to(dtype), activation, rebuild, torch.float32


def assert_same(got, want, **tolerance):
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, **tolerance or dict(rtol=2e-5, atol=2e-5), check_stride=True)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@ACTIVATION
def test_launchers(activation, shape):
    for rebuild in (False, True):
        dy, z, *rest = arguments(*shape, activation, rebuild=rebuild)
        assert_same(activation_bwd.launch(dy, z, *rest), activation_bwd.reference(dy, z, *rest))
    assert_same([activation_fwd.launch(z, activation)], [activation_fwd.reference(z, activation)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@ACTIVATION
def test_columns_alone_have_the_bits_of_the_same_columns_among_others(activation, dtype):
    """On a CPU, where torch's sigmoid rounds the last elements of a tensor in another way than the others."""
    dy, z, *rest = (t.cpu() if isinstance(t, torch.Tensor) else t for t in arguments(5, 39, activation, dtype))
    columns, both = slice(3, 10), slice(3 * width(activation), 10 * width(activation))
    few_dy, few_z = dy[:, columns].contiguous(), z[:, both].contiguous()
    assert torch.equal(activation_fwd(few_z, activation), activation_fwd(z, activation)[:, columns])
    dz, _, y = activation_bwd(dy, z, *rest)
    few_dz, _, few_y = activation_bwd(few_dy, few_z, *rest)
    assert torch.equal(few_dz, dz[:, both]) and torch.equal(few_y, y[:, columns])


def places_of(results):
    """One for every output that has elements but for the bias gradient, among rows that are not to be touched."""
    wide = [torch.full((len(t) + 2, *t.shape[1:]), 7.0, device=DEVICE) for t in results if t.dim() == 2]
    return wide, tuple(t[1:-1] for t in wide)


@pytest.mark.parametrize("side", ["launch", "cpu"])
@ACTIVATION
def test_results_in_places_that_are_given(activation, side):
    """As other ops' bodies give them: the same bits, and nothing beside."""
    dy, z, *rest = arguments(130, 300, activation)
    for op, args in (activation_fwd, (z, activation)), (activation_bwd, (dy, z, *rest)):
        run = getattr(op, side)
        want = run(*args)
        want = (want,) if isinstance(want, torch.Tensor) else want
        wide, places = places_of(want)
        run(*args, *places)
        for t, place, made in zip(wide, places, [t for t in want if t.dim() == 2], strict=True):
            assert torch.equal(place, made) and (t[0] == 7).all() and (t[-1] == 7).all()


def test_column_sum():
    x = torch.randn(130, 300, device=DEVICE)
    assert_same([column_sum_launch(x, torch.float32)], [x.sum(0)])
    assert (
        column_sum_launch(torch.ones(4096, 1, device=DEVICE).bfloat16(), torch.float32).item() == 4096
    )  # a running sum in bf16 stops at 256


@pytest.mark.parametrize("side", ["launch", "cpu", "reference"])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "swiglu"])
def test_the_bias_gradient_in_the_dtype_asked_for(monkeypatch, activation, side):
    """It is the fp32 sum, rounded once; where none is asked for nothing is summed, and dz is the same."""
    started, start = [], _launch._start
    monkeypatch.setattr(_launch, "_start", lambda k, *a, **o: (started.append(k.fn.__name__), start(k, *a, **o))[1])
    run, (dy, z, *rest, _) = getattr(activation_bwd, side), arguments(130, 300, activation, torch.bfloat16)
    dz, db, y = run(dy, z, *rest, torch.float32)
    reductions = len(started)
    for dtype in (torch.bfloat16, None):
        other = run(dy, z, *rest, dtype)
        assert torch.equal(other[0], dz) and torch.equal(other[2], y)
        expected = db.to(dtype) if dtype is not None else db.new_empty(0)
        assert other[1].dtype == expected.dtype and torch.equal(other[1], expected)
    if side == "launch":
        assert started[reductions:] == ["_activation_bwd_kernel", "_reduce_kernel", "_activation_bwd_kernel"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@ACTIVATION
def test_low_precision(activation, dtype):
    """error(kernel, fp64) <= 2 error(reference in the same dtype, fp64) + 1e-6"""
    dy, z, *rest = arguments(9, 70, activation, dtype)
    ours = activation_fwd.launch(z, activation), *activation_bwd.launch(dy, z, *rest)
    theirs = activation_fwd.reference(z, activation), *activation_bwd.reference(dy, z, *rest)
    exact = activation_fwd.reference(z.double(), activation), *activation_bwd.reference(dy.double(), z.double(), *rest)
    for a, b, x in zip(ours, theirs, exact, strict=True):
        assert a.dtype == b.dtype and (a - x).abs().max() <= 2 * (b - x).abs().max() + 1e-6
    assert torch.equal(ours[0], ours[3])  # the activation, rebuilt


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
def test_in_the_tails(activation):
    """In fp32, value and derivative from -1e4 to 1e4: within 1e-6 of the exact ones, or of a rounding where these are
    large."""
    z = torch.cat((torch.linspace(-12, 12, 2001), torch.tensor([-1e4, -100.0, -0.0, 100.0, 1e4]))).to(DEVICE)[None]
    ones = torch.ones_like(z)
    ours = activation_fwd.launch(z, activation), activation_bwd.launch(ones, z, activation, False, None)[0]
    double = z.double(), activation
    exact = activation_fwd.reference(*double), activation_bwd.reference(ones.double(), *double, False, None)[0]
    assert_same(ours, [x.float() for x in exact], rtol=1e-6, atol=1e-6)


def test_gelu_of_every_bf16_number_and_of_a_dense_grid():
    """Value and derivative, in fp32, within 2e-7 of the exact ones, or 2e-7 of them where these are large; at infinity
    their limits, and of what is no number none."""
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16).float()
    grid = torch.linspace(-16, 16, 1 << 17)
    z = torch.cat((every[every.isfinite()], grid)).to(DEVICE).view(-1, 256)
    ones = torch.ones_like(z)
    ours = activation_fwd.launch(z, "gelu"), activation_bwd.launch(ones, z, "gelu", False, None)[0]
    double = z.double(), "gelu"
    exact = activation_fwd.reference(*double), activation_bwd.reference(ones.double(), *double, False, None)[0]
    for a, x in zip(ours, exact, strict=True):
        assert ((a - x).abs() <= 2e-7 * x.abs().clamp(min=1)).all()
    ends = torch.tensor([[-torch.inf, torch.inf, torch.nan]], device=DEVICE)
    slope = activation_bwd.launch(torch.ones_like(ends), ends, "gelu", False, None)[0]
    limits = torch.tensor([[0.0, torch.inf, torch.nan]], device=DEVICE), torch.tensor([[0.0, 1.0, torch.nan]])
    assert_same((activation_fwd.launch(ends, "gelu"), slope.cpu()), limits, rtol=0, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("activation", ["relu", "relu2"])
def test_ends_of_relu(activation):
    """NaN stays what it is, and no gradient comes through a unit that is off, were it infinite (relu alone)."""
    z = torch.tensor([[-torch.inf, torch.inf, torch.nan, -1.0, 0.0]], device=DEVICE)
    value = torch.tensor([[0.0, torch.inf, torch.nan, 0.0, 0.0]])
    for forward in (activation_fwd.launch, activation_fwd.cpu):
        torch.testing.assert_close(forward(z, activation).cpu(), value, rtol=0, atol=0, equal_nan=True)
    if activation == "relu":
        dy = torch.tensor([[torch.inf, 2.0, 3.0, torch.nan, torch.inf]], device=DEVICE)
        dz = activation_bwd.cpu(dy, z, activation, False, None)[0].cpu()
        torch.testing.assert_close(dz, torch.tensor([[0.0, 2.0, 3.0, 0.0, 0.0]]), rtol=0, atol=0)


@pytest.mark.parametrize("activation", ["gelu_tanh", "swiglu"])
def test_non_contiguous(activation):
    dy, z, *rest = arguments(6, 8, activation)
    far_dy, far_z = dy.t().contiguous().t(), torch.stack((z, z), 2)[:, :, 0]
    assert not far_dy.is_contiguous() and not far_z.is_contiguous()
    assert_same(activation_bwd.launch(far_dy, far_z, *rest), activation_bwd.launch(dy, z, *rest), rtol=0, atol=0)
    assert_same([activation_fwd.launch(far_z, activation)], [activation_fwd.launch(z, activation)], rtol=0, atol=0)


@pytest.mark.parametrize("activation", ["gelu_tanh", "swiglu"])
def test_declared_bytes(activation):
    dy, z, *_ = arguments(66, 64, activation, torch.bfloat16)
    assert_declared(activation_fwd, (z, activation))
    for rebuild in (False, True):
        moved = assert_declared(activation_bwd, (dy, z, activation, rebuild, torch.float32))
        assert moved.written > 2 * z.numel() + 2 * dy.numel() * rebuild  # the partial sums are counted


def test_partials_are_a_small_part_of_the_traffic(monkeypatch):
    monkeypatch.setattr(_launch, "_target", lambda device: _launch.Target("sm_90", 132))
    for rows, columns in (4096, 4096), (1 << 16, 1024), (1 << 16, 64), (16, 1024):
        dy = torch.empty(rows, columns, dtype=torch.bfloat16, device="meta")
        P = _activation.partial_rows(dy)
        assert 1 <= P <= max(1, rows // 64)
        assert P * -(-columns // _activation.BWD["A"]) >= min(8 * 132, rows // 64 * -(-columns // _activation.BWD["A"]))


@pytest.mark.gpu
@ACTIVATION
def test_on_a_gpu(activation):
    """Compiled, in bf16: to a rounding of the result."""
    dy, z, *rest = arguments(1000, 1000, activation, torch.bfloat16)
    assert_same(activation_bwd.launch(dy, z, *rest), activation_bwd.reference(dy, z, *rest), rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_far_rows_on_a_gpu(activation):
    """Offsets beyond 2^31 elements, which take gigabytes that other tests on the same GPU may need: not of every
    activation."""
    large = torch.randn(
        (1 << 20) // width(activation) + 1, 2048 * width(activation), device=DEVICE, dtype=torch.bfloat16
    )
    y = activation_fwd.launch(large, activation)
    assert_same([y[-1:]], [activation_fwd.reference(large[-1:], activation)], rtol=2e-2, atol=2e-2)
