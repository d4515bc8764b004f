"""The MLP with its width split over the ranks.

x [m, D] -> z [M, F/R] -> act -> parts [R, m, D] -> sum + bias [m, D]
"""

from typing import Any

from torch import Tensor

from ..kernels.gemm.activation import ACTIVATIONS, GATED
from ..kernels.gemm.gated import activate
from ..kernels.norm import Recompute, reduce_bias_dropout_add_norm
from ..kernels.runtime.errors import check
from ..parallel import TensorParallel
from ..sequence_parallel import gather_mlp_exchange
from .hooks import hooked
from .linear import ColumnParallelLinear, RowParallelLinear
from .module import ParallelModule, check_width, local, replicated


class ParallelMLP(ParallelModule):
    """fc2(act(fc1(x))), or with ``gated`` fc2(act(gate) * up), whose fc1 is [F, 2, D], gate and up side by side.

    ``activation``: one of kernels.linear.activation.ACTIVATIONS; with ``gated``, one that has a gated form.  ValueError
    for another, or where ``ffn_size`` cannot be split.
    """

    shown = ("activation",)

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
        **factory: Any,
    ):
        super().__init__(tp)
        self.width = hidden_size
        self.tp.divide(ffn_size, "ParallelMLP: ffn_size")
        known = list(GATED.values() if gated else ACTIVATIONS)
        check(
            activation in known,
            f"ParallelMLP: {'a gated ' * gated}activation must be one of {', '.join(known)}, got {activation!r}",
        )
        gated_name = ACTIVATIONS[activation].gated
        self.activation = gated_name if gated and gated_name is not None else activation
        shared: dict[str, Any] = dict(bias=bias, tp=self.tp, **factory)
        self.fc1 = ColumnParallelLinear(hidden_size, (ffn_size, 2) if gated else ffn_size, init_std=init_std, **shared)
        out_std = init_std if out_init_std is None else out_init_std
        self.fc2 = RowParallelLinear(ffn_size, hidden_size, init_std=out_std, **shared)
        self.compare_alone()

    @property
    def in_one(self) -> bool:
        """Whether nothing stands between the two GEMMs but the activation."""
        return self.fc1.adapter is None and self.fc2.adapter is None

    def parts(self, n: Tensor, recompute: Recompute | None = None, keep: bool | None = None) -> Tensor:
        """n [m, D] or expanded [R, m, D] -> parts [R, m, D], to be summed over R and given the bias.

        ``recompute``: n and the activation are made again in backward; ``keep`` says of the activation alone whether it
        is saved.
        """
        if self.in_one:
            options: dict[str, Any] = dict(activation=self.activation, tp=self.tp, recompute=recompute, keep=keep)
            return gather_mlp_exchange(n, *self.fc1.flat(), local(self.fc2.weight), **options)
        return self.fc2.parts(self.fc1.project(n, recompute, self.activation))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D], all dimensions but the last rows (this rank's; without sequence parallelism all) -> [..., D].

        ValueError for another width.
        """
        check_width("ParallelMLP", x, self.width)
        rows = x.reshape(-1, self.width)
        if hooked(self):
            y: Tensor = self.fc2(activate(self.fc1(rows), self.activation))
        else:
            (bias,) = replicated(self.tp, self.fc2.bias)
            y = reduce_bias_dropout_add_norm(self.parts(rows), bias)[0]
        return y.view(x.shape)
