"""accelerate's Accelerator, which takes every process for a replica: refused on split models without the mix-in, before
anything is changed or written.

accelerate is never imported for this.  Its class is patched when somebody imports it.
"""

import sys
from collections.abc import Callable, Iterable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from torch import nn

from .behind import stand_behind_method
from .known import any_split, wholes_of

MODULE, CLASS = "accelerate.accelerator", "Accelerator"
KNOWS = "knows_split_models"  # attribute of the classes that take split models
Modules = Callable[..., Iterable[Any]]

# method -> (the models that a call is about, of the Accelerator and the call's positional arguments; the cure)
_PREPARE = "call prepare of class Accelerator(tpfuse.AcceleratorMixin, accelerate.Accelerator)"
_SAVE = (
    "call it of class Accelerator(tpfuse.AcceleratorMixin, accelerate.Accelerator), or use tpfuse.save_checkpoint and"
    " save_pretrained of the model"
)
METHODS: dict[str, tuple[Modules, str]] = {
    "prepare": (lambda accelerator, args: args, _PREPARE),
    "prepare_model": (lambda accelerator, args: args[:1], _PREPARE),
    "save_state": (lambda accelerator, args: accelerator._models, _SAVE),
    "load_state": (lambda accelerator, args: accelerator._models, _SAVE.replace("save_checkpoint", "load_checkpoint")),
    "save_model": (lambda accelerator, args: args[:1], _SAVE),
}


def install() -> None:
    if MODULE in sys.modules:
        _patch(sys.modules[MODULE])
    else:
        sys.meta_path.insert(0, _Awaited())


class _Awaited(MetaPathFinder):
    """Waits for accelerate's import."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_patch(module: ModuleType) -> None:
                execute(module)
                _patch(module)

            spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec


def _patch(module: ModuleType) -> None:
    for name, (modules, cure) in METHODS.items():
        stand_behind_method(getattr(module, CLASS), name, _refusing(name, modules, cure))


def _refusing(name: str, modules: Modules, cure: str) -> Callable[..., Any]:
    def around(original: Callable[..., Any], accelerator: Any, *args: Any, **kwargs: Any) -> Any:
        if any_split() and not getattr(accelerator, KNOWS, False):
            given = args or ((kwargs["model"],) if "model" in kwargs else ())
            if any(map(_split, modules(accelerator, given))):
                raise ValueError(
                    f"accelerate.Accelerator.{name}: the model is split over tensor-parallel ranks, which accelerate"
                    f" takes for replicas; {cure}"
                )
        return original(accelerator, *args, **kwargs)

    return around


def _split(model: Any) -> bool:
    return isinstance(model, nn.Module) and any(wholes_of(list(model.parameters())))
