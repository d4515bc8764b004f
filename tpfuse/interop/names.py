"""Where the parameters of a model stand in a Hugging Face file, by family.

Each function returns, for every parameter of the whole model, the tensors that it is made of; names are those of the
base model, without its prefix.
"""

from typing import Protocol

from .huggingface.source import Source

Modules = dict[str, dict[str, Source]]  # module -> parameter -> source


class Sizes(Protocol):
    """What names depend on, of a model's config."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def tie_embeddings(self) -> bool: ...


def _table(name: str) -> dict[str, Source]:
    return {"weight": Source.one(f"{name}.weight", "v d -> v d")}


def _linear(name: str, weight: str = "o i -> o i") -> dict[str, Source]:
    return {"weight": Source.one(f"{name}.weight", weight), "bias": Source.one(f"{name}.bias", "o -> o")}


def _norm(name: str) -> dict[str, Source]:
    return {"weight": Source.one(f"{name}.weight", "d -> d"), "bias": Source.one(f"{name}.bias", "d -> d")}


def gpt2_sources(config: Sizes) -> dict[str, Source]:
    """GPT2LMHeadModel: Conv1D holds its weights transposed, and q, k and v in one."""
    transposed = "i o -> o i"
    modules: Modules = {
        "embedding": _table("wte"),
        "positions": _table("wpe"),
        "norm_in": _norm("h.0.ln_1"),
        "head": _table("lm_head"),
    }
    last = config.num_layers - 1
    for i in range(config.num_layers):
        ours, theirs = f"blocks.{i}", f"h.{i}"
        modules |= {
            f"{ours}.attention.qkv": {
                "weight": Source.one(f"{theirs}.attn.c_attn.weight", "d (t h e) -> h t e d"),
                "bias": Source.one(f"{theirs}.attn.c_attn.bias", "(t h e) -> h t e"),
            },
            f"{ours}.attention.out": _linear(f"{theirs}.attn.c_proj", transposed),
            f"{ours}.mlp.fc1": _linear(f"{theirs}.mlp.c_fc", transposed),
            f"{ours}.mlp.fc2": _linear(f"{theirs}.mlp.c_proj", transposed),
            f"{ours}.norm_attention": _norm(f"{theirs}.ln_2"),
            f"{ours}.norm_mlp": _norm("ln_f" if i == last else f"h.{i + 1}.ln_1"),
        }
    return _flat(modules)


def llama_sources(config: Sizes) -> dict[str, Source]:
    """LlamaForCausalLM and its kin: q, k and v apart, gate and up apart."""
    modules: Modules = {
        "embedding": _table("embed_tokens"),
        "norm_in": _norm("layers.0.input_layernorm"),
        "head": _table("lm_head"),
    }
    last, widths = config.num_layers - 1, (config.num_heads // config.kv_heads, 1, 1)
    for i in range(config.num_layers):
        ours, theirs = f"blocks.{i}", f"layers.{i}"
        q, k, v = (f"{theirs}.self_attn.{n}_proj" for n in "qkv")
        gate, up = (f"{theirs}.mlp.{n}_proj" for n in ("gate", "up"))
        modules |= {
            f"{ours}.attention.qkv": {
                "weight": Source.several((f"{q}.weight", f"{k}.weight", f"{v}.weight"), "(h q e) d -> h q e d", widths),
                "bias": Source.several((f"{q}.bias", f"{k}.bias", f"{v}.bias"), "(h q e) -> h q e", widths),
                # the layout where kv heads are fewer than ranks
                "q": Source.one(f"{q}.weight", "(h e) d -> h e d"),
                "q_bias": Source.one(f"{q}.bias", "(h e) -> h e"),
                "kv": Source.several((f"{k}.weight", f"{v}.weight"), "(h e) d -> h 1 e d"),
                "kv_bias": Source.several((f"{k}.bias", f"{v}.bias"), "(h e) -> h 1 e"),
            },
            f"{ours}.attention.q_norm": _norm(f"{theirs}.self_attn.q_norm"),
            f"{ours}.attention.k_norm": _norm(f"{theirs}.self_attn.k_norm"),
            f"{ours}.attention.out": _linear(f"{theirs}.self_attn.o_proj"),
            f"{ours}.mlp.fc1": {
                "weight": Source.several((f"{gate}.weight", f"{up}.weight"), "f d -> f 1 d"),
                "bias": Source.several((f"{gate}.bias", f"{up}.bias"), "f -> f 1"),
            },
            f"{ours}.mlp.fc2": _linear(f"{theirs}.mlp.down_proj"),
            f"{ours}.norm_attention": _norm(f"{theirs}.post_attention_layernorm"),
            f"{ours}.norm_mlp": _norm("norm" if i == last else f"layers.{i + 1}.input_layernorm"),
        }
    return _flat(modules)


def bert_sources(config: Sizes) -> dict[str, Source]:
    """BertForMaskedLM and BertModel: q, k and v apart, norms after the GEMM pairs."""
    modules: Modules = {
        "embedding": _table("embeddings.word_embeddings"),
        "positions": _table("embeddings.position_embeddings"),
        "types": _table("embeddings.token_type_embeddings"),
        "norm_in": _norm("embeddings.LayerNorm"),
        "pooler": _linear("pooler.dense"),
        "transform": _linear("cls.predictions.transform.dense"),
        "transform_norm": _norm("cls.predictions.transform.LayerNorm"),
        "head": {"bias": Source.one("cls.predictions.bias", "v -> v")},
    }
    if not config.tie_embeddings:  # transformers then adds decoder.bias, and keeps an idle cls.predictions.bias
        bias = Source.one("cls.predictions.decoder.bias", "v -> v", also="cls.predictions.bias")
        modules["head"] = _table("cls.predictions.decoder") | {"bias": bias}
    for i in range(config.num_layers):
        ours, theirs = f"blocks.{i}", f"encoder.layer.{i}"
        q, k, v = (f"{theirs}.attention.self.{n}" for n in ("query", "key", "value"))
        modules |= {
            f"{ours}.attention.qkv": {
                "weight": Source.several((f"{q}.weight", f"{k}.weight", f"{v}.weight"), "(h e) d -> h 1 e d"),
                "bias": Source.several((f"{q}.bias", f"{k}.bias", f"{v}.bias"), "(h e) -> h 1 e"),
            },
            f"{ours}.attention.out": _linear(f"{theirs}.attention.output.dense"),
            f"{ours}.norm_attention": _norm(f"{theirs}.attention.output.LayerNorm"),
            f"{ours}.mlp.fc1": _linear(f"{theirs}.intermediate.dense"),
            f"{ours}.mlp.fc2": _linear(f"{theirs}.output.dense"),
            f"{ours}.norm_mlp": _norm(f"{theirs}.output.LayerNorm"),
        }
    return _flat(modules)


def _flat(modules: Modules) -> dict[str, Source]:
    return {f"{module}.{leaf}": source for module, leaves in modules.items() for leaf, source in leaves.items()}
