"""The sizes that every formula is written in, from any model's config, for each kind of its layers."""

from typing import NamedTuple

from ...kernels.runtime.errors import check
from ...layers.shapes import MLPShape, MoEShape
from ...models.config.model import ModelConfig


def layers_by_mlp(config: ModelConfig) -> dict[MLPShape | MoEShape, list[int]]:
    """Returns the layers of a model by their MLP or experts, in order of appearance."""
    layers: dict[MLPShape | MoEShape, list[int]] = {}
    for layer in range(config.num_layers):
        layers.setdefault(config.mlp_shape(layer), []).append(layer)
    return layers


class Shape(NamedTuple):
    """D width, L layers, H query heads, G kv heads, E head width, F ffn width.

    The layers are those that are alike, of a model that has an MLP in some and experts in others.  ``gated``: the MLP
    has two matrices in and one out.  ``parallel``: it stands beside attention.  ``experts``: in place of the MLP, each
    of width F, and perhaps a shared one of a width of its own.
    """

    D: int
    L: int
    H: int
    G: int
    E: int
    F: int
    gated: bool
    parallel: bool
    experts: MoEShape | None = None

    @classmethod
    def of(cls, c: ModelConfig, layer: int | None = None) -> "Shape":
        """Returns the sizes of the layers that are like ``layer``.

        ValueError for a layer that is not there, and for None where layers are not alike.
        """
        kinds, last = layers_by_mlp(c), c.num_layers - 1
        check(
            layer is not None or len(kinds) == 1,
            "some layers have an MLP and some experts: say which is meant by layer=, got None",
        )
        check(layer is None or 0 <= layer <= last, f"layer must be 0 to {last}, got {layer}")
        mlp = c.mlp_shape(layer or 0)
        return cls(
            D=c.hidden_size,
            L=len(kinds[mlp]),
            H=c.num_heads,
            G=c.kv_heads,
            E=c.head_size,
            F=mlp.ffn_size,
            gated=c.gated,
            parallel=c.parallel_residual,
            experts=mlp if isinstance(mlp, MoEShape) else None,
        )

    def over(self, tp: int) -> "Shape":
        """Returns the sizes over ``tp`` ranks together: where there are fewer kv heads than ranks, each has a copy."""
        return self._replace(G=max(self.G, tp))

    @classmethod
    def kinds(cls, c: ModelConfig) -> list["Shape"]:
        """Returns the sizes of each kind of a model's layers, whose L add up to all of them."""
        return [cls.of(c, layers[0]) for layers in layers_by_mlp(c).values()]

    @property
    def mlp_name(self) -> str:
        """The name of the MLP, or of what stands for it."""
        return "MLP" if self.experts is None else "experts"

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
        """Elements of a layer's matrices that the ranks of a replica divide, without its experts."""
        return self.attention + self.shared + (self.mlp if self.experts is None else 0)

    @property
    def expert_weights(self) -> int:
        """Elements of the matrices of a layer's experts."""
        return 0 if self.experts is None else self.experts.num_experts * self.mlp

    @property
    def used(self) -> int:
        """Elements of a layer's matrices that one row is multiplied with."""
        mlps = 1 if self.experts is None else self.experts.routing.k
        return self.attention + mlps * self.mlp + self.shared + self.router


def check_imbalance(caller: str, config: ModelConfig, imbalance: float, tp: int, *, replicas: int = 1) -> None:
    """Raises ValueError of ``caller`` for an imbalance that ranks cannot have: that of the rank whose experts have the
    most rows, over the mean.

    ``replicas``: how many divide the experts among all their ranks; more than one only of a model with experts.
    """
    ranks = f"tp={tp}" if replicas == 1 else f"{replicas} x tp={tp * replicas}"
    check(
        1 <= imbalance <= tp * replicas,
        f"{caller}: imbalance is the busiest rank's rows over the mean, 1 to {ranks}, got {imbalance}",
    )
    has_experts = getattr(config, "num_experts", None) is not None
    check(
        imbalance == 1 or has_experts,
        f"{caller}: imbalance is of a model with experts, and this one has none, got {imbalance}",
    )
    check(replicas == 1 or has_experts, f"{caller}: over_replicas is of a model with experts, and this one has none")
