"""What the tests of every kernel share: the rules by which a result counts as right."""

import itertools

import pytest
import torch
from torch import Tensor

from tpfuse.kernels.runtime.op import Op, flatten
from tpfuse.kernels.runtime.philox import make_rng

RNG = make_rng(seed=1, step=3, first_sample=2)


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def run(fn, inputs, non_contiguous: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    """Differentiable outputs of ``fn``, and the gradients of its differentiable inputs for fixed random output
    gradients."""
    outputs = fn(*inputs)
    outputs = [y for y in (outputs if isinstance(outputs, tuple) else (outputs,)) if y.requires_grad]
    random = torch.Generator().manual_seed(1)
    dys = [torch.randn(y.shape, generator=random, dtype=torch.float64).to(y.dtype) for y in outputs]
    if non_contiguous:
        dys = [dy.mT.contiguous().mT if dy.dim() > 1 else dy for dy in dys]
    leaves = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    return outputs, torch.autograd.grad(outputs, leaves, dys)


def assert_same(fn, oracle, *inputs, rtol: float = 1e-10, non_contiguous: bool = False) -> None:
    """Values and gradients equal those of an oracle that autograd differentiates."""
    torch.testing.assert_close(run(fn, inputs, non_contiguous), run(oracle, inputs), rtol=rtol, atol=rtol)


def assert_accurate(fn, oracle, *inputs, dtype: torch.dtype, keep: tuple[int, ...] = ()) -> None:
    """error(ours, fp64) <= 2 error(torch in the same dtype, fp64) + a tenth of a rounding, for values and gradients.

    The inputs numbered in ``keep`` stay fp32 for us, as norm parameters do; the rounded values are everybody's inputs.
    """
    lower = [x.detach().to(dtype).requires_grad_() for x in inputs]
    ours = run(fn, [x.detach().float().requires_grad_() if i in keep else x for i, x in enumerate(lower)])
    theirs, exact = run(oracle, lower), run(oracle, [x.detach().double().requires_grad_() for x in lower])
    for a, b, x in zip(sum(map(list, ours), []), sum(map(list, theirs), []), sum(map(list, exact), [])):
        assert a.isfinite().all()
        mine, limit = (a - x).abs().max(), 2 * (b - x).abs().max() + 0.1 * torch.finfo(dtype).eps * x.abs().max()
        assert mine <= limit, f"shape {tuple(x.shape)}: error {mine:.2e}, limit {limit:.2e}"


def assert_autocast(fn, oracle, *inputs: Tensor, size: int) -> None:
    """Under autocast: output bf16, gradients fp32, values by the rule above, and nothing fp32 of ``size`` elements
    saved."""
    saved = []
    inputs = [x.detach().bfloat16().float().requires_grad_() for x in inputs]
    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        outputs, grads = run(fn, inputs)
    assert {y.dtype for y in outputs} == {torch.bfloat16} and {g.dtype for g in grads} == {torch.float32}
    assert any(t.numel() >= size for t in saved) and not [
        t.shape for t in saved if t.dtype == torch.float32 and t.numel() >= size
    ]

    def under_autocast(*xs):
        with torch.autocast("cpu", torch.bfloat16):
            return fn(*(x.float() for x in xs))

    assert_accurate(under_autocast, oracle, *inputs, dtype=torch.bfloat16)


def assert_compiles(fn, *inputs, backend: str = "aot_eager") -> None:
    """``torch.compile(fullgraph=True)``, forward and backward: bitwise the eager result (to rounding where inductor
    fuses)."""
    torch._dynamo.reset()
    rtol = 0 if backend == "aot_eager" else 1e-6
    compiled = torch.compile(fn, fullgraph=True, backend=backend)
    torch.testing.assert_close(run(compiled, inputs), run(fn, inputs), rtol=rtol, atol=rtol)


def peak(fn) -> tuple[object, int]:
    """Returns fn() and the bytes that it held at most beyond what was there before, by torch's own record of its
    allocations on a CPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = fn()
    sizes = (e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]")
    return result, max(itertools.accumulate(sizes), default=0)


def gradcheck(fn, *inputs) -> None:
    """fp64, every differentiable input, undefined output gradients included."""
    assert torch.autograd.gradcheck(fn, inputs)


def opcheck(samples: list[tuple[Op, tuple]]):
    """A test that runs torch.library.opcheck on (op, arguments) of a module's ``SAMPLES``: every day on each op's
    first."""
    names = [op.name for op, _ in samples]
    later = [name in names[:i] for i, name in enumerate(names)]

    @pytest.mark.parametrize(
        "op, args",
        [
            pytest.param(*sample, id=name, marks=[pytest.mark.slow] * again)
            for sample, name, again in zip(samples, names, later, strict=True)
        ],
    )
    def test_opcheck(op, args):
        torch.library.opcheck(op.overload, tuple(flatten(args)))

    return test_opcheck


def assert_once_differentiable(fn, *inputs) -> None:
    """A second derivative is an error; it would leave out what goes through the backward op, silently."""
    y = fn(*inputs)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(y.square().sum(), inputs[0], create_graph=True)
