"""What an encoder of BERT's kind is made of."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ..kernels.runtime.rules import Rule, shown
from .config import ModelConfig
from .families import ENCODERS
from .fields import BERT_FIELDS


@dataclass(frozen=True, kw_only=True)
class BertConfig(ModelConfig):
    """A bidirectional post-norm encoder: BERT (Devlin et al. 2018, arXiv:1810.04805) or a relative of it.

    ``type_vocab_size=0``: no token types.  ``positions_skip_padding``: as in RoBERTa, a call's default positions count
    the tokens that are not padding, from ``pad_token_id + 1`` on, and padding has ``pad_token_id``.
    ``head_activation`` is that of the masked-LM head (None: ``activation``).
    """

    family: str = "bert"
    activation: str = "gelu"
    eps: float = 1e-12
    type_vocab_size: int = 2
    pad_token_id: int | None = 0
    positions_skip_padding: bool = False
    head_activation: str | None = None
    families: ClassVar[tuple[str, ...]] = ENCODERS
    rules: ClassVar[Mapping[str, Rule]] = BERT_FIELDS
    post_norm: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positions_skip_padding and (self.pad_token_id is None or self.pad_token_id < 0):
            raise ValueError(f"BertConfig: positions_skip_padding needs a pad_token_id, got {shown(self.pad_token_id)}")

    @property
    def first_position(self) -> int:
        return 1 + (self.pad_token_id or 0) if self.positions_skip_padding else 0
