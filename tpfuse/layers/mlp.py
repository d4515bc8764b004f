"""The MLP with its width split over the ranks.

x [m, D] -> z [M, F/R] -> act -> parts [R, m, D] -> sum + bias [m, D]
"""

from torch import Tensor

from ..kernels._op import check
from ..kernels.linear import ACTIVATIONS
from ..kernels.norm import Remake
from ..kernels.reduce_bias_dropout_add_norm import reduce_bias_dropout_add_norm
from ..parallel import TensorParallel
from ..sequence_parallel import gather_mlp_exchange
from ._module import ParallelModule, local, replicated
from .linear import ColumnParallelLinear, RowParallelLinear

GATED = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh"}


class ParallelMLP(ParallelModule):
    """fc2(act(fc1(x))), or fc2(act(gate) * up) where ``gated``: fc1 is then [F, 2, D], gate and up side by side.

    ``activation``: "gelu" (erf), "gelu_tanh", "relu" or "silu".  ValueError where ``ffn_size`` cannot be split, or the gate is not built.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        *,
        tp: TensorParallel | None = None,
        activation: str = "gelu",
        gated: bool = False,
        bias: bool = True,
        init_std: float = 0.02,
        out_init_std: float | None = None,
        **factory,
    ):
        super().__init__(tp)
        self.tp.divide(ffn_size, "ParallelMLP: ffn_size")
        kinds = GATED if gated else ACTIVATIONS
        check(activation in kinds, f"ParallelMLP: {'a gated ' * gated}activation must be one of {', '.join(kinds)}, got {activation!r}")
        self.activation = GATED[activation] if gated else activation
        shared = dict(bias=bias, tp=self.tp, **factory)
        self.fc1 = ColumnParallelLinear(hidden_size, (ffn_size, 2) if gated else ffn_size, init_std=init_std, **shared)
        self.fc2 = RowParallelLinear(ffn_size, hidden_size, init_std=init_std if out_init_std is None else out_init_std, **shared)

    def parts(self, n: Tensor, remake: Remake | None = None) -> Tensor:
        """n [m, D] or expanded [R, m, D] -> parts [R, m, D], to be summed over R and given the bias."""
        if self.fc1.adapter is None and self.fc2.adapter is None:
            return gather_mlp_exchange(n, *self.fc1.flat(), local(self.fc2.weight), activation=self.activation, tp=self.tp, remake=remake)
        return self.fc2.parts(self.fc1.project(n, remake, self.activation))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D], rows [m] (without sequence parallelism [M]) -> [m, D]"""
        parts = self.parts(x.reshape(-1, x.shape[-1]))
        return reduce_bias_dropout_add_norm(parts, *replicated(self.tp, self.fc2.bias))[0]
