"""The forms of the ops between row shards and GEMMs: modules with the same functions; an op's autograd Function is
given one of them.

All forms send the same bytes and give the same values, to rounding: a GEMM of pieces of rows, or by leaves, adds in
another order.  :mod:`..choice` decides between them.  A form whose messages
travel under wgrads runs these itself: work that is to be done later (see :mod:`..records`) is the plain form's.

Shapes: n, dn, dp, parts [R, m, D], one of them expanded with stride 0 if it stands for one shard; x, y, dy [M, ...].
Gradients of weights that ``grads`` does not ask for are None.

leafwise    with ``bitwise``: sums by leaves, the same bits at every number of ranks
overlapped  with sequence parallelism: messages travel while GEMMs run, forward and backward
plain       a message, then its GEMM: the definition, the path at R = 1, and the fallback of the others
replicated  without sequence parallelism: the sum of dx travels under the wgrads
"""

from typing import Protocol

from torch import Tensor

from ...parallel import TensorParallel
from ..records import MLP, LinearWeights, MLPSaved, SavedInput, WantedGrads


class Form(Protocol):
    """The functions of each module, or the methods of an object."""

    def gather_linear_fwd(self, n: Tensor, linear: LinearWeights, tp: TensorParallel) -> tuple[Tensor, Tensor]:
        """Returns y and z, its value before the activation (empty for "none")."""

    def gather_linear_bwd(
        self, dy: Tensor, w: Tensor, *, n: SavedInput, grads: WantedGrads, tp: TensorParallel
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Returns dn, unsummed, None unless it is wanted, dw and db."""

    def linear_exchange_fwd(self, x: Tensor, w: Tensor, tp: TensorParallel) -> Tensor:
        """Returns parts."""

    def linear_exchange_bwd(
        self, dp: Tensor, w: Tensor, *, x: Tensor, grads: WantedGrads, tp: TensorParallel
    ) -> tuple[Tensor, Tensor | None]:
        """Returns dx and dw."""

    def gather_mlp_exchange_fwd(
        self, n: Tensor, mlp: MLP, *, keep: bool, tp: TensorParallel
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns parts, z and, with ``keep``, act(z)."""

    def gather_mlp_exchange_bwd(
        self, dp: Tensor, mlp: MLP, *, saved: MLPSaved, grads: WantedGrads, tp: TensorParallel
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Returns dn, unsummed, dw1, db1 and dw2."""
