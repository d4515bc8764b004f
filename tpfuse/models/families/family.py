"""The entry of a family of models: the values that a model_type of transformers fixes, the keys of its config.json for
the rest, and the places of its parameters in a file."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..files.source import Source

# Which layers may have a sliding window, as a family's config.json tells it: none, all or none, all or none by a key of
# its own, or some; and some by a pattern, where it does not list them.
NO_WINDOW, ONE_WINDOW, WINDOWED_LAYERS = "no window", "one window", "windowed layers"
SWITCHED_WINDOW, PATTERNED_LAYERS = "switched window", "patterned layers"
FULL, SLIDING = "full_attention", "sliding_attention"  # as transformers' layer_types has them


# What a classification head classifies.
SEQUENCE, TOKEN = PER = "sequence", "token"


# config field -> its key in config.json, as most families have it, and other names of that key.
KEYS: dict[str, tuple[str, ...]] = dict(
    vocab_size=("vocab_size",),
    max_positions=("max_position_embeddings",),
    hidden_size=("hidden_size",),
    num_layers=("num_hidden_layers",),
    num_heads=("num_attention_heads",),
    ffn_size=("intermediate_size",),
    activation=("hidden_act",),
    init_std=("initializer_range",),
    tie_embeddings=("tie_word_embeddings",),
)


class RotaryKeys(NamedTuple):
    """The rotary positions that a family may have, and their keys in its config.json."""

    kinds: tuple[str, ...] = ("default", "linear", "dynamic", "llama3", "yarn")  # the rope_type that it may have
    partial: bool = False  # whether a part of each head may be left as it is
    aliases: dict[str, str] = {}  # other spellings of a rope_type
    theta: str = "rope_theta"  # the key of older files for rope_theta
    usual_theta: float = 10000.0  # what transformers takes where none says it
    share: str = "partial_rotary_factor"  # and for partial_rotary_factor
    usual_share: float | None = None  # what transformers takes where neither says it
    trained_outside: bool = False  # original_max_position_embeddings stands beside rope_parameters
    thetas: dict[str, tuple[str, float]] = {}  # kind of layers -> its key of older files, its usual theta
    scaled: tuple[str, ...] = ()  # the kinds of layers that rope_scaling of older files is of


USUAL = RotaryKeys()


class Classes(NamedTuple):
    """A class of transformers that classifies."""

    architecture: str
    output: str  # what it returns
    module: str  # the head's name in it


class HeadLayers(NamedTuple):
    """The layers of an encoder's class that classifies, below the linear layer that scores.

    ``dense``: a linear layer of a head per sequence, on the row of the first token; "": the base model's pooler.
    ``activation`` follows it, and with ``dropped`` dropout stands before it too.  ``transform``: the masked-LM head's
    linear layer, activation and norm in their place, on every row of a head per token, too.
    """

    dense: str = ""  # its name in the class
    activation: Callable[[Tensor], Tensor] = torch.tanh
    dropped: bool = False
    transform: bool = False
    dropout_key: str | None = "classifier_dropout"  # of the scoring layer's input; None: it is the model's
    dropout: float | None = None  # where config.json has no such key; None: the model's


class Family(NamedTuple):
    """One model_type.

    ``hf_keys``: config field -> its key in config.json and that key's other names, which transformers lets go first.
    ``defaults`` and ``nullable``: what a missing key counts as, and which keys may be null (defaults.py).  ``fixed``:
    fields that the family decides.  ``not_built``: keys of config.json whose other values are errors.
    """

    architecture: str  # the class of transformers with a language-model head
    output: str  # what that class returns
    base_prefix: str  # precedes the base model's tensors in a file of that class
    head_prefixes: tuple[str, ...]  # begin the names that it does not precede
    sources: Callable[[Any], dict[str, Source]]
    hf_keys: dict[str, tuple[str, ...]]
    defaults: dict[str, Any] = {}
    nullable: tuple[str, ...] = ()
    fixed: dict[str, Any] = {}
    not_built: dict[str, Any] = {}
    ignorable: tuple[str, ...] = ()  # patterns of tensors that are no parameters
    classifiers: dict[str, str] = {SEQUENCE: "score", TOKEN: "score"}  # the head of a class that classifies
    heads: dict[str, HeadLayers] = {}  # of an encoder, where they are not BERT's
    pooler: bool = True  # whether an encoder's class without a head may have one
    causal: bool = True
    rotary: bool = False
    windows: str = NO_WINDOW
    windows_first: bool = False  # windowed layers are every second of the first ones, not all of the last
    full_every: int = 0  # of patterned layers, which have no window: every so-many-th
    full_first: bool = False  # the first of so many layers, not the last
    pattern_key: str | None = None  # of config.json, which may say another number
    stem: str | None = None  # begins the names of the classes, where that is not what the architecture begins with
    transposed: bool = False  # weights are Conv1D's
    scaled_residuals: bool = False  # residual projections start divided by sqrt(2 num_layers)
    rotary_keys: RotaryKeys = USUAL
    filed: dict[str, str] = {}  # tensors whose name in a file is not that in the class -> the name there

    @property
    def has_experts(self) -> bool:
        return "num_experts" in self.hf_keys

    @property
    def mixes_mlps(self) -> bool:
        """True if layers with an MLP may stand beside layers with experts."""
        return "mlp_only_layers" in self.defaults

    @property
    def base_architecture(self) -> str:
        """The class of transformers without a head."""
        return f"{self._stem}Model"

    @property
    def classes(self) -> dict[str, Classes]:
        """The classes of transformers that classify, by what they do."""
        past = "WithPast" if self.causal else ""
        outputs = {SEQUENCE: f"SequenceClassifierOutput{past}", TOKEN: "TokenClassifierOutput"}
        return {
            per: Classes(f"{self._stem}For{per.capitalize()}Classification", outputs[per], module)
            for per, module in self.classifiers.items()
        }

    def head(self, per: str) -> HeadLayers:
        """Returns the layers that an encoder's class that classifies has below its scoring layer."""
        return self.heads.get(per, HeadLayers())

    @property
    def _stem(self) -> str:
        return self.stem or re.sub(r"(ForCausalLM|LMHeadModel|ForMaskedLM)$", "", self.architecture)
