"""Hooks of torch on parts of a layer, which fused code would run past.

A fused layer reads its parts' parameters and calls none of them.  Where one of them has a hook the layer runs as the
plain composition of its parts instead, each by its __call__.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules import module as _torch

Hook = TypeVar("Hook", bound=Callable[..., Any])

# of every module: torch.nn.modules.module.register_module_forward_hook and its kin
_EVERYWHERE: tuple[Mapping[int, Any], ...] = (
    _torch._global_forward_hooks,
    _torch._global_forward_pre_hooks,
    _torch._global_backward_hooks,
    _torch._global_backward_pre_hooks,
)


def onlooker(hook: Hook) -> Hook:
    """Marks a hook that looks at modules as they run: for its sake nothing runs otherwise."""
    hook.tpfuse_onlooker = True  # type: ignore[attr-defined]
    return hook


def hooked(module: nn.Module) -> bool:
    """True if a hook would be called if the parts of ``module``, at any depth, were called; its own do not count."""
    forward, forward_pre, backward, backward_pre = _EVERYWHERE
    return bool(forward or forward_pre or backward or backward_pre) or _inside(module)


def served(module: nn.Module) -> bool:
    """True if a hook would be called if ``module`` or a part of it were called."""
    return _waits(module) or hooked(module)


def hooked_within(model: nn.Module) -> bool:
    """True if a hook makes a layer of ``model`` run as the composition of its parts, whose messages are others."""
    lists = (part for part in model.children() if isinstance(part, nn.ModuleList))
    return any(hooked(layer) for layers in lists for layer in layers if layer is not None) or any(
        served(part) for part in model.children() if not isinstance(part, nn.ModuleList)
    )


def served_backward(module: nn.Module) -> bool:
    """True if a backward hook would be called if ``module`` were called."""
    _, _, *everywhere = _EVERYWHERE
    return any((*everywhere, module._backward_hooks, module._backward_pre_hooks))


def _inside(module: nn.Module) -> bool:
    for part in module._modules.values():
        if part is None:
            continue
        if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks:
            if _waits(part):
                return True
        if part._modules and _inside(part):
            return True
    return False


def _waits(part: nn.Module) -> bool:
    hooks = part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks
    return any(not hasattr(hook, "tpfuse_onlooker") for hooks in hooks for hook in hooks.values())
