"""No kernel multiplies or adds 32-bit integers past 2^31, whatever the sizes.

Launchers take meta tensors with more elements than 32 bits count.  What they would start runs under the interpreter
with every check of integer overflow on: the first and the last program of a grid, whose loads give 0 and whose stores
go nowhere, on a GPU with so many multiprocessors that no program strides far.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.kernels.samples import LAUNCHED, cases, samples, take_other_paths
from tpfuse.kernels.attn.options import Options, QueryChunk
from tpfuse.kernels.losses import linear_triton
from tpfuse.kernels.runtime import launch as _launch
from tpfuse.kernels.runtime.op import OPS
from tpfuse.kernels.runtime.triton import triton

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs the interpreter")

BUILDER = interpreter.interpreter_builder
CHECKED = dataclasses.replace(BUILDER.options, debug=True)


def stand_in(value: Any) -> Any:
    """Returns an argument of a kernel with a tensor of one element in the place of every tensor."""
    if isinstance(value, Tensor):
        return torch.zeros(1, dtype=value.dtype, device="cpu")
    if isinstance(value, TensorDescriptor):
        return TensorDescriptor(stand_in(value.base), value.shape, value.strides, value.block_shape)
    return type(value)(*map(stand_in, value)) if isinstance(value, tuple) else value


def nothing_there(self: Any, ptrs: Any, *_: Any, **__: Any) -> Any:
    element = ptrs.get_element_ty()
    return interpreter.TensorHandle(np.zeros(ptrs.data.shape, interpreter._get_np_dtype(element)), element)


def run_ends(kernel: Any, grid: tuple[int, ...], device: torch.device, args: tuple, config: dict) -> None:
    """Runs the programs at the ends of a grid, instead of launching it."""
    config = {name: stand_in(value) for name, value in config.items() if name not in _launch._OPTIONS}
    grid = (*grid, 1, 1)[:3]
    with contextlib.ExitStack() as stack:
        patch = lambda *a: stack.enter_context(mock.patch.object(*a))
        patch(BUILDER, "options", CHECKED)
        patch(interpreter.InterpreterBuilder, "create_masked_load", nothing_there)
        patch(interpreter.InterpreterBuilder, "create_masked_store", lambda *_, **__: None)
        patch(BUILDER, "set_grid_dim", lambda *_: None)
        patch(BUILDER, "set_grid_idx", lambda *_: None)
        BUILDER.grid_dim = grid
        for BUILDER.grid_idx in itertools.product(*({0, n - 1} for n in grid)):
            kernel[(1,)](*map(stand_in, args), **config)


@pytest.fixture
def unlimited(monkeypatch):
    """Launches on a GPU so large that no loop is long, of which the ends of a grid run."""
    monkeypatch.setitem(_launch.MULTIPROCESSORS, "sm_90", 1 << 12)
    monkeypatch.setattr(_launch, "_start", run_ends)
    with _launch.pretending("sm_90"):
        yield


# (rows, columns) of 2^30 elements and more, with loops of at most some thousand turns
LARGE = dict.fromkeys(LAUNCHED, (1 << 24, 72)) | dict(
    **dict.fromkeys(("norm_bwd", "embed_finish_bwd", "reduce_bias_dropout_add_norm_bwd"), (1 << 18, 4104)),
    linear_dgrad_act=(1 << 21, 520),
    linear_wgrad=(1 << 12, (1 << 19) + 8),
    linear_cross_entropy_bwd=(1 << 16, (1 << 15) + 8),
    linear_cross_entropy_bwd_add=(1 << 16, (1 << 15) + 8),
    select_large=(1 << 16, (1 << 16) + 8),
)
ATTENTIONS = "attention_fwd", "attention_bwd", "attention_of_queries_fwd", "attention_of_queries_bwd"
SECONDS = "attention_decode", "activation_bwd", "linear_fwd", "linear_dgrad_act", "norm_bwd", "embed_finish_bwd"
SECONDS += "linear_cross_entropy_bwd", "linear_cross_entropy_bwd_add", "reduce_bias_dropout_add_norm_bwd"


def large_cases() -> Iterator:
    """One op of each launcher."""
    for case in cases():
        name, other = case.values
        if not case.marks and name not in ATTENTIONS:
            late = [pytest.mark.slow] * (name in SECONDS) + [pytest.mark.rare] * (name in SECONDS and other)
            yield pytest.param(*case.values, id=case.id, marks=late)


@pytest.mark.parametrize("name, other", list(large_cases()))
def test_large_sizes(monkeypatch, unlimited, name, other):
    if other:
        take_other_paths(monkeypatch)
    monkeypatch.setattr(linear_triton, "ELEMENTS", 1 << 62)
    with torch.device("meta"):
        for args in samples(name, *LARGE[name]):
            OPS[name].launch(*args)


# One position of all samples and heads is more than 2^31 elements; all positions of one sample are
@pytest.mark.parametrize("B, S, E", [(1 << 22, 2, 128), (1, 1 << 25, 16)])
def test_attention(unlimited, B, S, E):
    G, Q = 2, 2
    with torch.device("meta"):
        qkv, o, lse = torch.empty(S * B, G, Q + 2, E), torch.empty(S * B, G * Q * E), torch.empty(B, G * Q, S)
        table, seen, positions = torch.empty(S, E // 2), torch.ones(B, S, dtype=torch.bool), torch.arange(S * B)
        options = Options(seen, cos=table, sin=table, positions=positions, rng=torch.arange(3), batch=B, seq=S)
        options = options._replace(causal=True, window=64, p=0.1, softcap=9.0)
        OPS["attention_fwd"].launch(qkv, options)
        OPS["attention_bwd"].launch(o, qkv, o, lse, options)
        chunk, n = QueryChunk(torch.empty(S * B, G, 2, E), S // 2, S - S // 2), (S - S // 2) * B
        q, o, lse = torch.empty(n, G, Q, E), torch.empty(n, G * Q * E), torch.empty(B, G * Q, S - S // 2)
        OPS["attention_of_queries_fwd"].launch(q, chunk, options)
        OPS["attention_of_queries_bwd"].launch(o, q, chunk, o, lse, options)


@triton.jit
def _doubling_kernel(n):
    n * 2


def test_an_overflow_is_seen(unlimited):
    _launch.launch(_doubling_kernel, (3,), torch.device("cpu"), (1 << 30) - 1)
    with pytest.raises(Exception, match="overflow"):
        _launch.launch(_doubling_kernel, (3,), torch.device("cpu"), 1 << 30)
