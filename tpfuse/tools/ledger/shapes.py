"""The sizes that every formula is written in, from any model's config."""

from typing import NamedTuple

from ...layers.shapes import MoEShape
from ...models.config.model import ModelConfig


def check_dense(config: ModelConfig) -> None:
    """Raises ValueError for a model with experts, whose calls depend on where its rows go."""
    experts = {mlp.num_experts for mlp in map(config.mlp_shape, range(config.num_layers)) if isinstance(mlp, MoEShape)}
    if experts:
        raise ValueError(
            f"the ledger and the planner are built for models with one MLP a layer, got num_experts={experts.pop()}"
        )


class Shape(NamedTuple):
    """D width, L layers, H query heads, G kv heads, E head width, F ffn width, V vocabulary, P learned positions.

    ``gated``: the MLP has two matrices in and one out.  ``parallel``: it stands beside attention.
    """

    D: int
    L: int
    H: int
    G: int
    E: int
    F: int
    V: int
    P: int
    gated: bool
    parallel: bool

    @classmethod
    def of(cls, c: ModelConfig) -> "Shape":
        """Returns the sizes of a model's config; rotary positions are not learned.  ValueError for experts."""
        check_dense(c)
        return cls(
            D=c.hidden_size,
            L=c.num_layers,
            H=c.num_heads,
            G=c.kv_heads,
            E=c.head_size,
            F=c.ffn_width,
            V=c.vocab_size,
            P=c.learned_positions,
            gated=c.gated,
            parallel=c.parallel_residual,
        )

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
