"""The same bits at every split: losses, gradients, norms and weights after steps of AdamW, against one process.

Spans: tpfuse/kernels/runtime/leaves.py and all that sums by leaves.
"""

import functools
import itertools

import pytest
import torch

from tests.bitwise.training import LAYOUTS, TRAINED_KINDS, Layout, differences, train
from tpfuse.kernels.experts.router import router_wgrad
from tpfuse.kernels.norm import core
from tpfuse.kernels.runtime import op
from tpfuse.layers import linear, lora, module
from tpfuse.layers import norm as split_norm
from tpfuse.models import head
from tpfuse.sequence_parallel import experts
from tpfuse.sequence_parallel.forms import leafwise
from tpfuse.training.foreign import norm

# Every kind in one form; what is left in the slow suite.
EVERYDAY = {("gpt2 odd", "fastest", torch.float32), ("llama", "smallest", torch.bfloat16)}
EVERYDAY |= {("llama", "fastest", torch.float64)}
FP64 = [(kind, "fastest", torch.float64) for kind in ("llama", "qwen2 moe odd", "bert odd")]
CASES = [
    pytest.param(
        *case, marks=[pytest.mark.slow] * (case not in EVERYDAY), id="-".join(map(str, case)).replace("torch.", "")
    )
    for case in (*itertools.product(TRAINED_KINDS, ("fastest", "smallest"), (torch.float32, torch.bfloat16)), *FP64)
]


@pytest.mark.parametrize("kind, saving, dtype", CASES)
def test_every_layout(kind, saving, dtype, ranks):
    """Of a kind, half of the layouts as it saves much and the others as it saves little, and of the next kind the other
    way round."""
    options = dict(dtype=dtype, saving=saving)
    (one,) = ranks(1, _train, kind, Layout(1), options)
    for layout in LAYOUTS[(list(TRAINED_KINDS).index(kind) + (saving == "smallest")) % 2 :: 2]:
        results = ranks(layout.size, _train, kind, layout, options)
        assert {r: differences(one, result) for r, result in enumerate(results)} == {r: {} for r in range(layout.size)}


def _train(world, kind, layout, options):
    torch.set_num_threads(1)
    return train(world, kind, sequence_parallel=layout.sequence_parallel, **options)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["gpt2 odd", "qwen3 odd", "bert odd"])
def test_a_leaf_a_rank(kind, dtype, ranks):
    """Eight ranks: nothing is added before messages travel."""
    options = dict(dtype=dtype)
    (one,) = ranks(1, _train, kind, Layout(1), options)
    for layout in Layout(8), Layout(8, True):
        results = ranks(8, _train, kind, layout, options)
        assert {r: differences(one, result) for r, result in enumerate(results)} == {r: {} for r in range(8)}


def test_without_a_group_it_is_a_group_of_one(ranks):
    options = dict(dtype=torch.float32)
    (one,) = ranks(1, _train, "gpt2 odd", Layout(1), options)
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert not differences(one, train(None, "gpt2 odd", **options))
    finally:
        torch.set_num_threads(torch_threads)


# ---- each cure taken away ----


def in_order(leaves):
    """A sum in rank order, each partial one rounded."""
    return functools.reduce(torch.add, leaves)


def at_once(bwd, rows, order, wanted):
    return bwd(rows.dn, rows.dh, rows.saved, rows.mask, order=order, wanted=wanted._replace(leaves=1), out=rows.out)


CURES = {  # the kind that needs it, and where it is
    "sums over ranks": ("gpt2", op, "tree", in_order),
    "sums over rows": ("gpt2", core, "by_leaves", at_once),
    "row-parallel GEMM": ("gpt2", leafwise, "row_fwd", lambda x, w, leaves, tile: x @ w.t()),
    "column-parallel dgrad": ("gpt2", leafwise, "column_dgrad", lambda dy, w, leaf: dy @ w),
    "norms of leaves": ("gpt2", norm, "_leaf", lambda slice_of: None),
    "sums over the vocabulary": ("gpt2", head, "leaf_of", lambda vocab_size, tp: tp.slice_size(vocab_size)),
    "means over all heads": ("olmo2 odd", split_norm, "tree", in_order),
    "gradients of these": ("olmo2 odd", split_norm, "per_leaf", lambda x, leaves: [x] * leaves),
    "adapters of row-parallel layers": ("gpt2 odd lora", linear, "tree", in_order),
    "gradients of adapters": ("gpt2 odd lora", lora, "per_leaf", lambda x, leaves: [x] * leaves),
    "gradients of routers": ("qwen2 moe odd", experts, "_router_gradient", lambda dz, x, m, tp: router_wgrad(dz, x)),
    "tables and heads": ("bert odd hooked", head, "per_leaf", lambda x, leaves: [x] * leaves),
    "copies of kv heads": ("qwen2 odd", module, "per_leaf", lambda x, leaves: [x] * leaves),
}


def _without(world, cure, layout):
    kind, where, name, replacement = CURES[cure]
    right = getattr(where, name)
    setattr(where, name, replacement)
    try:
        return _train(world, kind, layout, dict(dtype=torch.float32))
    finally:
        setattr(where, name, right)


@pytest.mark.parametrize("cure", CURES)
def test_each_cure_is_needed(cure, ranks):
    """At four ranks: two are summed the same way by a tree and in order."""
    (one,) = ranks(1, _without, cure, Layout(1))
    results = ranks(4, _without, cure, Layout(4, True))
    assert any(differences(one, result) for result in results)


def test_without_it_bits_differ(ranks):
    """The comparison can fail: sums in rank order are other sums."""
    options = dict(dtype=torch.float32, bitwise=None)
    (one,) = ranks(1, _train, "gpt2", Layout(1), options)
    (result, _) = ranks(2, _train, "gpt2", Layout(2, True), options)
    assert len(differences(one, result)) > 20
