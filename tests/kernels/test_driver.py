"""Every kernel as its launcher starts it, through Triton's own launcher, down to a driver that starts nothing
(bench/idle): the driver refuses none of them, and each is the very binary that bench.compile's table is of.

Slow: the calls for sm_90 that work otherwise than all before them, by the table: another kernel, or other instructions
(products, descriptors, copies).  Rare: all others.
"""

import collections
import contextlib
import importlib
import re
from unittest import mock

import pytest

pytest.importorskip("triton")
import torch
from torch import Tensor

from bench.compile._pool import HERE, OPS, launches_of, wanted

ARCH = "sm_90"


# ---- in that process ----


def _untouched(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Memory that nobody reads or writes, so that none is taken."""
    return torch.empty(shape, dtype=dtype)


def _started(op: str, label: str) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(kernel, hash of its binary) of what a call starts, and of what bench.compile compiles for it."""
    from bench import idle
    from bench.compile._compile import build
    from tpfuse.kernels import replay
    from tpfuse.kernels.runtime import launch

    call, found = importlib.import_module(f"bench.compile.{op}").CALLS[label], []
    built = [(each.kernel.fn.__name__, build(each, ARCH).hash) for _, each in launches_of(op, [label], ARCH)]

    def start(*args, **named):
        compiled = idle._start(*args, **named)
        found.append((compiled.name, compiled.hash))
        return compiled

    with contextlib.ExitStack() as patches:
        for name in OPS:
            module = importlib.import_module(f"bench.compile.{name}")  # one may use another's tensors
            patches.enter_context(mock.patch.object(module, "meta", _untouched, create=True))
        patches.enter_context(mock.patch.object(launch, "_start", start))
        patches.enter_context(mock.patch.object(replay, "REPLAY", False))  # calls differ in tables of parameters alone
        patches.enter_context(mock.patch.object(idle, "STARTED", []))
        call.run()
        started = [each.name for each in idle.STARTED if each.name != "mm"]
    assert started == [name for name, _ in found], "not every kernel came to the driver"
    return [each for each in found if call.only in (None, each[0])], built


# ---- in this one ----


def _workings() -> dict[tuple[str, str], set[tuple[str, frozenset[str]]]]:
    """{(op, call): each kernel's name and the instructions that tell how it works}, of the table."""
    workings: dict = collections.defaultdict(set)
    for row in (HERE / "table.md").read_text().splitlines():
        op, label, arch, kernel, *_, opcodes, _ = row.strip("| ").split(" | ") if f" | {ARCH} | " in row else [""] * 6
        if arch == ARCH:
            workings[op, label].add((kernel, frozenset(re.findall("[A-Z]{2,}", opcodes))))
    return workings


EVERYDAY = {("linear", "gelu_tanh"), ("norm", "layer D=1024")}  # by descriptors, and by pointers


def _calls() -> list:
    calls, workings = [], _workings()
    for op in OPS:
        seen: set = set()
        for label in wanted(op, ARCH, default=False):
            alike = (op, label) in workings and workings[op, label] <= seen
            seen |= workings[op, label]
            marks = [pytest.mark.slow] * ((op, label) not in EVERYDAY) + [pytest.mark.rare] * alike
            calls.append(pytest.param(op, label, id=f"{op} {label}", marks=marks))
    return calls


@pytest.mark.parametrize("op, label", _calls())
def test_the_driver_takes_what_was_compiled(idle, op, label):
    started, built = idle(_started, op, label)
    assert started == built and started
