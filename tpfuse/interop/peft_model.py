"""A PeftModel in the place of the module that it wraps."""

import contextlib
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from ..kernels.runtime.errors import check
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


@contextlib.contextmanager
def adapter_of(
    module: Any, groups: Iterable[dist.ProcessGroup | None]
) -> Iterator[Callable[[nn.Module], nn.Module] | None]:
    """Yields what adds a PeftModel's one LoRA adapter to a model, as trainable as it is; of other modules None.

    The adapter goes through a folder of PEFT's format, which is gone afterwards.  ValueError for several adapters,
    merged ones and options that are not built.
    """
    if not is_peft_model(module):
        yield None
        return
    trainable = any(p.requires_grad for p in module.parameters())
    with tempfile.TemporaryDirectory(prefix="tpfuse-adapter-") as folder:

        def examine() -> Path:
            names = list(module.peft_config)
            check(len(names) == 1, f"parallelize: a PeftModel must have one adapter, got {', '.join(names) or 'none'}")
            merged = [name for name, m in module.named_modules() if getattr(m, "merged", False)]
            check(not merged, f"parallelize: adapters must not be merged, got {merged[:1]}; call unmerge_adapter()")
            module.save_pretrained(folder)
            inner = Path(folder) if names[0] == "default" else Path(folder, names[0])
            read_adapter(inner, trainable=trainable)
            return inner

        path = together(examine, groups)
        yield lambda model: load_adapter(model, path, trainable=trainable)
