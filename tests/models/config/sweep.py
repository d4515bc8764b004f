"""Every key of every family's config.json in every state that a file may have it in, beside transformers' own reading.

A case is a whole config.json.  What it is worth is one of ``VERDICTS``; a case that both read and read alike is right.
"""

import copy
import functools
import json
import pathlib
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from bench.defaults import declared
from tpfuse.models import GPT, Bert, BertConfig, GPTConfig
from tpfuse.models.families import FAMILIES, FULL, SLIDING

RIGHT, BOTH, OURS, THEIRS = VERDICTS = "right", "refused by both", "refused by tpfuse alone", "read by tpfuse alone"
Keys = dict[str, Any]
SIZES: Keys = dict(vocab_size=61, hidden_size=384, num_hidden_layers=3, num_attention_heads=16, intermediate_size=40)
SIZES |= dict(max_position_embeddings=24, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
SIZES |= dict(sliding_window=5, max_window_layers=1, head_dim=24, local_attention=6, query_pre_attn_scalar=7)
SIZES |= dict(cls_token_id=1, sep_token_id=2, type_vocab_size=2)
SIZES |= dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=12)
SIZES |= dict(shared_expert_intermediate_size=16)
NAMES = {"gpt2": dict(num_hidden_layers="n_layer", hidden_size="n_embd", num_attention_heads="n_head")}
NAMES["gpt2"] |= dict(max_position_embeddings="n_positions", intermediate_size="n_inner")
NAMES["distilbert"] = dict(num_hidden_layers="n_layers", hidden_size="dim", num_attention_heads="n_heads")
NAMES["distilbert"] |= dict(intermediate_size="hidden_dim")
SIZED = {*SIZES, *NAMES["gpt2"].values(), *NAMES["distilbert"].values(), "vocab_size"}
LINEAR, YARN = dict(type="linear", factor=4.0), dict(rope_type="yarn", factor=4.0)
LONG = dict(type="longrope", short_factor=[1.0, 1.5] * 6, long_factor=[3.0, 5.0] * 6)
# Keys of older files, of other files and of files that somebody edited, beside those that a class declares.
OLDER: dict[str, tuple[Any, ...]] = dict(
    rope_theta=(77.0,),
    rope_scaling=({}, LINEAR, YARN, dict(type="dynamic", factor=2.0), LONG, YARN | dict(rope_theta=50.0), LONG["type"]),
    rope_parameters=(dict(rope_theta=50.0), YARN | dict(original_max_position_embeddings=8), LINEAR, YARN, 3),
    partial_rotary_factor=(0.5, 1.0),
    rotary_emb_base=(77,),
    rotary_pct=(0.5,),
    rope_local_base_freq=(77.0,),
    global_rope_theta=(77.0,),
    local_rope_theta=(77.0,),
    original_max_position_embeddings=(9,),
    sliding_window_pattern=(2,),
    global_attn_every_n_layers=(2,),
    head_dim=(8,),
    hidden_act=("relu",),
    layer_norm_eps=(0.3,),
    intermediate_size=(44,),
    n_ctx=(16,),
    max_sequence_length=(16,),
    layer_types=([FULL, FULL, FULL], [SLIDING, FULL, SLIDING], ["attention"] * 3, [FULL], ["full"] * 3),
    position_embedding_type=("relative_key", "absolute"),
    per_layer_config=({"1": dict(intermediate_size=44)},),
    pretraining_tp=(2,),
    quantization_config=(None,),
    a_key_of_somebody=(1,),
)
ROTARY = "rope_scaling", "rope_parameters"
# Another value of a key, where what follows from its default's type is not one.
OTHER: Keys = dict(
    hidden_act="relu", activation_function="relu", activation="relu", hidden_activation="relu", hidden_size=768,
    classifier_activation="relu", classifier_pooling="mean", sliding_window=3, head_dim=8, num_key_value_heads=4,
    n_embd=768, dim=768, n_inner=44, attn_logit_softcapping=2.0, final_logit_softcapping=2.0, local_attention=4,
    layer_types=[FULL, SLIDING, FULL], use_bidirectional_attention=True, rope_parameters=dict(rope_theta=50.0),
    summary_type="last", summary_activation="tanh", classifier_dropout=0.3, num_attention_heads=8, n_head=8, n_heads=8,
    clip_qkv=8.0,
)  # fmt: skip


class Case(NamedTuple):
    """A config.json, and what is odd in it."""

    family: str
    key: str
    state: str  # missing, null, default, other, or "beside": an older key, a second name
    keys: Keys

    def __str__(self) -> str:
        return f"{self.family}: {self.key} {self.state} ({json.dumps(self.keys.get(self.key))})"


@functools.cache
def base(family: str) -> str:
    """Returns a small config.json of a family, as transformers writes it."""
    names = NAMES.get(family, {})
    cls: Any = CONFIG_MAPPING[family]
    known = declared(cls, cls().to_dict())
    sizes = {names.get(key, key): value for key, value in SIZES.items()}
    return json.dumps(declared(cls, cls(**{key: value for key, value in sizes.items() if key in known}).to_dict()))


def cases(family: str) -> Iterator[Case]:
    """Yields each key missing, null, at its default and at another value; older keys beside and in place of them."""
    whole, defaults = json.loads(base(family)), FAMILIES[family].defaults
    for key, default in defaults.items():
        yield Case(family, key, "missing", {k: v for k, v in whole.items() if k != key})
        yield Case(family, key, "null", whole | {key: None})
        yield Case(family, key, "default", whole | {key: default})
        yield Case(family, key, "other", whole | {key: another(key, whole[key])})
    for key, *aliases in FAMILIES[family].hf_keys.values():
        for alias in aliases:
            yield Case(family, alias, "beside", whole | {alias: another(key, whole[key])})
            yield Case(family, alias, "null", whole | {alias: None})
            renamed = {alias if k == key else k: v for k, v in whole.items()}
            yield Case(family, alias, "in place", renamed)
    without = {k: v for k, v in whole.items() if k not in ("rope_parameters", "layer_types")}
    for key, values in OLDER.items():
        if key == "layer_types" and key not in defaults or key in ROTARY and not FAMILIES[family].rotary:
            continue  # validated where nothing reads it
        for value in (*values, None):
            yield Case(family, key, "beside", whole | {key: value})
            yield Case(family, key, "in place", without | {key: value})
    yield Case(family, "every key", "missing", dict(model_type=family))
    if "use_sliding_window" in defaults:
        for window in {}, dict(sliding_window=None), dict(layer_types=None), dict(layer_types=[FULL, SLIDING, FULL]):
            yield Case(family, "use_sliding_window", "other", whole | dict(use_sliding_window=True) | window)
            less = {k: v for k, v in whole.items() if k not in ("layer_types", "max_window_layers")}
            yield Case(family, "use_sliding_window", "other", less | dict(use_sliding_window=True) | window)
        unsaid = {k: v for k, v in whole.items() if k != "sliding_window"}
        yield Case(family, "use_sliding_window", "other", unsaid | dict(use_sliding_window=True))


def another(key: str, value: Any) -> Any:
    """Returns another value of a key."""
    if key in OTHER:
        return OTHER[key]
    if isinstance(value, bool):
        return not value
    if isinstance(value, float):
        return 0.25 if value in (0.0, 0.1) else value * 8
    return value + 1 if isinstance(value, int) else 5


class Reading(NamedTuple):
    """What a library makes of a file: its config, or the words of a refusal."""

    config: Any
    refusal: str = ""


def ours(keys: Keys) -> Reading:
    cls: Any = GPTConfig if FAMILIES[keys["model_type"]].causal else BertConfig
    model: Any = GPT if cls is GPTConfig else Bert
    try:
        config = cls.from_hf(keys)
        if config.hidden_size * config.num_layers < 3000:
            with torch.device("meta"):
                model(config)
    except ValueError as error:
        return Reading(None, str(error))
    sizes = dict(head_width=config.head_size, num_kv_heads=config.kv_heads) if cls is GPTConfig else {}
    return Reading(replace(config, **sizes, layer_types=config.layer_types and tuple(config.layer_types)))


def theirs(keys: Keys) -> Reading:
    try:
        return Reading(CONFIG_MAPPING[keys["model_type"]].from_dict(copy.deepcopy(keys)))
    except Exception as error:  # of any class
        return Reading(None, f"{type(error).__name__}: {error}")


# ---- values ----


def small(config: Any) -> bool:
    sizes = "hidden_size", "vocab_size", "intermediate_size", "head_dim"
    try:
        return config.num_hidden_layers < 9 and all((getattr(config, size, 0) or 0) < 800 for size in sizes)
    except Exception:  # per_layer_config has no one size
        return True


@functools.lru_cache(maxsize=256)
def their_model(text: str) -> Any:
    keys = json.loads(text)
    family = FAMILIES[keys["model_type"]]
    config = CONFIG_MAPPING[keys["model_type"]].from_dict(copy.deepcopy(keys))
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(0)
    auto = transformers.AutoModelForCausalLM if family.causal else transformers.AutoModelForMaskedLM
    model: Any = auto.from_config(config).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.2)
    return model


CALL: dict[bool, Keys] = {True: dict(use_cache=False), False: {}}
IDS = torch.randint(3, 60, (2, 18), generator=torch.Generator().manual_seed(3))


def of_theirs(keys: Keys) -> torch.Tensor:
    """Returns logits of transformers' model of such a file; any error where it has none."""
    with torch.no_grad():
        return their_model(json.dumps(keys, sort_keys=True))(IDS, **CALL[FAMILIES[keys["model_type"]].causal]).logits


def trained(keys: Keys) -> torch.Tensor:
    """Returns logits of transformers' model of such a file in training mode, of the weights of the usual file."""
    usual = their_model(json.dumps(json.loads(base(keys["model_type"])), sort_keys=True))
    model = copy.deepcopy(their_model(json.dumps(keys, sort_keys=True))).train()
    model.load_state_dict(usual.state_dict())
    torch.manual_seed(1)
    with torch.no_grad():
        return model(IDS, **CALL[FAMILIES[keys["model_type"]].causal]).logits


def of_ours(keys: Keys) -> torch.Tensor:
    """Returns logits of the same weights read from a directory that holds this config.json."""
    model = their_model(json.dumps(keys, sort_keys=True))
    tied = model.config.tie_word_embeddings
    weights = {k: v.clone() for k, v in model.state_dict().items() if not (tied and k.endswith(HEADS))}
    with tempfile.TemporaryDirectory() as folder:
        if FAMILIES[keys["model_type"]].has_experts:  # one tensor in memory, many in a file
            model.save_pretrained(folder)
        else:
            save_file(weights, pathlib.Path(folder, "model.safetensors"), {"format": "pt"})
        pathlib.Path(folder, "config.json").write_text(json.dumps(keys))
        cls: Any = GPT if FAMILIES[keys["model_type"]].causal else Bert
        with torch.no_grad():
            return cls.from_pretrained(folder, dtype=torch.float64)(IDS).logits


HEADS = "lm_head.weight", "embed_out.weight", "decoder.weight", "vocab_projector.weight"


def verdict(case: Case, values: bool) -> tuple[str, str]:
    """Returns what a case is worth and why; AssertionError where both read it and not alike, or for an unknown reason.

    ``values``: whether all models that are small are run, and not those alone whose refusal has no known reason.
    """
    mine, other = ours(case.keys), theirs(case.keys)
    if mine.config is None and other.config is None:
        return BOTH, ""
    known = None if mine.config is not None else reason(REFUSED, case, mine.refusal)
    if known is not None and not values:
        return OURS, known
    values |= mine.config is None
    refused, exact, usual = other.refusal, None, Reading(None)
    if values and other.config is not None and small(other.config):
        try:
            exact = of_theirs(case.keys)
        except Exception as error:
            refused = f"{type(error).__name__}: {error}"
    if mine.config is None:
        assert refused or known is not None, f"{case}: {mine.refusal}"
        return (BOTH, "") if refused else (OURS, known or "")
    if refused:
        known = reason(READ, case, refused)
        assert known is not None, f"{case}: {refused}"
        return THEIRS, known
    filled = ours(json.loads(json.dumps(other.config.to_dict())))
    assert filled.config == mine.config, f"{case}: {mine.config} is not {filled.config or filled.refusal}"
    if exact is not None:
        error = (of_ours(case.keys) - exact).abs().max() / exact.abs().max()
        assert error < 1e-4, f"{case}: logits differ by {error:.1e}"
        usual = ours(json.loads(base(case.family)))
    if usual.config == mine.config and case.state != "null":  # a null of attention_dropout fails in training there
        assert torch.equal(trained(case.keys), trained(json.loads(base(case.family)))), f"{case} matters in training"
    return RIGHT, ""


# Words of a refusal by tpfuse alone, in it or in the case -> why, in the words of docs/limits.md.
REFUSED = {
    "rope_type='longrope' is not built": "longrope outside Phi-3",
    "rope_type '(longrope|dynamic)'": "longrope and dynamic beside a second table",
    "rope_type='.*' is not built; one of default is": "scaled positions in ModernBERT",
    "partial_rotary_factor=.* is not built": "a part of each head rotated",
    "head_dim=.* is not built": "a head_dim that rotates alone",
    "which gated MLPs have": "ReLU in a gated MLP",
    "scale_attn_weights|scale_attn_by_inverse": "GPT-2's other scales of scores",
    "add_cross_attention|is_decoder": "decoders of an encoder's class, cross-attention",
    "position_embedding_type": "relative positions, which transformers 5 ignores",
    "use_bidirectional_attention|attn_logit_softcapping=": "Gemma's both directions, Gemma 3's soft caps of scores",
    "(attention|mlp)_dropout=.* is not built|decoder_bias|sparse_prediction": "ModernBERT's dropout and heads",
    "rope_parameters must have full_attention": "one rotation for two kinds of layers, which transformers ignores",
    "router_jitter_noise": "noise of Mixtral's router",
    "clip_qkv": "bounds of OLMoE's q, k and v",
    "per_layer_config": "layers of unlike sizes",
    "got (null|None)$": "a null that no layer reads",
    "(has|have) \\d+ rotary columns|0 rotary columns": "heads too narrow to rotate",
    "layer_types must be": "other names of full attention",
    "qwen2_moe: .*layer_types has sliding_attention": "windows of no width",
}
# Words of a refusal by transformers alone -> why tpfuse reads it.
READ = {
    "multiple of the number of attention heads": "head_dim says the width of a head",
    "head_dim .*\\(null\\)": "null is the usual width",
    "num_key_value_heads null": "null is the usual number",
    "use_sliding_window .*Could not find a .sliding_window.": "no width of a window that no layer has",
    "pad_token_id .*Padding_idx": "a padding token that no text has",
}


def reason(table: dict[str, str], case: Case, words: str) -> str | None:
    """Returns the first reason of a table for a case; None where it has none."""
    return next((why for pattern, why in table.items() if re.search(pattern, f"{case}: {words}")), None)


def quiet() -> None:
    """Turns off what transformers says of odd files."""
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", module="transformers")


def row(family: str) -> list[str]:
    """Returns a family's row of docs/supported.md: cases, how many of each verdict, and the reasons of odd ones."""
    found = [verdict(case, values=True) for case in cases(family)]
    count = Counter(verdict for verdict, _ in found)
    why = {v: "; ".join(sorted({why for verdict, why in found if verdict == v})) for v in (OURS, THEIRS)}
    odd = [f"{count[v]}: {why[v]}" if count[v] else "" for v in (OURS, THEIRS)]
    return [family, str(len(found)), str(count[RIGHT]), str(count[BOTH]), *odd]
