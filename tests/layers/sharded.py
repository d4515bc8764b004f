"""A layer, sharded and whole: built from one seed, run forward and backward on the same rows, compared slice by
slice.

``test_sharded_is_whole = sharded_is_whole(CASES)`` is the test of every layer: to rounding in fp64, and in fp32, by
leaves, to the bit.
"""

import functools
import itertools
import zlib
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from tests.common import TOLERANCE, error
from tests.planted import Mistaken
from tpfuse import TensorParallel
from tpfuse.kernels.runtime.philox import make_rng
from tpfuse.layers.shards import named_specs

LEAVES = {torch.float32: 4}  # of TensorParallel(bitwise=...)


@dataclass(frozen=True)
class Case:
    """A layer with its arguments, and how its input and output lie: "rows" (shards under sequence parallelism),
    "columns" (a slice of the features), "all" (the same everywhere)."""

    layer: type
    args: tuple
    shape: tuple[int, ...]
    out: tuple[int, ...]
    options: dict = field(default_factory=dict)
    call: dict = field(default_factory=dict)
    x_is: str = "rows"
    y_is: str = "rows"
    rng: bool = False
    valid: int | None = None  # rows beyond are padding: garbage comes in, and no gradient from outside

    def __call__(self, **options) -> "Case":
        return replace(self, options=self.options | options)


def mine(t: Tensor, layout: str, tp: TensorParallel) -> Tensor:
    t = t.chunk(tp.cp_size, 0)[tp.cp_rank]
    if layout == "rows":
        return t.chunk(tp.row_shards, 0)[tp.row_rank]
    return t.chunk(tp.size, -1)[tp.rank] if layout == "columns" else t


def data(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = (
        torch.randint(0, case.args[0], case.shape)
        if case.x_is == "all"
        else torch.randn(case.shape, dtype=torch.float64).to(dtype)
    )
    dy = torch.randn(case.out, dtype=torch.float64).to(dtype)
    if case.valid is not None:
        x[case.valid :], dy[case.valid :] = 1e4 * torch.rand(x[case.valid :].shape), 0
    return x, dy


def build(case: Case, tp: TensorParallel | None, dtype: torch.dtype):
    """The layer from seed 1, its biases and gains moved away from 0 and 1, where much that is wrong looks right."""
    torch.manual_seed(1)
    layer = case.layer(*case.args, tp=tp, dtype=dtype, **case.options)
    with torch.no_grad():
        for name, p, spec, tp_ in named_specs(layer):
            if isinstance(spec.init, str):
                whole = torch.randn(
                    spec.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())), dtype=torch.float64
                )
                p += 0.1 * whole[spec.local(tp_)].to(dtype)
    return layer


def step(layer, case: Case, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """Forward and backward on this rank's part -> y, dx, and every parameter's gradient."""
    x, dy = mine(x, case.x_is, layer.tp).clone(), mine(dy, case.y_is, layer.tp)
    if x.is_floating_point():
        x.requires_grad_()
    y = layer(x, **case.call, **(dict(rng=make_rng(7, 3)) if case.rng else {}))
    y.backward(dy)
    grads = {name: p.grad for name, p in layer.named_parameters()}
    assert all(g is not None for g in grads.values()), [name for name, g in grads.items() if g is None]
    return dict(y=y.detach(), **({"x": x.grad} if x.is_floating_point() else {}), **grads)


def run(world, case: Case, sp: bool, dtype: torch.dtype, x: Tensor, dy: Tensor, cp: int = 1):
    """What one rank holds: its tp, what ``step`` gave, its weights, and the slices they are."""
    if cp == 1:
        tp = TensorParallel(world.group, sequence_parallel=sp, bitwise=LEAVES.get(dtype))
    else:
        mesh = world.pieces(1, cp, world.size // cp)
        tp = TensorParallel(mesh["tp"], sequence_parallel=sp, cp=mesh["cp"])
    layer = build(case, tp, dtype)
    out = step(layer, case, x, dy)
    weights = {name: p.detach() for name, p in layer.named_parameters()}
    return layer.tp, out, weights, {name: spec.local(tp) for name, _, spec, tp in named_specs(layer)}


def unsharded(case: Case, dtype: torch.dtype, x: Tensor, dy: Tensor):
    layer = build(case, TensorParallel(bitwise=LEAVES.get(dtype)), dtype)
    return step(layer, case, x, dy), {name: p.detach() for name, p in layer.named_parameters()}


def reference(forward, x: Tensor, dy: Tensor, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """What ``step`` gives, of a function of plain torch: y, and the gradients of x and of these parameters."""
    x = x.detach().clone().requires_grad_()
    y = forward(x)
    gradients = torch.autograd.grad(y, [x, *parameters.values()], dy)
    return dict(zip(("y", "x", *parameters), (y.detach(), *gradients)))


def compare(case: Case, dtype: torch.dtype, one, many) -> None:
    """Weights, and in fp32 everything, bitwise; else values and gradients to the dtype's tolerance; an element that
    dropout made zero is zero everywhere."""
    (values, weights), wrong = one, {}
    for tp, got, got_weights, slices in many:
        assert got.keys() == values.keys()
        for name, w in weights.items():
            assert torch.equal(got_weights[name], w[slices[name]]), name
        for name, g in got.items():
            layout = {"y": case.y_is, "x": case.x_is, "memory": "rows"}.get(name)
            exact = values[name][slices[name]] if layout is None else mine(values[name], layout, tp)
            if layout is not None and case.valid is not None:
                keep = mine(torch.arange(len(values[name])), layout, tp) < case.valid
                assert name == "y" or not g[~keep].any()
                g, exact = g[keep], exact[keep]
            equal = torch.equal(g, exact) if dtype in LEAVES else error(g, exact) <= TOLERANCE[dtype]
            if not equal:
                wrong[name, tp.rank] = error(g, exact)
    assert not wrong, wrong


def check(ranks, case: Case, R: int, sp: bool, dtype: torch.dtype, function=run) -> None:
    x, dy = data(case, dtype)
    compare(case, dtype, unsharded(case, dtype, x, dy), ranks(R, function, case, sp, dtype, x, dy))


def unsummed(right, tp, *vectors):
    """A mistake in place of ``replicated``: replicated vectors whose gradients are not summed over the ranks."""
    return list(vectors)


def assert_seen(ranks, case: Case, target: str, mistake, names: str, dtype=torch.float64) -> None:
    """A mistake that is planted on two ranks shows in what ``names`` matches."""
    with pytest.raises(AssertionError, match=names):
        check(ranks, case, 2, True, dtype, Mistaken(run, target, mistake))


def sharded_is_whole(cases: dict[str, Case], brief: tuple[str, ...] = ()):
    """A test of every case, over one, two and four ranks, with sequence parallelism and without, in fp64 and fp32, and
    of two context-parallel ranks in fp64.

    Every day it runs in fp64 over one and four ranks with sequence parallelism and over four without, and in fp32 over
    four with it, where its rounding shows; the rest is slow.  Cases in ``brief`` run every day in fp64 over four ranks
    with sequence parallelism alone.
    """

    @functools.cache
    def expected(name: str, dtype: torch.dtype):
        x, dy = data(cases[name], dtype)
        return x, dy, unsharded(cases[name], dtype, x, dy)

    def marked(dtype: torch.dtype, R: int, sp: bool, name: str):
        daily = R == 4 and (sp or dtype == torch.float64) or (dtype, R, sp) == (torch.float64, 1, True)
        if name in brief:
            daily = (dtype, R, sp) == (torch.float64, 4, True)
        case_id = f"fp{8 * dtype.itemsize}-{R}-{'sp' if sp else 'no sp'}-{name}"
        return pytest.param(dtype, R, sp, name, 1, id=case_id, marks=[] if daily else [pytest.mark.slow])

    def in_pieces(R: int, sp: bool, name: str):
        case_id, daily = f"fp64-{R // 2}x2-{'sp' if sp else 'no sp'}-{name}", (R, sp) == (4, True)
        return pytest.param(
            torch.float64, R, sp, name, 2, id=case_id, marks=[] if daily and name not in brief else [pytest.mark.slow]
        )

    settings = [
        marked(*setting)
        for setting in itertools.product((torch.float64, torch.float32), (1, 2, 4), (True, False), cases)
    ]
    settings += [in_pieces(R, sp, name) for R, sp in ((4, True), (4, False), (2, True)) for name in cases]

    @pytest.mark.parametrize("dtype, R, sp, name, cp", settings)
    def test_sharded_is_whole(ranks, R, sp, dtype, name, cp):
        x, dy, one = expected(name, dtype)
        compare(cases[name], dtype, one, ranks(R, run, cases[name], sp, dtype, x, dy, cp))

    return test_sharded_is_whole
