"""Bytes, flops and kernels of a call are those of its ops."""

from types import SimpleNamespace

import pytest
import torch

from tests.tools.bench.common import CARD, LAYER_NORM, declared, random
from tpfuse.kernels.norm.records import ALONE, Add, NormVectors, Saved, Wanted
from tpfuse.kernels.norm.triton_backward import BWD_ROW
from tpfuse.kernels.norm.verbs import NORM
from tpfuse.kernels.runtime.op import NAMESPACE, Cost
from tpfuse.kernels.runtime.philox import Mask
from tpfuse.tools.bench.count import CallCount, Kernel, OpCount, _Watched, count
from tpfuse.tools.bench.definition import load
from tpfuse.tools.bench.run import speed


def test_counted_bytes_are_the_declared_costs():
    x, weight, bias = LAYER_NORM.inputs(random(), 8, 16)
    with count() as counted:
        y = LAYER_NORM.providers["tpfuse"](x, weight, bias)
        torch.autograd.grad(y, [x, weight, bias], torch.ones_like(y))
    args = x[None], Add(), NormVectors(weight, bias, 1e-5), Mask(), ALONE
    made = NORM.fwd(*args)
    saved, wanted = Saved(x, made[2], made[3], weight, "layer"), Wanted(None, True, None, x.dtype)
    back = torch.ones(1, 8, 16), None, saved, Mask(), ALONE, wanted
    costs = NORM.fwd.cost(args, made), NORM.bwd.cost(back, NORM.bwd(*back))
    assert [call.op for call in counted.calls] == ["norm_fwd", "norm_bwd"]
    assert declared(counted) == sum(cost.read + cost.written for cost in costs) > 0
    assert counted.flops == sum(cost.flops for cost in costs)


def test_a_table_is_not_read_whole():
    bench = load("embedding")
    weight, ids = bench.inputs(random(), 1000, 4, 8)
    with count() as counted:
        bench.providers["tpfuse"](weight, ids)
    assert counted.least == 8 * 4 + 2 * (4 * 4 * 8)


def test_what_is_not_ours_counts_nothing():
    with count() as counted:
        torch.ones(4).softmax(0)
    assert counted.calls == [] and counted.least == 0 and counted.path == "" and counted.largest("registers") is None


def test_a_launch_leaves_its_registers():
    def _some_kernel(): ...

    class Compiled:
        fn = _some_kernel

        def __getitem__(self, grid):
            return lambda *args, **config: SimpleNamespace(n_regs=args[0], n_spills=2)

    launched: list[Kernel] = []
    watched = _Watched(Compiled(), launched)
    assert watched[(1,)](128, num_warps=4).n_regs == 128
    watched[(1,)](96)
    counted = CallCount(
        [OpCount("norm_fwd", Cost(1, 1), launched, "cuda"), OpCount("norm_bwd", Cost(1, 1), [], "cuda")]
    )
    assert counted.largest("registers") == 128 and counted.largest("spills") == 8
    assert counted.path == "_some_kernel, norm_bwd by torch"


def _counted_thrice() -> list[list[str]]:
    """The kernels of layer_norm in three calls, each of which runs its launcher as on a GPU, or replays it."""
    library = torch.library.Library(NAMESPACE, "IMPL")
    library.impl(NORM.fwd.name, NORM.fwd._flat(NORM.fwd._cuda), "CPU", allow_override=True)
    inputs, found = LAYER_NORM.inputs(random(dtype=torch.bfloat16), 8, 64), []
    for _ in range(3):
        with count() as counted:
            LAYER_NORM.providers["tpfuse"](*inputs)
        found.append([kernel.name for call in counted.calls for kernel in call.kernels])
    return found


@pytest.mark.slow
def test_what_a_call_launches_is_counted_each_time(idle):
    """A replay starts kernels past what counts them."""
    pytest.importorskip("triton")
    assert idle(_counted_thrice) == [["_fwd_kernel"]] * 3


def test_the_roofline_counts_the_least_bytes():
    """The backward of a wide row reads it twice, as declared: no useful work."""
    M, D = 2, 2 * BWD_ROW
    x, weight, bias = LAYER_NORM.inputs(random(dtype=torch.bfloat16), M, D)
    y = LAYER_NORM.providers["tpfuse"](x, weight, bias)
    with count() as counted:
        torch.autograd.grad(y, [x, weight, bias], torch.ones_like(y))
    rows, vectors, statistics = 2 * M * D, 2 * D, 4 * M
    assert counted.least == 3 * rows + 3 * vectors + 2 * statistics < declared(counted) - rows
    assert speed(counted, "bf16", 1.0, CARD)["bytes"] == counted.least
