"""Dropout whose mask is a function of (seed, step, site, global coordinates); its own adjoint, so nothing is saved but rng.

    y = mask x / (1 - p)        dx = mask dy / (1 - p)

Shapes: x, y [m, D]; the mask is that of _philox.py, scaling is done in fp32 (fp64 for fp64).
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._fused_norm import dropout_launch
from ._op import acc_dtype, autocast, op
from .reduce_bias_dropout_add_norm import active_rng, dropout_rows

# ---- reference ----


def dropout_fwd_ref(x: Tensor, rng: Tensor, p: float, site: int, first_row: int, batch: int) -> Tensor:
    return dropout_rows(x.to(acc_dtype(x)), rng, p, site, first_row, batch).to(x.dtype)


dropout_fwd = op(dropout_fwd_ref, launch=dropout_launch, fake=lambda x, *_: x.new_empty(x.shape))


# ---- autograd ----


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rng, *args):
        ctx.save_for_backward(rng)
        ctx.args = args
        return dropout_fwd(x, rng, *args)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return dropout_fwd(dy.contiguous(), *ctx.saved_tensors, *ctx.args), None, None, None, None, None


# ---- public ----


def dropout(x: Tensor, p: float, *, rng: Tensor, site: int = 0, first_row: int = 0, batch: int = 1) -> Tensor:
    """x [..., D], flattened to rows, of which row i is position (first_row + i) // batch of sample first_sample + (first_row + i) % batch.

    ``rng`` int64 [3] = (seed, step, first_sample); there is no default.  Returns x's shape and dtype; p = 0 returns x itself.
    """
    rng = active_rng("dropout", p, rng)
    if rng is None:
        return x
    (x,) = autocast(x)
    return _Dropout.apply(x.reshape(-1, x.shape[-1]).contiguous(), rng, p, site, first_row, batch).view(x.shape)
