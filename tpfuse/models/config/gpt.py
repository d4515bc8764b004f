"""The configuration of a causal decoder, in the field's own words, and its form in a Hugging Face config.json.

A key may stand under an older or a newer name; an option that is not built is an error that names it, never a silent
default.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ...kernels.experts.records import Routing
from ...kernels.runtime.errors import check
from ...kernels.runtime.rules import Rule, quoted
from ...layers.shapes import AttentionShape, MLPShape, MoEShape, mlp_or_experts
from ..families import CAUSAL, FULL, NO_WINDOW, ONE_WINDOW, PATTERNED_LAYERS, SLIDING, SWITCHED_WINDOW, WINDOWED_LAYERS
from .fields import GPT_FIELDS, MAX_EXPERTS, MAX_WEIGHT
from .model import ModelConfig
from .reader import Reader
from .rotary import written_rope


@dataclass(frozen=True, kw_only=True)
class GPTConfig(ModelConfig):
    """A causal pre-norm decoder: GPT-2, or with ``rope`` one of the Llama family.

    GPT-2 (Radford et al. 2019) has learned positions and LayerNorm; Llama (Touvron et al. 2023, arXiv:2302.13971)
    rotary positions, RMSNorm and a gated MLP.  ``rope`` is transformers' rope_parameters: {"rope_type": "default" |
    "linear" | "dynamic" | "llama3" | "yarn" | "longrope", "rope_theta": ..., ...}, of which a family may have some
    only; None: learned positions.  A query counts among the ``window`` keys that it sees.
    """

    family: str = "gpt2"
    norm: str = "layer"  # any of kernels.norm.KINDS
    gated: bool = False  # act(gate) * up in the MLP
    num_kv_heads: int | None = None  # None: num_heads
    head_width: int | None = None  # None: hidden_size / num_heads
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    num_experts: int | None = None  # gated MLPs in place of each one; None: there is one
    experts_per_token: int | None = None
    expert_size: int | None = None  # their width; None: ffn_size
    shared_size: int | None = None  # width of an expert that every token has beside them; None: there is none
    shared_gate: bool = False  # its output is multiplied by a sigmoid of the token
    renormalize: bool = True  # a token's weights of its experts are divided by their sum
    router_bias: bool = False  # a bias decides the choice of experts too, which tpfuse.balance_experts sets
    mlp_layers: tuple[int, ...] = ()  # layers with an MLP where all others have experts
    balanced: bool = False  # transformers' loss that keeps experts equally busy is added to the cross entropy
    balance_coefficient: float = 0.001  # times so much
    qk_norm: bool = False  # an RMSNorm over the width of every query and key head
    parallel_residual: bool = False  # attention and MLP read the same rows
    pre_norm: bool = True  # a norm before attention and before the MLP
    branch_norm: bool = False  # a norm behind each, before the residual is added
    qk_norm_kind: str = "rms"
    qk_norm_all: bool = False  # it is over all query heads together, and over all key heads
    attention_scalar: float | None = None  # scores are divided by its root; None: by that of a head's width
    attention_softcap: float | None = None  # bounds the scores
    logit_softcap: float | None = None  # bounds the logits
    scaled_embedding: bool = False  # the embedding's rows are multiplied by the root of hidden_size
    causal: ClassVar[bool] = True
    families: ClassVar[tuple[str, ...]] = CAUSAL
    rules: ClassVar[Mapping[str, Rule]] = GPT_FIELDS

    def __post_init__(self) -> None:
        super().__post_init__()
        check(
            (self.num_experts is None) == (self.experts_per_token is None),
            f"GPTConfig: num_experts and experts_per_token go together, got {self.num_experts} and"
            f" {self.experts_per_token}",
        )
        _ = self._experts  # ValueError for experts that are not built
        object.__setattr__(self, "mlp_layers", tuple(sorted(set(self.mlp_layers))))
        if self.num_experts is None:
            unused = dict(expert_size=None, renormalize=True, router_bias=False, mlp_layers=(), balanced=False)
            for name in (name for name, usual in unused.items() if getattr(self, name) != usual):
                raise ValueError(f"GPTConfig: {name} is of models with experts, got {getattr(self, name)!r} without")
        experts, elements = self.num_experts or 0, 2 * self.expert_width * self.hidden_size
        check(
            self.num_layers * experts <= MAX_EXPERTS,
            f"GPTConfig: {self.num_layers} layers of num_experts={experts} are more than {MAX_EXPERTS} experts",
        )
        check(
            experts * elements <= MAX_WEIGHT,
            f"GPTConfig: a weight of {experts} experts of {elements} elements is more than {MAX_WEIGHT}",
        )
        check(
            2 * (self.shared_size or 0) * self.hidden_size <= MAX_WEIGHT,
            f"GPTConfig: a weight of shared_size={self.shared_size} x 2 x {self.hidden_size} is more than {MAX_WEIGHT}",
        )
        check(
            set(self.mlp_layers) <= set(range(self.num_layers)),
            f"GPTConfig: mlp_layers must be some of 0 to {self.num_layers - 1}, got {quoted(self.mlp_layers)}",
        )
        if self.rope is not None:
            self._check_ropes()
        if not (self.pre_norm or self.branch_norm):
            raise ValueError("GPTConfig: pre_norm=False needs branch_norm=True")
        if self.parallel_residual and self.branch_norm:
            raise ValueError("GPTConfig: parallel_residual and branch_norm are two wirings, got both")
        if self.local_rope is not None:
            kinds = [(rope or {}).get("rope_type", "default") for rope in (self.rope, self.local_rope)]
            if self.rope is None or not {"dynamic", "longrope"}.isdisjoint(kinds):
                values = "rope=None" if self.rope is None else f"rope_type {quoted(kinds[0])} and {quoted(kinds[1])}"
                raise ValueError(
                    f"GPTConfig: local_rope needs rope, and longrope and dynamic ones are not built, got {values}"
                )

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads if self.head_width is None else self.head_width

    @property
    def expert_width(self) -> int:
        return self.ffn_width if self.expert_size is None else self.expert_size

    def mlp_shape(self, layer: int) -> MLPShape | MoEShape:
        """Returns the MLP of a layer, or its experts, whose weights are a softmax over all of them."""
        return super().mlp_shape(layer) if layer in self.mlp_layers else self._experts

    @property
    def _experts(self) -> MLPShape | MoEShape:
        mlp = MLPShape(self.hidden_size, self.expert_width, self.activation, self.gated, bias=self.mlp_bias)
        k = self.experts_per_token
        routing = None if k is None else Routing(k, renormalize=self.renormalize, biased=self.router_bias)
        return mlp_or_experts(
            "GPTConfig", mlp, self.num_experts, routing, shared_size=self.shared_size, shared_gate=self.shared_gate
        )

    @property
    def wiring(self) -> str:
        if self.branch_norm:
            return "sandwich" if self.pre_norm else "branch"
        return super().wiring

    def attention_shape(self, layer: int) -> AttentionShape:
        shape = super().attention_shape(layer)
        return shape._replace(
            qk_norm_kind=self.qk_norm_kind, qk_norm_all=self.qk_norm_all, scale=self.attention_scale,
            softcap=self.attention_softcap,
        )  # fmt: skip

    @property
    def attention_scale(self) -> float | None:
        """The factor of attention scores; None: head_size ** -0.5."""
        return None if self.attention_scalar is None else self.attention_scalar**-0.5

    def depends_on_length(self, most: int | None = None) -> bool:
        """Returns True if calls of different lengths (of at most ``most`` positions) differ in their tables of rotary
        positions."""
        limits = [limit for limit in (self.stretches_past, self.switches_at) if limit is not None]
        return any(most is None or limit < most for limit in limits)

    @classmethod
    def _values(cls, read: Reader) -> dict[str, Any]:
        values, family = super()._values(read), read.family
        if family.rotary_keys.thetas:
            values["rope"], values["local_rope"] = read.ropes().by_kind()
        elif family.rotary:
            values["rope"] = read.ropes().one()
        if family.windows == WINDOWED_LAYERS:
            values |= read.windows(values["num_layers"])
        elif family.windows == PATTERNED_LAYERS:
            values["layer_types"] = read.pattern(values["num_layers"])
        elif family.windows == SWITCHED_WINDOW:
            values["window"] = read.window()
        if family.mixes_mlps:
            values["mlp_layers"] = read.mlp_layers(values["num_layers"])
        return values

    def to_hf(self) -> dict[str, Any]:
        family, config = self.hf, super().to_hf()
        if "parallel_residual" not in family.hf_keys:
            self._check_fixed("parallel_residual", False)
        if "num_kv_heads" not in family.hf_keys:
            self._check_fixed("kv_heads", self.num_heads)
        if "head_width" not in family.hf_keys:
            self._check_fixed("head_size", self.hidden_size // self.num_heads)
        if not family.has_experts:
            self._check_fixed("num_experts", None)
        if family.rotary:
            if self.rope is None:
                raise ValueError(
                    f"GPTConfig: a {self.family} model of transformers has rotary positions, got rope=None"
                )
            if "num_kv_heads" in family.hf_keys:
                config |= dict(num_key_value_heads=self.kv_heads, head_dim=self.head_size)
            config |= written_rope(self.rope, family.rotary_keys, self.max_positions)
            local = dict(self.local_rope or self.rope)
            if family.rotary_keys.thetas:
                config["rope_parameters"] = {FULL: dict(self.rope), SLIDING: local}
                config["rope_local_base_freq"] = local["rope_theta"]
            elif local != dict(self.rope):
                self._check_fixed("local_rope", None)
        if "attention_scalar" in family.hf_keys:
            scalar = self.head_size if self.attention_scalar is None else self.attention_scalar
            key = family.hf_keys["attention_scalar"][0]
            config[key] = int(scalar) if scalar == int(scalar) else scalar  # transformers takes integers
        if "expert_size" in family.hf_keys:
            config[family.hf_keys["expert_size"][0]] = self.expert_width
        self._check_fixed("router_bias", False)
        if family.mixes_mlps:
            config |= dict(mlp_only_layers=list(self.mlp_layers), decoder_sparse_step=1)
        else:
            self._check_fixed("mlp_layers", ())
        if family.windows == SWITCHED_WINDOW:
            config |= dict(use_sliding_window=self.window is not None, sliding_window=self.window)
        if family.windows == PATTERNED_LAYERS:
            config["layer_types"] = [FULL if w is None else SLIDING for w in self.windows]
            config["sliding_window"] = self.window or self.max_positions  # transformers takes no null, used or not
        if family.windows == WINDOWED_LAYERS:
            types = [FULL if w is None else SLIDING for w in self.windows]
            config |= dict(use_sliding_window=self.window is not None, sliding_window=self.window, layer_types=types)
            if not family.windows_first:
                config["max_window_layers"] = types.index(SLIDING) if SLIDING in types else self.num_layers
        elif family.windows == NO_WINDOW and self.window is not None:
            raise ValueError(
                f"GPTConfig: a {self.family} model of transformers has no sliding window, got window={self.window}"
            )
        elif family.windows in (ONE_WINDOW, SWITCHED_WINDOW) and self.window is not None and None in self.windows:
            raise ValueError(
                f"GPTConfig: a {self.family} model of transformers has one window for all layers, got layer_types"
            )
        return config
