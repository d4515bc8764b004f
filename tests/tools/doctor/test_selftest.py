"""The self-test passes here, leaves no op out, and finds and names an op that is wrong."""

import pytest
import torch

from tests.common import Recorder
from tpfuse import TensorParallel, kernels
from tpfuse.kernels.replay import replay
from tpfuse.kernels.runtime import op, philox
from tpfuse.kernels.runtime.op import OPS
from tpfuse.tools.doctor.report import FAULT, OK
from tpfuse.tools.doctor.selftest import block, cases, compare
from tpfuse.tools.doctor.selftest import kernels as selftest

CPU = torch.device("cpu")
CASES = cases.cases()
CALLED = {case.name: {call.name for call in selftest.by_definition(case, torch.float32)[1]} for case in CASES}
LOCAL = sorted(set().union(*CALLED.values()))
IN_BLOCK = {"linear_dgrad_act": block.ALONE[0], "norm_apply": block.ALONE[1]}


def broken(name: str, how):
    """The implementation of an op, whose floating outputs ``how`` changes."""
    right = OPS[name].cpu

    def wrong(*args):
        out = right(*args)
        change = lambda t: how(t) if t.is_floating_point() else t
        return tuple(map(change, out)) if isinstance(out, tuple) else change(out)

    return wrong


def recorded(act) -> set[str]:
    with Recorder() as recorder:
        act()
    return {call.name for call in recorder.calls if call.ours}


def test_all_is_well_here():
    found = [*selftest.results(CPU), *block.alone(CPU)]
    assert {f.status for f in found} == {OK} and len(found) == len(CASES) + len(block.ALONE) + 1
    assert all("fp32" in f.value and "bf16" in f.value for f in found[: len(CASES)])


def test_every_public_function_has_a_case():
    tables = {"rope_table"}  # of which rope's case takes its angles
    assert {case.name.split(",")[0] for case in CASES} == set(kernels.__all__) - tables


def test_every_op_that_needs_no_group_is_run():
    ran = recorded(lambda: [*selftest.results(CPU), *block.alone(CPU)])
    assert set(LOCAL) | set(IN_BLOCK) <= ran
    assert set(OPS) - ran == {name for split in block.SPLIT for name in split.ops}


@pytest.mark.parametrize("name", LOCAL)
def test_an_op_that_is_wrong_is_found_and_named(monkeypatch, name):
    """By a part in a thousand, in one implementation; its definition stays."""
    case = next(case for case in CASES if name in CALLED[case.name])
    monkeypatch.setattr(OPS[name], "cpu", broken(name, lambda t: t * 1.001))
    found = selftest.tried(case, CPU)
    assert found and {f.status for f in found} == {FAULT}
    for words in ("error ", "limit 4.3e-06", " in fp32", f"op {name}"):
        assert any(words in f.value for f in found), words


@pytest.mark.parametrize("name", IN_BLOCK)
def test_an_op_that_is_wrong_in_a_block_is_named(monkeypatch, name):
    monkeypatch.setattr(OPS[name], "cpu", broken(name, lambda t: t * 1.001))
    found = block.compared(IN_BLOCK[name], TensorParallel(), CPU)
    assert {f.status for f in found} == {FAULT} and all(name in f.value for f in found)


def test_an_op_that_is_wrong_from_the_second_call_on_is_found(monkeypatch):
    """As one that is replayed wrongly."""
    right, calls = OPS["rope_fwd"].cpu, []
    wrong = lambda *args: calls.append(1) or right(*args) * (1 if len(calls) == 1 else 2)
    monkeypatch.setattr(OPS["rope_fwd"], "cpu", wrong)
    assert "output in fp32" in selftest.tried(CASES[-1]._replace(backward=False), CPU)[0].value


@pytest.mark.parametrize("how", [lambda t: t * float("nan"), lambda t: t[..., :-1]], ids=["NaN", "shape"])
def test_what_is_no_number_of_the_right_shape_is_wrong(monkeypatch, how):
    monkeypatch.setattr(OPS["rope_fwd"], "cpu", broken("rope_fwd", how))
    assert {f.status for f in selftest.tried(CASES[-1], CPU)} == {FAULT}


def test_an_op_that_raises_is_named(monkeypatch):
    def wrong(*args):
        raise RuntimeError("planted")

    monkeypatch.setattr(OPS["rope_fwd"], "cpu", wrong)
    (found,) = selftest.tried(CASES[-1], CPU)
    assert found.status == FAULT and "planted" in found.value and "op rope_fwd" in found.value
    assert {f.status for f in selftest.results(CPU)} == {OK, FAULT}


@pytest.mark.slow
def test_the_kernels_pass_and_a_wrong_one_does_not(monkeypatch):
    """Launchers in Triton's interpreter, picked on the CPU as they are on a GPU."""
    monkeypatch.setattr(replay, "REPLAY", False)  # which needs a GPU's stream
    monkeypatch.setattr(replay, "LAUNCHED", replay.LAUNCHED | {"cpu"})
    monkeypatch.setattr(op, "LAUNCHED", replay.LAUNCHED)
    assert {f.status for f in [*selftest.results(CPU), *block.alone(CPU)]} == {OK}
    right = OPS["dropout_fwd"].launch
    monkeypatch.setattr(OPS["dropout_fwd"], "launch", lambda x, mask: right(x, mask._replace(site=mask.site + 1)))
    assert {f.name for f in selftest.results(CPU) if f.status == FAULT} == {"dropout", "dropout's mask"}


def test_a_wrong_mask_is_found(monkeypatch):
    monkeypatch.setattr(selftest, "keep_rows", lambda mask, *rest: ~philox.keep_rows(mask, *rest))
    assert selftest.masks(CPU).status == FAULT


def test_the_limit_is_what_the_document_says():
    assert compare.limit(torch.float32) == pytest.approx(4.3e-6, rel=0.01)
    assert compare.limit(torch.bfloat16) == pytest.approx(0.031, rel=0.01)


def test_tf32_is_counted(monkeypatch):
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert compare.limit(torch.float32) == pytest.approx(0.031, rel=0.01)
