"""The configuration of an encoder of BERT's kind, and the windows and rotary positions of its layers in config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ...kernels.runtime.rules import Rule, check_number, integer, quoted
from ..families import ENCODERS, FULL, SLIDING
from .fields import BERT_FIELDS
from .model import ModelConfig
from .reader import Reader


@dataclass(frozen=True, kw_only=True)
class BertConfig(ModelConfig):
    """A bidirectional encoder: BERT (Devlin et al. 2018, arXiv:1810.04805) or a relative of it.

    ``type_vocab_size=0``: no token types.  ``positions_skip_padding``: as in RoBERTa, a call's default positions count
    the tokens that are not padding, from ``pad_token_id + 1`` on, and padding has ``pad_token_id``.
    ``head_activation`` and ``head_bias`` are the masked-LM head's (None: ``activation``).

    With ``rope`` (transformers' rope_parameters) positions are rotary and not learned.  ``window``: a query sees keys
    at a distance below it, in the layers that ``layer_types`` calls sliding (None: all); these have the rotary
    positions of ``local_rope``, where that is given.  ``post_norm=False``: norms stand before attention and the MLP,
    but for the first layer's, which reads the embedding's.  ``pooling``: what a head per sequence reads, the first
    row ("cls") or the mean of those that may be seen.
    """

    family: str = "bert"
    activation: str = "gelu"
    eps: float = 1e-12
    type_vocab_size: int = 2
    pad_token_id: int | None = 0
    positions_skip_padding: bool = False
    head_activation: str | None = None
    head_bias: bool = True
    pooling: str = "cls"
    gated: bool = False
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    norm_bias: bool = True
    post_norm: bool = True
    causal: ClassVar[bool] = False
    families: ClassVar[tuple[str, ...]] = ENCODERS
    rules: ClassVar[Mapping[str, Rule]] = BERT_FIELDS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positions_skip_padding and (self.pad_token_id is None or self.pad_token_id < 0):
            raise ValueError(
                f"BertConfig: positions_skip_padding needs a pad_token_id, got {quoted(self.pad_token_id)}"
            )
        if not self.type_vocab_size and "type_vocab_size" in self.hf.hf_keys:
            raise ValueError(f"BertConfig: type_vocab_size must be a positive integer in a {self.family} model, got 0")
        if self.local_rope is not None and (self.rope is None or self.window is None):
            raise ValueError("BertConfig: local_rope needs rope and window")
        self._check_ropes()

    @property
    def first_position(self) -> int:
        return 1 + (self.pad_token_id or 0) if self.positions_skip_padding else 0

    @classmethod
    def _values(cls, read: Reader) -> dict[str, Any]:
        values = super()._values(read)
        if read.family.rotary:
            values["rope"], values["local_rope"] = read.ropes().by_kind()
            values["layer_types"] = read.pattern(values["num_layers"])
            half = read.config.get("sliding_window", read.config["local_attention"] // 2)  # transformers takes either
            check_number("BertConfig: sliding_window", half, integer(least=0))
            values["window"] = half + 1  # keys on either side, and the query's own
        return values

    def to_hf(self) -> dict[str, Any]:
        config = super().to_hf()
        if self.hf.rotary:
            name = f"BertConfig: a {self.family} model of transformers has"
            if self.rope is None or self.window is None:
                raise ValueError(f"{name} rotary positions and a window, got rope={self.rope} and window={self.window}")
            types = [FULL if window is None else SLIDING for window in self.windows]
            config |= dict(local_attention=2 * (self.window - 1), layer_types=types)
            config["rope_scaling"] = None
            config["rope_parameters"] = {FULL: dict(self.rope), SLIDING: dict(self.local_rope or self.rope)}
        return config
