"""The forms of the ops between row shards and GEMMs: modules with the same functions, one of which an op's autograd
Function is given.

    plain        definition, path at R = 1, and fallback of the others; with and without sequence parallelism
    replicated   without sequence parallelism: the sum of dx travels under the wgrads
    overlapped   with sequence parallelism: messages travel under GEMMs, forward and backward

All forms give the same values and send the same bytes; :mod:`..choice` decides between them.  A form whose messages
travel under wgrads runs these itself: work that is to be done later (see :mod:`..records`) is the plain form's.
Parts that come from experts are two functions more in each form, with their own record of weights.

Shapes: n, dn, dp, parts [R, m, D], one of them expanded with stride 0 if it stands for one shard; x, y, dy [M, ...].
Gradients of weights that ``needs`` does not ask for are None.

overlapped  with it: messages travel while GEMMs run
plain       a message, then its GEMM
replicated  without sequence parallelism: the sum of dx travels under the wgrads
"""

from typing import Protocol

from torch import Tensor

from ...parallel import TensorParallel
from ..records import MLP, Linear, MLPSaved, Needs, Saved


class Form(Protocol):
    """What each of the modules has."""

    def gather_linear_fwd(self, n: Tensor, linear: Linear, tp: TensorParallel) -> tuple[Tensor, Tensor]:
        """Returns y and z, its value before the activation (empty for "none")."""

    def gather_linear_bwd(
        self, dy: Tensor, w: Tensor, *, n: Saved, needs: Needs, tp: TensorParallel
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns dn, unsummed, dw and db."""

    def linear_exchange_fwd(self, x: Tensor, w: Tensor, tp: TensorParallel) -> Tensor:
        """Returns parts."""

    def linear_exchange_bwd(
        self, dp: Tensor, w: Tensor, *, x: Tensor, needs: Needs, tp: TensorParallel
    ) -> tuple[Tensor, Tensor | None]:
        """Returns dx and dw."""

    def gather_mlp_exchange_fwd(
        self, n: Tensor, mlp: MLP, *, keep: bool, tp: TensorParallel
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns parts, z and, with ``keep``, act(z)."""

    def gather_mlp_exchange_bwd(
        self, dp: Tensor, mlp: MLP, *, saved: MLPSaved, needs: Needs, tp: TensorParallel
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Returns dn, unsummed, dw1, db1 and dw2."""
