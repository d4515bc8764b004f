"""Functions and methods of other libraries, replaced so that everybody who has imported one calls the replacement.

A method is replaced on its class.  A function that torch decorates keeps the function it decorates in a cell, and that
is replaced: the decorated object stays, with its signature, its docstring and its pickles.  Any other function is
replaced in its module.
"""

import functools
import sys
import warnings
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

import torch

Around = Callable[..., Any]  # (the original, *args, **kwargs) -> the result of a call
Undo = Callable[[], None]
_CELL = "func"  # the variable in which torch's decorators keep the decorated function


class Replacement(NamedTuple):
    """``around(original, ...)`` in place of ``owner.name``, and the reason.

    ``owner`` is a class, a module, or the address "module:Class" of a class in a package that need not be installed:
    that is replaced when somebody imports it.
    """

    owner: type | ModuleType | str
    name: str
    around: Around
    why: str

    def __str__(self) -> str:
        if isinstance(self.owner, str):
            return f"{self.owner.replace(':', '.')}.{self.name}"
        package = f"{self.owner.__module__}." if isinstance(self.owner, type) else ""
        return f"{package}{self.owner.__name__}.{self.name}"

    def put(self) -> Undo:
        """Replaces the function; returns a function that puts the original back.  A warning where there is none."""
        if isinstance(self.owner, str):
            module, _, owner = self.owner.partition(":")
            return _when_imported(module, lambda imported: replace(getattr(imported, owner), self.name, self.around))
        return replace(self.owner, self.name, self.around)


class Behind:
    """``around`` in the place of a function.  Equal to that function: torch files a module's states under it."""

    def __init__(self, original: Callable[..., Any], around: Around):
        functools.update_wrapper(self, original)
        self.original, self.around = original, around

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.around(self.original, *args, **kwargs)

    def __eq__(self, value: object) -> bool:
        return value is self or value is self.original

    def __hash__(self) -> int:
        return hash(self.original)


def replace(owner: type | ModuleType, name: str, around: Around) -> Undo:
    """Replaces ``owner.name`` by a call of ``around(original, ...)``; see :meth:`Replacement.put`."""
    raw = vars(owner).get(name)
    original: Any = raw.__func__ if isinstance(raw, classmethod | staticmethod) else raw
    if not callable(original):
        warnings.warn(
            f"tpfuse: {owner.__name__}.{name} of torch {torch.__version__} is not what tpfuse knows; given parameters"
            " that are split over tensor-parallel ranks, it may compute something else in silence",
            stacklevel=2,
        )
        return lambda: None
    if isinstance(owner, ModuleType) and _CELL in original.__code__.co_freevars:
        return _replace_cell(original.__closure__[original.__code__.co_freevars.index(_CELL)], around)

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    new = type(raw)(replacement) if isinstance(raw, classmethod | staticmethod) else replacement
    setattr(owner, name, new)

    def undo() -> None:
        if vars(owner).get(name) is new:  # or somebody has replaced it since
            setattr(owner, name, raw)

    return undo


def _replace_cell(cell: Any, around: Around) -> Undo:
    original = cell.cell_contents
    new = cell.cell_contents = Behind(original, around)

    def undo() -> None:
        if cell.cell_contents is new:
            cell.cell_contents = original

    return undo


def _when_imported(module: str, put: Callable[[ModuleType], Undo]) -> Undo:
    """Calls ``put`` with a module, which is not imported for this: now, or when somebody imports it."""
    if module in sys.modules:
        return put(sys.modules[module])
    finder = _Finder(module, put)
    sys.meta_path.insert(0, finder)
    return finder.undo


class _Finder(MetaPathFinder):
    """Waits for the import of one module."""

    def __init__(self, module: str, put: Callable[[ModuleType], Undo]):
        self.module, self.put = module, put
        self.undone: Undo | None = None

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_put(module: ModuleType) -> None:
                execute(module)
                self.undone = self.put(module)

            spec.loader.exec_module = execute_and_put  # type: ignore[method-assign]
        return spec

    def undo(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        if self.undone is not None:
            self.undone()
