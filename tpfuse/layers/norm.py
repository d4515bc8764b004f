"""LayerNorm and RMSNorm whose parameters have their full gradient on a sequence shard too."""

import functools
from typing import Any

from torch import Tensor, nn

from ..collectives import copy
from ..kernels.norm import KINDS, check_kind, layer_norm, rms_norm
from ..parallel import TensorParallel
from .module import ParallelModule, local, replicated


class LayerNorm(ParallelModule):
    """torch.nn.LayerNorm over the last dimension; under sequence parallelism gradients are summed over the ranks."""

    kind = "layer"
    shards_input = True  # or not: it acts on each row alone
    shown = "normalized_shape", "eps"
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-5,
        bias: bool = True,
        *,
        tp: TensorParallel | None = None,
        **factory: Any,
    ):
        super().__init__(tp)
        check_kind(type(self).__name__, self.kind, eps)
        self.normalized_shape, self.eps = normalized_shape, eps
        start = "zeros" if KINDS[self.kind].offset else "ones"  # the scale starts at 1
        self.add_parameter("weight", (normalized_shape,), None, start, **factory)
        if bias:
            self.add_parameter("bias", (normalized_shape,), None, "zeros", **factory)
        else:
            self.register_parameter("bias", None)
        self.initialize_alone()

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D]"""
        weight, bias = replicated(self.tp, self.weight, self.bias)
        return layer_norm(x, weight, bias, self.eps)


class RMSNorm(LayerNorm):
    """torch.nn.RMSNorm over the last dimension; under sequence parallelism the gradient is summed over the ranks."""

    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-6,
        *,
        kind: str = "rms",
        tp: TensorParallel | None = None,
        **factory: Any,
    ):
        check_kind("RMSNorm", kind)
        self.kind = kind
        super().__init__(normalized_shape, eps, bias=False, tp=tp, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D]"""
        (weight,) = replicated(self.tp, self.weight)
        return rms_norm(x, weight, self.eps, kind=self.kind)


class HeadNorm(RMSNorm):
    """An RMSNorm over the width of every head, x [..., E], of heads that are split over the ranks.

    Its gradient is summed over the ranks, with sequence parallelism or without.
    """

    def forward(self, x: Tensor) -> Tensor:
        """x [..., E] -> [..., E]"""
        return rms_norm(x, copy(local(self.weight), self.tp), self.eps, kind=self.kind)


def norm_layer(kind: str, width: int, eps: float, *, bias: bool = True, **options: Any) -> LayerNorm:
    """Returns the layer of a kind of norm; an RMSNorm has no ``bias`` anyway."""
    check_kind("norm_layer", kind)
    layer = functools.partial(LayerNorm, bias=bias) if KINDS[kind].centred else functools.partial(RMSNorm, kind=kind)
    return layer(width, eps, **options)
