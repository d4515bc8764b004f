"""LayerNorm and RMSNorm whose parameters have their full gradient on a sequence shard too."""

from torch import Tensor

from ..collectives import copy
from ..kernels.norm import layer_norm, rms_norm
from ..parallel import TensorParallel
from ._module import ParallelModule, local, replicated


class LayerNorm(ParallelModule):
    """torch.nn.LayerNorm over the last dimension; under sequence parallelism the gradients are summed over the ranks."""

    rms = False

    def __init__(self, normalized_shape: int, eps: float = 1e-5, bias: bool = True, *, tp: TensorParallel | None = None, **factory):
        super().__init__(tp)
        self.eps = eps
        self.add_parameter("weight", (normalized_shape,), None, "ones", **factory)
        if bias:
            self.add_parameter("bias", (normalized_shape,), None, "zeros", **factory)
        else:
            self.register_parameter("bias", None)
        self.initialize_alone()

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D]"""
        return layer_norm(x, *replicated(self.tp, self.weight, self.bias), self.eps)


class RMSNorm(LayerNorm):
    """torch.nn.RMSNorm over the last dimension; under sequence parallelism the gradient is summed over the ranks."""

    rms = True

    def __init__(self, normalized_shape: int, eps: float = 1e-6, *, tp: TensorParallel | None = None, **factory):
        super().__init__(normalized_shape, eps, bias=False, tp=tp, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D]"""
        return rms_norm(x, *replicated(self.tp, self.weight), self.eps)


class HeadNorm(RMSNorm):
    """An RMSNorm over the width of every head, x [..., E], of heads that are split over the ranks: its gradient is summed over them,
    with sequence parallelism or without."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, copy(local(self.weight), self.tp), self.eps)
