"""The fused norm's kernels by leaves: ranks simulated in one process, each with its nodes of parts and its leaves of
rows, against one rank; under Triton's interpreter or on a GPU.

Spans: tpfuse/kernels/norm/row_leaves.py, triton_forward.py, triton_backward.py, tpfuse/kernels/runtime/partials.py.
"""

import functools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.bitwise.training import bits
from tests.kernels.kernel_rules import DEVICE, narrow
from tpfuse.kernels.norm import triton_backward, triton_forward
from tpfuse.kernels.norm.records import ALONE, DROP, POST, PRE, Add, NormVectors, Saved, Wanted
from tpfuse.kernels.norm.row_leaves import table_bwd
from tpfuse.kernels.norm.verbs import EMBED_FINISH, NORM, REDUCE_BIAS_DROPOUT_ADD_NORM
from tpfuse.kernels.runtime import device, partials
from tpfuse.kernels.runtime.leaves import tree
from tpfuse.kernels.runtime.philox import NO_MASK, Mask, make_rng
from tpfuse.kernels.runtime.triton import tl, triton

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("poisoned")
V = 8
SPLITS = [(1, True), (2, False), (4, True), (8, False), (8, True)]  # ranks, sequence parallel
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


class Problem(NamedTuple):
    """A call of all rows; parts and dn of all leaves, [V, M, D]."""

    parts: Tensor
    dn: Tensor
    dh: Tensor
    add: Add
    norm: NormVectors
    mask: Mask
    order: str

    @classmethod
    def of(cls, rows: int, D: int, dtype: torch.dtype, order: str = PRE, kind: str = "layer") -> "Problem":
        """``rows`` a leaf."""
        random = lambda *shape: torch.randn(*shape, device=DEVICE).to(dtype)
        M, (bias, gamma, beta) = V * rows, random(3, D).unbind(0)
        tables: dict[str, Any] = {}
        if order == DROP:
            index = lambda: torch.randint(3, (M,), device=DEVICE)
            tables = dict(position_weight=random(3, D), positions=index(), type_weight=random(3, D), types=index())
        add = Add(bias, residual=random(M, D)) if order != DROP else Add(**tables)
        norm = NormVectors(gamma, beta if kind == "layer" else None, 1e-5, kind)
        mask = Mask(make_rng(3, 2, 5, DEVICE), 0.3, site=7, first_row=0, batch=3)
        return cls(random(V, M, D), random(V, M, D), random(M, D), add, norm, mask, order)


class Sums(NamedTuple):
    """How ranks' nodes are added, in the kernels (``leaves`` False: in rank order) and between them."""

    leaves: bool = True
    join: Any = tree


BY_LEAVES = Sums()


def in_order(nodes: Any) -> Tensor:
    return functools.reduce(torch.add, nodes)


def results(problem: Problem, ranks: int, sequence_parallel: bool, sums: Sums = BY_LEAVES) -> dict[str, Tensor]:
    """What ``ranks`` make of it together."""
    ops = EMBED_FINISH if problem.order == DROP else REDUCE_BIAS_DROPOUT_ADD_NORM
    shards = ranks if sequence_parallel else 1
    (_, M, _), leaves = problem.parts.shape, V // shards
    nodes, dns = (torch.stack([tree(t) for t in whole.chunk(ranks)]) for whole in (problem.parts, problem.dn))
    made: list[dict[str, Tensor]] = []
    for start in range(0, M, M // shards):
        rows = slice(start, start + M // shards)
        cut = lambda t, rows=rows: None if t is None else t[rows].contiguous()
        add = Add(*(t if name in ("bias", "position_weight", "type_weight") else cut(t)
                    for name, t in problem.add._asdict().items()))  # fmt: skip
        mask = problem.mask._replace(first_row=start)
        parts, dn, dh = nodes[:, rows].contiguous(), dns[:, rows].contiguous(), cut(problem.dh)
        h, n, mean, rstd = ops.fwd.launch(parts, add, problem.norm, mask, problem.order, leaves * sums.leaves)
        saved = Saved(h, mean, rstd, problem.norm.gamma, problem.norm.kind)
        of = lambda t: None if t is None else t.dtype
        wanted = Wanted(of(add.bias), problem.norm.beta is not None, of(add.residual), h.dtype, leaves * sums.leaves)
        d, dresidual, dbias, dgamma, dbeta = ops.bwd.launch(dn, dh, saved, mask, problem.order, wanted)
        vectors = dict(dbias=dbias, dgamma=dgamma, dbeta=dbeta)
        if add.positions is not None and add.types is not None:
            table = 3, d.dtype
            vectors |= dict(positions=table_bwd(d, add.positions, table, leaves))
            vectors |= dict(types=table_bwd(d, add.types, table, leaves))
        made.append(dict(h=h, n=n, mean=mean, rstd=rstd, d=d, dresidual=dresidual) | vectors)
    together = lambda name: torch.cat if name in ("h", "n", "mean", "rstd", "d", "dresidual") else sums.join
    return {name: together(name)([rank[name] for rank in made]) for name in made[0]}


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    assert all(a.shape == b.shape and a.dtype == b.dtype for a, b in zip(one.values(), other.values()))
    return [name for name in one if not torch.equal(bits(one[name]), bits(other[name]))]


@DTYPES
@pytest.mark.parametrize("count", [3, 6, 9])
def test_any_number_of_parts(count, dtype):
    """Outputs of k experts, and gradients of what k + 1 layers read."""
    parts, dn = torch.randn(2, count, 2 * V, 40, device=DEVICE).to(dtype).unbind(0)
    op, nothing = REDUCE_BIAS_DROPOUT_ADD_NORM, (NormVectors(), NO_MASK, PRE)
    h, *_ = op.fwd.launch(parts, Add(), *nothing, V)
    d, *_ = op.bwd.launch(
        dn, None, Saved(None, None, None, None, "layer"), NO_MASK, PRE, Wanted(None, False, None, dtype, V)
    )
    for ours, leaves in (h, parts), (d, dn):
        assert torch.equal(bits(ours), bits(tree(leaves)))
        assert dtype == torch.float32 or not torch.equal(ours, leaves.float().sum(0).to(dtype))


# Rows a leaf, columns: several programs a leaf and two tiles; several rows a program; wide rows.
CASES = [
    pytest.param((17, 160), PRE, "layer", False, torch.float32, marks=pytest.mark.slow),
    ((3, 5), PRE, "layer", False, torch.float32),
    ((3, 5), PRE, "layer", False, torch.bfloat16),
    ((3, 37), POST, "rms", False, torch.bfloat16),
    ((3, 37), DROP, "layer", False, torch.float32),
    ((3, 5), POST, "gemma_rms", False, torch.float32),
    pytest.param((2, 80), PRE, "layer", True, torch.float32, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("shape, order, kind, wide, dtype", CASES, ids=str)
def test_every_split(monkeypatch, shape, order, kind, wide, dtype):
    narrow(monkeypatch, wide)
    problem = Problem.of(*shape, dtype, order, kind)
    one = results(problem, 1, False)
    assert not any(t.isnan().any() for t in one.values())
    assert {split: differing(one, results(problem, *split)) for split in SPLITS} == {split: [] for split in SPLITS}


@pytest.mark.parametrize("order", [PRE, POST, DROP])
def test_values(order):
    """Those of the CPU's definition, to rounding."""
    problem = Problem.of(3, 20, torch.float32, order)
    ops = EMBED_FINISH if order == DROP else REDUCE_BIAS_DROPOUT_ADD_NORM
    call = problem.parts, problem.add, problem.norm, problem.mask, order, V
    forward = ops.fwd.reference(*call)
    torch.testing.assert_close(ops.fwd.launch(*call), forward, rtol=2e-5, atol=2e-5)
    saved = Saved(forward[0], *forward[2:], problem.norm.gamma, problem.norm.kind)
    wanted = Wanted(torch.float32, True, torch.float32, torch.float32, V)
    call = problem.dn, problem.dh, saved, problem.mask, order, wanted
    torch.testing.assert_close(ops.bwd.launch(*call), ops.bwd.reference(*call), rtol=2e-5, atol=2e-4)


@DTYPES
def test_rank_order_is_seen(dtype):
    """At four ranks; of two nodes there is one order, so that fp32, which nothing rounds, shows nothing."""
    problem = Problem.of(3, 20, dtype)
    one, left_to_right = results(problem, 1, False), Sums(leaves=False)
    assert {"h", "n", "d"} < set(differing(one, results(problem, 4, False, left_to_right)))
    assert dtype != torch.float32 or "h" not in differing(one, results(problem, 2, False, left_to_right))
    vectors = {"dbias", "dgamma", "dbeta"}
    assert vectors == set(differing(one, results(problem, 4, True, Sums(join=in_order))))
    assert not differing(one, results(problem, 2, True, Sums(join=in_order)))


@triton.jit
def _parts_in_order(ptr, offsets, mask, stride, COUNT: tl.constexpr, LEFT: tl.constexpr):
    node = tl.load(ptr + offsets, mask=mask, other=0.0)
    for r in tl.static_range(1, COUNT):
        node = device.join(node, tl.load(ptr + r * stride + offsets, mask=mask, other=0.0))
    return node


@triton.jit
def _leaves_in_order(nodes, LEVELS: tl.constexpr):
    return tl.sum(nodes, 0)


@pytest.mark.skipif(DEVICE == "cuda", reason="a compiled kernel keeps its functions")
@pytest.mark.parametrize("where, name, mistake, seen", [
    (device, "_sum_tree", _parts_in_order, {"h", "n", "d", "dresidual"}),
    (partials, "sum_leaves", _leaves_in_order, {"dbias", "dgamma", "dbeta"}),
])  # fmt: skip
def test_a_kernel_that_adds_from_left_to_right(monkeypatch, where, name, mistake, seen):
    monkeypatch.setattr(where, name, mistake)
    problem = Problem.of(3, 20, torch.float32)
    assert seen <= set(differing(results(problem, 1, False), results(problem, 4, True)))


def test_where_a_tensor_lies_does_not_matter():
    """A kernel is compiled for what it knows of addresses and strides: with leaves it gets the same of all tensors."""
    problem = Problem.of(3, 12, torch.bfloat16)
    moved = lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape)
    shifted = problem._replace(dn=moved(problem.dn), dh=moved(problem.dh), parts=moved(problem.parts))
    assert shifted.dh.data_ptr() % 16
    assert not differing(results(problem, 4, False), results(shifted, 4, False))


def test_no_measured_parameters(monkeypatch):
    """They go by the number of rows, which differs from split to split."""

    def tuned(*lookup, default):
        raise AssertionError(lookup)

    for module in triton_forward, triton_backward:
        monkeypatch.setattr(module, "tuned", tuned)
    x, gamma = torch.randn(1, 8, 20, device=DEVICE), torch.ones(20, device=DEVICE)
    for ops, order in (NORM, ALONE), (REDUCE_BIAS_DROPOUT_ADD_NORM, PRE):
        _, _, mean, rstd = ops.fwd.launch(x, Add(), NormVectors(gamma, None, 1e-5, "layer"), NO_MASK, order, 2)
        saved = Saved(x[0], mean, rstd, gamma, "layer")
        ops.bwd.launch(x, x[0], saved, NO_MASK, order, Wanted(None, False, None, x.dtype, 2))


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("shape", [(64, 1024), (37, 1000), (100, 4096), (9, 12288)], ids=str)
@pytest.mark.parametrize("order", [PRE, DROP])
def test_on_a_gpu(shape, order, dtype):
    """Compiled: each number of ranks compiles another kernel."""
    problem = Problem.of(*shape, dtype, order)
    one = results(problem, 1, False)
    assert {split: differing(one, results(problem, *split)) for split in SPLITS} == {split: [] for split in SPLITS}
