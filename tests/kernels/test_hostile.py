"""Every launcher on tensors that lie in memory as no test of its own would lay them, and at the smallest sizes.

Whatever an op's arguments look like to torch, its launcher gives what its reference gives for contiguous copies.  What
lies between and around the elements is NaN (integers: 0), so that a read beside them shows.  An op with a launcher
joins by an entry of SAMPLES in samples.py.
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.kernel_rules import DEVICE, assert_same
from tests.kernels.samples import LAUNCHED, SAMPLES, cases, samples, take_other_paths
from tpfuse.kernels.norm.records import Recompute
from tpfuse.kernels.runtime.op import OPS, flatten

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),  # numpy's word for a sigmoid of 0
]

# ---- forms: a tensor -> one of its shape; its elements are the tensor's own but where one is repeated ----


def room(t: Tensor, *shape: int) -> Tensor:
    return torch.full(shape, float("nan") if t.is_floating_point() else 0, dtype=t.dtype, device=t.device)


def strided(t: Tensor) -> Tensor:
    """Every second element of a buffer."""
    return room(t, *t.shape[:-1], 2 * t.shape[-1])[..., ::2].copy_(t)


def sliced(t: Tensor) -> Tensor:
    return room(t, *(n + 3 for n in t.shape))[tuple(slice(1, n + 1) for n in t.shape)].copy_(t)


def offset(t: Tensor) -> Tensor:
    """Dense, one element into a buffer, so that nothing is aligned."""
    return room(t, t.numel() + 1)[1:].view(t.shape).copy_(t)


def repeated_rows(t: Tensor) -> Tensor:
    return t[:1].expand_as(t) if len(t) else t


def repeated_columns(t: Tensor) -> Tensor:
    return t[..., :1].expand_as(t) if t.shape[-1] else t


def transposed(t: Tensor) -> Tensor:
    last_first = tuple(reversed(range(t.dim())))
    return t.permute(last_first).contiguous().permute(last_first)


FORMS = strided, sliced, offset, repeated_rows, repeated_columns, transposed


def one_after_another() -> Callable[[Tensor], Tensor]:
    every = itertools.cycle(FORMS)
    return lambda t: next(every)(t)


def written(name: str) -> list[int]:
    """The flat arguments that the op writes to, which its callers own: they are contiguous."""
    arguments = OPS[name].overload._schema.arguments
    return [i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]


def ordering(name: str) -> list[int]:
    """The flat arguments that are an order of rows, or a row's experts: an element repeated makes none."""
    names = [a.name for a in OPS[name].overload._schema.arguments]
    return [i for i, each in enumerate(names) if each.endswith(("index", "offsets")) or each == "chosen"]


def in_form(name: str, args: tuple[Any, ...], form: Callable[[Tensor], Tensor], only: int | None = None) -> list[Any]:
    """Flat arguments with ``form`` on every tensor that is read, or on argument ``only`` alone."""
    kept = written(name) + ([] if form in (strided, sliced, offset, transposed) else ordering(name))
    formed = lambda i, arg: isinstance(arg, Tensor) and only in (None, i) and i not in kept
    return [form(arg) if formed(i, arg) else arg for i, arg in enumerate(flatten(args))]


# ---- tests ----


def test_every_launcher_has_samples():
    assert len(LAUNCHED) > 20 and set(LAUNCHED) == set(SAMPLES)


def applied(recipe: Recompute) -> Tensor:
    """What norm_apply's launcher is to give: the op's reference takes the statistics of h, not those it is given."""
    return (recipe.h - recipe.mean[:, None]) * recipe.rstd[:, None] * recipe.gamma + recipe.beta


def on_device(name: str, rows: int, columns: int) -> list[tuple[Any, ...]]:
    with torch.device(DEVICE):
        return samples(name, rows, columns)


def assert_launch(name: str, flat: list[Any]) -> None:
    op = OPS[name]
    truth = applied if name == "norm_apply" else op.reference
    copies = [arg.clone(memory_format=torch.contiguous_format) if isinstance(arg, Tensor) else arg for arg in flat]
    assert_same(op.launch(*op.pack(tuple(flat))), truth(*op.pack(tuple(copies))))
    for i in written(name):
        if i < len(flat) and flat[i] is not None:
            assert_same(flat[i], copies[i])


SIZES = [(0, 5), (1, 7), (7, 1)]
SLOW_SIZES = [(5, 13), (37, 29)]
CASE = pytest.mark.parametrize("name, other", cases())
FORM = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)


@pytest.mark.parametrize("size", [*SIZES, *(pytest.param(s, marks=pytest.mark.slow) for s in SLOW_SIZES)], ids=str)
@CASE
def test_sizes(monkeypatch, name, other, size):
    if other:
        take_other_paths(monkeypatch)
    for args in on_device(name, *size):
        assert_launch(name, flatten(args))


@CASE
def test_forms_mixed(monkeypatch, name, other):
    """Each tensor of a call in another form than the one before."""
    if other:
        take_other_paths(monkeypatch)
    for args in on_device(name, 5, 13):
        assert_launch(name, in_form(name, args, one_after_another()))


@pytest.mark.slow
@FORM
@CASE
def test_forms(monkeypatch, name, other, form):
    """All tensors of a call together."""
    if other:
        take_other_paths(monkeypatch)
    for args in on_device(name, 5, 13):
        assert_launch(name, in_form(name, args, form))


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, pytest.param(len(FORMS) // 2, marks=pytest.mark.rare)])
@CASE
def test_forms_one_by_one(monkeypatch, name, other, first):
    """One tensor at a time, each in another form than the one before."""
    if other:
        take_other_paths(monkeypatch)
    for args in on_device(name, 7, 19):
        for i, arg in enumerate(flatten(args)):
            if isinstance(arg, Tensor):
                assert_launch(name, in_form(name, args, FORMS[(first + i) % len(FORMS)], only=i))
