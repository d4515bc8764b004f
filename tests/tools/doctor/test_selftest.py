"""The self-test passes here, leaves no op out, and names an op that is wrong."""

import functools
import itertools

import pytest
import torch

from tests.common import Recorder, own_ops
from tests.planted import scaled
from tpfuse import TensorParallel, kernels
from tpfuse.kernels import replay
from tpfuse.kernels.runtime import op, philox
from tpfuse.tools.doctor.report import FAULT, OK
from tpfuse.tools.doctor.selftest import block, cases
from tpfuse.tools.doctor.selftest import kernels as selftest
from tpfuse.tools.doctor.selftest.compare import tensor_errors

CPU = torch.device("cpu")
CASES = cases.cases()
CALLED = {case.name: {call.name for call in selftest.by_definition(case, torch.float32)[1]} for case in CASES}
LOCAL = sorted(set().union(*CALLED.values()))
IN_BLOCK = {"linear_dgrad_act": block.ALONE[0], "norm_apply": block.ALONE[1]}
A_THOUSANDTH = functools.partial(scaled, 1.001)  # a wrong implementation; its definition stays
INTEGERS = "sparse_matmul", "sampled_matmul"
ROPE = CASES[-1]


def test_every_op_that_needs_no_group_is_run_and_right():
    with Recorder() as recorder:
        lines = [*selftest.results(CPU), *block.alone(CPU)]
    assert {f.status for f in lines} == {OK} and len(lines) == len(CASES) + len(block.ALONE) + 1
    assert all("fp32" in f.value and "bf16" in f.value for f in lines[: len(CASES)])
    ran = {call.name for call in recorder.calls if call.ours}
    assert set(LOCAL) | set(IN_BLOCK) <= ran
    assert own_ops() - ran == {name for split in block.SPLIT for name in split.ops} - ran


@pytest.mark.parametrize("seed", range(5))
def test_rounding_takes_at_most_half_of_the_limit(seed):
    """Whatever the numbers: the limit holds on processors that round and add in other orders."""
    for case, dtype in itertools.product(cases.cases(seed), selftest.DTYPES):
        exact, _ = selftest.by_definition(case, dtype)
        for tensor in tensor_errors(selftest.run(case, dtype, CPU, rounded=dtype), exact, dtype):
            assert tensor.error <= tensor.limit / 2, (case.name, tensor)


def test_every_public_function_has_a_case():
    others = {"rope_table", "Routing", "SparseInt"}  # whose results the cases of functions take
    assert {case.name.split(",")[0] for case in CASES} == set(kernels.__all__) - others


def one_more(right, *args):
    return right(*args) + 1


@pytest.mark.parametrize("name", LOCAL)
def test_an_op_that_is_wrong_is_named(planted, name):
    case = next(case for case in CASES if name in CALLED[case.name])
    planted(name, one_more if name in INTEGERS else A_THOUSANDTH)
    lines = selftest.tried(case, CPU)
    assert lines and {f.status for f in lines} == {FAULT}
    for words in ("error ", "limit 4.3e-06", " in fp32", f"op {name}"):
        assert any(words in f.value for f in lines), words


@pytest.mark.parametrize("name", IN_BLOCK)
def test_an_op_that_is_wrong_in_a_block_is_named(planted, name):
    planted(name, A_THOUSANDTH)
    lines = block.compared(IN_BLOCK[name], TensorParallel(), CPU)
    assert {f.status for f in lines} == {FAULT} and all(name in f.value for f in lines)


def test_an_op_that_is_wrong_from_the_second_call_on_is_seen(planted):
    """As one that is replayed wrongly."""
    calls = []
    planted("rope_fwd", lambda right, *args: calls.append(1) or right(*args) * min(len(calls), 2))
    assert "output in fp32" in selftest.tried(ROPE._replace(backward=False), CPU)[0].value


def nan(right, *args):
    return right(*args) * float("nan")


def narrow(right, *args):
    return right(*args)[..., :-1]


@pytest.mark.parametrize("mistake", [nan, narrow])
def test_no_number_and_another_shape_are_wrong(planted, mistake):
    planted("rope_fwd", mistake)
    assert {f.status for f in selftest.tried(ROPE, CPU)} == {FAULT}


def test_an_op_that_raises_is_named(planted):
    def wrong(right, *args):
        raise RuntimeError("planted")

    planted("rope_fwd", wrong)
    (finding,) = selftest.tried(ROPE, CPU)
    assert finding.status == FAULT and "planted" in finding.value and "op rope_fwd" in finding.value
    assert {f.status for f in selftest.results(CPU)} == {OK, FAULT}


@pytest.mark.slow
def test_the_kernels_pass_and_a_wrong_one_does_not(monkeypatch, planted):
    """Launchers in Triton's interpreter, picked on the CPU as they are on a GPU."""
    monkeypatch.setattr(replay, "REPLAY", False)  # which needs a GPU's stream
    monkeypatch.setattr(replay.calls, "LAUNCHED", replay.calls.LAUNCHED | {"cpu"})
    monkeypatch.setattr(op, "LAUNCHED", replay.calls.LAUNCHED)
    monkeypatch.setattr(block, "ALONE", [split for split in block.ALONE if split.kernels])  # leaves have no kernels
    assert {f.status for f in [*selftest.results(CPU), *block.alone(CPU)]} == {OK}
    planted("dropout_fwd", lambda right, x, mask: right(x, mask._replace(site=mask.site + 1)))
    assert {f.name for f in selftest.results(CPU) if f.status == FAULT} == {"dropout", "dropout's mask"}


def test_a_wrong_mask_is_seen(monkeypatch):
    monkeypatch.setattr(selftest, "keep_rows", lambda mask, *rest: ~philox.keep_rows(mask, *rest))
    assert selftest.masks(CPU).status == FAULT
