"""An expert that every row has, beside those that a router chooses: a gated MLP whose width F is split over the ranks.

    rank r of R      n [m, D]      W1 [L, 2 F / V, D], W2 [L, D, F / V]      wg [1, D] replicated, or none
    forward          x = gather(n);  g = gather(sigmoid(n wg')), or 1;  z = x W1', a = act(z);  scatter(g (a W2'))
    dgrad            dy = gather(dparts);  dz = g (dy W2) act'(z);  dg = scatter(sum_F (dy W2) a);  scatter(dz W1)
    wgrad            dW1 = dz' x, dW2 = dy' (g a), and of the gate dlogits' n

To the GEMMs of experts it is one expert with all rows, and the gate is a row's weight, so that nothing but GEMMs reads
or writes the rows.  With ``bitwise`` it is the L = V / R leaves of the width here, experts with the same rows each,
whose results are added as a tree; without, V = R and L = 1.

Results go to the ranks that have their rows as R parts, which are not yet summed; with ``bitwise`` as their sum, one
part.  Rows are shards here also where every rank has all of them.

Saved: z [L M, 2 F / V], the gate of all rows, and this rank's logits of it.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..collectives import summed
from ..kernels.experts.grouped import experts_dact, experts_down, experts_dx, experts_up
from ..kernels.experts.records import ExpertRows, Routed, Routing, Sides
from ..kernels.experts.router import router_bwd, router_fwd
from ..kernels.runtime.leaves import tree
from ..kernels.runtime.main_grad import derived
from ..kernels.runtime.op import acc_dtype
from ..parallel import TensorParallel
from .crossings import exchange_parts
from .records import ExpertWeightGrad, WantedGrads

GATE = Routing(1, "sigmoid", renormalize=False)  # the router of one expert, which weighs it


class SharedParts(NamedTuple):
    """The numbers of [m, D] that the expert adds to the parts of the rows and to the gradients of n; without one 0."""

    parts: int = 0
    gradients: int = 0

    @classmethod
    def of(cls, tp: TensorParallel, *, gated: bool) -> "SharedParts":
        parts = tp.size if tp.bitwise is None else 1
        return cls(parts, parts + gated)


class SharedWeights(NamedTuple):
    """This rank's slices of the weights; ``gated``: the expert has a gate, whose weight is a row of the router's."""

    fc1: Tensor  # [F / R, 2, D]
    fc2: Tensor  # [D, F / R]
    gated: bool = False

    def by_leaves(self, tp: TensorParallel) -> tuple[Tensor, Tensor]:
        """Returns W1 [L, 2 F / V, D] and W2 [L, D, F / V]."""
        leaves = max(tp.leaves, 1)
        w1 = self.fc1.view(leaves, -1, self.fc1.shape[-1])
        if leaves == 1:
            return w1, self.fc2[None]
        return w1, derived(lambda w: w.unflatten(1, (leaves, -1)).transpose(0, 1).contiguous(), self.fc2)


class SharedSaved(NamedTuple):
    """The tensors that backward needs beside n and the weights."""

    z: Tensor  # [L M, 2 F / V]
    g: Tensor  # [L M]
    logits: Tensor | None = None  # of the gate; it and the next two are of this rank's valid rows
    weights: Tensor | None = None
    chosen: Tensor | None = None


# ---- crossings ----


def _gathered(parts: Tensor, tp: TensorParallel) -> Tensor:
    """Returns what all ranks have for all rows, [M, C], of [m, C] or what is for each rank, [R, m, C]."""
    return exchange_parts(parts.expand(tp.size, *parts.shape[-2:]), tp).flatten(0, 1)


def _scattered(y: Tensor, leaves: int, tp: TensorParallel) -> Tensor:
    """Sends partial sums [L M, C] to the ranks of their rows: parts [R, m, C], with ``bitwise`` [1, m, C]."""
    node = tree(y.view(leaves, -1, y.shape[1]).unbind(0))
    parts = exchange_parts(node.view(tp.size, -1, y.shape[1]), tp)
    return parts if tp.bitwise is None else summed(parts, tp)[None]


def _all_rows(M: int, leaves: int, device: torch.device) -> ExpertRows:
    """Returns M rows for each of the leaves."""
    offsets = torch.arange(leaves + 1, device=device) * M
    return ExpertRows(None if leaves == 1 else torch.arange(M, device=device).repeat(leaves), offsets)


# ---- forward and backward, inside the experts' node ----


def shared_fwd(
    n: Tensor, w1: Tensor, w2: Tensor, gate: Tensor, *, valid: int, activation: str, tp: TensorParallel
) -> tuple[Tensor, SharedSaved]:
    """Returns the parts of n [m, D], of which rows from ``valid`` on are padding and have results of 0.

    ``gate`` [1, D] or, without one, [0, D].
    """
    leaves, g = len(w1), n.new_ones(valid, 1, dtype=acc_dtype(n))
    routed: tuple[Tensor, ...] = ()
    if len(gate) > 0:
        g, chosen, logits = router_fwd(n[:valid], gate, None, GATE)
        routed = logits, g, chosen
    g = _gathered(F.pad(g, (0, 0, 0, n.shape[0] - valid)), tp).flatten().repeat(leaves)
    x = _gathered(n, tp)
    rows = _all_rows(x.shape[0], leaves, n.device)
    z, a = experts_up(x, rows, w1, activation, tile=tp.row_tile)
    y = experts_down(a, rows._replace(row_index=None), w2, g, count=len(a), tile=tp.row_tile)
    return _scattered(y, leaves, tp), SharedSaved(z, g, *routed)


class SharedGrads(NamedTuple):
    """Gradients of the weights, and of the gate's logits [valid, 1]; None for what is made elsewhere, not wanted, or
    not there."""

    w1: Tensor | None = None
    w2: Tensor | None = None
    logits: Tensor | None = None


def shared_bwd(
    dparts: Tensor,
    n: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    saved: SharedSaved,
    *,
    dn: Tensor,
    valid: int,
    activation: str,
    grads: WantedGrads,
    tp: TensorParallel,
) -> SharedGrads:
    """Fills ``dn`` [gradients, m, D], those of n [m, D], from the gradients of the parts."""
    (w1, w2, gate), (z, g, *_) = weights, saved
    routed: tuple[Any, ...] = saved[2:]  # as it is saved
    leaves, dy = len(w1), _gathered(dparts, tp)
    rows = _all_rows(dy.shape[0], leaves, dy.device)
    dz, ga, dg = experts_dact(dy, rows, w2, z, weights=g, activation=activation)
    dx = experts_dx(dz, rows._replace(row_index=None), w1, len(dz), room=0)
    dn[len(gate) :] = _scattered(dx, leaves, tp)
    dw1: Tensor | None = None
    dw2: Tensor | None = None
    dlogits: Tensor | None = None
    if grads.out_weight:
        sides = Sides(dy, ga, rows.offsets, dy_index=rows.row_index)
        dw2, _ = grads.run("out_weight", ExpertWeightGrad(sides, w2.dtype))
    if grads.weight:
        sides = Sides(dz, _gathered(n, tp), rows.offsets, x_index=rows.row_index)
        dw1, _ = grads.run("weight", ExpertWeightGrad(sides, w1.dtype))
    if len(gate) > 0:
        dg = summed(_scattered(dg[:, None], leaves, tp), tp)[:valid]
        dlogits = router_bwd(dg, None, Routed(*routed), gate, routing=GATE, dx=dn[0, :valid])
        dn[0, valid:] = 0
    return SharedGrads(dw1, dw2, dlogits)
