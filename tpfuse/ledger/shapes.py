"""The sizes that every formula is written in, from any model's config."""

from typing import NamedTuple

from ..models.config import BertConfig, ModelConfig


class Shape(NamedTuple):
    """D width, L layers, H query heads, G kv heads, E head width, F ffn width, V vocabulary, P learned positions; ``gated``: the MLP has
    two matrices in and one out."""

    D: int
    L: int
    H: int
    G: int
    E: int
    F: int
    V: int
    P: int
    gated: bool

    @classmethod
    def of(cls, c: ModelConfig) -> "Shape":
        """GPT-2, BERT or one of the Llama family (rotary positions are not learned)."""
        learned = 0 if getattr(c, "rope", None) is not None else c.max_positions
        heads = getattr(c, "kv_heads", c.num_heads), getattr(c, "head_size", c.hidden_size // c.num_heads)
        return cls(c.hidden_size, c.num_layers, c.num_heads, *heads, c.ffn_size, c.vocab_size, learned, getattr(c, "gated", False))

    @property
    def ffn_in(self) -> int:
        """Columns of the MLP's first GEMM."""
        return self.F * (2 if self.gated else 1)

    @property
    def qkv(self) -> int:
        """Columns of the first GEMM of attention."""
        return (self.H + 2 * self.G) * self.E

    @property
    def weights(self) -> int:
        """Elements of a layer's matrices."""
        return self.D * (self.qkv + self.H * self.E + self.ffn_in + self.F)


def is_bert(config: ModelConfig) -> bool:
    return isinstance(config, BertConfig)
