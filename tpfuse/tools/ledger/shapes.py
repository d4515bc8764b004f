"""The sizes that every formula is written in, from any model's config."""

from typing import NamedTuple

from ...kernels.runtime.errors import check
from ...layers.shapes import MoEShape
from ...models.config.model import ModelConfig


class Shape(NamedTuple):
    """D width, L layers, H query heads, G kv heads, E head width, F ffn width, V vocabulary, P learned positions.

    ``gated``: the MLP has two matrices in and one out.  ``parallel``: it stands beside attention.  ``experts``: in
    place of the MLP, each of width F, and perhaps a shared one of a width of its own.
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
    experts: MoEShape | None = None

    @classmethod
    def of(cls, c: ModelConfig) -> "Shape":
        """Returns the sizes of a model's config; rotary positions are not learned.  ValueError for unlike layers."""
        mlp, *others = dict.fromkeys(map(c.mlp_shape, range(c.num_layers)))
        check(
            not others,
            "the ledger and the planner are built for models whose layers are alike, got some with an MLP and some with"
            " experts",
        )
        return cls(
            D=c.hidden_size,
            L=c.num_layers,
            H=c.num_heads,
            G=c.kv_heads,
            E=c.head_size,
            F=mlp.ffn_size,
            V=c.vocab_size,
            P=c.learned_positions,
            gated=c.gated,
            parallel=c.parallel_residual,
            experts=mlp if isinstance(mlp, MoEShape) else None,
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
    def mlp(self) -> int:
        """Elements of the matrices of one MLP."""
        return self.D * (self.ffn_in + self.F)

    @property
    def attention(self) -> int:
        """Elements of attention's matrices."""
        return self.D * (self.qkv + self.H * self.E)

    @property
    def router(self) -> int:
        """Elements of a layer's router, which every rank has."""
        return 0 if self.experts is None else self.experts.router_rows * self.D

    @property
    def shared(self) -> int:
        """Elements of the matrices of a layer's shared expert."""
        return 0 if self.experts is None else 3 * self.experts.shared_width * self.D

    @property
    def weights(self) -> int:
        """Elements of a layer's matrices that ranks divide."""
        mlps = 1 if self.experts is None else self.experts.num_experts
        return self.attention + mlps * self.mlp + self.shared

    @property
    def used(self) -> int:
        """Elements of a layer's matrices that one row is multiplied with."""
        mlps = 1 if self.experts is None else self.experts.routing.k
        return self.attention + mlps * self.mlp + self.shared + self.router


def check_imbalance(caller: str, config: ModelConfig, imbalance: float, ranks: int) -> None:
    """Raises ValueError of ``caller`` for an imbalance that ``ranks`` cannot have: that of the rank whose experts have
    the most rows, over the mean."""
    check(
        1 <= imbalance <= ranks,
        f"{caller}: imbalance is the busiest rank's rows over the mean, 1 to tp={ranks}, got {imbalance}",
    )
    check(
        imbalance == 1 or isinstance(config.mlp_shape(0), MoEShape),
        f"{caller}: imbalance is of a model with experts, and this one has none, got {imbalance}",
    )
