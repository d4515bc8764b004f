"""Translates a LoraConfig of PEFT into the arguments of add_lora."""

import re
from importlib import import_module
from typing import Any, NamedTuple

from ..kernels.runtime.errors import check
from ..kernels.runtime.rules import listed, quoted
from ..layers.lora import TARGETS
from ..layers.lora_targets import check_shared_experts
from ..models.model import Model
from .adaptable import Adaptables, ExpertParameter, unadaptable
from .adapter import check_saved
from .expert_adapter import expert_modules, expert_targets, take_patterns
from .lora_options import check_options


class LoRAArguments(NamedTuple):
    """The arguments of :func:`tpfuse.add_lora`."""

    rank: int
    alpha: float
    dropout: float
    targets: list[str]


def lora_arguments(config: Any, base: Model, model_type: str) -> LoRAArguments:
    """Returns the arguments of add_lora; ValueError, which names it, for an option that is not built.

    A is drawn with the variance of PEFT's, the same bits at every split, so not PEFT's bits.
    """
    values = config.to_dict()
    caller = f"add_adapter: {type(config).__name__}"
    values["peft_type"] = getattr(values.get("peft_type"), "value", values.get("peft_type"))
    apart = base.config.hf.has_experts and take_patterns(values)
    check_options(caller, values, stored=False)
    check_saved(caller, values.get("modules_to_save"), base)
    rank, alpha = values["r"], values["lora_alpha"]
    adaptables = Adaptables.of(base)
    experts, modules = adaptables.experts, values.get("target_modules")
    if modules is not None and modules != "all-linear":
        check_shared_experts(caller, base, modules)
    parameters = expert_targets(caller, values, experts)
    targets = [] if modules is None and parameters else _targets(modules, base, adaptables, model_type)
    targets += [t for name in sorted(parameters) for t in expert_modules(name, experts[name], apart)]
    scale = rank**0.5 if values.get("use_rslora") else 1
    check(
        not values.get("use_rslora") or not any(_is_part(t, p) for t in targets for p in experts.values()),
        f"{caller}: use_rslora=True is not built with gate and up of experts by their own names, which PEFT scales"
        " otherwise than other layers; give target_parameters",
    )
    return LoRAArguments(rank, alpha * scale, values.get("lora_dropout", 0.0), targets)


def _is_part(target: str, parameter: ExpertParameter) -> bool:
    """Returns whether a target names one of several projections in a parameter."""
    several = len(parameter.projections) > 1
    return several and any(f".{name}".endswith(f".{target}") for name in parameter.projections)


def _targets(targets: Any, base: Model, adaptables: Adaptables, model_type: str) -> list[str]:
    """Returns the layers of PEFT's target_modules: endings, a regular expression, "all-linear", or None for the
    family's default; ValueError where it names one that PEFT would adapt beside them and whose adapter is not built.

    An ending that names projections of experts names no others, as PEFT has it.
    """
    layers, experts = adaptables
    projections = [name for parameter in experts.values() for name in parameter.projections]
    if targets is None:
        defaults = import_module("peft.utils.constants").TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
        check(model_type in defaults, f"add_adapter: give target_modules; PEFT has none for {model_type}")
        targets = defaults[model_type]
    if targets == "all-linear":
        check(
            not experts,
            "add_adapter: target_modules='all-linear' names routers too, by PEFT's rule, and their adapters are not"
            " built; name the layers",
        )
    others = [name for name, linear in unadaptable(base).items() if _names(targets, name, linear=linear)]
    check(
        not others,
        f"add_adapter: target_modules={quoted(targets)} names {listed(others)}, whose adapters are not built; name the"
        " other layers alone, by longer endings",
    )
    if targets == "all-linear":
        return list(TARGETS)
    if not isinstance(targets, str):
        leaves = {name.rpartition(".")[2] for name in projections}
        return sorted({f"experts.{leaf}" if (leaf := t.rpartition(".")[2]) in leaves else t for t in targets})
    names = [name for name in (*layers, *projections) if re.fullmatch(targets, name)]
    check(bool(names), f"add_adapter: no linear layer is called {targets}")
    return names


def _names(targets: Any, name: str, *, linear: bool) -> bool:
    """Returns whether PEFT's target_modules name a module."""
    if targets == "all-linear":
        return linear
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(f".{name}".endswith(f".{target}") for target in targets)
