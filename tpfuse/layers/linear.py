"""Megatron's two linear layers (Shoeybi et al. 2019, arXiv:1909.08053), with the rows sharded between them.

                            x                weight           out              forward            dx                dW
    ColumnParallelLinear    [m, K]           [N/R, K]         [M, N/R]         all-gather, GEMM   GEMM, exchange    re-gather, GEMM
    RowParallelLinear       [M, K/R]         [N, K/R]         [m, N]           GEMM, exchange     all-gather, GEMM  GEMM

M = R m rows, sequence-major.  Without sequence parallelism m = M: no gather, an all-reduce for each exchange.
"""

import math

from torch import Tensor

from ..kernels._op import check
from ..kernels.gated import activate
from ..kernels.linear import ACTIVATIONS, linear
from ..kernels.norm import Remake
from ..kernels.reduce_bias_dropout_add_norm import reduce_bias_dropout_add_norm
from ..parallel import TensorParallel
from ..sequence_parallel import gather_linear, leave_parts, linear_exchange
from ._module import ParallelModule, local, replicated


class Adaptable(ParallelModule):
    """A projection that may have an adapter beside its weight (lora.py)."""

    def __init__(self, tp: TensorParallel | None):
        super().__init__(tp)
        self.register_module("lora", None)

    @property
    def adapter(self):
        """None too where it is merged into the weight."""
        return None if self.lora is None or self.lora.merged else self.lora


class ColumnProjection(Adaptable):
    """What can be used as one weight [N/R, K] and bias [N/R], its ``flat()``."""

    def project(self, n: Tensor, remake: Remake | None = None, activation: str = "none") -> Tensor:
        """n [m, K] or expanded [R, m, K] -> [M, N/R]"""
        if self.adapter is None:
            return gather_linear(n, *self.flat(), tp=self.tp, activation=activation, remake=remake)
        return activate(gather_linear(n, *self.flat(), tp=self.tp, remake=remake) + self.adapter(n, remake), activation)


class ColumnParallelLinear(ColumnProjection):
    """act(x W' + b) with W split by rows over the ranks.

    ``out_features`` may be a shape: the weight is then [*shape, K], split on its first dimension.  x [..., K], of which all but the
    last dimension are rows -> [M, N/R].
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | tuple[int, ...],
        bias: bool = True,
        *,
        tp: TensorParallel | None = None,
        activation: str = "none",
        init_std: float = 0.02,
        **factory,
    ):
        super().__init__(tp)
        check(activation in ACTIVATIONS, f"{type(self).__name__}: activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        shape = (out_features,) if isinstance(out_features, int) else tuple(out_features)
        self.tp.divide(shape[0], "ColumnParallelLinear: out_features")
        self.in_features, self.out_features, self.activation = in_features, math.prod(shape), activation
        self.add_parameter("weight", (*shape, in_features), 0, init_std, **factory)
        if bias:
            self.add_parameter("bias", shape, 0, "zeros", **factory)
        else:
            self.register_parameter("bias", None)
        self.initialize_alone()

    def flat(self) -> tuple[Tensor, Tensor | None]:
        """weight [N/R, K], bias [N/R]"""
        bias = local(self.bias)
        return local(self.weight).reshape(-1, self.in_features), None if bias is None else bias.reshape(-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x.reshape(-1, self.in_features), activation=self.activation)


class RowParallelLinear(Adaptable):
    """x W' + b with W split by columns: x [M, K/R] -> [m, N].  The bias is added once, after the sum."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, tp: TensorParallel | None = None, init_std: float = 0.02, **factory
    ):
        super().__init__(tp)
        self.tp.divide(in_features, "RowParallelLinear: in_features")
        self.in_features, self.out_features = in_features, out_features
        self.add_parameter("weight", (out_features, in_features), 1, init_std, **factory)
        if bias:
            self.add_parameter("bias", (out_features,), None, "zeros", **factory)
        else:
            self.register_parameter("bias", None)
        self.initialize_alone()

    def parts(self, x: Tensor) -> Tensor:
        """x [M, K/R] -> parts [R, m, N], to be summed over R and given the bias"""
        if self.adapter is None:
            return linear_exchange(x, local(self.weight), tp=self.tp)
        return leave_parts(linear(x, local(self.weight)) + self.adapter(x), self.tp)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.parts(x.reshape(-1, x.shape[-1]))
        return reduce_bias_dropout_add_norm(parts, *replicated(self.tp, self.bias))[0]
