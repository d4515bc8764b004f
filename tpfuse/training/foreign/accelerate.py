"""accelerate's Accelerator, which takes every process for a replica: refused on split models without the mix-in, before
anything is changed or written."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from .known import any_split, wholes_of

CLASS = "accelerate.accelerator:Accelerator"
KNOWS = "knows_split_models"  # attribute of the classes that take split models
Models = Callable[..., Iterable[Any]]

# method -> (the models that a call is about, of the Accelerator and the call's positional arguments; the cure)
_PREPARE = "call prepare of class Accelerator(tpfuse.AcceleratorMixin, accelerate.Accelerator)"
_SAVE = (
    "call it of class Accelerator(tpfuse.AcceleratorMixin, accelerate.Accelerator), or use tpfuse.save_checkpoint and"
    " save_pretrained of the model"
)
METHODS: dict[str, tuple[Models, str]] = {
    "prepare": (lambda accelerator, args: args, _PREPARE),
    "prepare_model": (lambda accelerator, args: args[:1], _PREPARE),
    "save_state": (lambda accelerator, args: accelerator._models, _SAVE),
    "load_state": (lambda accelerator, args: accelerator._models, _SAVE.replace("save_checkpoint", "load_checkpoint")),
    "save_model": (lambda accelerator, args: args[:1], _SAVE),
}


def refusing(method: str) -> Callable[..., Any]:
    models, cure = METHODS[method]

    def around(original: Callable[..., Any], accelerator: Any, *args: Any, **kwargs: Any) -> Any:
        if any_split() and not getattr(accelerator, KNOWS, False):
            positional = args or ((kwargs["model"],) if "model" in kwargs else ())
            if any(map(_split, models(accelerator, positional))):
                raise ValueError(
                    f"accelerate.Accelerator.{method}: the model is split over tensor-parallel ranks, which accelerate"
                    f" takes for replicas; {cure}"
                )
        return original(accelerator, *args, **kwargs)

    return around


def _split(model: Any) -> bool:
    return isinstance(model, nn.Module) and any(wholes_of(list(model.parameters())))
