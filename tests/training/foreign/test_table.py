"""What is replaced in torch, when, and how it is put back: as the table says, and the page of the documents with it."""

import inspect
import pathlib
import pickle
import re
import subprocess
import sys
import types

import pytest
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tpfuse
from tpfuse.training.foreign.behind import replace
from tpfuse.training.foreign.guard import install
from tpfuse.training.foreign.table import TABLE

SNAPSHOT = pathlib.Path(__file__).with_name("snapshot.py")
PAGE = pathlib.Path(__file__).parents[3] / "docs/faults.md"


@pytest.mark.slow
def test_torch_before_and_after(tmp_path):
    """In a process of its own: the script compares all of torch's functions and methods."""
    command = [sys.executable, str(SNAPSHOT), str(tmp_path / "layer")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    everything = str(sorted(str(record) for record in TABLE if not isinstance(record.owner, str)))
    assert dict(line.split(": ", 1) for line in done.stdout.splitlines()) == {
        "import": "[]",
        "one rank": "[]",
        "a split parameter": everything,
        "an unpickled layer": everything,
        "a MainGrad": everything,
        "off": "[]",
        "off, another split parameter": "[]",
        "on again": everything,
    }


def test_the_page_is_the_table():
    rows = re.findall(r"^\| `(\w+\.[\w.]+)` \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    assert rows == [(str(record), record.why) for record in TABLE]
    count = sum(not isinstance(record.owner, str) for record in TABLE)
    assert f"{count} functions of torch" in (PAGE.parents[1] / "README.md").read_text()


def test_torch_has_every_name():
    """Said here first where a new torch has moved one."""
    for record in TABLE:
        if not isinstance(record.owner, str):
            raw = vars(record.owner)[record.name]
            assert callable(getattr(raw, "__func__", raw)), record


def test_a_name_that_is_not_there_is_said():
    with pytest.warns(UserWarning, match="Linear.no_such of torch .* is not what tpfuse knows"):
        replace(nn.Linear, "no_such", len)()
    with pytest.warns(UserWarning, match="functional.no_such of torch"):
        replace(nn.functional, "no_such", len)()


class Kinds:
    """A method of each kind."""

    def method(self, x):
        return x

    @classmethod
    def of_class(cls, x):
        return x

    @staticmethod
    def static(x):
        return x


MODULE = types.ModuleType("module")
MODULE.function = lambda x: x


def minus(original, *args):
    return -original(*args)


@pytest.mark.parametrize(
    "owner, caller, name",
    [(Kinds, Kinds(), "method"), (Kinds, Kinds, "of_class"), (Kinds, Kinds, "static"), (MODULE, MODULE, "function")],
)
def test_each_kind_is_replaced_and_put_back(owner, caller, name):
    raw = vars(owner)[name]
    undo = replace(owner, name, minus)
    assert getattr(caller, name)(3) == -3 and inspect.signature(getattr(caller, name)).parameters.keys() == {"x"}
    undo()
    assert vars(owner)[name] is raw
    undo = replace(owner, name, minus)
    setattr(owner, name, later := object())
    undo()
    assert vars(owner)[name] is later  # somebody else's
    setattr(owner, name, raw)


def test_what_is_replaced_keeps_its_face():
    install()
    for record in TABLE:
        if isinstance(record.owner, type):
            assert pickle.loads(pickle.dumps(record.owner)) is record.owner
        elif not isinstance(record.owner, str):
            function = getattr(record.owner, record.name)
            assert pickle.loads(pickle.dumps(function)) is function and len(function.__doc__) > 100
            assert "args" not in inspect.signature(function).parameters
    assert list(inspect.signature(DistributedDataParallel).parameters)[0] == "module"


def test_what_is_off_refuses_nothing(ranks):
    assert ranks(2, weight_norm) == [(True, False, True)] * 2


def weight_norm(world):
    """-> whether a split weight was refused: before, when switched off, and when on again"""

    def refused():
        layer = tpfuse.layers.ColumnParallelLinear(4, 8, tp=tpfuse.TensorParallel(world.group))
        try:
            nn.utils.parametrizations.weight_norm(layer)
        except ValueError:
            return True
        return False

    before = refused()
    tpfuse.guard_torch(False)
    try:
        off = refused()
    finally:
        tpfuse.guard_torch()
    return before, off, refused()
