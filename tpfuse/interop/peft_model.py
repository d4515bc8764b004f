"""A PeftModel in the place of the module that it wraps."""

import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from ..kernels.runtime.errors import check
from ..ranks.messages import together
from .adapter import load_adapter, read_adapter


def is_peft_model(module: nn.Module) -> bool:
    """True for one of PEFT's wrappers, which need not be installed."""
    return type(module).__module__.startswith("peft.") and hasattr(module, "get_base_model")


def split_peft_model(
    module: Any, split: Callable[[nn.Module], nn.Module], groups: Iterable[dist.ProcessGroup | None]
) -> nn.Module:
    """Splits the module that a PeftModel of one LoRA adapter wraps, and gives it the adapter; returns the module.

    The adapter goes through a folder of PEFT's format, which stays where an error comes after PEFT's layers are gone:
    the error names it.  ValueError before that for several adapters, merged ones and options that are not built.
    """

    def examine() -> Path:
        names = list(module.peft_config)
        check(len(names) == 1, f"parallelize: a PeftModel must have one adapter, got {', '.join(names) or 'none'}")
        merged = [name for name, m in module.named_modules() if getattr(m, "merged", False)]
        check(not merged, f"parallelize: adapters must not be merged, got {merged[:1]}; call unmerge_adapter()")
        folder = Path(tempfile.mkdtemp(prefix="tpfuse-adapter-"))
        try:
            module.save_pretrained(folder)
            inner = folder if names[0] == "default" else folder / names[0]
            read_adapter(inner, trainable=any(p.requires_grad for p in module.parameters()))
        except BaseException:
            shutil.rmtree(folder)
            raise
        return inner

    folder = together(examine, groups)
    trainable = any(p.requires_grad for p in module.parameters())
    try:
        base = split(module.unload())
        load_adapter(base, folder, trainable=trainable)
    except Exception as error:
        error.add_note(
            f"parallelize: the adapter is kept in {folder}; PeftModel.from_pretrained(model, folder) reads it"
        )
        raise
    shutil.rmtree(folder)
    return base
