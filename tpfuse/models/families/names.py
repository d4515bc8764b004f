"""Building blocks for the names of parameters in Hugging Face files.

A family's ``sources`` returns, for every parameter of the whole model, the tensors that it is made of; names are those
of the base model, without its prefix.
"""

from collections.abc import Callable
from typing import Protocol

from ..files.source import RowBlocks, Source, Stacked

Modules = dict[str, dict[str, Source]]  # module -> parameter -> source


class NamingConfig(Protocol):
    """The fields of a config that names depend on."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def num_experts(self) -> int | None: ...
    @property
    def tie_embeddings(self) -> bool: ...


def table(name: str) -> dict[str, Source]:
    return {"weight": Source.one(f"{name}.weight", "v d -> v d")}


def linear(name: str, weight: str = "o i -> o i", bias: str = "o -> o") -> dict[str, Source]:
    """A linear layer, as nn.Linear holds it unless patterns say otherwise."""
    return {"weight": Source.one(f"{name}.weight", weight), "bias": Source.one(f"{name}.bias", bias)}


def norm(name: str) -> dict[str, Source]:
    return {"weight": Source.one(f"{name}.weight", "d -> d"), "bias": Source.one(f"{name}.bias", "d -> d")}


def qkv(*names: str, heads: int = 1) -> dict[str, Source]:
    """q, k and v apart, of such ``names``, with ``heads`` query heads to each kv head.

    Where kv heads are fewer than ranks, q and kv are parameters of their own.
    """
    weights, biases = ([f"{name}.{leaf}" for name in names] for leaf in ("weight", "bias"))
    widths = heads, 1, 1
    return {
        "weight": Source.several(tuple(weights), "(h q e) d -> h q e d", widths),
        "bias": Source.several(tuple(biases), "(h q e) -> h q e", widths),
        "q": Source.one(weights[0], "(h e) d -> h e d"),
        "q_bias": Source.one(biases[0], "(h e) -> h e"),
        "kv": Source.several(tuple(weights[1:]), "(h e) d -> h 1 e d"),
        "kv_bias": Source.several(tuple(biases[1:]), "(h e) -> h 1 e"),
    }


def joined_qkv(name: str, heads: int) -> dict[str, Source]:
    """q, k and v one after another in one tensor without a bias, with ``heads`` query heads to each kv head."""
    q, k, v = RowBlocks(0, heads, heads + 2), RowBlocks(heads, 1, heads + 2), RowBlocks(heads + 1, 1, heads + 2)
    weight = f"{name}.weight"
    return {
        "weight": Source.several((weight,) * 3, "(h q e) d -> h q e d", (heads, 1, 1)).within(q, k, v),
        "q": Source.one(weight, "(h e) d -> h e d").within(q),
        "kv": Source.several((weight,) * 2, "(h e) d -> h 1 e d").within(k, v),
    }


def gate_up(gate: str, up: str) -> dict[str, Source]:
    """The two maps of a gated MLP, apart."""
    return {
        "weight": Source.several((f"{gate}.weight", f"{up}.weight"), "f d -> f 1 d"),
        "bias": Source.several((f"{gate}.bias", f"{up}.bias"), "f -> f 1"),
    }


def experts(module: str, merged: str, count: int, names: tuple[str, str, str]) -> dict[str, Source]:
    """A router and ``count`` experts, an expert a module, whose gate, up and down are ``names``.

    They are read from a module ``merged`` too, where each of these is one tensor of all experts, gate and up together.
    """
    modules = [f"{module}.experts.{expert}" for expert in range(count)]
    gate, up, down = names
    both = Source.one(f"{merged}.experts.gate_up_proj", "e (t f) d -> e f t d")
    router, same = (Source.one(f"{m}.gate.weight", "e d -> e d") for m in (module, merged))
    return {
        "router": router.or_read(same),
        "fc1": Stacked.of(gate_up(f"{m}.{gate}", f"{m}.{up}")["weight"] for m in modules).or_read(both),
        "fc2": Stacked.of(linear(f"{m}.{down}")["weight"] for m in modules).or_read(
            Source.one(f"{merged}.experts.down_proj", "e d f -> e d f")
        ),
    }


def shared_expert(name: str) -> dict[str, Source]:
    """The gated MLP that every token has beside experts, and its gate."""
    return {
        "shared_fc1": gate_up(f"{name}.gate_proj", f"{name}.up_proj")["weight"],
        "shared_fc2": linear(f"{name}.down_proj")["weight"],
        "shared_gate": linear(f"{name}_gate")["weight"],
    }


def in_layers(config: NamingConfig, path: str, make: Callable[[str], Modules]) -> Modules:
    """Modules of all blocks, of which ``make`` returns one's by its layer's name, ``path`` and a number."""
    blocks = {f"blocks.{i}": make(f"{path}.{i}") for i in range(config.num_layers)}
    return {f"{block}.{name}": leaves for block, modules in blocks.items() for name, leaves in modules.items()}


def norms_before(config: NamingConfig, path: str, leaf: str, final: str) -> Modules:
    """The norm before each layer, which the block below it has, and behind them all the final one."""
    modules = "input_norm", *(f"blocks.{i}.mlp_norm" for i in range(config.num_layers))
    names = *(f"{path}.{i}.{leaf}" for i in range(config.num_layers)), final
    return {module: norm(name) for module, name in zip(modules, names, strict=True)}


def flat(modules: Modules) -> dict[str, Source]:
    """module -> parameter -> source, by the parameter's whole name."""
    return {f"{module}.{leaf}": source for module, leaves in modules.items() for leaf, source in leaves.items()}
