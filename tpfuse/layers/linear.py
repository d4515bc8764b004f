"""Megatron's two linear layers (Shoeybi et al. 2019, arXiv:1909.08053), with the rows sharded between them.

                          x         weight    out       forward           dx                dW
    ColumnParallelLinear  [m, K]    [N/R, K]  [M, N/R]  all-gather, GEMM  GEMM, exchange    re-gather, GEMM
    RowParallelLinear     [M, K/R]  [N, K/R]  [m, N]    GEMM, exchange    all-gather, GEMM  GEMM

M = R m rows, sequence-major.  Without sequence parallelism m = M: no gather, an all-reduce for each exchange.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.gemm.activation import PLAIN
from ..kernels.gemm.gated import activate
from ..kernels.gemm.op import linear
from ..kernels.norm import Recompute, reduce_bias_dropout_add_norm
from ..kernels.runtime.errors import check
from ..kernels.runtime.leaves import cut, tree
from ..parallel import TensorParallel
from ..sequence_parallel import gather_linear, leave_parts, linear_exchange
from .module import ParallelModule, check_width, local, on_pieces, replicated

# Of a layer: weight -> (indices of its dimension 1, name) of each projection that it holds.
Parts = dict[str, list[tuple[int, str]]]


class Adapter(ParallelModule):
    """A low-rank adapter beside a weight (lora.py): its call returns what is added to the weight's product.

    With ``tp.bitwise`` that of a row-parallel weight is :meth:`of_leaves`.
    ``adapted`` names the projections that it adapts, ``parts`` all of the layer's; ``merged`` says whether the weight
    holds it already.  ``apart``: as of ExpertLoRA.
    """

    merged = False

    def __init__(
        self,
        layer: Any,
        parts: Parts,
        adapted: list[str],
        *,
        rank: int,
        alpha: float,
        apart: bool,
        dtype: torch.dtype,
        device: torch.device,
    ):
        super().__init__(layer.tp)
        self.parts, self.adapted, self.rank, self.scale, self.apart = parts, adapted, rank, alpha / rank, apart
        self._make(layer, functools.partial(self.add_parameter, dtype=dtype, device=device))

    def _make(self, layer: Any, add: Callable[..., None]) -> None:
        """Adds A and B for a layer by ``add``, which is add_parameter with their dtype and device."""
        raise NotImplementedError

    def of_leaves(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """Returns what is added to the products of a row-parallel weight's leaves with xs, each [M, K/V]."""
        raise NotImplementedError

    def deltas(self) -> dict[str, Tensor]:
        """Returns s B A for each of the layer's weights, this rank's slice."""
        raise NotImplementedError

    @staticmethod
    def std_of(width: int) -> float:
        """Returns the standard deviation of PEFT's uniform A in (-1, 1) / sqrt(K)."""
        return float((3 * width) ** -0.5)


class Adaptable(ParallelModule):
    """A layer that may have an adapter beside its weights (lora.py)."""

    lora: Adapter | None

    def __init__(self, tp: TensorParallel | None):
        super().__init__(tp)
        self.lora = None  # no module while there is none, so that repr() shows none

    @property
    def adapter(self) -> Adapter | None:
        """The adapter to be added to the product; None where there is none or it is merged into the weight."""
        lora: Any = self._modules.get("lora")  # nn.Module's attribute access costs the host
        return None if lora is None or lora.merged else lora


def activated(z: Tensor, activation: str, tp: TensorParallel) -> Tensor:
    """Returns act(z) of a column-parallel z [M, N/R], by leaves of the N: torch's loops round a tensor's end in another
    way."""
    leaves = cut("activated", z, 1, max(tp.leaves, 1))
    return activate(z, activation) if len(leaves) == 1 else torch.cat([activate(x, activation) for x in leaves], 1)


class ColumnProjection(Adaptable):
    """A projection that can be used as one weight [N/R, K] and bias [N/R], its :meth:`flat`."""

    in_features: int
    activation = "none"

    def flat(self) -> tuple[Tensor, Tensor | None]:
        """Returns weight [N/R, K] and bias [N/R]."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [M, N/R]; all dimensions but the last are rows.  ValueError for another width."""
        check_width(type(self).__name__, x, self.in_features)
        return self.project(x.reshape(-1, self.in_features), activation=self.activation)

    def project(self, n: Tensor, recompute: Recompute | None = None, activation: str = "none") -> Tensor:
        """n [m, K] or expanded [R, m, K] -> [M, N/R]"""
        weight, bias = self.flat()
        if self.adapter is None:
            return gather_linear(n, weight, bias, tp=self.tp, activation=activation, recompute=recompute)
        if self.tp.bitwise is not None and n.dim() == 3:
            n = n[0]  # so that the adapter's gradient is added to the sum of the weight's parts
        z = gather_linear(n, weight, bias, tp=self.tp, recompute=recompute) + self.adapter(n, recompute)
        return activated(z, activation, self.tp)


class ColumnParallelLinear(ColumnProjection):
    """act(x W' + b) with W split by rows over the ranks: x [..., K] -> [M, N/R].

    All dimensions of x but the last are rows.  ``out_features`` may be a shape: the weight is then [*shape, K], split
    on its first dimension.
    """

    repr_fields = "in_features", "out_features", "activation"
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int | tuple[int, ...],
        bias: bool = True,
        *,
        tp: TensorParallel | None = None,
        activation: str = "none",
        init_std: float = 0.02,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__(tp)
        check(
            activation in PLAIN,
            f"{type(self).__name__}: activation must be one of {', '.join(PLAIN)}, got {activation!r}",
        )
        shape = tuple(out_features) if isinstance(out_features, tuple | list) else (out_features,)
        self.tp.divide_leaves(shape[0], "ColumnParallelLinear: out_features")
        self.in_features, self.out_features, self.activation = in_features, math.prod(shape), activation
        self.add_parameter("weight", (*shape, in_features), 0, init_std, dtype=dtype, device=device)
        self.add_parameter("bias", shape, 0, "zeros", present=bias, dtype=dtype, device=device)
        self.initialize_alone()

    def flat(self) -> tuple[Tensor, Tensor | None]:
        weight, bias = on_pieces(self.weight, self.tp), on_pieces(self.bias, self.tp)
        return weight.reshape(-1, self.in_features), None if bias is None else bias.reshape(-1)


class RowParallelLinear(Adaptable):
    """x W' + b with W split by columns: x [M, K/R] -> [m, N].  The bias is added once, after the sum."""

    shards_input = True
    repr_fields = "in_features", "out_features"
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        tp: TensorParallel | None = None,
        init_std: float = 0.02,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__(tp)
        self.tp.divide_leaves(in_features, "RowParallelLinear: in_features")
        self.in_features, self.out_features = in_features, out_features
        self.add_parameter("weight", (out_features, in_features), 1, init_std, dtype=dtype, device=device)
        self.add_parameter("bias", (out_features,), None, "zeros", present=bias, dtype=dtype, device=device)
        self.initialize_alone()

    def parts(self, x: Tensor) -> Tensor:
        """x [M, K/R] -> parts [R, m, N], to be summed over R and given the bias."""
        if self.adapter is None:
            return linear_exchange(x, on_pieces(self.weight, self.tp), tp=self.tp)
        if self.tp.bitwise is None:
            return leave_parts(linear(x, on_pieces(self.weight, self.tp)) + self.adapter(x), self.tp)
        xs, weights = (cut("RowParallelLinear", t, 1, self.tp.leaves) for t in (x, local(self.weight)))
        leaves = zip(xs, weights, self.adapter.of_leaves(xs), strict=True)
        return leave_parts(tree(linear(x_v, w_v) + added for x_v, w_v, added in leaves), self.tp)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K/R] -> [m, N].  ValueError for another width."""
        check_width("RowParallelLinear", x, self.in_features // self.tp.size)
        (bias,) = replicated(self.tp, self.bias)
        return reduce_bias_dropout_add_norm(self.parts(x.reshape(-1, x.shape[-1])), bias, leaves=self.tp.row_leaves)[0]
