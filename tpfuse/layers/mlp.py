"""The MLP with its width split over the ranks.

x [m, D] -> z [M, F/R] -> act -> parts [R, m, D] -> sum + bias [m, D]
"""

import torch
from torch import Tensor

from ..kernels.gemm.activation import ACTIVATIONS, GATED
from ..kernels.norm import Recompute, reduce_bias_dropout_add_norm
from ..kernels.runtime.errors import check
from ..parallel import TensorParallel
from ..sequence_parallel import gather_mlp_exchange
from .call import CALL, Call
from .hooks import hooked
from .linear import ColumnParallelLinear, RowParallelLinear, activated
from .module import ParallelModule, check_width, on_pieces, replicated
from .shapes import INIT, Init, MLPShape


class ParallelMLP(ParallelModule):
    """fc2(act(fc1(x))), or with ``gated`` fc2(act(gate) * up), whose fc1 is [F, 2, D], gate and up side by side.

    ``activation``: one of tpfuse.kernels.gemm.activation.ACTIVATIONS; with ``gated``, one that has a gated form.
    ValueError for another, or where ``ffn_size`` cannot be split.
    """

    repr_fields = ("activation",)
    has_router = False

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        *,
        tp: TensorParallel | None = None,
        activation: str = "gelu_tanh",
        gated: bool = False,
        bias: bool = True,
        init_std: float = 0.02,
        out_init_std: float | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__(tp)
        self._build(
            MLPShape(hidden_size, ffn_size, activation, gated, bias=bias), Init(init_std, out_init_std, dtype, device)
        )
        self.compare_alone()

    @classmethod
    def of(cls, shape: MLPShape, *, tp: TensorParallel | None = None, init: Init = INIT) -> "ParallelMLP":
        """Returns the layer of a shape, for a block that compares its calls itself."""
        layer = cls.__new__(cls)
        ParallelModule.__init__(layer, tp)
        layer._build(shape, init)
        return layer

    def _build(self, shape: MLPShape, init: Init) -> None:
        D, F, activation, gated, bias = shape
        self.width = D
        self.tp.divide_leaves(F, "ParallelMLP: ffn_size")
        choices = list(GATED.values() if gated else ACTIVATIONS)
        check(
            activation in choices,
            f"ParallelMLP: {'a gated ' * gated}activation must be one of {', '.join(choices)}, got {activation!r}",
        )
        gated_name = ACTIVATIONS[activation].gated
        self.activation = gated_name if gated and gated_name is not None else activation
        dtype, device = init.dtype, init.device
        self.fc1 = ColumnParallelLinear(
            D, (F, 2) if gated else F, bias, tp=self.tp, init_std=init.std, dtype=dtype, device=device
        )
        self.fc2 = RowParallelLinear(F, D, bias, tp=self.tp, init_std=init.output_std, dtype=dtype, device=device)

    @property
    def copies(self) -> int:
        """The number of gradients of n that come back unsummed."""
        return self.tp.row_shards

    @property
    def in_one(self) -> bool:
        """True if nothing stands between the two GEMMs but the activation."""
        return self.fc1.adapter is None and self.fc2.adapter is None

    @property
    def out_bias(self) -> Tensor | None:
        """Bias [D], added once to the sum of the parts."""
        return self.fc2.bias

    def parts(self, n: Tensor, recompute: Recompute | None = None, call: Call = CALL) -> Tensor:
        """n [m, D] or expanded [R, m, D] -> parts [R, m, D], to be summed over R and given the bias.

        ``recompute``: n is recomputed in backward.  The activation is too unless ``call.keep``.
        """
        if self.in_one:
            weights = *self.fc1.flat(), on_pieces(self.fc2.weight, self.tp)
            return gather_mlp_exchange(
                n, *weights, activation=self.activation, tp=self.tp, recompute=recompute, keep=call.keep
            )
        return self.fc2.parts(self.fc1.project(n, recompute, self.activation))

    def forward(self, x: Tensor, *, call: Call = CALL) -> Tensor:
        """x [..., D], all dimensions but the last rows (this rank's; without sequence parallelism all) -> [..., D].

        ``call`` is a block's, which calls all branches alike.  ValueError for another width.
        """
        check_width("ParallelMLP", x, self.width)
        rows = x.reshape(-1, self.width)
        if hooked(self):
            y: Tensor = self.fc2(activated(self.fc1(rows), self.activation, self.tp))
        else:
            (bias,) = replicated(self.tp, self.out_bias)
            y = reduce_bias_dropout_add_norm(self.parts(rows, call=call), bias, leaves=self.tp.row_leaves)[0]
        return y.view(x.shape)
