import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

from tests.kernels import common
from tests.kernels.common import gradcheck, leaf, run
from tests.kernels.interpreter_bytes import assert_declared
from tests.kernels.kernel_rules import DEVICE, assert_accurate_launch, assert_same, narrow, on_a_gpu
from tpfuse.kernels import layer_norm, rms_norm
from tpfuse.kernels.norm import Recompute, norm_apply, norm_in
from tpfuse.kernels.norm.core import reduce_parts
from tpfuse.kernels.norm.records import ALONE, PRE, Add, NormVectors, Saved, Wanted
from tpfuse.kernels.norm.verbs import NORM, REDUCE_BIAS_DROPOUT_ADD_NORM
from tpfuse.kernels.runtime.philox import Mask

X, GAMMA, STAT = torch.randn(3, 7), torch.randn(7), torch.rand(3)
FP32 = torch.float32
_, norm_fwd, norm_bwd = NORM


def alone(x, norm):
    return x[None], Add(), norm, Mask(), ALONE


def back(dn, dh, saved, beta):
    return dn, dh, saved, Mask(), ALONE, Wanted(None, beta, None, saved.h.dtype)


SAMPLES = [
    (norm_fwd, alone(X, NormVectors(GAMMA, GAMMA, 1e-5))),
    (norm_fwd, alone(X.bfloat16(), NormVectors(GAMMA, None, 1e-5, "rms"))),
    (norm_apply, (Recompute(X, STAT, STAT, GAMMA, GAMMA, 1e-5, "layer", FP32),)),
    (norm_apply, (Recompute(X, STAT[:0], STAT, GAMMA, None, 1e-5, "rms", FP32),)),
    (norm_bwd, back(X[None].expand(2, 3, 7), X, Saved(X, STAT, STAT, GAMMA, "layer"), True)),
    (norm_bwd, back(X.bfloat16()[None], None, Saved(X.bfloat16(), STAT[:0], STAT, GAMMA, "rms"), False)),
    (reduce_parts, (torch.randn(3, 4, 5),)),
]
test_opcheck = common.opcheck(SAMPLES)


def gemma(x, w):
    return F.rms_norm(x, x.shape[-1:], 1 + w, 1e-6)


LAYER = layer_norm, lambda x, w, b=None: F.layer_norm(x, x.shape[-1:], w, b)
RMS = rms_norm, lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-6)
GEMMA = functools.partial(rms_norm, kind="gemma_rms"), gemma
KINDS = pytest.mark.parametrize(
    "ours, oracle, vectors",
    [(*LAYER, 1), (*LAYER, 2), (*RMS, 1), (*GEMMA, 1)],
    ids=["layer", "layer+bias", "rms", "gemma_rms"],
)


# no rows, one row, a width of one (whose x_hat is 0), ragged, three dimensions
@pytest.mark.parametrize("shape", [(0, 5), (1, 4), (3, 1), (3, 7), (2, 3, 5)], ids=str)
@KINDS
def test_against_torch(ours, oracle, vectors, shape):
    inputs = leaf(*shape), *(leaf(shape[-1]) for _ in range(vectors))
    common.assert_same(ours, oracle, *inputs)
    if shape[0]:
        gradcheck(ours, *inputs)


def test_against_the_module():
    module, x = nn.RMSNorm(6, eps=1e-3), torch.randn(4, 6)
    nn.init.normal_(module.weight)
    torch.testing.assert_close(rms_norm(x, module.weight, eps=1e-3), module(x))
    assert (rms_norm(x, module.weight, eps=1.0) - module(x)).abs().max() > 1e-2  # eps is used


def test_against_gemma():
    """transformers' own layer: a weight that starts at 0, added to 1 in fp32."""
    theirs = GemmaRMSNorm(6, eps=1e-3)
    x, w = torch.randn(4, 6), leaf(6, dtype=FP32)
    with torch.no_grad():
        theirs.weight.copy_(w)
    ours = rms_norm(x, w, eps=1e-3, kind="gemma_rms")
    torch.testing.assert_close(ours, theirs(x))
    dy = torch.randn(4, 6)
    torch.testing.assert_close(torch.autograd.grad(ours, w, dy), torch.autograd.grad(theirs(x), theirs.weight, dy))
    assert (rms_norm(x, w, eps=1e-3) - theirs(x)).abs().max() > 1e-2


@pytest.mark.parametrize("D", [20, 768, pytest.param(9000, marks=pytest.mark.slow)])
def test_gemma_launchers(poisoned, D):
    for op, arguments in launch_arguments(5, D, FP32, True, kind="gemma_rms"):
        assert_same(op.launch(*arguments), op.reference(*arguments))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@KINDS
def test_low_precision(ours, oracle, vectors, dtype):
    inputs = leaf(33, 100), *(leaf(100) for _ in range(vectors))
    common.assert_accurate(ours, oracle, *inputs, dtype=dtype)
    common.assert_accurate(
        ours, oracle, *inputs, dtype=dtype, keep=(1, 2)
    )  # fp32 norm parameters beside 16-bit activations


@KINDS
def test_autocast(ours, oracle, vectors):
    common.assert_autocast(ours, oracle, leaf(33, 100), *(leaf(100) for _ in range(vectors)), size=3300)


@KINDS
def test_non_contiguous(ours, oracle, vectors):
    x = leaf(5, 4, 6).transpose(0, 1)  # of which dimension 0 and 1 stay swapped
    leaves = x, *(leaf(12)[::2] for _ in range(vectors))
    common.assert_same(ours, oracle, *(t.detach().requires_grad_() for t in leaves), non_contiguous=True)
    common.assert_same(
        ours, oracle, leaf(6, 4).T.detach().requires_grad_(), *(leaf(6) for _ in range(vectors)), non_contiguous=True
    )


@KINDS
def test_compile(ours, oracle, vectors):
    common.assert_compiles(ours, leaf(3, 7, dtype=FP32), *(leaf(7, dtype=FP32) for _ in range(vectors)))


@pytest.mark.slow
def test_compile_inductor():
    common.assert_compiles(layer_norm, *(leaf(*s, dtype=FP32) for s in ((3, 7), (7,), (7,))), backend="inductor")


def test_results_of_transposed_rows_lie_as_a_compiler_is_told():
    x, none = torch.randn(1, 16, 8).mT, NormVectors()
    h, *_ = REDUCE_BIAS_DROPOUT_ADD_NORM.fwd(x, Add(), none, Mask(), order=PRE)
    wanted = Wanted(None, False, torch.float32, torch.float32)
    dparts, dresidual, *_ = REDUCE_BIAS_DROPOUT_ADD_NORM.bwd(
        x, None, Saved(None, None, None, None, "layer"), Mask(), order=PRE, wanted=wanted
    )
    assert all(t.is_contiguous() and torch.equal(t, x[0]) for t in (h, dparts, dresidual))


def test_compile_under_autocast():
    """The fake kernels of an op see autocast too, and must not let it choose their dtypes."""
    inputs = [leaf(*s, dtype=FP32) for s in ((3, 7), (7,), (7,))]
    with torch.autocast("cpu", torch.bfloat16):
        common.assert_compiles(lambda x, w, b: layer_norm(x, w, b) + rms_norm(x, w), *inputs)


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("ranks", [1, 3])
def test_norm_in(rms, ranks):
    """The norm that enters a block: its gradients come back from ``ranks`` peers unsummed, and past the norm."""
    x, gamma, beta = leaf(3, 5), leaf(5), None if rms else leaf(5)

    def ours(x, gamma, beta):
        return norm_in(x, gamma, beta, eps=1e-5, norm="rms" if rms else "layer", ranks=ranks)[:2]

    def oracle(x, gamma, beta):
        n = F.rms_norm(x, (5,), gamma, 1e-5) if rms else F.layer_norm(x, (5,), gamma, beta)
        return x * 1, torch.stack([n] * ranks)

    common.assert_same(ours, oracle, x, gamma, beta)
    gradcheck(ours, x, gamma, beta)
    h, n = ours(x, gamma, beta)
    assert n.stride(0) == 0 or ranks == 1
    assert h.data_ptr() == x.data_ptr()  # no copy


def test_parts_are_summed_in_fp32():
    """256 + 1 + 1 + 1 in bf16 would stay 256; rounded once it is 260."""
    dy = torch.tensor([256.0, 1, 1, 1]).bfloat16()[:, None, None].expand(4, 1, 8)
    x = torch.randn(1, 8).bfloat16()
    saved = Saved(x, torch.zeros(1), torch.ones(1), torch.ones(8), "layer")
    *_, dbeta = norm_bwd(*back(dy, None, saved, True))
    assert torch.equal(dbeta, torch.full((8,), 259.0))


@pytest.mark.parametrize("dtype", [FP32, torch.bfloat16])
@pytest.mark.parametrize("rms", [False, True])
def test_recompute_is_bitwise_the_first(rms, dtype):
    x, gamma, beta = (t.detach() for t in (leaf(17, 33), leaf(33), leaf(33)))
    _, n, recompute = norm_in(
        x.to(dtype),
        gamma.float(),
        None if rms else beta.float(),
        eps=1e-5,
        norm="rms" if rms else "layer",
        recompute=True,
    )
    assert n.dtype == dtype and torch.equal(norm_apply(recompute), n[0])
    assert not torch.equal(norm_apply(recompute._replace(gamma=recompute.gamma + 0.1)), n[0])


def test_recompute_survives_the_parameter():
    """FSDP frees a block's parameters after its forward, before another block makes its n again."""
    x, gamma, beta = leaf(3, 4), leaf(4), leaf(4)
    _, n, recompute = norm_in(x, gamma, beta, eps=1e-5, recompute=True)
    with torch.no_grad():
        gamma.fill_(float("nan")), beta.fill_(float("nan"))
    assert torch.equal(norm_apply(recompute), n[0])


def test_once_differentiable():
    common.assert_once_differentiable(rms_norm, leaf(3, 4), leaf(4))


def test_errors():
    with pytest.raises(ValueError, match=r"layer_norm: weight must have shape \(4,\), got \(3,\)"):
        layer_norm(torch.randn(2, 4), torch.randn(3))
    with pytest.raises(ValueError, match=r"layer_norm: bias must have shape \(4,\), got \(2, 4\)"):
        layer_norm(torch.randn(2, 4), torch.randn(4), torch.randn(2, 4))
    with pytest.raises(ValueError, match=r"rms_norm: weight must have shape \(4,\), got \(1,\)"):
        rms_norm(torch.randn(2, 4), torch.randn(1))


def test_only_what_is_needed():
    """A frozen norm and an input without gradient."""
    x, gamma = torch.randn(3, 4), leaf(4, dtype=FP32)
    assert run(layer_norm, (x, gamma))[1][0].shape == (4,)
    assert run(layer_norm, (leaf(3, 4, dtype=FP32), gamma.detach()))[1][0].shape == (3, 4)


# ---- the Triton side: launcher == reference under the interpreter, or compiled on a GPU ----


def launch_arguments(m, D, dtype, rms, R=2, kind="rms"):
    x, gamma, beta = torch.randn(m, D, device=DEVICE).to(dtype), *torch.randn(2, D, device=DEVICE).unbind(0)
    norm = NormVectors(gamma, None if rms else beta, 1e-5, kind if rms else "layer")
    _, _, mean, rstd = norm_fwd.reference(*alone(x, norm))
    apply = (Recompute(x, mean, rstd, *norm, dtype),)
    dy = torch.randn(R, m, D, device=DEVICE).to(dtype)
    bwd = [
        back(dy, dh, Saved(x, mean, rstd, gamma, norm.kind), not rms)
        for dh in (torch.randn(m, D, device=DEVICE).to(dtype), None)
    ]
    return [(norm_fwd, alone(x, norm)), (norm_apply, apply), *((norm_bwd, b) for b in bwd)]


SLOW = [
    pytest.param((2, D), marks=[pytest.mark.slow] + [pytest.mark.rare] * (D in (12288, 16384, 32768)))
    for D in (5120, 12288, 16384, 17000, 32768, 65537)
]


# no rows, rows that share a program, two tiles, several chunks of columns; the two-pass backward, and slow: the
# chunked forward
@pytest.mark.parametrize("shape", [(0, 5), (37, 20), (3, 768), (2, 1000), (2, 9000), *SLOW], ids=str)
@pytest.mark.parametrize("rms", [False, True])
def test_launchers(poisoned, shape, rms):
    for op, arguments in launch_arguments(*shape, FP32, rms):
        assert_same(op.launch(*arguments), op.reference(*arguments))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rms", [False, True])
def test_launchers_in_low_precision(poisoned, dtype, rms):
    for op, arguments in launch_arguments(5, 100, dtype, rms):
        assert_accurate_launch(op, arguments)


@pytest.mark.parametrize("D", [100, 768, 17000])
@pytest.mark.parametrize("rms", [False, True])
def test_apply_launches_bitwise_the_first(poisoned, D, rms):
    """From the statistics that the first launch has stored, in bf16 beside fp32 parameters, out of fp32 too."""
    (_, (parts, _, norm, *_)), (_, (recipe,)), *_ = launch_arguments(3, D, torch.bfloat16, rms)
    zero, fwd = torch.zeros_like(parts), REDUCE_BIAS_DROPOUT_ADD_NORM.fwd
    for x in (parts[0], parts[0].float()):
        if x.dtype == FP32:  # a residual stream in fp32 beside parts, and so n, in bf16
            _, y, mean, rstd = fwd.launch(zero, Add(residual=x), norm, Mask(), PRE)
        else:
            _, y, mean, rstd = norm_fwd.launch(*alone(x, norm))
        assert torch.equal(norm_apply.launch(recipe._replace(h=x, mean=mean, rstd=rstd)), y)


def test_launchers_read_strided_rows(poisoned):
    for op, (first, *rest) in launch_arguments(4, 16, FP32, False):
        for strided in (lambda x: torch.cat([x, x], -1)[..., :16], lambda x: x.mT.contiguous().mT):
            x = first._replace(h=strided(first.h)) if isinstance(first, Recompute) else strided(first)
            assert_same(op.launch(x, *rest), op.launch(first, *rest))


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("rms", [False, True])
def test_declared_bytes(monkeypatch, wide, rms):
    narrow(monkeypatch, wide)
    for op, arguments in launch_arguments(3, 256, torch.bfloat16, rms):
        assert_declared(op, arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP32, torch.bfloat16])
@pytest.mark.parametrize("D", [64, 768, 4096, 8192, 12288, 16384, 65537])
def test_on_a_gpu(D, dtype):
    for rms in (False, True):
        calls = launch_arguments(67, D, dtype, rms)
        for op, arguments in calls:
            on_a_gpu(op, arguments)
        _, y, mean, rstd = norm_fwd.launch(*calls[0][1])
        (recipe,) = calls[1][1]
        assert torch.equal(norm_apply.launch(recipe._replace(mean=mean, rstd=rstd)), y)
