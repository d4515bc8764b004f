"""Where the parameters of a causal model stand in a Hugging Face file, by family."""

from collections.abc import Iterable

from .config import GPTConfig
from .huggingface import Source


def gpt2_sources(config: GPTConfig, names: Iterable[str]) -> dict[str, Source]:
    linear = lambda name: {"weight": Source(f"{name}.weight", "i o -> o i"), "bias": Source(f"{name}.bias", "o -> o")}  # noqa: E731
    norm = lambda name: {"weight": Source(f"{name}.weight", "d -> d"), "bias": Source(f"{name}.bias", "d -> d")}  # noqa: E731
    modules = {
        "embedding": {"weight": Source("wte.weight", "v d -> v d")},
        "positions": {"weight": Source("wpe.weight", "p d -> p d")},
        "norm_in": norm("h.0.ln_1"),
        "head": {"weight": Source("lm_head.weight", "v d -> v d")},
    }
    last = config.num_layers - 1
    for i in range(config.num_layers):
        ours, theirs = f"blocks.{i}", f"h.{i}"
        modules |= {
            f"{ours}.attention.qkv": {
                "weight": Source(f"{theirs}.attn.c_attn.weight", "d (t h e) -> h t e d"),
                "bias": Source(f"{theirs}.attn.c_attn.bias", "(t h e) -> h t e"),
            },
            f"{ours}.attention.out": linear(f"{theirs}.attn.c_proj"),
            f"{ours}.mlp.fc1": linear(f"{theirs}.mlp.c_fc"),
            f"{ours}.mlp.fc2": linear(f"{theirs}.mlp.c_proj"),
            f"{ours}.norm_attention": norm(f"{theirs}.ln_2"),
            f"{ours}.norm_mlp": norm("ln_f" if i == last else f"h.{i + 1}.ln_1"),
        }
    return _present(modules, names)


def llama_sources(config: GPTConfig, names: Iterable[str]) -> dict[str, Source]:
    table = lambda name: {"weight": Source(f"{name}.weight", "v d -> v d")}  # noqa: E731
    linear = lambda name: {"weight": Source(f"{name}.weight", "o i -> o i"), "bias": Source(f"{name}.bias", "o -> o")}  # noqa: E731
    norm = lambda name: {"weight": Source(f"{name}.weight", "d -> d")}  # noqa: E731
    modules = {
        "embedding": table("embed_tokens"),
        "norm_in": norm("layers.0.input_layernorm"),
        "head": table("lm_head"),
    }
    last, widths = config.num_layers - 1, (config.num_heads // config.kv_heads, 1, 1)
    for i in range(config.num_layers):
        ours, theirs = f"blocks.{i}", f"layers.{i}"
        q, k, v = (f"{theirs}.self_attn.{n}_proj" for n in "qkv")
        gate, up = (f"{theirs}.mlp.{n}_proj" for n in ("gate", "up"))
        modules |= {
            f"{ours}.attention.qkv": {
                "weight": Source((f"{q}.weight", f"{k}.weight", f"{v}.weight"), "(h q e) d -> h q e d", widths),
                "bias": Source((f"{q}.bias", f"{k}.bias", f"{v}.bias"), "(h q e) -> h q e", widths),
                "q": Source(f"{q}.weight", "(h e) d -> h e d"),  # the layout where kv heads are fewer than ranks
                "q_bias": Source(f"{q}.bias", "(h e) -> h e"),
                "kv": Source((f"{k}.weight", f"{v}.weight"), "(h e) d -> h 1 e d"),
                "kv_bias": Source((f"{k}.bias", f"{v}.bias"), "(h e) -> h 1 e"),
            },
            f"{ours}.attention.q_norm": norm(f"{theirs}.self_attn.q_norm"),
            f"{ours}.attention.k_norm": norm(f"{theirs}.self_attn.k_norm"),
            f"{ours}.attention.out": linear(f"{theirs}.self_attn.o_proj"),
            f"{ours}.mlp.fc1": {
                "weight": Source((f"{gate}.weight", f"{up}.weight"), "f d -> f 1 d"),
                "bias": Source((f"{gate}.bias", f"{up}.bias"), "f -> f 1"),
            },
            f"{ours}.mlp.fc2": linear(f"{theirs}.mlp.down_proj"),
            f"{ours}.norm_attention": norm(f"{theirs}.post_attention_layernorm"),
            f"{ours}.norm_mlp": norm("norm" if i == last else f"layers.{i + 1}.input_layernorm"),
        }
    return _present(modules, names)


def _present(modules: dict[str, dict[str, Source]], names: Iterable[str]) -> dict[str, Source]:
    """Of the parameters that this model has."""
    return {f"{m}.{leaf}": source for m, leaves in modules.items() for leaf, source in leaves.items() if f"{m}.{leaf}" in names}
