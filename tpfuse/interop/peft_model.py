"""A PeftModel in the place of the module that it wraps."""

import contextlib
import math
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from ..kernels.runtime.errors import check
from ..kernels.runtime.rules import listed
from ..ranks.messages import together
from .adapter import load_adapter, read_adapter

T = TypeVar("T")


def is_peft_model(module: nn.Module) -> bool:
    """True for one of PEFT's wrappers, which need not be installed."""
    return type(module).__module__.startswith("peft.") and hasattr(module, "get_base_model")


def before_peft(tensors: Mapping[str, T]) -> dict[str, T]:
    """Returns the tensors of a module that PEFT may have wrapped layers of, without PEFT's own, by the names before."""
    kept = {name: t for name, t in tensors.items() if ".lora_" not in name and ".modules_to_save." not in name}
    return {re.sub(r"(\.base_layer)+\.|\.original_module\.", ".", name): t for name, t in kept.items()}


def in_use(parameters: Mapping[str, T]) -> dict[str, T]:
    """Returns the parameters as :func:`before_peft` does; of a module that PEFT trains a copy of, those of the copy."""
    copies = {name: p for name, p in parameters.items() if ".modules_to_save." in name}
    return before_peft(
        {**parameters, **{re.sub(r"\.modules_to_save\.[^.]+\.", ".original_module.", n): p for n, p in copies.items()}}
    )


@contextlib.contextmanager
def adapter_of(
    module: Any, groups: Iterable[dist.ProcessGroup | None]
) -> Iterator[Callable[[nn.Module], nn.Module] | None]:
    """Yields what adds a PeftModel's one LoRA adapter to a model, as trainable as it is; of other modules None.

    The adapter goes through a folder of PEFT's format, which is gone afterwards.  ValueError for several adapters,
    merged, disabled or scaled ones, one of which a part is frozen, options that are not built, and for another module
    with layers of PEFT.
    """
    if not is_peft_model(module):
        together(lambda: _check_unwrapped(module), groups)
        yield None
        return
    trainable = any(p.requires_grad for p in module.parameters())
    trained = {p.requires_grad for name, p in module.named_parameters() if ".lora_" in name}
    with tempfile.TemporaryDirectory(prefix="tpfuse-adapter-") as folder:

        def examine() -> Path:
            names = list(module.peft_config)
            check(len(names) == 1, f"parallelize: a PeftModel must have one adapter, got {', '.join(names) or 'none'}")
            merged = [name for name, m in module.named_modules() if getattr(m, "merged", False)]
            check(not merged, f"parallelize: adapters must not be merged, got {merged[:1]}; call unmerge_adapter()")
            disabled = [name for name, m in module.named_modules() if getattr(m, "disable_adapters", None) is True]
            check(
                not disabled,
                f"parallelize: adapters must not be disabled, got {disabled[:1]}; call enable_adapter_layers()",
            )
            check(len(trained) < 2, "parallelize: an adapter must be frozen as a whole or not at all")
            module.save_pretrained(folder)
            inner = Path(folder) if names[0] == "default" else Path(folder, names[0])
            options = read_adapter(inner, trainable=trainable).config
            scale = options["lora_alpha"] / (options["r"] ** 0.5 if options.get("use_rslora") else options["r"])
            scaled = [m for m in module.modules() if not math.isclose(_scale(m, names[0], scale), scale)]
            check(
                not scaled,
                f"parallelize: an adapter must be scaled as its config says, by {scale}, got"
                f" {[_scale(m, names[0], scale) for m in scaled[:1]]}; set lora_alpha",
            )
            return inner

        path = together(examine, groups)
        yield lambda model: load_adapter(model, path, trainable=True in trained)


def _check_unwrapped(module: nn.Module) -> None:
    wrapped = [name for name, m in module.named_modules() if type(m).__module__.startswith("peft.")]
    check(
        not wrapped,
        f"parallelize: {type(module).__name__} has adapters of PEFT, which would be lost, in {listed(wrapped)}; give"
        " the PeftModel around it, or the module without them, whose add_adapter and load_adapter add them afterwards",
    )


def _scale(layer: Any, name: str, usual: float) -> float:
    """Returns what a layer of PEFT multiplies an adapter by; ``usual`` for one without it."""
    scaling = getattr(layer, "scaling", None)
    return scaling.get(name, usual) if isinstance(scaling, dict) else usual
