"""Matrix products on a CPU without instructions for 16 bits: values, places, and that nothing is left to torch.

Every test says itself whether the processor has the instructions, so that it holds on any.
"""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from bench.bits.kinds import KINDS
from tests.common import error
from tpfuse.kernels.runtime import matmul, processor
from tpfuse.kernels.runtime.philox import make_rng
from tpfuse.layers import CrossAttention
from tpfuse.models import GPT

BF16, FP16 = torch.bfloat16, torch.float16
PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mv", "mkldnn::_linear_pointwise"}


@pytest.fixture
def without(monkeypatch):
    """A processor without the instructions, and blocks that small matrices fill."""
    monkeypatch.setattr(matmul, "multiplies", lambda dtype: False)
    monkeypatch.setattr(matmul, "BLOCK", 700)


def random(*shape, dtype=BF16):
    return torch.randn(shape).to(dtype)


def rounded(exact, dtype):
    """One rounding of what fp32 adds up: half a last place, and what its order leaves."""
    return dict(rtol=2 * torch.finfo(dtype).eps, atol=1e-5 * float(exact.abs().max()) if exact.numel() else 0.0)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    "M, K, N", [(1, 5, 3), (3, 9, 70), (4, 1, 1), (67, 33, 129), (130, 800, 5), (0, 4, 4), (6, 0, 3)]
)
def test_products(without, M, K, N, dtype):
    x, w, b = random(M, K, dtype=dtype), random(N, K, dtype=dtype), random(N, dtype=dtype)
    exact = x.double() @ w.double().t()
    for product, want in (
        (matmul.linear(x, w), exact),
        (matmul.linear(x, w, b), exact + b.double()),
        (matmul.mm(x, w.t().contiguous()), exact),
        (matmul.mm(x.t().contiguous().t(), w.t(), b), exact + b.double()),
    ):
        assert product.dtype == dtype and product.is_contiguous()
        torch.testing.assert_close(product.double(), want, **rounded(want, dtype))


def test_a_place_is_filled(without):
    """Every second column of a larger matrix, of which the others stay."""
    x, w, place = random(40, 30), random(30, 25), torch.full((40, 50), 7.0, dtype=BF16)
    assert torch.equal(matmul.mm(x, w, place=place[:, ::2]), place[:, ::2])
    assert torch.equal(place[:, ::2], matmul.mm(x, w)) and (place[:, 1::2] == 7).all()


def test_batches(without):
    a, b = random(6, 9, 31), random(6, 31, 17)
    exact, place = torch.bmm(a.double(), b.double()), random(6, 9, 34)[..., ::2]
    torch.testing.assert_close(matmul.bmm(a, b).double(), exact, **rounded(exact, BF16))
    matmul.bmm(a, b, place=place)
    assert torch.equal(place, matmul.bmm(a, b))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, BF16])
def test_elsewhere_they_are_torchs(monkeypatch, dtype):
    """With the instructions, and in other dtypes: the same bits."""
    monkeypatch.setattr(matmul, "multiplies", lambda dtype: True)
    x, w, b = (random(*shape, dtype=dtype) for shape in ((8, 24), (16, 24), (16,)))
    assert torch.equal(matmul.linear(x, w, b), torch.nn.functional.linear(x, w, b))
    assert torch.equal(matmul.mm(x, w.t()), torch.mm(x, w.t()))
    assert torch.equal(matmul.bmm(x[None], w.t()[None]), torch.bmm(x[None], w.t()[None]))


def test_two_dtypes_are_torchs_error(without):
    matrix = torch.ones(5, 5)
    for product, x in (matmul.mm, matrix), (matmul.linear, matrix), (matmul.bmm, matrix[None]):
        with pytest.raises(RuntimeError, match="same dtype|expected scalar type"):
            product(x.to(BF16), x.to(FP16))


def test_memory(without, monkeypatch):
    """What is widened at a time has at most BLOCK elements, or is one row or column."""
    sizes, to_fp32 = [], torch.Tensor.float
    monkeypatch.setattr(torch.Tensor, "float", lambda x: sizes.append(x.numel()) or to_fp32(x))
    matmul.mm(random(200, 90), random(90, 300))
    matmul.mm(random(5, 900), random(900, 4))
    assert 600 < max(sizes) <= 900 and len(sizes) > 50


def sixteen_bits(run):
    """The products of 16-bit matrices of more than a few rows that torch makes in ``run``."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as record:
        run()
    events = [e for e in record.profiler.kineto_results.events() if e.name() in PRODUCTS]
    assert events
    half = [e for e in events if {"c10::BFloat16", "c10::Half"} & set(e.dtypes())]
    return [(e.name(), shapes) for e in half if (shapes := [s for s in e.shapes() if len(s) > 1])[0][0] >= matmul.FEW]


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma odd", "qwen2 moe odd"])
def test_nothing_is_left_to_torch(kind, monkeypatch):
    """A training step and generation: torch's products of 16 bits are dot products of a few rows alone."""
    model = GPT(KINDS[kind], seed=1).to(BF16)
    ids = torch.randint(0, model.config.vocab_size, (8, 24))

    def run():
        model.train()(ids, labels=ids, step=0).loss.backward()
        model.eval().generate(ids[:, :9], max_new_tokens=3)

    monkeypatch.setattr(matmul, "multiplies", lambda dtype: False)
    assert not sixteen_bits(run)
    losses = []
    for supported in (False, True):
        monkeypatch.setattr(matmul, "multiplies", lambda dtype, supported=supported: supported)
        losses.append(model.eval()(ids, labels=ids).loss.detach())
    assert error(*losses) <= 2e-2
    assert sixteen_bits(run)  # what the profiler would have seen


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_cross_attention_too(dropout, monkeypatch):
    """Products that autograd records: their operands are widened, and gradients come back in 16 bits."""
    layer = CrossAttention(32, num_heads=4, dropout=dropout).to(BF16)
    x, memory = random(6 * 2, 32).requires_grad_(), random(9 * 2, 32).requires_grad_()

    def run():
        y = layer(x, memory, batch=2, rng=make_rng(seed=0, step=0))
        assert y.dtype == BF16
        y.float().square().sum().backward()

    monkeypatch.setattr(matmul, "multiplies", lambda dtype: False)
    assert not sixteen_bits(run) and x.grad.dtype == memory.grad.dtype == BF16


@pytest.mark.parametrize("limit, name", [("AVX2", "ONEDNN_MAX_CPU_ISA"), ("sse41", "DNNL_MAX_CPU_ISA")])
def test_a_limit_of_the_instructions_is_heeded(limit, name, monkeypatch):
    monkeypatch.setitem(processor.LIMITS, name, limit)
    assert not processor.multiplies.__wrapped__(BF16)


def test_what_torch_says_is_asked(monkeypatch):
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.setitem(processor.LIMITS, name, None)
    for dtype, op in processor.SUPPORTED.items():
        assert processor.multiplies.__wrapped__(dtype) == bool(getattr(torch.ops.mkldnn, op)())
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not processor.multiplies.__wrapped__(BF16)


@pytest.mark.parametrize("biased", [False, True])
def test_one_row_times_a_vectors_product(monkeypatch, biased):
    """As with AMX, bf16 and contiguous; anything else is mm's."""
    random = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(*shape, generator=random).to(BF16) for shape in ((1, 24), (10, 24), (10,)))
    b, calls = b if biased else None, []
    name = "addmv" if biased else "mv"
    right = getattr(torch, name)
    monkeypatch.setattr(torch, name, lambda *args, **named: calls.append(args) or right(*args, **named))
    exact = torch.nn.functional.linear(x.double(), w.double(), None if b is None else b.double())
    place = torch.empty(1, 10, dtype=BF16)
    for tiles, count in ((False, 0), (True, 1)):
        monkeypatch.setattr(matmul, "multiplies_tiles", lambda tiles=tiles: tiles)
        monkeypatch.setattr(matmul, "multiplies", lambda dtype: True)
        torch.testing.assert_close(matmul.row(x, w, b).double(), exact, rtol=0.02, atol=0.02)
        assert len(calls) == count
    assert biased or (matmul.row(x, w, place=place) is place and torch.equal(place, matmul.row(x, w)))
    calls.clear()
    matmul.row(x, w.t().contiguous().t(), b)
    matmul.row(x.float(), w.float(), None if b is None else b.float())
    assert calls == []
