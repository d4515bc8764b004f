"""Shapes of a block's layers, as records that a model builds once from its config."""

from typing import NamedTuple

import torch

from ..kernels.experts.records import Routing, check_routing
from ..kernels.runtime.errors import check
from ..kernels.runtime.rules import COUNT, check_number


class AttentionShape(NamedTuple):
    """Heads of self-attention, and what happens to queries, keys and scores; see :class:`ParallelAttention`."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int | None = None  # None: num_heads
    head_width: int | None = None  # None: hidden_size / num_heads
    causal: bool = True
    window: int | None = None
    qk_norm: bool = False
    qk_norm_kind: str = "rms"
    qk_norm_all: bool = False
    eps: float = 1e-5
    scale: float | None = None
    softcap: float | None = None
    dropout: float = 0.0
    bias: bool = True
    out_bias: bool | None = None  # None: bias


def check_heads(caller: str, hidden_size: int, heads: int, kv_heads: int, head_width: int | None) -> None:
    """Raises the ValueError of ``caller`` where one is no positive integer, hidden_size no multiple of heads, or
    these of kv heads."""
    for name, size in dict(hidden_size=hidden_size, num_heads=heads, num_kv_heads=kv_heads).items():
        check_number(f"{caller}: {name}", size, COUNT)
    fits = head_width is not None or hidden_size % heads == 0
    check(fits, f"{caller}: hidden_size={hidden_size} is not divisible by num_heads={heads}")
    check(heads % kv_heads == 0, f"{caller}: num_heads={heads} is not divisible by num_kv_heads={kv_heads}")


class MLPShape(NamedTuple):
    """Widths and activation of an MLP; see :class:`ParallelMLP`."""

    hidden_size: int
    ffn_size: int
    activation: str = "gelu_tanh"
    gated: bool = False
    bias: bool = True

    @property
    def columns(self) -> int:
        """Multiply-adds of a row's GEMMs, over hidden_size."""
        return self.ffn_size * (3 if self.gated else 2)


class MoEShape(NamedTuple):
    """Widths of experts, their number, and how rows choose them; see :class:`ParallelMoE`."""

    hidden_size: int
    ffn_size: int
    num_experts: int
    routing: Routing
    activation: str = "silu"
    shared_size: int | None = None  # width of an expert that every row has beside them; None: there is none
    shared_gate: bool = False

    @property
    def router_rows(self) -> int:
        """Rows of the router's weight, and of the gate's."""
        return self.num_experts + self.shared_gate

    @property
    def shared_width(self) -> int:
        """The shared expert's width; 0 without one."""
        return self.shared_size or 0

    @property
    def columns(self) -> int:
        """Multiply-adds of a row's GEMMs, over hidden_size: of the router, and of the experts that it has."""
        return self.router_rows + 3 * (self.ffn_size * self.routing.k + self.shared_width)


def check_shared(caller: str, shared_size: int | None, *, shared_gate: bool, num_experts: int | None) -> None:
    """Raises the ValueError of ``caller`` for a shared expert without others, and for a gate without one."""
    check(
        shared_size is None or num_experts is not None,
        f"{caller}: shared_size={shared_size} needs num_experts, got None",
    )
    check(
        not shared_gate or shared_size is not None, f"{caller}: shared_gate={shared_gate} needs shared_size, got None"
    )


def mlp_or_experts(
    caller: str,
    mlp: MLPShape,
    num_experts: int | None,
    routing: Routing | None,
    *,
    shared_size: int | None = None,
    shared_gate: bool = False,
) -> MLPShape | MoEShape:
    """Returns ``mlp``, or with ``num_experts`` the shape of so many experts like it.

    ValueError of ``caller`` for experts that are not built.
    """
    check_shared(caller, shared_size, shared_gate=shared_gate, num_experts=num_experts)
    if num_experts is None:
        check(routing is None, f"{caller}: routing={routing} needs num_experts, got None")
        return mlp
    if routing is None:
        raise ValueError(f"{caller}: num_experts={num_experts} needs a routing, got None")
    check(mlp.gated, f"{caller}: experts must be gated, got gated={mlp.gated} with num_experts={num_experts}")
    check(not mlp.bias, f"{caller}: experts have no bias, got mlp_bias={mlp.bias} with num_experts={num_experts}")
    check_routing(caller, routing, num_experts)
    return MoEShape(
        mlp.hidden_size, mlp.ffn_size, num_experts, routing, activation=mlp.activation, shared_size=shared_size,
        shared_gate=shared_gate,
    )  # fmt: skip


class NormShape(NamedTuple):
    """Norms of a block: an entry of KINDS, its epsilon, and whether a LayerNorm has a bias."""

    kind: str = "layer"
    eps: float = 1e-5
    bias: bool = True


class Init(NamedTuple):
    """Initial values and storage of a layer's parameters: standard deviations of weights and of output projections
    (None: the same), dtype and device (None: torch's defaults)."""

    std: float = 0.02
    out_std: float | None = None
    dtype: torch.dtype | None = None
    device: torch.device | str | None = None

    @property
    def output_std(self) -> float:
        """Standard deviation of an output projection's weight."""
        return self.std if self.out_std is None else self.out_std


INIT = Init()
