"""The Triton side of linear_cross_entropy, under the interpreter or on a GPU: each launcher equals its reference."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.losses.test_linear import many_rows
from tests.kernels.losses.test_op import double
from tests.kernels.samples import fused
from tpfuse.kernels.losses import linear_triton as K
from tpfuse.kernels.losses.linear import linear_cross_entropy_bwd, linear_cross_entropy_stats
from tpfuse.kernels.losses.options import Linear, Loss, Rows
from tpfuse.kernels.runtime import launch as _launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# one ragged tile whose rows are not 16 bytes apart; ragged tiles in every dimension; chunks of 128 columns, a ragged
# last; one column
SHAPES = [(3, 5, 7), (70, 100, 40), (5, 300, 24), (4, 1, 8)]


@pytest.fixture(params=["torch", "fused"])
def path(request, monkeypatch):
    """Which GEMMs make dW and dx; torch's by default."""
    if request.param == "fused":
        monkeypatch.setattr(K, "tuned", fused)
    return request.param


def launch_arguments(rows, vocab, width, dtype=torch.float32, bias=True, smoothing=0.1):
    """The middle of three slices: labels on its first and last column, outside it on either side, ignored.  -> stats',
    bwd's"""
    pytest.importorskip("triton")
    labels = torch.randint(3 * vocab, (rows,))
    for i, label in enumerate((vocab, 2 * vocab - 1, -100, vocab - 1, 2 * vocab)[:rows]):
        labels[i] = label
    x, w, b = (torch.randn(*shape).to(dtype).to(DEVICE) for shape in ((rows, width), (vocab, width), (vocab,)))
    x, b, labels = x * width**-0.5, b if bias else None, labels.to(DEVICE)
    lse = torch.logsumexp(F.linear(x.float(), w.float(), None if b is None else b.float()), -1) + 1
    dloss = torch.rand(1, device=DEVICE).expand(rows)
    layer, loss = Linear(x, w, b), Loss(3 * vocab, first_token=vocab, label_smoothing=smoothing, z_loss=1e-2)
    return (layer, labels, loss), (layer, Rows(labels, lse, dloss), loss)


def both_launchers(shape, **options):
    return zip((linear_cross_entropy_stats, linear_cross_entropy_bwd), launch_arguments(*shape, **options), strict=True)


def outputs(y):
    return (y,) if isinstance(y, torch.Tensor) else y


@pytest.mark.parametrize("bias, smoothing", [(True, 0.1), (False, 0.0)])
@pytest.mark.parametrize("shape", [*SHAPES, (0, 7, 8)], ids=str)
def test_launchers(shape, bias, smoothing, path, small_chunks, poisoned):
    for op, args in both_launchers(shape, bias=bias, smoothing=smoothing):
        got, want = outputs(op.launch(*args)), outputs(op.reference(*args))
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5, check_stride=True)


def test_two_runs_give_the_same_bits(path, small_chunks):
    for op, args in both_launchers((5, 300, 24)):
        assert all(map(torch.equal, outputs(op.launch(*args)), outputs(op.launch(*args))))


def assert_accurate(op, args, theirs):
    exact = op.reference(*double(args))
    for y, z, truth in zip(outputs(op.launch(*args)), outputs(theirs), outputs(exact), strict=True):
        error, allowed = (torch.linalg.vector_norm(t.double() - truth, torch.inf) if len(truth) else 0 for t in (y, z))
        assert error <= 2 * allowed + 1e-6, (op.name, truth.shape, error, allowed)


# tiles are 128 x 128 here
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(20, 300, 72), (130, 60, 9)], ids=str)
def test_launchers_in_low_precision(shape, dtype, path, small_chunks, poisoned):
    """Against torch's own GEMMs in that dtype, which is what a CPU runs."""
    for op, args in both_launchers(shape, dtype=dtype):
        assert_accurate(op, args, op.cpu(*args))


def test_launched_dw_is_summed_in_fp32(path):
    x, w, labels = (t.detach().bfloat16().to(DEVICE) if t.is_floating_point() else t.to(DEVICE) for t in many_rows())
    pytest.importorskip("triton")
    lse, dloss = torch.logsumexp(x.float() @ w.float().t(), -1), torch.full((1,), 1 / 4096, device=DEVICE).expand(4096)
    args = Linear(x, w, None), Rows(labels, lse, dloss), Loss(5)
    assert_accurate(linear_cross_entropy_bwd, args, linear_cross_entropy_bwd.cpu(*args))


def test_launchers_where_columns_are_minus_infinity(poisoned):
    """A bias of -inf is how padding is kept out: no probability, no gradient, no NaN; a whole tile and a whole slice of
    it too."""
    (layer, labels, loss), (_, rows, _) = launch_arguments(5, 200, 8)
    loss, b = loss._replace(label_smoothing=0.0), layer.b
    for columns in (slice(150, None), slice(0, 70), slice(None)):
        b = b.clone()
        b[columns] = -torch.inf
        labels = torch.full_like(labels, loss.first_token + 100)
        layer = layer._replace(b=b)
        stats = linear_cross_entropy_stats.launch(layer, labels, loss)
        torch.testing.assert_close(stats[:, :2], linear_cross_entropy_stats.reference(layer, labels, loss)[:, :2])
        args = layer, rows._replace(labels=labels), loss
        torch.testing.assert_close(linear_cross_entropy_bwd.launch(*args), linear_cross_entropy_bwd.reference(*args))


def test_launchers_take_any_strides():
    """Transposed, expanded and misaligned operands; labels with gaps; offsets beyond 2^31 elements."""
    (layer, labels, loss), (_, rows, _) = launch_arguments(5, 20, 16, dtype=torch.float16)
    x, w, b = layer
    far = torch.empty((1 << 31) + 200, dtype=torch.float16, device=DEVICE).as_strided((5, 16), ((1 << 29) + 8, 1))
    misaligned = torch.empty(20 * 16 + 1, dtype=torch.float16, device=DEVICE)[1:].view(20, 16)
    gaps = torch.stack([labels, labels], 1)[:, 0]
    strided = Linear(far.copy_(x), misaligned.copy_(w), b)
    assert torch.equal(
        linear_cross_entropy_stats.launch(strided, gaps, loss), linear_cross_entropy_stats.launch(layer, labels, loss)
    )
    strided = Linear(x.t().contiguous().t(), w.t().contiguous().t(), torch.stack([b, b], 1)[:, 0])
    got = linear_cross_entropy_bwd.launch(strided, rows._replace(labels=gaps), loss)
    assert all(map(torch.equal, got, linear_cross_entropy_bwd.launch(layer, rows, loss)))


@pytest.mark.skipif(DEVICE == "cuda", reason="counts what the interpreter moves")
@pytest.mark.parametrize("bias, smoothing", [(True, 0.1), (False, 0.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_declared_bytes(dtype, bias, smoothing, small_chunks, monkeypatch):
    pytest.importorskip("triton")
    from tests.kernels.interpreter_bytes import assert_declared

    monkeypatch.setattr(K, "tuned", fused)
    for op, args in both_launchers((64, 384, 16), dtype=dtype, bias=bias, smoothing=smoothing):
        assert_declared(op, args)


@pytest.mark.skipif(DEVICE == "cuda", reason="counts what the interpreter moves")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_declared_bytes_with_torchs_products(dtype, small_chunks, monkeypatch):
    """What kernels and GEMMs move; in 16 bits also fp32 sums, which the last chunk's GEMM leaves to be rounded."""
    pytest.importorskip("triton")
    from tests.kernels.interpreter_bytes import count_bytes

    _, args = launch_arguments(64, 384, 16, dtype=dtype)
    contract, read, written = K._contract, [], []

    def counted(kernel, dz, b, *, out, add=None, fixed=False):
        contract(kernel, dz, b, out=out, add=add, fixed=fixed)
        total = out if add is None else add
        rounded = total is not out
        read.extend((dz, b, *([] if add is None else [add]), *[total] * rounded))
        written.extend((total, *[out] * rounded))

    monkeypatch.setattr(K, "_contract", counted)
    with count_bytes() as moved:
        outputs = linear_cross_entropy_bwd.launch(*args)
    cost = linear_cross_entropy_bwd.cost(args, outputs)
    assert sum(t.nbytes for t in read) + moved.read == cost.read
    assert sum(t.nbytes for t in written) + moved.written == cost.written


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(300, 1000, 100), (4096, 50257, 768)], ids=str)
def test_on_a_gpu(shape, dtype, path):
    """Compiled: the second takes several chunks."""
    rounding = dict(rtol=2e-2, atol=2e-2) if dtype == torch.bfloat16 else dict(rtol=1e-3, atol=1e-3)
    for op, args in both_launchers(shape, dtype=dtype):
        torch.testing.assert_close(outputs(op.launch(*args)), outputs(op.reference(*args)), **rounding)


@pytest.mark.parametrize("arch, used", [("sm_90", "torch"), ("sm_80", "torch"), ("gfx942", "fused")])
def test_whose_products(arch, used, monkeypatch):
    """One GEMM for dW and one for dx, of torch's where it has one with an fp32 sum; the chunk's buffer is bounded."""
    pytest.importorskip("triton")
    started, asked = [], []
    monkeypatch.setattr(_launch, "_start", lambda kernel, *_, **__: started.append(kernel.fn.__name__))
    monkeypatch.setattr(K, "_multiply", lambda a, b, **to: asked.append((a, to)))
    monkeypatch.setattr(K, "ELEMENTS", 300 * 256)
    monkeypatch.setattr(K, "LEAST_COLUMNS", 128)
    with torch.device("meta"), _launch.pretending(arch):
        x, w, labels = torch.empty(300, 64).bfloat16(), torch.empty(768, 64).bfloat16(), torch.empty(300).long()
        rows = Rows(labels, torch.empty(300), torch.empty(1).expand(300))
        linear_cross_entropy_bwd.launch(Linear(x, w, None), rows, Loss(768))
    kernels = dict(torch=[], fused=["_contract_kernel"] * 2)[used]
    assert started == ["_dlogits_kernel", *kernels] * 3
    if used == "torch":
        assert [(to["out"].dtype, to["adding"]) for _, to in asked] == [
            (torch.bfloat16, False), (torch.float32, False), *[(torch.bfloat16, False), (torch.float32, True)] * 2
        ]  # fmt: skip
        assert all(a.untyped_storage().nbytes() == 2 * 300 * 256 for a, _ in asked)


@pytest.mark.parametrize("transposed", [False, True])
def test_padding_of_a_chunk_is_not_read(transposed):
    """dz's rows are padded to 16 bytes, unfilled.  oneDNN on AMX multiplies the padding by zero: NaN."""
    a = torch.full((21, 40), torch.nan, dtype=torch.bfloat16)[:, :37].normal_()
    a = a.t() if transposed else a
    b, out = torch.randn(a.shape[1], 40).bfloat16(), torch.empty(len(a), 40, dtype=torch.bfloat16)
    K._multiply(a, b, out=out, adding=False)
    torch.testing.assert_close(out, (a.float() @ b.float()).bfloat16(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("rows, vocab", [(0, 1), (1, 7), (4096, 131072), (4096, 50257), (1 << 20, 50257)])
def test_chunks_cover_the_vocabulary(rows, vocab):
    chunks = list(K.vocabulary_chunks(rows, vocab, K.ELEMENTS))
    assert chunks[0][0] == 0 and chunks[-1][1] == vocab and all(a[1] == b[0] for a, b in itertools.pairwise(chunks))
    assert all(i % 128 == 0 for i, _ in chunks)  # so that a chunk of W begins where a descriptor may
    assert max(j - i for i, j in chunks) * rows <= max(K.ELEMENTS, rows * K.LEAST_COLUMNS) + 128 * rows
