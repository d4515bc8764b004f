"""Planted mistakes: an op, or a function by its address, that is wrong for as long as a test looks.

    def off_by_a_thousandth(right, *args):
        return right(*args) * 1.001

    def test_it_is_seen(planted):
        planted("rope_fwd", off_by_a_thousandth)  # an op: for the rest of the test
        planted("tpfuse.kernels.runtime.philox.keep_rows", lambda right, *args: ~right(*args))  # a function or method

A mistake is called in place of what it spoils, which it is handed first.  The fixture serves the test's own process;
what runs in processes of the pool says ``with planted(op, mistake):`` itself, or ``ranks`` is handed
``Mistaken(fn, op, mistake)`` in place of fn, whose parts are pickled.
"""

import contextlib
import functools
import pkgutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from tpfuse.kernels.runtime.op import NAMESPACE, OPS

Mistake = Callable[..., Any]  # (the right function, *its arguments) -> a wrong result


@contextlib.contextmanager
def planted(target: str, mistake: Mistake) -> Iterator[None]:
    """Spoils an op of OPS, or what stands at a dotted address.

    Of an op, its CPU implementation and its launcher are wrong however it is called: directly, by the dispatcher, or
    inside another op.  Its reference, against which it is tested, stays right.
    """
    with contextlib.ExitStack() as stack:
        if "." in target:
            parent, _, name = target.rpartition(".")
            owner = pkgutil.resolve_name(parent)
            stack.enter_context(mock.patch.object(owner, name, _wrong(getattr(owner, name), mistake)))
        else:
            op = OPS[target]
            for name in "cpu", "launch":
                if (right := getattr(op, name)) is not None:
                    stack.enter_context(mock.patch.object(op, name, _wrong(right, mistake)))
            library = stack.enter_context(torch.library._scoped_library(NAMESPACE, "IMPL"))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # an override is what is wanted
                library.impl(target, op._flat(op.cpu, "cpu"), "CPU", allow_override=True)
        yield


def _wrong(right: Callable[..., Any], mistake: Mistake) -> Callable[..., Any]:
    """Returns a plain function, so that a method's stays one."""

    @functools.wraps(right)
    def wrong(*args: Any, **named: Any) -> Any:
        return mistake(right, *args, **named)

    return wrong


@dataclass(frozen=True)
class Mistaken:
    """A function for the pool of processes, run while a mistake is planted in each of them, or in one rank's."""

    fn: Callable[..., Any]
    target: str
    mistake: Mistake
    rank: int | None = None  # None: in all

    def __call__(self, world: Any, *args: Any) -> Any:
        with planted(self.target, self.mistake) if self.rank in (None, world.rank) else contextlib.nullcontext():
            return self.fn(world, *args)


def doubled(right: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """A mistake that every test of values shows: floating outputs are twice too large."""
    return scaled(2.0, right, *args, **named)


def scaled(factor: float, right: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """A mistake once its factor is bound: ``functools.partial(scaled, 1.001)``.

    An op that returns nothing fills its last argument, which is then too large.
    """
    change = lambda t: t * factor if isinstance(t, torch.Tensor) and t.is_floating_point() else t
    result = right(*args, **named)
    if result is None:
        args[-1].mul_(factor)
    return tuple(map(change, result)) if isinstance(result, tuple) else change(result)
